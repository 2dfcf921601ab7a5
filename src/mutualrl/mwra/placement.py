"""Which policy runs on which devices. Pure: a machine and a recipe in, a placement out.

Source: paper, Section "Multi-Worker Resource Allocation": workers of different policies are distributed evenly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from mutualrl.errors import MachineError, RecipeError
from mutualrl.mwra.devices import Machine
from mutualrl.recipes.batch import BatchPlan, plan_batch
from mutualrl.recipes.schema import Recipe


@dataclass(frozen=True, slots=True)
class Seat:
    """One policy's share: its GPUs (empty on CPU), processes, threads a process, strategy, batch plan, and how many
    policies run on each of its GPUs."""

    policy: str
    gpus: tuple[str, ...]
    processes: int
    threads: int
    strategy: str
    batch: BatchPlan
    tenants: int = 1

    @property
    def devices(self) -> str:
        """The devices in words."""
        if self.gpus:
            return "GPU " + ",".join(self.gpus)
        return f"CPU, {self.processes} process{'es' if self.processes > 1 else ''} x {self.threads} thread" + (
            "s" if self.threads > 1 else ""
        )


@dataclass(frozen=True, slots=True)
class Placement:
    """A seat for every policy, and what the user should know about it."""

    seats: tuple[Seat, ...]
    notes: tuple[str, ...]

    def seat(self, policy: str) -> Seat:
        """The seat of a policy."""
        return next(s for s in self.seats if s.policy == policy)


def place(recipe: Recipe, machine: Machine) -> Placement:
    """Split the machine over the policies: `hardware.gpus` of its GPUs (all of them by default), else its cores.

    Raises MachineError when there are fewer GPUs than policies, RecipeError when no split divides the batch.
    """
    gpus = machine.gpus[: recipe.hardware.gpus]
    if gpus:
        return _on_gpus(recipe, Machine(gpus, machine.cores))
    return _on_cpu(recipe, machine)


def _on_cpu(recipe: Recipe, machine: Machine) -> Placement:
    policies = [p.name for p in recipe.policies]
    processes = recipe.launch.processes or 1
    share = machine.cores // (len(policies) * processes)
    notes = []
    if share == 0:
        notes.append(
            f"{len(policies) * processes} processes share {machine.cores} CPU cores: steps take longer, results "
            "do not change"
        )
    strategy = "ddp" if recipe.launch.strategy == "auto" else recipe.launch.strategy
    seats = tuple(
        Seat(name, (), processes, max(share, 1), strategy, plan_batch(recipe, name, processes)) for name in policies
    )
    _same_rounds(recipe, seats)
    return Placement(seats, tuple(notes))


def _on_gpus(recipe: Recipe, machine: Machine) -> Placement:
    policies = recipe.policies
    strategy = "zero3" if recipe.launch.strategy == "auto" else recipe.launch.strategy
    if recipe.launch.share_gpus:
        count = len(machine.gpus)
        threads = max(machine.cores // (count * len(policies)), 1)
        seats = [
            Seat(p.name, machine.gpus, count, threads, strategy, plan_batch(recipe, p.name, count), len(policies))
            for p in policies
        ]
        _same_rounds(recipe, seats)
        return Placement(tuple(seats), (f"{len(policies)} policies share every GPU",))
    if len(machine.gpus) < len(policies):
        raise MachineError(
            f"{len(policies)} policies need {len(policies)} GPUs at least, found {len(machine.gpus)}; use a smaller "
            "pool, let them share with --set launch.share_gpus=true, or run on CPU with --set hardware.gpus=0"
        )
    sizes = [p.parameters or 0.0 for p in policies]
    counts = best_split(len(machine.gpus), sizes, lambda i, n: _divides(recipe, policies[i].name, n))
    if counts is None:
        raise RecipeError([f"no split of {len(machine.gpus)} GPUs over {len(policies)} policies divides the batch"])
    seats, start = [], 0
    for policy, count in zip(policies, counts, strict=True):
        gpus = machine.gpus[start : start + count]
        start += count
        threads = max(machine.cores // len(machine.gpus), 1)
        seats.append(Seat(policy.name, gpus, count, threads, strategy, plan_batch(recipe, policy.name, count)))
    notes = (
        [f"{len(machine.gpus) - start} GPU(s) stay idle: no even split uses them"] if start < len(machine.gpus) else []
    )
    _same_rounds(recipe, seats)
    return Placement(tuple(seats), tuple(notes))


def _divides(recipe: Recipe, policy: str, processes: int) -> bool:
    try:
        plan_batch(recipe, policy, processes)
    except RecipeError:
        return False
    return True


def best_split(devices: int, sizes: Sequence[float], allowed: Callable[[int, int], bool]) -> tuple[int, ...] | None:
    """Devices for each policy: all of them if possible, then as even as possible, then most for the largest.

    `allowed(i, n)` says whether policy i can run on n devices. None when no split is allowed.
    Example: three policies of which the last is the largest, 8 devices, powers of two allowed: (2, 2, 4).
    """

    def rank(counts: tuple[int, ...]) -> tuple[float, ...]:
        weighted = sum(size * count for size, count in zip(sizes, counts, strict=True))
        return (-sum(counts), max(counts) - min(counts), -weighted, *(-c for c in counts))

    most = devices - len(sizes) + 1
    possible = [[n for n in range(1, most + 1) if allowed(i, n)] for i in range(len(sizes))]
    return min(_splits(devices, possible), key=rank, default=None)


def _splits(devices: int, possible: Sequence[Sequence[int]]) -> Iterator[tuple[int, ...]]:
    """All tuples with one of the `possible` counts in each place whose sum is at most `devices`."""
    if not possible:
        yield ()
        return
    for first in possible[0]:
        if first <= devices:
            for rest in _splits(devices - first, possible[1:]):
                yield (first, *rest)


def _same_rounds(recipe: Recipe, seats: Sequence[Seat]) -> None:
    """All policies must see the same prompts. Raises RecipeError naming two that would not."""
    first = seats[0]
    for key, default in (("num_iterations", 1), ("shuffle_dataset", True)):
        values = {seat.policy: recipe.trainer_settings(seat.policy).get(key, default) for seat in seats}
        if len(set(values.values())) > 1:
            raise RecipeError(
                [f"trainer.{key} must be the same for all policies, found {values}: it decides the rounds"]
            )
    for seat in seats[1:]:
        if seat.batch.prompts != first.batch.prompts or seat.batch.optimizer_steps != first.batch.optimizer_steps:
            raise RecipeError(
                [
                    f"policies {first.policy!r} and {seat.policy!r} would not see the same rounds: "
                    f"{first.batch.prompts} prompts in {first.batch.optimizer_steps} steps against "
                    f"{seat.batch.prompts} in {seat.batch.optimizer_steps}; set round.prompts"
                ]
            )
