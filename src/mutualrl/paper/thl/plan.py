"""Plan of `thl-check`: pairs, texts, suites and sizes, checked before any model is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from mutualrl.console.options import given
from mutualrl.diagnostics.endpoints import Endpoint
from mutualrl.diagnostics.passages import load_passages
from mutualrl.engines.sampling import Sampling
from mutualrl.errors import UsageError
from mutualrl.paper.thl.request import ThlRequest
from mutualrl.recipes import Request, resolve
from mutualrl.recipes.schema import Recipe
from mutualrl.tasks import TASKS, TaskSource, get_task, load_prompts
from mutualrl.tasks.base import sample_evenly
from mutualrl.thl import ANCHORS, DEFAULT_ANCHOR, Anchor

SUITES = ("mass", "length", "scripts", "ratio", "sequence")
TOKENIZERS, EXAMPLE = "tokenizers", "example"
SAMPLED = ("ratio", "sequence")
#: the paper's sizes (Appendices "Sanity checks on THL word alignment" and "THL alignment diagnostics")
SPANS, SEQUENCES, PROMPTS, SAMPLES = 1024, 64, 256, 5
MAX_NEW_TOKENS = 64
BUNDLED = "the package's text"
OPENING = 8  # words per prompt taken from the text


@dataclass(frozen=True)
class ThlPlan:
    """What a request checks: ordered pairs, texts, suites and sizes. `prompts`: None to take them from the text."""

    request: ThlRequest
    pairs: tuple[tuple[Endpoint, Endpoint], ...]
    passages: tuple[str, ...]
    text_name: str
    suites: tuple[str, ...]
    anchor: Anchor
    prompts: tuple[str, ...] | None
    prompt_name: str
    prompt_count: int
    sampling: Sampling

    @property
    def seed(self) -> int:
        """Return the seed of draws."""
        return self.sampling.seed

    def at_most(self, size: int) -> int:
        """Return a size, or the request's limit if that is smaller."""
        return _size(size, self.request.limit)


def plan_check(request: ThlRequest) -> ThlPlan:
    """Check a request. Raises UsageError, RecipeError or DataError with the expected value."""
    recipe = _recipe(request)
    pairs = _pairs(request, recipe)
    suites = _suites(request.suite, pairs)
    _reject_unused(request, suites)
    passages = load_passages(request.text)
    prompts, prompt_name = _prompts(request, recipe) if set(suites) & set(SAMPLED) else (None, "")
    tokens = recipe.trainer.get("max_completion_length") if recipe else None
    if tokens is None and request.asked.task is not None:
        tokens = get_task(request.asked.task).max_new_tokens
    return ThlPlan(
        request=request,
        pairs=pairs,
        passages=tuple(passages),
        text_name=BUNDLED if request.text is None else str(request.text),
        suites=suites,
        anchor=_anchor(request.anchor),
        prompts=prompts,
        prompt_name=prompt_name,
        prompt_count=_prompt_count(request),
        sampling=request.sampling.sampling(samples=SAMPLES, max_new_tokens=tokens or MAX_NEW_TOKENS, temperature=1.0),
    )


def _size(default: int, limit: int | None) -> int:
    return default if limit is None else min(default, limit)


def _prompt_count(request: ThlRequest) -> int:
    """Return the largest number of prompts; shuffling needs at least two."""
    return max(2, _size(request.prompts or PROMPTS, request.limit))


def _recipe(request: ThlRequest) -> Recipe | None:
    """Return the recipe of the requested pool; None for a pair of models."""
    if request.source is None and request.target is None:
        return resolve(Request(pool=request.asked.pool or "tiny"))
    if request.asked.pool is not None:
        raise UsageError("name a pool or a pair: --pool NAME, or --source A --target B, not both")
    return None


def _pairs(request: ThlRequest, recipe: Recipe | None) -> tuple[tuple[Endpoint, Endpoint], ...]:
    if recipe is not None:
        ends = [Endpoint.of_policy(p, trust_remote_code=request.trust_remote_code) for p in recipe.policies]
        if len(ends) < 2:
            raise UsageError(f"pool {recipe.pool!r} has one policy ({ends[0].name!r}); a check needs two")
        return tuple((a, b) for a in ends for b in ends if a is not b)
    if request.source is None or request.target is None:
        present, missing = ("--target", "--source") if request.source is None else ("--source", "--target")
        raise UsageError(f"{present} alone is not a pair; add {missing} MODEL")
    trust = request.trust_remote_code
    return (
        (
            Endpoint.of("--source", request.source, trust_remote_code=trust),
            Endpoint.of("--target", request.target, trust_remote_code=trust),
        ),
    )


def _suites(requested: str | None, pairs: tuple[tuple[Endpoint, Endpoint], ...]) -> tuple[str, ...]:
    known = (TOKENIZERS, *SUITES, EXAMPLE, "all")
    if requested is not None and requested not in known:
        raise UsageError(f"--suite {requested}: expected one of: {', '.join(known)}, turns")
    without_weights = [end.name for pair in pairs for end in pair if not end.has_model]
    if requested == TOKENIZERS or (requested is None and without_weights):
        return ()
    if without_weights:
        raise UsageError(
            f"--suite {requested} needs models, and {without_weights[0]!r} has no weights (only a tokenizer); "
            f"use --suite {TOKENIZERS}, or name a model directory"
        )
    return SUITES if requested in (None, "all") else (str(requested),)


def _reject_unused(request: ThlRequest, suites: tuple[str, ...]) -> None:
    """Raise UsageError for a flag about responses when none are sampled."""
    unused = given(request, "task", "data", "prompts", "samples", "max_new_tokens")
    if unused and not set(suites) & set(SAMPLED):
        chosen = ", ".join(suites) or TOKENIZERS
        raise UsageError(
            f"{', '.join(unused)}: no effect with suite {chosen}; only {' and '.join(SAMPLED)} sample responses"
        )


def _anchor(requested: str | None) -> Anchor:
    for anchor in ANCHORS:
        if requested == anchor:
            return anchor
    if requested is not None:
        raise UsageError(f"--anchor {requested}: expected one of: {', '.join(ANCHORS)}")
    return DEFAULT_ANCHOR


def _prompts(request: ThlRequest, recipe: Recipe | None) -> tuple[tuple[str, ...] | None, str]:
    """Return training prompts of the requested task, or the pool's own; None for openings of the text."""
    name = request.asked.task or (recipe.task.name if recipe else None)
    if name is None:
        if request.asked.data is not None:
            raise UsageError("--data is read by a task; add --task, one of: " + ", ".join(sorted(TASKS)))
        return None, f"openings of {OPENING} words"
    loaded = load_prompts(get_task(name), "train", TaskSource(data=request.asked.data, seed=request.sampling.seed))
    prompts = list({prompt.text: prompt for prompt in loaded}.values())
    return tuple(prompt.text for prompt in sample_evenly(prompts, _prompt_count(request))), f"task {name}"
