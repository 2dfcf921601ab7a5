"""Plan of a start: every check before the first process, made once for `train`, `join`, `--resume`, `--dry-run` and
`init`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from mutualrl.engines.model_files import is_local, model_digest
from mutualrl.errors import DataUnavailableError, MachineError, MutualRLError, UsageError
from mutualrl.launch.checks import (
    AskedSources,
    CheckedData,
    check_asked_sources,
    check_batch,
    check_inputs,
    check_models,
    check_sources,
    check_training,
    check_turns,
    predictions,
)
from mutualrl.launch.ray_launcher import bundles
from mutualrl.launch.session import (
    Launch,
    accept_changes,
    by_policy,
    open_resumable_run,
    recipe_text,
    require_same_plan,
    sha256_of,
    verify_finished_policies,
)
from mutualrl.launch.trajectories import check_trajectories
from mutualrl.machine.devices import Machine
from mutualrl.machine.extensions import build_locks, lock_note
from mutualrl.machine.ray_cluster import require_capacity
from mutualrl.machine.requirements import busy_ports, missing_requirements
from mutualrl.mwra.device_map import read_device_map
from mutualrl.mwra.fit import Estimates, estimates, fit_notes
from mutualrl.mwra.memory import GIB
from mutualrl.mwra.placement import Placement, place, source_devices
from mutualrl.recipes import Recipe, load_run
from mutualrl.recipes.agreement import source_digests
from mutualrl.recipes.pool_tokenizers import load_tokenizers
from mutualrl.recipes.run_sources import Prediction, described, recorded_digests
from mutualrl.regimes.info import RegimeInfo
from mutualrl.see.bucket import PROBE_SECONDS
from mutualrl.see.manifest import read_manifest
from mutualrl.see.store import remote_store
from mutualrl.storage.allocation import BatchPlan
from mutualrl.storage.hub import hub_problem
from mutualrl.storage.run_info import Fingerprint, RunInfo
from mutualrl.storage.rundir import RunDirectory, command_line, versions
from mutualrl.tasks.prompting import prompt_ids
from mutualrl.tiny import resolve_path

if TYPE_CHECKING:
    from mutualrl.sources.prepare import Prepared

F = TypeVar("F")

#: prompts with the most characters, of which the tokens are counted
LONGEST = 8


class fact(cached_property[F]):  # noqa: N801  (a decorator, as the one that it extends)
    """Cached property whose error is kept as its value is: what could not be found is not looked for again."""

    def __get__(self, facts: object, owner: type | None = None) -> F:  # type: ignore[override]
        """Return the value of an instance, or raise its error."""
        failed = f"{self.attrname} failed"
        if failed in facts.__dict__:
            raise facts.__dict__[failed]
        try:
            return super().__get__(facts, owner)
        except MutualRLError as error:
            facts.__dict__[failed] = error
            raise


@dataclass(frozen=True)
class StartPlan:
    """What a start rests on, and will do. A fact is found when a check first asks for it, and raises what stands
    against it."""

    given: Recipe
    """The recipe as it was resolved."""
    launch: Launch
    resumed: RunDirectory | None
    """The run that is resumed; None for a new one."""
    machine: Machine
    hardware: Mapping[str, Machine]
    """The machines to place the members on, by label. The first one decides."""
    online: bool
    """Whether servers, the hub and the cluster are asked."""
    notes: list[str] = field(default_factory=list)
    """What the checks say, for the user."""
    problems: list[MutualRLError] = field(default_factory=list)
    """Why the start would be refused, in the order of the checks."""

    @property
    def recipe(self) -> Recipe:
        """Return the recipe, with its epochs converted to steps once the data are known."""
        counted = known(lambda: self.counted)
        return self.given if counted is None else counted[0]

    @fact
    def names(self) -> list[str]:
        """Return the policies that the start begins."""
        return self.launch.policies(self.given)

    @fact
    def here(self) -> Recipe:
        """Return the recipe with the members that the start begins."""
        return only(self.given, self.names, self.launch.sources(self.given))

    @fact
    def missing(self) -> list[str]:
        """Return what the machine lacks for these members, one line each with what to type."""
        return [*busy_ports(self.here), *missing_requirements(self.here, self.machine)]

    @fact
    def placements(self) -> dict[str, Placement | MutualRLError]:
        """Return the placement of the members by machine, or why there is none."""
        if not self.here.policies:
            return {"this machine": Placement((), (), source_devices(self.here, self.machine))}
        pins = None if self.launch.device_map is None else read_device_map(self.launch.device_map)
        before = {} if self.resumed is None else self.resumed.info().placement
        recorded = {name: allocation.strategy for name, allocation in before.items()}
        found: dict[str, Placement | MutualRLError] = {}
        for label, machine in self.hardware.items():
            try:
                found[label] = place(self.here, machine, pins, recorded)
            except MutualRLError as error:
                found[label] = error
        return found

    @fact
    def placement(self) -> Placement:
        """Return the first placement that is possible."""
        for placement in self.placements.values():
            if isinstance(placement, Placement):
                return placement
        raise next(each for each in self.placements.values() if isinstance(each, MutualRLError))

    @fact
    def batch(self) -> BatchPlan:
        """Return how a round is divided."""
        return self.placement.allocations[0].batch if self.here.policies else _batch_of_run(self.given)

    @fact
    def inputs(self) -> CheckedData:
        """Return the data."""
        return check_inputs(self.given)

    @fact
    def counted(self) -> tuple[Recipe, Fingerprint]:
        """Return the recipe with its epochs converted to steps, and what all policies of the run must share."""
        return check_batch(self.given, self.batch, self.inputs)

    @fact
    def memory(self) -> dict[str, Estimates]:
        """Return the memory of each policy by machine with GPUs."""
        on_gpus = {
            label: placement
            for label, placement in self.placements.items()
            if isinstance(placement, Placement) and any(each.gpus for each in placement.allocations)
        }
        longest = self._longest_prompt() if on_gpus else 0
        return {label: estimates(self.here, placement, longest) for label, placement in on_gpus.items()}

    @fact
    def asked(self) -> AskedSources:
        """Return the sources that are asked, those of this machine with their keys."""
        info, here = None if self.resumed is None else self.resumed.info(), self.launch.sources(self.given)
        return check_asked_sources(self.given, self.inputs, here, contact=self.online, resumed=info)

    @fact
    def predicted(self) -> dict[str, Prediction]:
        """Return what the sources that are asked will do."""
        return predictions(self.counted[0], self.batch, self.asked if self.online else None)

    @fact
    def sources(self) -> dict[str, Prepared]:
        """Return the recorded sources, read and verified; none for a run that is resumed, which has them, and offline
        none without the models, whose tokenizers they need."""
        readable = self.resumed is None and (self.online or models_are_local(self.given))
        return check_sources(self.given, self.inputs) if readable else {}

    @fact
    def fingerprint(self) -> Fingerprint:
        """Return what all policies of the run must share, its recorded sources too."""
        digests = {name: source.digest for name, source in self.sources.items()}
        if self.resumed is not None:
            digests = recorded_digests(self.resumed.info(), self.given)
        return self.counted[1] | source_digests(digests)

    @fact
    def models(self) -> dict[str, str]:
        """Return the digest of the model of each policy, and of each frozen source, that the start begins. Raises
        ModelError if a file cannot be read."""
        here = [*self.names, *self.launch.sources(self.given)]
        models = {name: model for name, model in self.given.models.items() if name in here}
        digests = {key: model_digest(resolve_path(key.path), key.revision) for key in set(models.values())}
        return {name: digests[key] for name, key in models.items()}

    def require(self) -> None:
        """Raise the first problem."""
        if self.problems:
            raise self.problems[0]

    def run_info(self, run_id: str | None = None, joined: str | None = None) -> RunInfo:
        """Return what run.json has of this start. `joined`: the member that joins an exchange alone."""
        recipe = self.recipe
        text = recipe_text(recipe)
        return RunInfo(
            run_id=run_id or uuid.uuid4().hex,
            created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            command=command_line(),
            versions=versions(),
            seed=recipe.run.seed,
            regime=recipe.regime_class.name,
            regime_info=RegimeInfo.of(recipe.regime_class).model_dump(mode="json"),
            pool=recipe.pool,
            fingerprint=self.fingerprint,
            data=dict(self.inputs.data),
            sources=described(self.sources),
            asked_sources={name: asdict(each) for name, each in self.predicted.items()},
            models=self.models,
            placement=by_policy(self.placement),
            exchange="" if recipe.bucket is None else recipe.bucket.url,
            joined=joined or "",
            recipe=text,
            recipe_sha256=sha256_of(text),
        )

    def _longest_prompt(self) -> int:
        """Return the tokens of the longest prompt, by the tokenizers where they and the data are here; else the most
        that the recipe allows."""
        limit, inputs = self.given.task.max_prompt_tokens, known(lambda: self.inputs)
        if inputs is None or not models_are_local(self.given):
            return limit
        longest = sorted(inputs.prompts, key=lambda prompt: len(str(prompt.content)))[-LONGEST:]
        contents = [prompt.content for prompt in longest]
        rows = [prompt_ids(contents, each, {}) for each in load_tokenizers(self.given).values()]
        return min(limit, max(len(ids) for each in rows for ids in each))


def known(find: Callable[[], F]) -> F | None:
    """Return a fact; None if something stands against it."""
    try:
        return find()
    except MutualRLError:
        return None


# ---- checks: each returns its notes, and raises the problem that it finds


def _placed(start: StartPlan) -> list[str]:
    first = next(iter(start.placements.values()))
    if isinstance(first, MutualRLError):
        raise first
    if start.online and start.launch.ray is not None:
        require_capacity(bundles(first))
    if not start.here.policies:
        _ = start.batch  # which a source that joins alone cannot always know
    by_deepspeed = start.online and any(each.sharding.stage is not None for each in first.allocations)
    return [lock_note(lock) for lock in build_locks()] if by_deepspeed else []


def _read(start: StartPlan) -> list[str]:
    return list(start.inputs.notes)


def _counted(start: StartPlan) -> list[str]:
    """Note what dynamic sampling may cost."""
    recipe, _ = start.counted
    if recipe.round.resample is None:
        return []
    rows = start.batch.prompts * start.batch.rollouts
    most = rows * (1 + recipe.round.resample.max_attempts)
    return [f"dynamic sampling: a round samples {rows:,} to {most:,} rollouts, and trains on {rows:,} (round.resample)"]


def _turns(start: StartPlan) -> list[str]:
    check_turns(start.given, start.inputs)
    return []


def _models(start: StartPlan) -> list[str]:
    check_models(start.given, start.names)
    return []


def _memory(start: StartPlan) -> list[str]:
    """Note where the memory may not suffice. Raises MachineError for the first machine, for which the recipe is."""
    notes: list[str] = []
    refused: MachineError | None = None
    for number, (label, machine) in enumerate(start.hardware.items()):
        placement = start.placements.get(label)
        if label not in start.memory or not isinstance(placement, Placement):
            continue
        try:
            notes += fit_notes(start.here, placement, machine, start.memory[label])
        except MachineError as error:
            refused = refused or (error if number == 0 else None)
            notes += [] if number == 0 else [f"{label}: {error}"]
    if refused is not None:
        raise refused
    return notes


def _training(start: StartPlan) -> list[str]:
    check_training(start.given, start.names)
    return []


def _asked(start: StartPlan) -> list[str]:
    return [*start.asked.notes, *(each.note(name) for name, each in start.predicted.items())]


def _recorded(start: StartPlan) -> list[str]:
    return [source.note for source in start.sources.values()]


def _trajectories(start: StartPlan) -> list[str]:
    """Check what chat templates keep of the runs that policies learn, where the models, whose tokenizers it needs, are
    here."""
    if start.resumed is not None or not models_are_local(start.given):
        return []
    return check_trajectories(start.given, start.inputs.prompts, start.sources)


#: cheap ones first, a question to a server and the rewards of recorded texts last
CHECKS: tuple[Callable[[StartPlan], list[str]], ...] = (
    *(_placed, _read, _counted, _turns, _models, _memory, _training, _asked, _recorded, _trajectories),
)


def _batch_of_run(recipe: Recipe) -> BatchPlan:
    """Return how a round is divided, for a source that joins: as the run in the bucket says, else as the recipe does.
    Raises UsageError where only the policies' processes decide it, and none has joined."""
    settings = recipe.trainer_settings(recipe.policies[0].name)
    manifest = None if recipe.bucket is None else read_manifest(remote_store(recipe.bucket.url, PROBE_SECONDS))
    keys = ("prompts_per_round", "rollouts_per_prompt", "optimizer_steps_per_round")
    if manifest is not None and all(isinstance(manifest.fingerprint.get(key), int) for key in keys):
        prompts, rollouts, steps = (int(manifest.fingerprint[key]) for key in keys)
        return BatchPlan(prompts, rollouts, prompts * rollouts, 1, steps)
    if recipe.round.prompts is None:
        raise UsageError(
            "round.prompts: null: the size of a round depends on the policies' processes, so a policy must join before "
            "the source; start one, or set round.prompts"
        )
    rollouts = int(settings.get("num_generations", 8))
    return BatchPlan(recipe.round.prompts, rollouts, recipe.round.prompts * rollouts, 1, recipe.round.optimizer_steps)


def plan(recipe: Recipe, machine: Machine, launch: Launch, resumed: RunDirectory | None = None) -> StartPlan:
    """Return the plan of a start, or of the resumption of a run. Raises the first problem."""
    start = StartPlan(recipe, launch, resumed, machine, {"this machine": machine}, online=True)
    if start.missing:
        raise MachineError("this machine lacks " + "; ".join(start.missing))
    for check in CHECKS:
        start.notes.extend(check(start))
    return start


def rehearse(recipe: Recipe, machine: Machine, launch: Launch) -> StartPlan:
    """Return the plan of a start on the hardware that the recipe names, and on this machine, with all its problems and
    what is missing here. No server is asked."""
    hardware = {_label(machine): machine}
    if count := recipe.hardware.gpus:
        size = recipe.hardware.gpu_memory
        memory = () if size is None else (int(size * GIB),) * count
        named = Machine(tuple(map(str, range(count))), machine.cores, memory)
        hardware = {f"the recipe's hardware: {count} GPUs": named, **hardware}
    start = StartPlan(recipe, launch, None, machine, hardware, online=False)
    start.missing.extend(absent_models(start.here))
    for check in CHECKS:
        try:
            start.notes.extend(check(start))
        except DataUnavailableError as error:
            unavailable = f"the data of task {recipe.task.name!r}: {error}"
            start.missing.extend([] if unavailable in start.missing else [unavailable])
        except MutualRLError as error:  # what rests on a fact raises that fact's error
            start.problems.extend([] if error in start.problems else [error])
    return start


def _label(machine: Machine) -> str:
    return f"this machine: {len(machine.gpus)} GPUs, {machine.cores} CPU cores"


def models_are_local(recipe: Recipe) -> bool:
    """Return whether the models of all policies are on this machine."""
    return all(is_local(resolve_path(policy.model), policy.revision) for policy in recipe.policies)


def absent_models(recipe: Recipe) -> list[str]:
    """Return the models that are neither on this machine nor, without a hub, to be downloaded."""
    absent = [p for p in recipe.policies if not is_local(resolve_path(p.model), p.revision)]
    problem = hub_problem() if absent else None
    return [] if problem is None else [f"the model {p.model!r} of policy {p.name!r} ({problem})" for p in absent]


def only(recipe: Recipe, names: Sequence[str], sources: Sequence[str]) -> Recipe:
    """Return the recipe with only these policies and, of the asked sources, only these, to plan them."""
    weights = {name: weight for name, weight in recipe.launch.weights.items() if name in names}
    policies = tuple(policy for policy in recipe.policies if policy.name in names)
    launch = recipe.launch.model_copy(update={"weights": weights})
    asked = {source.name for source in recipe.asked_sources} - set(sources)
    kept = tuple(source for source in recipe.sources if source.name not in asked)
    return recipe.model_copy(update={"policies": policies, "sources": kept, "launch": launch})


def plan_resumption(recipe: Recipe, machine: Machine, launch: Launch) -> tuple[RunDirectory, StartPlan]:
    """Return a run and the plan of its resumption, with notes on what is different from its start, without harm.
    Nothing is changed yet. Raises UsageError, FileDamagedError, and the errors of `plan`."""
    if recipe.run.dir is None:
        raise UsageError("--resume: name the run with --run-dir DIR (the command that began it printed the directory)")
    run = open_resumable_run(Path(recipe.run.dir), joining=launch.member is not None)
    stored = load_run(run, run_code=True)
    accept_changes(stored, recipe)  # before the data are loaded: another task may have others
    made = plan(recipe, machine, launch, run)
    changes = accept_changes(stored, made.recipe)
    changes += require_same_plan(run.info(), made.placement, made.fingerprint, made.models)
    verify_finished_policies(run, made.recipe)
    made.notes[:] = [*made.placement.notes, *changes, *made.asked.notes]
    return run, made
