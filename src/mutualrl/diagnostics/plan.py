"""Plan of a diagnostic: where its rollouts come from, checked before any model is loaded."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Literal

from mutualrl.console.lines import notify
from mutualrl.console.options import given
from mutualrl.console.user_path import user_path
from mutualrl.diagnostics.endpoints import Endpoint
from mutualrl.diagnostics.gates import Thresholds
from mutualrl.diagnostics.request import ComplementarityRequest, DiagnosticRequest
from mutualrl.diagnostics.rollout_reader import has_rewards
from mutualrl.diagnostics.scales import Scales
from mutualrl.engines.model_files import model_problem
from mutualrl.engines.sampling import Sampling
from mutualrl.errors import DataError, UsageError
from mutualrl.recipes import Recipe, Request, load_run, resolve
from mutualrl.recipes.pool_tokenizers import load_tokenizers
from mutualrl.recipes.run_sources import criterion_of, require_recorded
from mutualrl.records import Prompt
from mutualrl.regimes import Regime, parts_of
from mutualrl.regimes.sgt import SGT
from mutualrl.regimes.xgrpo import XGRPO
from mutualrl.sources.prepare import Criterion
from mutualrl.sources.recorded import require_exists
from mutualrl.sources.section import TASK, RecordedSource
from mutualrl.storage.rundir import RunDirectory
from mutualrl.storage.trained_model import has_trained_model, trained_model
from mutualrl.tasks import get_task, load_prompts
from mutualrl.tasks.base import TurnsSpec, sample_evenly
from mutualrl.tasks.prompting import Template

PROMPTS = 256  # the paper's batch (Section "SGT diagnostics")


@dataclass(frozen=True)
class SampledPool:
    """Rollouts to sample: the models of a recipe on prompts of its task. `engine`: None to choose one per model."""

    recipe: Recipe
    prompts: tuple[Prompt, ...]
    sampling: Sampling
    engine: str | None
    save: Path | None


@dataclass(frozen=True)
class Recorded:
    """Rollouts of a run: its directory, its recipe, and the requested rounds (None: all)."""

    run: RunDirectory
    recipe: Recipe
    rounds: range | None


@dataclass(frozen=True)
class RecordedTexts:
    """Recorded texts beside the models' rollouts: what to read, the prompts of the task, and the recipe that has the
    task and, if they are known, the models that will learn them."""

    sources: tuple[RecordedSource, ...]
    prompts: tuple[Prompt, ...]
    recipe: Recipe
    models_known: bool

    def held_out(self) -> list[Prompt]:
        """Return the task's validation prompts; none where the task has none."""
        task, source = get_task(self.recipe.task.name), self.recipe.task.source(self.recipe.run.seed)
        try:
            return load_prompts(task, "validation", source)
        except DataError:
            return []

    def criterion(self) -> Criterion:
        """Return what the texts are judged by; loads the tokenizers of the models."""
        tokenizers = load_tokenizers(self.recipe) if self.models_known else {}
        return criterion_of(self.recipe, tokenizers, self.prompts)


@dataclass(frozen=True)
class DiagnosticPlan:
    """Source of the rollouts (one of `sampled`, `recorded`, `files`, or none with `sources` only), the models behind
    them by policy, and thresholds. `seed`: of draws and intervals."""

    request: DiagnosticRequest
    origin: str
    seed: int
    thresholds: Thresholds
    sampled: SampledPool | None = None
    recorded: Recorded | None = None
    files: tuple[Path, ...] = ()
    sources: RecordedTexts | None = None
    ends: Mapping[str, Endpoint] = field(default_factory=dict)
    templates: Mapping[str, Template] = field(default_factory=dict)
    scales: Scales = Scales()

    @property
    def turns(self) -> TurnsSpec | None:
        """Return the tools of the task whose rollouts are sampled or were recorded; None without any."""
        known = self.sampled or self.recorded
        if known is None or known.recipe.task.turns is None:
            return None
        return known.recipe.task.turns._replace(iterations=known.recipe.trainer.get("max_tool_calling_iterations"))


def plan_diagnostic(request: DiagnosticRequest) -> DiagnosticPlan:
    """Check a request. Raises UsageError, RecipeError or DataError with the expected value."""
    request, specs = split_files(request)
    asked = request.asked
    named = {"--run": request.run, "--rollouts": request.rollouts, "--pool": asked.pool, "--model": asked.models}
    sources = [flag for flag, value in named.items() if value]
    if len(sources) > 1:
        raise UsageError(f"{' and '.join(sources)}: name one source of rollouts")
    _reject_unused(request, sources[0] if sources else "--source" if specs else "--pool", texts=bool(specs))
    keys = _task_keys(request)
    if keys and (request.run is not None or (request.rollouts and not specs)):
        where = "--run, whose recipe has them" if request.run is not None else "--rollouts, which has the rewards"
        raise UsageError(f"--set {keys[0]}: no effect with {where}; leave it out")
    if request.rollouts or (specs and not sources):
        return _of_files(request, specs)
    if request.run is not None:
        return _of_run(request, request.run, specs)
    return _of_models(request, specs)


def _of_files(request: DiagnosticRequest, specs: list[RecordedSource]) -> DiagnosticPlan:
    """Return the plan for rollouts in files, or for recorded texts alone."""
    files = [*(path.name for path in request.rollouts), *(Path(spec.recorded).name for spec in specs)]
    seed = request.asked.seed or 0
    recipe = resolve(
        Request(task=request.asked.task, data=request.asked.data, seed=seed, assignments=_task_keys(request))
    )
    return DiagnosticPlan(
        request=request,
        origin=", ".join(files),
        seed=seed,
        thresholds=_thresholds(request, None),
        files=request.rollouts,
        sources=_recorded_texts(specs, recipe, models_known=False),
        ends=_named_models(request),
    )


def _of_run(request: DiagnosticRequest, directory: Path, specs: list[RecordedSource]) -> DiagnosticPlan:
    """Return the plan for the rollouts of a run's exchange."""
    recorded = _recorded(request, directory, alone=bool(specs))
    ends = _run_models(recorded, request.trust_remote_code)
    asked, recipe = request.asked.seed, recorded.recipe
    seed = recipe.run.seed if asked is None else asked
    plan = _of_recipe(request, recipe, ends, specs, origin=str(directory), seed=seed)
    return replace(plan, recorded=recorded)


def _of_models(request: DiagnosticRequest, specs: list[RecordedSource]) -> DiagnosticPlan:
    """Return the plan for models that are sampled."""
    asked, seed = request.asked, request.asked.seed or 0
    pool = None if asked.models else asked.pool or "tiny"
    recipe = resolve(replace(asked, pool=pool, sources=(), seed=seed, assignments=_task_keys(request)))
    specs = [*specs, *(require_recorded(section) for section in recipe.sources)]
    for spec in specs:
        if spec.recorded != TASK:
            require_exists(spec.recorded)  # before the models are sampled
    if len(recipe.policies) < 2 and not specs:
        raise UsageError(
            f"pool {recipe.pool!r} has one policy ({recipe.policies[0].name!r}); a pool of two or more is needed"
        )
    ends = _pool_models(recipe, request.trust_remote_code)
    origin = f"pool {recipe.pool}" if recipe.pool else ", ".join(p.model for p in recipe.policies)
    plan = _of_recipe(request, recipe, ends, specs, origin=origin, seed=seed)
    return replace(plan, sampled=_sampled(recipe, request))


def _require_turns(request: DiagnosticRequest, recipe: Recipe) -> None:
    """Raise UsageError for a task with tools if the diagnostic reads texts of one turn."""
    if not recipe.task.has_turns:
        return
    if not isinstance(request, ComplementarityRequest):
        raise UsageError(
            f"task {recipe.task.name!r} has tools, and this diagnostic is of texts; expected mutualrl complementarity"
        )
    if request.hints:
        raise UsageError(
            f"--hints: found task {recipe.task.name!r} with tools, whose hints are runs; leave it out, and train a few "
            "steps: mutualrl train --regime hinted --steps 10 (metric hinted/success_rate)"
        )


def _of_recipe(
    request: DiagnosticRequest,
    recipe: Recipe,
    ends: Mapping[str, Endpoint],
    specs: Sequence[RecordedSource],
    *,
    origin: str,
    seed: int,
) -> DiagnosticPlan:
    """Return what a run's and a pool's plan have in common."""
    _require_turns(request, recipe)
    return DiagnosticPlan(
        request=request,
        origin=origin,
        seed=seed,
        thresholds=_thresholds(request, recipe),
        sources=_recorded_texts(specs, recipe),
        ends={**ends, **_named_models(request)},
        templates={p.name: recipe.trainer_settings(p.name).get("chat_template_kwargs") or {} for p in recipe.policies},
        scales=Scales(own={p.name: _scale(recipe, p.name) for p in recipe.policies}),
    )


def split_files(request: DiagnosticRequest) -> tuple[DiagnosticRequest, list[RecordedSource]]:
    """Return the request with rollouts only, and the recorded texts: those of `--source`, and the files of `--rollouts`
    without rewards, each under its file's name. Raises UsageError."""
    sections = list(request.asked.sources)
    dumps = []
    for path in request.rollouts:
        if not request.texts or has_rewards(user_path(path), request.reward):
            dumps.append(path)
        else:
            name = re.sub(r"[^a-z0-9._-]+", "-", path.name.partition(".")[0].lower()).strip("._-") or "file"
            sections.append(f"{name}=recorded:{path}")
    names = [section.partition("=")[0] for section in sections]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"two files of recorded texts are named {repeated[0]!r}: --source NAME=recorded:FILE")
    if foreign := [each for each in request.asked.assignments if not each.startswith(("sources.", "task."))]:
        raise UsageError(
            f"--set {foreign[0]}: a diagnostic takes keys of the task and of its sources: task.template={{question}}, "
            "task.reward=my.py:reward, sources.NAME.columns.text=COLUMN"
        )
    of_sources = tuple(each for each in request.asked.assignments if each.startswith("sources."))
    if of_sources and not sections:
        raise UsageError(f"--set {of_sources[0]}: there is no source; add --source NAME=recorded:FILE")
    recipe = resolve(Request(sources=tuple(sections), assignments=of_sources)) if sections else None
    known = [] if recipe is None else recipe.sources
    return replace(request, rollouts=tuple(dumps)), [
        require_recorded(section) for section in known if section.name in names
    ]


def _task_keys(request: DiagnosticRequest) -> tuple[str, ...]:
    """Return the assignments to keys of the task."""
    return tuple(each for each in request.asked.assignments if each.startswith("task."))


def _recorded_texts(
    sources: Sequence[RecordedSource], recipe: Recipe, *, models_known: bool = True
) -> RecordedTexts | None:
    if not sources:
        return None
    prompts = load_prompts(get_task(recipe.task.name), "train", recipe.task.source(recipe.run.seed))
    return RecordedTexts(tuple(sources), tuple(prompts), recipe, models_known)


#: options that say what to sample, by field
_SAMPLING = ("task", "data", "prompts", "samples", "max_new_tokens", "temperature", "engine", "save")


def _reject_unused(request: DiagnosticRequest, source: str, *, texts: bool) -> None:
    """Raise UsageError for an option that the source of the rollouts does not use. `texts`: recorded texts are matched
    with the task's prompts."""
    used = ("--task", "--data") if texts and source != "--run" else ()
    unused = [name for name in given(request, *_SAMPLING) if name not in used]
    if source not in ("--pool", "--model") and unused:
        raise UsageError(f"{', '.join(unused)}: no effect with {source}, whose rollouts already exist; use --pool")
    if request.hints and source not in ("--pool", "--model"):
        raise UsageError(f"--hints samples the models, and {source} has rollouts of theirs only; use --pool or --model")
    if source != "--run" and request.rounds is not None:
        raise UsageError("--rounds: only a run has rounds; add --run DIR")
    if source != "--rollouts" and request.reward is not None:
        raise UsageError("--reward: only files of rollouts have such a column; add --rollouts FILE")


def _thresholds(request: DiagnosticRequest, recipe: Recipe | None) -> Thresholds:
    """Return the success and failure thresholds: the request's, else those of a run under SGT, else the paper's."""
    success, own_success = _threshold_values("--success-above", request.thresholds.success_above)
    failure, own_failure = _threshold_values("--failure-below", request.thresholds.failure_below)
    policies = None if recipe is None else [policy.name for policy in recipe.policies]
    for name in (*own_success, *own_failure):
        if policies is not None and name not in policies:
            raise UsageError(f"no policy {name!r} in this pool; expected one of: {', '.join(policies)}")
    base: dict[str, Thresholds] = {}
    if recipe is not None and SGT.name in parts_of(recipe.regime_name):
        base = {p.name: _sgt_thresholds(recipe, p.name) for p in recipe.policies}
    common = next(iter(base.values()), Thresholds())
    common = replace(
        common, success_above=_first(success, common.success_above), failure_below=_first(failure, common.failure_below)
    )
    own: dict[str, Thresholds] = {}
    for name in dict.fromkeys((*base, *own_success, *own_failure)):
        rule = base.get(name, common)
        own[name] = replace(
            rule,
            success_above=_first(own_success.get(name), success, rule.success_above),
            failure_below=_first(own_failure.get(name), failure, rule.failure_below),
        )
    for rule in (common, *own.values()):
        if rule.failure_below > rule.success_above:
            raise UsageError(
                f"--failure-below {rule.failure_below:g} must not exceed --success-above {rule.success_above:g}"
            )
    return replace(common, own=own)


def _first(*values: float | None) -> float:
    """Return the first value that is given."""
    return next(value for value in values if value is not None)


def _threshold_values(flag: str, texts: Sequence[str]) -> tuple[float | None, dict[str, float]]:
    """Return the value for all learners, if there is one, and those of single learners. Raises UsageError."""
    common: float | None = None
    own: dict[str, float] = {}
    for text in texts:
        name, equals, number = text.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            value = float("nan")
        if not isfinite(value) or (equals and not name):
            raise UsageError(f"{flag} {text}: expected a finite number, or POLICY=NUMBER, such as ada=0.5")
        if name:
            own[name] = value
        else:
            common = value
    return common, own


def _sgt_thresholds(recipe: Recipe, policy: str) -> Thresholds:
    settings = _part_settings(recipe, policy, SGT.name)
    assert isinstance(settings, SGT)
    gate: Literal["all", "any"] = "any" if settings.gate == "any" else "all"
    pick: Literal["uniform", "shortest"] = "uniform" if settings.pick == "lowest_nll" else settings.pick
    for key, configured, used in (("gate", settings.gate, gate), ("pick", settings.pick, pick)):
        if configured != used:
            notify(f"policy {policy!r} trained with regime.{key}: {configured}; the diagnostics use {used}")
    return Thresholds(settings.success_above, settings.failure_below, gate, pick)


def _scale(recipe: Recipe, policy: str) -> tuple[str, str]:
    """Return the divisors of a policy's local and pooled advantages."""
    local = str(recipe.trainer_settings(policy).get("scale_rewards", "group"))
    local = {"True": "group", "False": "none"}.get(local, local)
    value = XGRPO.name
    shares_values = value in parts_of(recipe.regime_name)
    pooled = getattr(_part_settings(recipe, policy, value), "scale", None) if shares_values else None
    return local, pooled or local


def _part_settings(recipe: Recipe, policy: str, name: str) -> Regime:
    """Return the settings of a regime that a run uses, alone or combined with others."""
    settings = recipe.regime_of(policy)
    part: Regime = settings if recipe.regime_name == name else getattr(settings, name)
    return part


def _named_models(request: DiagnosticRequest) -> dict[str, Endpoint]:
    ends = {}
    for text in request.models:
        name, equals, path = text.partition("=")
        if not equals or not name or not path:
            raise UsageError(f"--model {text}: expected POLICY=PATH, such as ada=./models/ada")
        end = Endpoint.of("--model", path, trust_remote_code=request.trust_remote_code)
        if not end.has_model:
            raise UsageError(f"--model {text}: a tokenizer without weights; expected a model")
        ends[name] = end
    return ends


def _pool_models(recipe: Recipe, trust_remote_code: bool) -> dict[str, Endpoint]:
    return {p.name: Endpoint.of_policy(p, trust_remote_code=trust_remote_code) for p in recipe.policies}


def _run_models(recorded: Recorded, trust_remote_code: bool) -> dict[str, Endpoint]:
    """Return the trained models of a run if they exist, else its base models if they exist."""
    ends = _pool_models(recorded.recipe, trust_remote_code)
    for name, end in list(ends.items()):
        if has_trained_model(recorded.run, name):
            ends[name] = Endpoint(
                end.name, str(trained_model(recorded.run, name, verify=True)), True, None, end.trust_remote_code
            )
        elif model_problem(end.path) is not None:
            del ends[name]
    return ends


def _recorded(request: DiagnosticRequest, directory: Path, *, alone: bool = False) -> Recorded:
    run = RunDirectory(user_path(directory))
    run.info()
    recipe = load_run(run, without_models=True)
    if len(recipe.policies) < 2 and not alone:
        raise UsageError(
            f"{directory}: the run has one policy ({recipe.policies[0].name!r}); name a run of a pool, or see what "
            "texts would revive (mutualrl complementarity --run DIR --source NAME=recorded:FILE)"
        )
    return Recorded(run, recipe, None if request.rounds is None else _rounds(request.rounds))


def _rounds(text: str) -> range:
    match = re.fullmatch(r"(?P<one>[0-9]{1,9})|(?P<first>[0-9]{0,9}):(?P<last>[0-9]{0,9})", text)
    first_round = int((match["one"] or match["first"] or "0") if match else "0")
    end = int((match["one"] or match["last"] or 2**62) if match else -1)
    if end < first_round:
        raise UsageError(f"--rounds {text}: expected FIRST:LAST (both included), FIRST:, :LAST or one number")
    return range(first_round, end + 1)


def _sampled(recipe: Recipe, request: DiagnosticRequest) -> SampledPool:
    loaded = load_prompts(get_task(recipe.task.name), "train", recipe.task.source(recipe.run.seed))
    distinct = list({(prompt.text, prompt.answer): prompt for prompt in loaded}.values())
    if not distinct:
        raise DataError(f"task {recipe.task.name!r} has no training prompts; provide some with --data")
    sampling = request.sampling.sampling(
        samples=1 if request.sampling.temperature == 0 else int(recipe.trainer.get("num_generations", 8)),
        max_new_tokens=int(recipe.trainer.get("max_completion_length", 256)),
        temperature=1.0,
    )
    save = None if request.save is None else user_path(request.save)
    if save is not None:
        _check_save(save, request.save)
    prompts = tuple(sample_evenly(distinct, request.prompts or PROMPTS))
    return SampledPool(recipe, prompts, sampling, request.sampling.engine, save)


def _check_save(path: Path, flag: Path | None) -> None:
    if path.suffix != ".parquet":
        raise UsageError(f"--save {flag}: expected a name that ends in .parquet")
    if path.exists():
        raise UsageError(f"--save {flag}: the file already exists; name another, or remove it")
    if not path.parent.is_dir():
        raise UsageError(f"--save {flag}: there is no directory {path.parent}")
