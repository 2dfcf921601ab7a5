"""Sources of a run: prepared before it starts, stored in its directory, read by its policies."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mutualrl.console.display import counted
from mutualrl.errors import FileDamagedError, PlanMismatchError, UsageError
from mutualrl.recipes.schema import Policy, Recipe
from mutualrl.records import Prompt
from mutualrl.regimes.regime import success_above
from mutualrl.sources.prepare import Criterion, Learner, Prepared, prepare_sources, read_stored
from mutualrl.sources.section import FrozenSource, RecordedSource, ServedSource, SourceSection
from mutualrl.sources.source import StoredSource
from mutualrl.storage.accounts import Account
from mutualrl.storage.allocation import BatchPlan
from mutualrl.storage.files import read_regular, write_atomic
from mutualrl.storage.run_info import RunInfo
from mutualrl.storage.rundir import RunDirectory
from mutualrl.tiny import resolve_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


MAX_COMPLETION = 256  # TRL's default
LARGEST = 8 * 2**30  # bytes of a source's stored rollouts


def prepared(
    recipe: Recipe,
    tokenizers: Mapping[str, PreTrainedTokenizerBase],
    prompts: Sequence[Prompt],
    validation: Sequence[Prompt],
    names: Collection[str] | None = None,
) -> dict[str, Prepared]:
    """Return the sources of a recipe, or those of some `names`, read and verified by its reward functions. Raises
    DataError, RewardError."""
    sections = [section for section in recipe.recorded_sources if names is None or section.name in names]
    return prepare_sources(sections, criterion_of(recipe, tokenizers, prompts, validation))


def criterion_of(
    recipe: Recipe,
    tokenizers: Mapping[str, PreTrainedTokenizerBase],
    prompts: Sequence[Prompt],
    validation: Sequence[Prompt] = (),
) -> Criterion:
    """Return what the texts of a recipe's sources are judged by."""
    learners = learners_of(recipe, tokenizers) if tokenizers else []
    turns = recipe.task.has_turns
    return Criterion(prompts, recipe.task.reward, learners, recipe.run.step_timeout, validation, turns=turns)


def learners_of(recipe: Recipe, tokenizers: Mapping[str, PreTrainedTokenizerBase]) -> list[Learner]:
    """Return what verification and encoding need of each policy."""
    learners = []
    for policy in recipe.policies:
        settings = recipe.trainer_settings(policy.name)
        weights = settings.get("reward_weights")
        learners.append(
            Learner(
                policy.name,
                tokenizers[policy.name],
                settings.get("max_completion_length"),
                None if weights is None else tuple(weights),
                settings.get("chat_template_kwargs") or {},
                success_above(recipe.regime_of(policy.name)),
                context_length(policy),
            )
        )
    return learners


def context_length(policy: Policy) -> int | None:
    """Return the positions of a policy's model, from its configuration; None if that is not on this machine, or names
    none."""
    try:
        config = json.loads((Path(resolve_path(policy.model)) / "config.json").read_text())
    except (OSError, ValueError):
        return None
    inner = config.get("text_config") if isinstance(config, dict) else None
    known = inner if isinstance(inner, dict) else config
    length = known.get("max_position_embeddings") if isinstance(known, dict) else None
    return length if isinstance(length, int) else None


def require_recorded(section: SourceSection) -> RecordedSource:
    """Return a source. Raises UsageError for one that is not recorded."""
    if not isinstance(section, RecordedSource):
        raise UsageError(
            f"source {section.name!r} is {section.kind}; expected a recorded one: NAME=recorded:FILE. One that "
            "is asked is tried by the first question of mutualrl train"
        )
    return section


@dataclass(frozen=True, slots=True)
class SourceSampling:
    """How an asked source is sampled: answers per prompt, tokens per answer, and temperature (None: the server's)."""

    samples: int
    max_tokens: int
    temperature: float | None


def sampling_of(recipe: Recipe, section: ServedSource | FrozenSource) -> SourceSampling:
    """Return how an asked source is sampled: as the recipe says, else by the settings of its first reader; its answers
    may be as long as any reader's."""
    settings = [recipe.trainer_settings(name) for name in recipe.readers_of(section)]
    longest = max(int(each.get("max_completion_length") or MAX_COMPLETION) for each in settings)
    samples, temperature = 1, section.temperature
    if isinstance(section, FrozenSource):
        samples = int(settings[0].get("num_generations", 8))
        temperature = float(settings[0].get("temperature", 1.0)) if temperature is None else temperature
    return SourceSampling(section.samples or samples, section.max_tokens or longest, temperature)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a source that is asked will do, before the start: prompts and answers per round, at most; rounds; tokens per
    answer, at most; its budget in tokens; the server's name of the model and what the first question cost, once the
    server was asked."""

    kind: str
    ask: str
    prompts_per_round: int
    answers_per_round: int
    rounds: int
    tokens_per_answer: int
    budget_tokens: int | None = None
    model: str | None = None
    first: Account | None = None

    def note(self, name: str) -> str:
        """Return it in words."""
        most, which = "at most ", " (those on which a learner failed)"
        if self.ask == "all":
            most = which = ""
        answers, tokens = self.answers_per_round, self.answers_per_round * self.tokens_per_answer
        text = (
            f"source {name} ({self.kind}): {most}{counted(self.prompts_per_round, 'prompt')} per round{which}, {most}"
            f"{counted(answers, 'answer')} of at most {self.tokens_per_answer:,} tokens; beside the questions "
            f"{tokens:,} tokens per round at most, and {tokens * self.rounds:,} in {counted(self.rounds, 'round')}"
        )
        return text if self.budget_tokens is None else f"{text}; its budget is {self.budget_tokens:,} tokens"


def prediction_of(recipe: Recipe, section: ServedSource | FrozenSource, batch: BatchPlan) -> Prediction:
    """Return what a source that is asked will do."""
    sampling = sampling_of(recipe, section)
    everywhere = any(recipe.regime_of(name).needs().everywhere for name in recipe.readers_of(section))
    return Prediction(
        section.kind,
        "gated" if section.gated and not everywhere else "all",
        batch.prompts,
        batch.prompts * sampling.samples,
        recipe.rounds(batch.optimizer_steps),
        sampling.max_tokens,
        section.budget_tokens if isinstance(section, ServedSource) else None,
    )


def served_source(recipe: Recipe, section: ServedSource, model: str | None = None) -> ServedSource:
    """Return a served source with what the recipe has in place of its nulls: samples, tokens, temperature, and the
    server's name of the model when the run began (`model`)."""
    sampling = sampling_of(recipe, section)
    return section.model_copy(update={**asdict(sampling), "model": section.model or model})


def described(sources: Mapping[str, Prepared]) -> dict[str, dict[str, object]]:
    """Return what run.json says of the sources."""
    return {
        name: {**source.summary, "digest": source.digest, "learners_only": list(source.source.learners or ())}
        for name, source in sources.items()
    }


def recorded_digests(info: RunInfo, recipe: Recipe) -> dict[str, str]:
    """Return the digests of a recipe's sources that run.json has, by name; empty for one that it lacks."""
    return {source.name: str(info.sources.get(source.name, {}).get("digest", "")) for source in recipe.recorded_sources}


def store(run: RunDirectory, sources: Mapping[str, Prepared]) -> None:
    """Write the sources' rollouts to the run's directory."""
    for name, source in sources.items():
        path = run.source(name)
        path.parent.mkdir(exist_ok=True)
        write_atomic(path, source.data)


def restore(run: RunDirectory, recipe: Recipe, prepare: Callable[[Collection[str]], dict[str, Prepared]]) -> None:
    """Verify the stored rollouts of a run's sources, which training reads, and prepare again those that are missing.
    Raises FileDamagedError for changed ones, PlanMismatchError if their files have others now."""
    known = run.info().sources
    missing = [section.name for section in recipe.recorded_sources if not run.source(section.name).exists()]
    for section in recipe.recorded_sources:
        if section.name not in missing:
            read(run, section.name)
    sources = prepare(missing) if missing else {}
    for name, source in sources.items():
        if source.digest != known.get(name, {}).get("digest"):
            raise PlanMismatchError(
                f"source {name!r}: its rollouts in {run.source(name)} are missing, and its file has other texts or "
                "rewards than when the run began; restore one of the two, or start another run with --run-dir"
            )
    store(run, sources)


def read(run: RunDirectory, name: str) -> StoredSource:
    """Return a source's stored rollouts. Raises FileDamagedError if they are missing or were changed."""
    path, known = run.source(name), run.info().sources.get(name)
    if known is None:
        raise FileDamagedError(f"{run.run_json}: says nothing of source {name!r}, which the recipe has; use --clean")
    data = _bytes(path, name)
    learners = known.get("learners_only") or None
    return read_stored(
        data, name, str(known["digest"]), verified=bool(known["verified"]), learners=learners, where=str(path)
    )


def _bytes(path: Path, name: str) -> bytes:
    try:
        return read_regular(path, LARGEST)
    except OSError as error:
        raise FileDamagedError(
            f"{path}: the rollouts of source {name!r} cannot be read ({error.strerror or error}); "
            "mutualrl train --resume --run-dir DIR writes them again from its file"
        ) from None
