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
from mutualrl.errors import MutualRLError
from mutualrl.launch.plan import StartPlan, known, models_are_local, plan_resumption, rehearse
from mutualrl.launch.session import Launch
from mutualrl.machine.devices import this_machine
from mutualrl.mwra.fit import Estimates, format_estimate
from mutualrl.mwra.memory import MemoryEstimate
from mutualrl.mwra.placement import Placement
from mutualrl.recipes import Recipe, dump
from mutualrl.recipes.agreement import all_prompts, fitting_prompts, require_enough, too_long_notes
from mutualrl.recipes.pool_tokenizers import load_tokenizers
from mutualrl.recipes.trainer_table import defaults
from mutualrl.records import Prompt, columns_of
from mutualrl.see.files import PUBLISH_REQUESTS, READ_REQUESTS
from mutualrl.see.mirror import BEATS
from mutualrl.storage.run_logs import log_paths
from mutualrl.storage.rundir import PolicyFiles, require_creatable
from mutualrl.tasks.reward_trial import Trial, flat_note, try_rewards, varied_prompts
from mutualrl.tasks.rewarding import BOXED
from mutualrl.tasks.rewards import load_rewards, require_columns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Rehearsal:
    """Plan of a start that is not made, with what only people read of it."""

    plan: StartPlan
    trials: Mapping[str, list[Trial]] = field(default_factory=dict)
    """Reward trials by policy."""
    untried: str = ""
    """The reason for no trials."""


def show(recipe: Recipe, launch: Launch, *, as_json: bool) -> None:
    """Print the recipe, its placement on the hardware it names, and its placement on this machine; then what a start
    would be refused for."""
    if launch.resume:
        _, made = plan_resumption(recipe, this_machine(), launch)
        _print(Rehearsal(made), as_json=as_json)
        return
    if recipe.run.dir is not None:
        require_creatable(Path(recipe.run.dir), clean=launch.clean)
    rehearsal = try_out(recipe, launch)
    problems = rehearsal.plan.problems
    if not problems or not as_json:  # else the object is the error
        _print(rehearsal, as_json=as_json)
    for problem in () if as_json else problems[1:]:
        print_text(screen(), f"Also refused: {problem}")
    rehearsal.plan.require()


def _print(rehearsal: Rehearsal, *, as_json: bool) -> None:
    if as_json:
        emit(plan_json(rehearsal))
        return
    screen().print(dump(rehearsal.plan.recipe), markup=False, highlight=False, soft_wrap=True, end="")
    show_plan(rehearsal)


def try_out(recipe: Recipe, launch: Launch) -> Rehearsal:
    """Make the plan of a start without starting it, estimate its memory, and try the reward."""
    made = rehearse(recipe, this_machine(), launch)
    inputs = known(lambda: made.inputs)
    if made.problems or inputs is None:
        return Rehearsal(made, untried="" if made.problems else "the data are not on this machine")
    try:
        recipe = made.recipe
        require_columns(load_rewards(recipe.task.reward), columns_of(inputs.prompts))
        local = models_are_local(recipe) and not recipe.task.has_turns
        tokenizers = load_tokenizers(recipe) if local else None
        if tokenizers is not None:
            made.notes.extend(_prompt_notes(recipe, inputs.prompts, tokenizers))
        trials, untried = _reward_trials(recipe, inputs.prompts, tokenizers)
        made.notes.extend(flat_note([trial for each in trials.values() for trial in each]))
        return Rehearsal(made, trials, untried)
    except MutualRLError as error:
        made.problems.append(error)
        return Rehearsal(made)


def _prompt_notes(
    recipe: Recipe, prompts: Sequence[Prompt], tokenizers: Mapping[str, PreTrainedTokenizerBase]
) -> list[str]:
    """Return notes on prompts that are too long. Raises DataError if no prompt remains. With tools, whose descriptions
    count, the run says it."""
    fitting = fitting_prompts(recipe, prompts, all_prompts(recipe, "validation"), tokenizers)
    require_enough(fitting.training, recipe.round.prompts or 1)
    return too_long_notes(fitting.counts, recipe.task.max_prompt_tokens)


def plan_json(rehearsal: Rehearsal) -> dict[str, object]:
    """Return a plan as a JSON object."""
    made, memory = rehearsal.plan, {}
    for label, estimates in (known(lambda: made.memory) or {}).items():
        memory[label] = {policy: estimate and memory_json(estimate) for policy, estimate in estimates.items()}
    inputs = known(lambda: made.inputs) if made.resumed is None else None  # a run that is resumed has said it
    predicted = (known(lambda: made.predicted) or {}) if made.resumed is None else {}
    return {
        "recipe": made.recipe.model_dump(mode="json"),
        "placement": _placements_json(known(lambda: made.placements) or {}),
        "memory": memory,
        "missing_requirements": made.missing,
        "notes": made.notes,
        "data": {} if inputs is None else inputs.data,
        "exchange": requests(made.recipe),
        "asked_sources": {name: asdict(each) for name, each in predicted.items()},
        "rewards": {policy: [_trial_json(trial) for trial in trials] for policy, trials in rehearsal.trials.items()},
    }


def memory_json(estimate: MemoryEstimate) -> dict[str, object]:
    """Return an estimate as a JSON object, with its peak."""
    return {**asdict(estimate), "peak": estimate.peak, "instant": estimate.instant}


def show_plan(rehearsal: Rehearsal) -> None:
    """Print a plan without its recipe."""
    made = rehearsal.plan
    console, recipe = screen(), made.recipe
    memory = known(lambda: made.memory) or {}
    for label, placement in (known(lambda: made.placements) or {}).items():
        if isinstance(placement, Placement):
            show_table(_placement_table(label, placement, memory.get(label, {}), recipe))
        else:
            print_text(console, f"Placement on {label}: {placement}")
    if recipe.bucket is not None:
        counts = requests(recipe)
        message = (
            f"Exchange {recipe.bucket.url}, per policy: {counts['heartbeat_puts_per_hour']} heartbeat puts per hour, "
            f"at most {counts['mirror_puts_per_hour']} puts of files for `watch`; {counts['puts_per_round']} puts and "
            f"at least {counts['gets_per_round']} gets per round; during a wait at most one get per second per peer"
        )
        print_text(console, message)
    if (waits := waiting(recipe, known(lambda: made.placement))) is not None:
        print_text(console, waits)
    for policy, trials in rehearsal.trials.items():
        show_table(_trial_table(policy, recipe.task.reward, trials))
    if rehearsal.untried:
        print_text(console, f"The reward function was not tried: {rehearsal.untried}")
    if (unset := unset_defaults(recipe)) is not None:
        print_text(console, unset)
    for note in made.notes:
        print_text(console, f"Note: {note}")
    for line in made.missing:
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
    if not recipe.regime_class().needs().peers or len(recipe.policies) < 2:  # no policy waits for a source
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
    if not all(recipe.regime_of(policy.name).needs().late for policy in recipe.policies):
        return text
    return f"{text}. `mutualrl report` of a run shows what other values would have saved"


MIRRORED = len(log_paths(PolicyFiles(Path())))  # files that grow during the run


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


def _placements_json(planned: Mapping[str, Placement | MutualRLError]) -> dict[str, object]:
    placements: dict[str, object] = {}
    for label, placement in planned.items():
        if not isinstance(placement, Placement):
            placements[label] = {"problem": str(placement)}
        else:
            allocations = [asdict(allocation) for allocation in placement.allocations]
            placements[label] = {"allocations": allocations, "notes": list(placement.notes)}
    return placements


def _placement_table(label: str, placement: Placement, memory: Estimates, recipe: Recipe) -> Table:
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
