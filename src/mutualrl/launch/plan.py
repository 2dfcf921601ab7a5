"""Plan of a start: every check before the first process, made once for `train`, `join`, `--resume`, `--dry-run` and
`init`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from mutualrl.engines.model_files import is_local, model_digest
from mutualrl.errors import DataUnavailableError, MachineError, MutualRLError, UsageError
from mutualrl.launch.checks import (
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

R = TypeVar("R")

#: prompts with the most characters, of which the tokens are counted
LONGEST = 8


@dataclass
class StartPlan:
    """What a start will do, and what stands against it."""

    recipe: Recipe
    """The recipe, with its epochs converted to steps once the data are known."""
    rehearsed: bool
    """Whether nothing starts: problems are collected, and no server is asked. Otherwise the first one is raised."""
    placements: dict[str, Placement | str] = field(default_factory=dict)
    """Placement by machine, or why there is none: on the hardware that the recipe names, if any, then on this machine.
    A start has that of its machine only."""
    machines: dict[str, Machine] = field(default_factory=dict)
    """The machines that have a placement."""
    memory: dict[str, Estimates] = field(default_factory=dict)
    """Memory of each policy on GPUs, by machine; None where the model's configuration is not available."""
    batch: BatchPlan | None = None
    """How a round is divided; None without a placement."""
    fingerprint: Fingerprint = field(default_factory=dict)
    """What all policies of the run must share."""
    inputs: CheckedData | None = None
    """The checked data; None where they cannot be read."""
    sources: dict[str, Prepared] = field(default_factory=dict)
    """The recorded sources, read and verified; empty for a run that is resumed, which has them."""
    predicted: dict[str, Prediction] = field(default_factory=dict)
    """What the sources that are asked will do."""
    asked: list[str] = field(default_factory=list)
    """Notes on the sources that are asked."""
    notes: list[str] = field(default_factory=list)
    """Other notes for the user."""
    missing: list[str] = field(default_factory=list)
    """What this machine lacks, one line each with what to type."""
    problems: list[MutualRLError] = field(default_factory=list)
    """Why the start would be refused, in the order of the checks."""

    @property
    def placement(self) -> Placement | None:
        """Return the first placement that is possible; None if there is none."""
        return next((each for each in self.placements.values() if isinstance(each, Placement)), None)

    @property
    def placed(self) -> Placement:
        """Return the placement of a start, which has one."""
        return next(each for each in self.placements.values() if isinstance(each, Placement))

    def check(self, step: Callable[[], R]) -> R | None:
        """Return what a check returns. A rehearsal collects its error, and returns None."""
        try:
            return step()
        except DataUnavailableError as error:
            if not self.rehearsed:
                raise
            self.missing.append(f"the data of task {self.recipe.task.name!r}: {error}")
        except MutualRLError as error:
            if not self.rehearsed:
                raise
            self.problems.append(error)
        return None

    def run_info(self, models: dict[str, str], run_id: str | None = None, joined: str | None = None) -> RunInfo:
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
            data={} if self.inputs is None else dict(self.inputs.data),
            sources=described(self.sources),
            asked_sources={name: asdict(each) for name, each in self.predicted.items()},
            models=models,
            placement=by_policy(self.placed),
            exchange="" if recipe.bucket is None else recipe.bucket.url,
            joined=joined or "",
            recipe=text,
            recipe_sha256=sha256_of(text),
        )

    def require(self) -> None:
        """Raise the first problem."""
        if self.problems:
            raise self.problems[0]


def plan(
    recipe: Recipe, machine: Machine, launch: Launch, resumed: RunDirectory | None = None, *, rehearsed: bool = False
) -> StartPlan:
    """Return the plan of a start, or of the resumption of a run. Cheap checks come first, a question to a server and
    the rewards of recorded texts last. Without `rehearsed` the first problem is raised."""
    made, names = StartPlan(recipe, rehearsed), launch.policies(recipe)
    here = only(recipe, names, launch.sources(recipe))
    _check_machine(made, here, machine)
    _place(made, here, machine, launch, resumed)
    made.inputs = made.check(lambda: check_inputs(recipe))
    if made.inputs is not None:
        made.notes += made.inputs.notes
        made.check(lambda: _count_steps(made))
        made.check(lambda: _try_turns(made))
    made.check(lambda: check_models(recipe, names))
    made.check(lambda: _check_memory(made, here))
    made.check(lambda: check_training(recipe, names))
    if made.inputs is not None:
        made.check(lambda: _check_asked(made, launch, resumed))
        if resumed is None:
            made.check(lambda: _prepare_recorded(made))
            made.check(lambda: _check_trajectories(made))
    if not rehearsed:
        digests = {name: source.digest for name, source in made.sources.items()}
        made.fingerprint |= source_digests(digests if resumed is None else recorded_digests(resumed.info(), recipe))
    return made


def _check_machine(made: StartPlan, recipe: Recipe, machine: Machine) -> None:
    """Note what the machine lacks for the members that it runs; a start is refused for it."""
    made.missing += [*busy_ports(recipe), *missing_requirements(recipe, machine)]
    if made.rehearsed:
        made.missing += absent_models(recipe)
    elif made.missing:
        raise MachineError("this machine lacks " + "; ".join(made.missing))


def _place(made: StartPlan, recipe: Recipe, machine: Machine, launch: Launch, resumed: RunDirectory | None) -> None:
    """Place the members on this machine; a rehearsal also on the hardware that the recipe names, whose problem is the
    start's there."""
    if not recipe.policies:
        made.placements["this machine"] = Placement((), (), source_devices(recipe, machine))
        made.batch = _batch_of_run(made.recipe)
        return
    pins = None if launch.device_map is None else read_device_map(launch.device_map)
    before = {} if resumed is None else resumed.info().placement
    recorded = {name: allocation.strategy for name, allocation in before.items()}
    machines = {f"this machine: {len(machine.gpus)} GPUs, {machine.cores} CPU cores": machine}
    if made.rehearsed and recipe.hardware.gpus:
        count, size = recipe.hardware.gpus, recipe.hardware.gpu_memory
        named = Machine(
            tuple(str(i) for i in range(count)), machine.cores, () if size is None else (int(size * GIB),) * count
        )
        machines = {f"the recipe's hardware: {recipe.hardware.gpus} GPUs": named, **machines}
    for number, (label, candidate) in enumerate(machines.items()):
        try:
            placement = place(recipe, candidate, pins, recorded)
            made.placements[label] = placement
            made.batch = made.batch or placement.allocations[0].batch
            made.machines[label] = candidate
        except MutualRLError as error:
            if not made.rehearsed:
                raise
            made.placements[label] = str(error)
            made.problems += [error] if number == 0 else []
    if not made.rehearsed and launch.ray is not None:
        require_capacity(bundles(made.placed))
    if not made.rehearsed and any(allocation.sharding.stage is not None for allocation in made.placed.allocations):
        made.notes += [lock_note(lock) for lock in build_locks()]


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


def _try_turns(made: StartPlan) -> None:
    if made.inputs is not None:
        check_turns(made.recipe, made.inputs)


def _check_memory(made: StartPlan, recipe: Recipe) -> None:
    """Estimate each policy's memory, and note where it may not suffice. A rehearsal is refused for the first machine
    only, for which the recipe is."""
    prompt: int | None = None
    refused: MachineError | None = None
    for number, (label, machine) in enumerate(made.machines.items()):
        placement = made.placements[label]
        if isinstance(placement, str) or not any(each.gpus for each in placement.allocations):
            continue
        prompt = _longest_prompt(made) if prompt is None else prompt
        made.memory[label] = estimates(recipe, placement, prompt)
        try:
            made.notes += fit_notes(recipe, placement, machine, made.memory[label])
        except MachineError as error:
            refused = refused or (error if number == 0 else None)
            made.notes += [] if number == 0 else [f"{label}: {error}"]
    if refused is not None:
        raise refused


def _longest_prompt(made: StartPlan) -> int:
    """Return the tokens of the longest prompt, by the tokenizers where they and the data are here; else the most that
    the recipe allows."""
    limit = made.recipe.task.max_prompt_tokens
    if made.inputs is None or not models_are_local(made.recipe):
        return limit
    longest = sorted(made.inputs.prompts, key=lambda prompt: len(str(prompt.content)))[-LONGEST:]
    contents = [prompt.content for prompt in longest]
    rows = [prompt_ids(contents, each, {}) for each in load_tokenizers(made.recipe).values()]
    return min(limit, max(len(ids) for each in rows for ids in each))


def _count_steps(made: StartPlan) -> None:
    """Convert the recipe's epochs to steps, and make the fingerprint."""
    if made.batch is not None and made.inputs is not None:
        made.recipe, made.fingerprint = check_batch(made.recipe, made.batch, made.inputs)
        made.notes += _resample_notes(made.recipe, made.batch)


def _resample_notes(recipe: Recipe, batch: BatchPlan) -> list[str]:
    """Return what dynamic sampling may cost; nothing without it."""
    if recipe.round.resample is None:
        return []
    rows = batch.prompts * batch.rollouts
    most = rows * (1 + recipe.round.resample.max_attempts)
    note = f"a round samples {rows:,} to {most:,} rollouts, and trains on {rows:,}"
    return [f"dynamic sampling: {note} (round.resample)"]


def _check_asked(made: StartPlan, launch: Launch, resumed: RunDirectory | None) -> None:
    """Check the sources that are asked, those of this machine with their keys, and predict what they will do."""
    if made.batch is None or made.inputs is None:
        return
    info, here = None if resumed is None else resumed.info(), launch.sources(made.recipe)
    asked = check_asked_sources(made.recipe, made.inputs, here, contact=not made.rehearsed, resumed=info)
    made.predicted = predictions(made.recipe, made.batch, None if made.rehearsed else asked)
    made.asked = asked.notes
    made.notes += [*asked.notes, *(each.note(name) for name, each in made.predicted.items())]


def _prepare_recorded(made: StartPlan) -> None:
    """Read and verify the recorded sources; a rehearsal only where the models, whose tokenizers it needs, are here."""
    if made.inputs is None or (made.rehearsed and not models_are_local(made.recipe)):
        return
    made.sources = check_sources(made.recipe, made.inputs)
    made.notes += [source.note for source in made.sources.values()]


def _check_trajectories(made: StartPlan) -> None:
    """Check what chat templates keep of the runs that policies learn, where the models, whose tokenizers it needs, are
    here."""
    if made.inputs is not None and models_are_local(made.recipe):
        made.notes += check_trajectories(made.recipe, made.inputs.prompts, made.sources)


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


@dataclass(frozen=True, slots=True)
class Resumption:
    """Checked resumption of a run: nothing is changed yet."""

    run: RunDirectory
    plan: StartPlan
    models: dict[str, str]
    """Digest of each policy's base model, and of each frozen source."""
    notes: list[str]
    """What is different from the run's start, without harm, and what asked sources have to say."""


def plan_resumption(recipe: Recipe, machine: Machine, launch: Launch) -> Resumption:
    """Check that a run can be resumed under a recipe. Raises UsageError, FileDamagedError, and the errors of `plan`."""
    if recipe.run.dir is None:
        raise UsageError("--resume: name the run with --run-dir DIR (the command that began it printed the directory)")
    run = open_resumable_run(Path(recipe.run.dir), joining=launch.member is not None)
    stored = load_run(run, run_code=True)
    accept_changes(stored, recipe)  # before the data are loaded: another task may have others
    made = plan(recipe, machine, launch, run)
    models = model_digests(made.recipe, launch)
    changes = accept_changes(stored, made.recipe)
    changes += require_same_plan(run.info(), made.placed, made.fingerprint, models)
    verify_finished_policies(run, made.recipe)
    return Resumption(run, made, models, [*made.placed.notes, *changes, *made.asked])


def model_digests(recipe: Recipe, launch: Launch) -> dict[str, str]:
    """Return the digest of the model of each policy, and of each frozen source, that this session starts. Raises
    ModelError if a file cannot be read."""
    here = [*launch.policies(recipe), *launch.sources(recipe)]
    models = {name: model for name, model in recipe.models.items() if name in here}
    digests = {key: model_digest(resolve_path(key.path), key.revision) for key in set(models.values())}
    return {name: digests[key] for name, key in models.items()}
