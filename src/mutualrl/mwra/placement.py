"""Placement of policies on devices: a pure function of machine and recipe.

Source: paper, Section "Multi-Worker Resource Allocation": workers of different policies are distributed evenly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from mutualrl.errors import MachineError, RecipeError
from mutualrl.machine.devices import Machine
from mutualrl.mwra.device_map import DevicePin, pin_problems
from mutualrl.recipes.batch_plan import plan_batch
from mutualrl.recipes.schema import Policy, Recipe
from mutualrl.storage.allocation import SHARDINGS, Allocation, Devices, Strategy


@dataclass(frozen=True, slots=True)
class Placement:
    """Allocation of every policy, notes for the user, and the devices of the sources that are asked."""

    allocations: tuple[Allocation, ...]
    notes: tuple[str, ...]
    sources: tuple[Devices, ...] = ()

    def allocation(self, policy: str) -> Allocation:
        """Return the allocation of a policy."""
        return next(allocation for allocation in self.allocations if allocation.policy == policy)


def place(
    recipe: Recipe,
    machine: Machine,
    pins: Mapping[str, DevicePin] | None = None,
    recorded: Mapping[str, Strategy] | None = None,
) -> Placement:
    """Split the machine over the policies: `hardware.gpus` of its GPUs (all by default), or its cores without GPUs.

    `pins` (a device map) override the split, and `recorded` strategies, of the run that is resumed, those that `auto`
    would choose. Raises MachineError if there are fewer GPUs than policies, RecipeError if
    no split divides the batch or a pin is invalid."""
    used = Machine(machine.gpus[: recipe.hardware.gpus], machine.cores)
    shared = pins is None and shares_gpus(recipe, used)
    usable, sources = _with_sources(recipe, used, shared=shared)
    if pins is not None:
        allocations, notes = _pinned(recipe, usable, pins)
    elif usable.gpus:
        allocations, notes = _on_gpus(recipe, recipe.policies, usable, shared=shared)
    else:
        allocations, notes = _on_cpu(recipe, recipe.policies, usable)
    _require_same_rounds(recipe, allocations)
    if recorded and recipe.launch.strategy == "auto":
        allocations = [replace(each, strategy=recorded.get(each.policy, each.strategy)) for each in allocations]
    return Placement(tuple(allocations), (*notes, *strategy_notes(recipe, allocations)), sources)


def source_devices(recipe: Recipe, machine: Machine) -> tuple[Devices, ...]:
    """Return the devices of the recipe's asked sources on a machine without policies."""
    used = Machine(machine.gpus[: recipe.hardware.gpus], machine.cores)
    return _with_sources(recipe, used, shared=False)[1]


def _frozen(recipe: Recipe) -> list[str]:
    """Return the names of the sources that are sampled on a device of their own."""
    return [source.name for source in recipe.frozen_sources]


def shares_gpus(recipe: Recipe, machine: Machine) -> bool:
    """Return whether the members share the GPUs: as `launch.share_gpus` says, else where there are fewer than members.
    Whether they fit is checked where their sizes are known (`mwra.fit`)."""
    if recipe.launch.share_gpus is not None:
        return recipe.launch.share_gpus
    return 0 < len(machine.gpus) < len(recipe.policies) + len(_frozen(recipe))


def _with_sources(recipe: Recipe, machine: Machine, *, shared: bool) -> tuple[Machine, tuple[Devices, ...]]:
    """Return what remains of a machine for the policies, and the devices of the sources: one GPU, the last ones, for
    each frozen source; if the GPUs are `shared` the last one also serves the policies. Served sources need none. Raises
    MachineError if too few GPUs remain."""
    frozen, remaining = _frozen(recipe), machine
    if machine.gpus and frozen and not shared:
        count = len(machine.gpus) - len(frozen)
        if count < len(recipe.policies):
            raise MachineError(
                f"{len(recipe.policies)} policies and the frozen sources {', '.join(frozen)} need "
                f"{len(recipe.policies) + len(frozen)} GPUs, found {len(machine.gpus)}; let them share (without --set "
                "launch.share_gpus=false), or use the CPU: --set hardware.gpus=0"
            )
        remaining = Machine(machine.gpus[:count], machine.cores)
    free = list(machine.gpus[len(machine.gpus) - len(frozen) :] if not shared else machine.gpus[-1:] * len(frozen))
    threads = max(1, machine.cores // max(1, len(recipe.policies)))
    devices = []
    for source in recipe.asked_sources:
        gpus = (free.pop(0),) if source.kind == "frozen" and free else ()
        devices.append(Devices(source.name, gpus, 1, threads if source.kind == "frozen" else 1))
    return remaining, tuple(devices)


def _on_cpu(recipe: Recipe, policies: Sequence[Policy], machine: Machine) -> tuple[list[Allocation], list[str]]:
    processes = recipe.launch.processes or 1
    threads = machine.cores // (len(policies) * processes)
    notes = []
    if threads == 0:
        notes.append(
            f"{len(policies) * processes} processes share {machine.cores} CPU cores: steps take longer, results "
            "do not change"
        )
    strategy = strategy_of(recipe, processes, gpus=False)
    return [
        Allocation(p.name, (), processes, max(threads, 1), strategy, plan_batch(recipe, p.name, processes))
        for p in policies
    ], notes


def _sharing_note(recipe: Recipe, policies: Sequence[Policy], machine: Machine) -> str:
    members = len(policies) + len(_frozen(recipe))
    if recipe.launch.share_gpus:
        return f"{len(policies)} policies share every GPU"
    return (
        f"{len(policies)} policies share every GPU: there are fewer GPUs ({len(machine.gpus)}) than members "
        f"({members}) (launch.share_gpus=false forbids it)"
    )


def strategy_of(recipe: Recipe, processes: int, *, gpus: bool) -> Strategy:
    """Return the strategy of a policy's processes. `auto`: one is plain (DDP without a group); several are ZeRO-3 on
    GPUs, DDP on CPU. FSDP2 shards over several processes: one is plain."""
    chosen = recipe.launch.strategy
    if chosen == "auto":
        return _by_size(processes, gpus=gpus)
    return "ddp" if processes == 1 and SHARDINGS[chosen].wraps_layers else chosen


def _by_size(processes: int, *, gpus: bool) -> Strategy:
    return "zero3" if gpus and processes > 1 else "ddp"


def strategy_notes(recipe: Recipe, allocations: Sequence[Allocation]) -> list[str]:
    """Return which strategy each policy has and why, if the recipe leaves it to the number of processes."""
    chosen = recipe.launch.strategy
    if chosen != "auto" and not SHARDINGS[chosen].wraps_layers:
        return []
    if chosen == "auto" and all(each.processes == 1 and not each.gpus for each in allocations):
        return []
    reasons: dict[str, list[str]] = {}
    for each in allocations:
        reasons.setdefault(_reason(chosen, each), []).append(each.policy)
    return [f"launch.strategy {chosen}: " + ", ".join(f"{' and '.join(names)} {why}" for why, names in reasons.items())]


def _reason(chosen: str, allocation: Allocation) -> str:
    """Return an allocation's strategy and why it has it."""
    if chosen == "auto" and allocation.strategy != _by_size(allocation.processes, gpus=bool(allocation.gpus)):
        return f"{allocation.strategy} (as the run began)"
    if allocation.processes == 1 and not allocation.sharding.states:
        return "plain (one process" + (")" if chosen == "auto" else ": trainer.fsdp_config is not used)")
    title = allocation.sharding.title
    if chosen != "auto":
        return title
    return f"{title} (several processes on {'GPUs' if allocation.gpus else 'a CPU'})"


def _on_gpus(
    recipe: Recipe, policies: Sequence[Policy], machine: Machine, *, shared: bool
) -> tuple[list[Allocation], list[str]]:
    if shared:
        count = len(machine.gpus)
        strategy = strategy_of(recipe, count, gpus=True)
        threads = max(machine.cores // (count * len(policies)), 1)
        return [
            Allocation(p.name, machine.gpus, count, threads, strategy, plan_batch(recipe, p.name, count), len(policies))
            for p in policies
        ], [_sharing_note(recipe, policies, machine)]
    if len(machine.gpus) < len(policies):
        raise MachineError(
            f"{len(policies)} policies need at least {len(policies)} GPUs, one each: found {len(machine.gpus)}, "
            f"{len(policies) - len(machine.gpus)} short; use a smaller pool, let them share (without --set "
            "launch.share_gpus=false each takes a fraction of every GPU) or with --device-map FILE (memory fractions "
            "that add up to 1 on each GPU), or run on CPU with --set hardware.gpus=0"
        )
    sizes = [p.parameters or 0.0 for p in policies]
    weights = [recipe.launch.weights.get(p.name, 1.0) for p in policies] if recipe.launch.weights else None
    counts = best_split(len(machine.gpus), sizes, lambda i, n: _divides(recipe, policies[i].name, n), weights=weights)
    if counts is None:
        raise RecipeError([f"no split of {len(machine.gpus)} GPUs over {len(policies)} policies divides the batch"])
    allocations, start = [], 0
    for policy, count in zip(policies, counts, strict=True):
        gpus = machine.gpus[start : start + count]
        start += count
        threads = max(machine.cores // len(machine.gpus), 1)
        batch = plan_batch(recipe, policy.name, count)
        strategy = strategy_of(recipe, count, gpus=True)
        allocations.append(Allocation(policy.name, gpus, count, threads, strategy, batch))
    idle = len(machine.gpus) - start
    return allocations, [f"{idle} GPU(s) idle: no split uses them"] if idle else []


def _pinned(recipe: Recipe, machine: Machine, pins: Mapping[str, DevicePin]) -> tuple[list[Allocation], list[str]]:
    problems = pin_problems([p.name for p in recipe.policies], machine, pins)
    if problems:
        raise RecipeError(problems)
    allocations = []
    for policy in recipe.policies:
        pin = pins[policy.name]
        count = len(pin.gpus) or pin.processes or 1
        users = [p for p in pins.values() if set(p.gpus) & set(pin.gpus)]
        strategy = strategy_of(recipe, count, gpus=bool(pin.gpus))
        threads = max(machine.cores // sum(len(p.gpus) or p.processes or 1 for p in pins.values()), 1)
        allocations.append(
            Allocation(
                policy.name,
                pin.gpus,
                count,
                threads,
                strategy,
                plan_batch(recipe, policy.name, count),
                max(len(users), 1),
                pin.memory,
            )
        )
    used = {gpu for pin in pins.values() for gpu in pin.gpus}
    idle = [gpu for gpu in machine.gpus if gpu not in used]
    return allocations, [f"GPU {','.join(idle)} idle: not in the device map"] if idle and used else []


def _divides(recipe: Recipe, policy: str, processes: int) -> bool:
    try:
        plan_batch(recipe, policy, processes)
    except RecipeError:
        return False
    return True


def best_split(
    devices: int,
    sizes: Sequence[float],
    allowed: Callable[[int, int], bool],
    weights: Sequence[float] | None = None,
) -> tuple[int, ...] | None:
    """Return the number of devices of each policy: all devices if possible, then as even as possible (with `weights`:
    as close as possible to their proportions), then most for the largest.

    `allowed(i, n)`: whether policy i can run on n devices. None if no split is allowed. Example: three policies, the
    last the largest, 8 devices, powers of two allowed: (2, 2, 4).
    """

    def imbalance(counts: tuple[int, ...]) -> float:
        if weights is None:
            return max(counts) - min(counts)
        return sum(abs(c / sum(counts) - w / sum(weights)) for c, w in zip(counts, weights, strict=True))

    def rank(counts: tuple[int, ...]) -> tuple[float, ...]:
        weighted = sum(size * count for size, count in zip(sizes, counts, strict=True))
        return (-sum(counts), imbalance(counts), -weighted, *(-c for c in counts))

    limit = devices - len(sizes) + 1
    possible = [list(filter(partial(allowed, i), range(1, limit + 1))) for i in range(len(sizes))]
    return min(_splits(devices, possible), key=rank, default=None)


def _splits(devices: int, possible: Sequence[Sequence[int]]) -> Iterator[tuple[int, ...]]:
    """Yield all tuples with one of the `possible` counts per position and a sum of at most `devices`."""
    if not possible:
        yield ()
        return
    for first in possible[0]:
        if first <= devices:
            for rest in _splits(devices - first, possible[1:]):
                yield (first, *rest)


def _require_same_rounds(recipe: Recipe, allocations: Sequence[Allocation]) -> None:
    """Raise RecipeError naming two policies that would not see the same prompts."""
    first = allocations[0]
    for key, default in (("num_iterations", 1), ("shuffle_dataset", True)):
        values = {
            allocation.policy: recipe.trainer_settings(allocation.policy).get(key, default)
            for allocation in allocations
        }
        if len(set(values.values())) > 1:
            raise RecipeError(
                [f"trainer.{key} must be the same for all policies, found {values}: it decides the rounds"]
            )
    for allocation in allocations[1:]:
        if (
            allocation.batch.prompts != first.batch.prompts
            or allocation.batch.optimizer_steps != first.batch.optimizer_steps
        ):
            raise RecipeError(
                [
                    f"policies {first.policy!r} and {allocation.policy!r} would not see the same rounds: "
                    f"{first.batch.prompts} prompts in {first.batch.optimizer_steps} steps against "
                    f"{allocation.batch.prompts} in {allocation.batch.optimizer_steps}; set round.prompts"
                ]
            )
