"""`mutualrl train --dry-run`: the resolved recipe, and the placement of each policy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from mutualrl.cli.output import emit, screen, show_table
from mutualrl.console.display import clean, print_text
from mutualrl.engines.model_files import is_local
from mutualrl.errors import DataUnavailableError, MachineError, MutualRLError
from mutualrl.launch.checks import (
    check_asked_sources,
    check_batch,
    check_inputs,
    check_models,
    check_sources,
    check_training,
    predictions,
)
from mutualrl.launch.session import Launch, stored
from mutualrl.launch.supervisor import check_resumption
from mutualrl.machine.devices import Machine, this_machine
from mutualrl.machine.requirements import missing_requirements, require_ports
from mutualrl.mwra.device_map import read_device_map
from mutualrl.mwra.memory import Estimate, estimate_allocation, format_estimate, require_fit
from mutualrl.mwra.placement import Placement, place
from mutualrl.recipes import Recipe, dump
from mutualrl.recipes.agreement import all_prompts, fitting_prompts, require_enough, too_long_notes
from mutualrl.recipes.pool_tokenizers import load_tokenizers
from mutualrl.recipes.run_sources import Prediction
from mutualrl.recipes.trainer_table import defaults
from mutualrl.records import Prompt
from mutualrl.see.files import PUBLISH_REQUESTS, READ_REQUESTS
from mutualrl.see.mirror import BEATS
from mutualrl.storage.hub import hub_problem
from mutualrl.storage.rundir import require_creatable
from mutualrl.tasks.reward_trial import Trial, flat_note, try_rewards, varied_prompts
from mutualrl.tasks.rewarding import BOXED
from mutualrl.tiny import resolve_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of a run: the recipe with its steps, placements (or the reason for none) and memory by machine, reward
    trials by policy (or the reason for none), the requirements that this machine does not meet, notes, and the error
    with which the start would be refused, the numbers and origins of the prompts, and what asked sources will do."""

    recipe: Recipe
    placements: dict[str, Placement | str]
    memory: dict[str, dict[str, Estimate | None]]
    trials: dict[str, list[Trial]]
    untried: str
    missing: Sequence[str]
    notes: Sequence[str] = ()
    failure: MutualRLError | None = None
    data: Mapping[str, object] = field(default_factory=dict)
    predicted: Mapping[str, Prediction] = field(default_factory=dict)


def show(recipe: Recipe, launch: Launch, *, as_json: bool) -> None:
    """Print the recipe, its placement on the hardware it names, and its placement on this machine."""
    if launch.resume:
        show_resumption(recipe, launch, as_json=as_json)
        return
    if recipe.run.dir is not None:
        require_creatable(Path(recipe.run.dir), clean=launch.clean)
    plan = plan_of(recipe, launch)
    if plan.failure is None or not as_json:  # else the object is the error
        _print_plan(plan, as_json=as_json)
    if plan.failure is not None:
        raise plan.failure


def show_resumption(recipe: Recipe, launch: Launch, *, as_json: bool) -> None:
    """Print the recipe and the placement of a run that `--resume` would continue."""
    resumption = check_resumption(recipe, this_machine(), launch)
    label = "this machine"
    plan = Plan(resumption.recipe, {label: resumption.placement}, {label: {}}, {}, "", (), resumption.notes)
    _print_plan(plan, as_json=as_json)


def _print_plan(plan: Plan, *, as_json: bool) -> None:
    if as_json:
        emit(plan_json(plan))
        return
    screen().print(dump(plan.recipe), markup=False, highlight=False, soft_wrap=True, end="")
    show_plan(plan)


def placements_of(
    recipe: Recipe, machine: Machine, launch: Launch
) -> tuple[dict[str, Placement | str], MutualRLError | None]:
    """Return the placement, or why there is none, on the hardware that the recipe names and on this machine; and the
    error of the first of them."""
    pins = None if launch.device_map is None else read_device_map(launch.device_map)
    machines = {f"this machine: {len(machine.gpus)} GPUs, {machine.cores} CPU cores": machine}
    if recipe.hardware.gpus:
        named = Machine(tuple(str(i) for i in range(recipe.hardware.gpus)), machine.cores)
        machines = {f"the recipe's hardware: {recipe.hardware.gpus} GPUs": named, **machines}
    placements: dict[str, Placement | str] = {}
    impossible: list[MutualRLError] = []
    for label, candidate in machines.items():
        try:
            placed = place(recipe, candidate, pins)
            if pins is None:
                require_fit(recipe, placed, candidate)
            placements[label] = placed
        except MutualRLError as error:
            placements[label] = str(error)
            impossible.append(error)
    on_recipe = next(iter(placements.values()))  # the hardware that the recipe names, else this machine
    return placements, impossible[0] if isinstance(on_recipe, str) else None


def plan_of(recipe: Recipe, launch: Launch) -> Plan:
    """Place the policies, estimate their memory, check data and models as a start does, and try the reward."""
    machine = this_machine()
    placements, failure = placements_of(recipe, machine, launch)
    missing = missing_requirements(recipe, machine)
    notes: Sequence[str] = ()
    data: Mapping[str, object] = {}
    trials: dict[str, list[Trial]] = {}
    untried = ""
    predicted: dict[str, Prediction] = {}
    try:
        require_ports(recipe)
    except MachineError as error:
        missing.append(str(error))
    try:
        inputs = check_inputs(recipe)
        notes, data = inputs.notes, inputs.data
        placement = next((p for p in placements.values() if isinstance(p, Placement)), None)
        if placement is not None:
            batch = placement.allocations[0].batch
            recipe, _ = check_batch(recipe, batch, inputs)
            notes = [*notes, *check_asked_sources(recipe, inputs, contact=False).notes]
            predicted = predictions(recipe, batch)
            notes = [*notes, *(each.note(name) for name, each in predicted.items())]
        check_models(recipe, [p.name for p in recipe.policies])
        check_training(recipe, [p.name for p in recipe.policies])
        missing += _absent_models(recipe)
        if all(is_local(resolve_path(policy.model), policy.revision) for policy in recipe.policies):
            sources = check_sources(recipe, inputs)
            notes = [*notes, *(source.note for source in sources.values())]
        tokenizers = None if recipe.task.has_turns else _local_tokenizers(recipe)
        if tokenizers is not None:
            notes = [*notes, *_prompt_notes(recipe, inputs.prompts, tokenizers)]
        trials, untried = _reward_trials(recipe, inputs.prompts, tokenizers)
        notes = [*notes, *flat_note([trial for each in trials.values() for trial in each])]
    except DataUnavailableError as error:
        missing.append(f"the data of task {recipe.task.name!r}: {error}")
        untried = str(error)
    except MutualRLError as error:
        failure = failure or error
    memory: dict[str, dict[str, Estimate | None]] = {}
    for label, planned_placement in placements.items():
        if not isinstance(planned_placement, str):
            memory[label] = {a.policy: estimate_allocation(recipe, a) for a in planned_placement.allocations}
    return Plan(recipe, placements, memory, trials, untried, missing, notes, failure, data, predicted)


def _absent_models(recipe: Recipe) -> list[str]:
    """Return the models that are neither on this machine nor, without a hub, to be downloaded."""
    absent = [p for p in recipe.policies if not is_local(resolve_path(p.model), p.revision)]
    problem = hub_problem() if absent else None
    return [] if problem is None else [f"the model {p.model!r} of policy {p.name!r} ({problem})" for p in absent]


def _local_tokenizers(recipe: Recipe) -> Mapping[str, PreTrainedTokenizerBase] | None:
    """Return the tokenizers by policy; None if the model of any is not on this machine."""
    if not all(is_local(resolve_path(policy.model), policy.revision) for policy in recipe.policies):
        return None
    return load_tokenizers(recipe)


def _prompt_notes(
    recipe: Recipe, prompts: Sequence[Prompt], tokenizers: Mapping[str, PreTrainedTokenizerBase]
) -> list[str]:
    """Return notes on prompts that are too long. Raises DataError if no prompt remains. With tools, whose descriptions
    count, the run says it."""
    fitting = fitting_prompts(recipe, prompts, all_prompts(recipe, "validation"), tokenizers)
    require_enough(fitting.training, recipe.round.prompts or 1)
    return too_long_notes(fitting.counts, recipe.task.max_prompt_tokens)


def plan_json(plan: Plan) -> dict[str, object]:
    """Return a plan as a JSON object."""
    memory = {}
    for label, estimates in plan.memory.items():
        memory[label] = {policy: estimate and asdict(estimate) for policy, estimate in estimates.items()}
    return {
        "recipe": plan.recipe.model_dump(mode="json"),
        "placement": _placements_json(plan.placements),
        "memory": memory,
        "missing_requirements": plan.missing,
        "notes": list(plan.notes),
        "data": dict(plan.data),
        "exchange": requests(plan.recipe),
        "asked_sources": {name: asdict(each) for name, each in plan.predicted.items()},
        "rewards": {policy: [_trial_json(trial) for trial in trials] for policy, trials in plan.trials.items()},
    }


def show_plan(plan: Plan) -> None:
    """Print a plan without its recipe."""
    console, recipe = screen(), plan.recipe
    for label, placement in plan.placements.items():
        if isinstance(placement, str):
            print_text(console, f"Placement on {label}: {placement}")
        else:
            show_table(_placement_table(label, placement, plan.memory.get(label, {}), recipe))
    if recipe.bucket is not None:
        counts = requests(recipe)
        message = (
            f"Exchange {recipe.bucket.url}, per policy: {counts['heartbeat_puts_per_hour']} heartbeat puts per hour, "
            f"at most {counts['mirror_puts_per_hour']} puts of files for `watch`; {counts['puts_per_round']} puts and "
            f"at least {counts['gets_per_round']} gets per round; during a wait at most one get per second per peer"
        )
        print_text(console, message)
    first = next((placement for placement in plan.placements.values() if isinstance(placement, Placement)), None)
    if (waits := waiting(recipe, first)) is not None:
        print_text(console, waits)
    for policy, trials in plan.trials.items():
        show_table(_trial_table(policy, recipe.task.reward, trials))
    if plan.untried:
        print_text(console, f"The reward function was not tried: {plan.untried}")
    if (unset := unset_defaults(recipe)) is not None:
        print_text(console, unset)
    for note in plan.notes:
        print_text(console, f"Note: {note}")
    for line in plan.missing:
        print_text(console, f"This machine lacks: {line}")


def _reward_trials(
    recipe: Recipe, prompts: Sequence[Prompt], tokenizers: Mapping[str, PreTrainedTokenizerBase] | None
) -> tuple[dict[str, list[Trial]], str]:
    """Return the trials of the user's reward functions on the first prompts, for one policy per completion format; and
    the reason for none, if the tokenizers are not available.

    Raises RewardError for a function that fails.
    """
    if recipe.task.reward == BOXED:
        return {}, ""
    if recipe.task.has_turns:
        return {}, "it scores multi-turn rollouts"
    if tokenizers is None:
        return {}, "the models are not on this machine"
    trials: dict[str, list[Trial]] = {}
    forms = set()
    for name, tokenizer in tokenizers.items():
        weights = recipe.trainer_settings(name).get("reward_weights")
        form = (bool(tokenizer.chat_template), str(weights))
        if form not in forms:
            trials[name] = try_rewards(recipe.task.reward, weights, varied_prompts(prompts), tokenizer)
            forms.add(form)
    return trials, ""


def _trial_table(policy: str, paths: Sequence[str], trials: Sequence[Trial]) -> Table:
    names = ", ".join(path.rpartition("/")[2] for path in paths)
    table = Table("completion", "rewards", title=clean(f"{names} on the first prompts as {policy} sees them"))
    for trial in trials:
        table.add_row(trial.completion, ", ".join(map(_reward, trial.rewards)))
    return table


def _trial_json(trial: Trial) -> dict[str, object]:
    rewards = [None if math.isnan(reward) else reward for reward in trial.rewards]
    return {"completion": trial.completion, "rewards": rewards}


def _reward(value: float) -> str:
    return "no reward" if math.isnan(value) else f"{value:g}"


def unset_defaults(recipe: Recipe) -> str | None:
    """Return the message with TRL's defaults of decisive keys that the recipe leaves unset."""
    missing: set[str] = set()
    for policy in recipe.policies:
        settings = recipe.trainer_settings(policy.name)
        missing.update(key for key in DECISIVE if key not in settings)
        if settings.get("use_vllm") and settings.get(CORRECTION[0], True):
            missing.update(key for key in CORRECTION if key not in settings)
    unset = [f"{key} {defaults()[key]:g}" for key in DECISIVE if key in missing]
    unset += [f"{key} {defaults()[key]}" for key in CORRECTION if key in missing]
    return f"Left to TRL's defaults: {', '.join(unset)}" if unset else None


DECISIVE = ("learning_rate", "beta", "temperature", "max_completion_length")  # every user should choose these
#: treatment of completions whose log-probs differ between vLLM and the trainer
CORRECTION = (
    "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode",
    "vllm_importance_sampling_clip_max",
)

#: below this ratio of weights per device, policies are about equally fast
UNEVEN = 1.2


def waiting(recipe: Recipe, placement: Placement | None) -> str | None:
    """Return the message about waiting: the others wait for the policy with the most weights per device, if the pool
    has the sizes. None if no policy waits."""
    if not recipe.regime_class.reads_peers or len(recipe.policies) < 2:  # no policy waits for a source
        return None
    staleness = recipe.exchange.staleness
    behind = "each policy of the pool" if not staleness else f"policies more than {staleness} round(s) behind"
    text = f"A round waits for {behind} (exchange.staleness: {staleness})"
    weights: dict[str, float] = {}
    for allocation in () if placement is None else placement.allocations:
        if (parameters := recipe.policy(allocation.policy).parameters) is not None:
            weights[allocation.policy] = parameters / allocation.processes
    if len(weights) == len(recipe.policies):
        slowest, fastest = max(weights, key=lambda name: weights[name]), min(weights, key=lambda name: weights[name])
        ratio = weights[slowest] / weights[fastest]
        if ratio >= UNEVEN:
            text += f"; {slowest} has {ratio:.1f} times the weights per device of {fastest}: the others wait for it"
    return f"{text}. `mutualrl report` of a run shows what other values would have saved"


MIRRORED = 2  # files that grow during the run: metrics, rescues


def requests(recipe: Recipe) -> dict[str, int]:
    """Return the numbers of requests of a policy to a bucket, per hour and per round; none for a directory."""
    if recipe.bucket is None:
        return {}
    peers = len(recipe.policies) - 1
    puts, gets = PUBLISH_REQUESTS
    return {
        "heartbeat_puts_per_hour": math.ceil(3600 / recipe.bucket.heartbeat_seconds),
        "mirror_puts_per_hour": MIRRORED * math.ceil(3600 / (BEATS * recipe.bucket.heartbeat_seconds)),
        "puts_per_round": puts,
        "gets_per_round": gets + READ_REQUESTS * peers,
    }


def _placements_json(planned: dict[str, Placement | str]) -> dict[str, object]:
    placements: dict[str, object] = {}
    for label, placement in planned.items():
        if isinstance(placement, str):
            placements[label] = {"problem": placement}
        else:
            allocations = [stored(allocation).to_json() for allocation in placement.allocations]
            placements[label] = {"allocations": allocations, "notes": list(placement.notes)}
    return placements


def _placement_table(label: str, placement: Placement, memory: dict[str, Estimate | None], recipe: Recipe) -> Table:
    table = Table(
        "policy",
        "devices",
        "strategy",
        "per round",
        "per optimizer step",
        "memory per GPU",
        title=f"Placement on {label}",
        title_justify="left",
        caption="; ".join(placement.notes) or None,
    )
    for allocation in placement.allocations:
        plan = allocation.batch
        steps = recipe.steps_per_round(plan.optimizer_steps)
        strategy = allocation.strategy if allocation.processes > 1 or allocation.gpus else "one process"
        table.add_row(
            allocation.policy,
            allocation.devices,
            strategy,
            f"{plan.prompts} prompts x {plan.rollouts} rollouts = {steps} step(s)",
            f"{plan.micro_batches} x {plan.per_device} completions x {allocation.processes} device(s)",
            format_estimate(memory.get(allocation.policy)) if allocation.gpus else "-",
        )
    return table
