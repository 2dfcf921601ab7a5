"""Checks before the first step that all policies of a run have the same prompts, order, seed and batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from mutualrl.errors import DataError, PlanMismatchError
from mutualrl.process.plugins import entry_points, is_import_path, portable_path, source_digest
from mutualrl.recipes.schema import Recipe
from mutualrl.records import Prompt, content_digest
from mutualrl.regimes import parts_of
from mutualrl.storage.allocation import BatchPlan
from mutualrl.storage.files import JsonObject
from mutualrl.storage.run_info import Fingerprint
from mutualrl.tasks import Split, get_task
from mutualrl.tasks.base import TaskData, load_data, normalized, sample_evenly
from mutualrl.tasks.mixture import sample_evenly_by_task
from mutualrl.tasks.prompting import within_limit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class DataSplits(NamedTuple):
    """Data of a recipe by split: all prompts, and where they are from."""

    train: TaskData
    validation: TaskData

    def to_json(self, validated: int) -> dict[str, object]:
        """Return what run.json says of the data: numbers of prompts, origins, and how many of the validation prompts
        are used."""
        return {
            "train": {"prompts": len(self.train.prompts), "origin": self.train.origin},
            "validation": {
                "prompts": len(self.validation.prompts),
                "origin": self.validation.origin,
                "used": validated,
                "held_out": self.validation.held_out,
            },
        }


def read_splits(recipe: Recipe) -> DataSplits:
    """Return the data of both splits. Raises DataError for invalid rows, for a split without prompts, and for training
    rows that would be held out against `task.hold_out`."""
    splits = DataSplits(_read_split(recipe, "train"), _read_split(recipe, "validation"))
    if splits.validation.held_out and not recipe.task.hold_out:
        count = len(splits.validation.prompts)
        raise DataError(
            f"task {recipe.task.name!r}: {count} of {count + len(splits.train.prompts)} training rows "
            f"({splits.train.origin}) would be held out for validation, which this recipe refuses (task.hold_out: "
            "false): give the evaluation split with --set task.validation_data=FILE, or hold rows out with --set "
            "task.hold_out=true"
        )
    return splits


def _read_split(recipe: Recipe, split: Split) -> TaskData:
    section = recipe.task
    data = load_data(get_task(section.name), split, section.source(recipe.run.seed))
    if not data.prompts:
        raise DataError(f"task {section.name!r} has no {split} prompts; provide more data or set task.validation_data")
    return data


def data_note(data: JsonObject) -> str:
    """Return what a run trains on and validates on, from `DataSplits.to_json`."""
    train, validation = data["train"], data["validation"]
    used, count = validation["used"], validation["prompts"]
    part = f"all {count:,} prompts" if used == count else f"{used:,} of {count:,} prompts (run.validation_limit)"
    return f"trains on {train['prompts']:,} prompts: {train['origin']}; validates on {part}: {validation['origin']}"


#: held-out prompts below which a comparison will hardly decide anything: one of them is more than .03 of the result
ENOUGH = 30


def few_held_out(data: JsonObject) -> str | None:
    """Return that a run validates on too few prompts for a verdict, and what to do, from `DataSplits.to_json`; None if
    there are enough, or if that is not recorded."""
    validation = data.get("validation")
    used = validation.get("used") if isinstance(validation, dict) else None
    if not isinstance(validation, dict) or not isinstance(used, int) or not 0 < used < ENOUGH:
        return None
    if used < validation.get("prompts", 0):
        advice = f"raise run.validation_limit: the data have {validation['prompts']:,}"
    elif validation.get("held_out"):
        advice = _more_held_out(used + int(data["train"]["prompts"]))
    else:
        advice = "give more (--set task.validation_data=FILE)"
    return f"{used} held-out prompts will hardly decide anything: one of them is {1 / used:.0%} of the result; {advice}"


def _more_held_out(rows: int) -> str:
    """Return how to validate on ENOUGH of the training rows, at most half of them, or on others. `rows`: all of
    them."""
    others = "give others (--set task.validation_data=FILE)"
    share = math.ceil(100 * ENOUGH / rows) / 100 if rows else 1.0
    if share > 0.5:
        return f"the data have {rows:,} rows, too few to hold {ENOUGH} of them out: {others}"
    return f"hold {round(share * rows):,} of the {rows:,} rows out (--set task.hold_out={share:g}), or {others}"


def shared_prompts(training: Sequence[Prompt], validation: Sequence[Prompt]) -> list[str]:
    """Return a note on validation prompts that are training prompts, too: the same text but for whitespace."""
    known = {normalized(prompt.text) for prompt in training}
    count = sum(normalized(prompt.text) in known for prompt in validation)
    if not count:
        return []
    return [f"{count:,} of {len(validation):,} validation prompts are training prompts, too (the same text)"]


def load_recipe_prompts(recipe: Recipe, split: Split) -> list[Prompt]:
    """Return the prompts of a split of the recipe's task; validation is sampled down to `run.validation_limit`.

    Raises DataError for invalid rows, or for a split without prompts.
    """
    prompts = all_prompts(recipe, split)
    return validation_sample(recipe, prompts) if split == "validation" else prompts


def all_prompts(recipe: Recipe, split: Split) -> list[Prompt]:
    """Return all prompts of a split. Raises DataError for invalid rows, or if there are none."""
    return _read_split(recipe, split).prompts


def validation_sample(recipe: Recipe, prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return at most `run.validation_limit` of the validation prompts (for a mixture, per member)."""
    sample = sample_evenly_by_task if recipe.task.name == "mixture" else sample_evenly
    return sample(prompts, recipe.run.validation_limit)


class FittingPrompts(NamedTuple):
    """Prompts within `task.max_prompt_tokens` for every policy, the validation sampled from these, and the numbers of
    prompts before and after by split."""

    training: list[Prompt]
    validation: list[Prompt]
    counts: dict[str, dict[str, int]]


def fitting_prompts(
    recipe: Recipe,
    training: Sequence[Prompt],
    validation: Sequence[Prompt],
    tokenizers: Mapping[str, PreTrainedTokenizerBase],
    tools: Mapping[str, object] | None = None,
) -> FittingPrompts:
    """Return the prompts, of all of both splits, that every policy can read within the limit; `tools`: template
    arguments that describe them.

    Raises DataError if a split has none.
    """
    limit, readers, remaining, counts = recipe.task.max_prompt_tokens, [], {}, {}
    for name, tokenizer in tokenizers.items():
        readers.append(
            (tokenizer, {**(recipe.trainer_settings(name).get("chat_template_kwargs") or {}), **(tools or {})})
        )
    for split, prompts in (("train", training), ("validation", validation)):
        remaining[split] = within_limit(prompts, readers, limit)
        counts[split] = {"prompts": len(prompts), "too_long": len(prompts) - len(remaining[split])}
        if not remaining[split]:
            raise DataError(
                f"none of the {len(prompts)} {split} prompts is within task.max_prompt_tokens ({limit}) for every "
                "policy; raise it, or shorten the prompts"
            )
    return FittingPrompts(remaining["train"], validation_sample(recipe, remaining["validation"]), counts)


def too_long_notes(counts: Mapping[str, Mapping[str, int]], limit: int) -> list[str]:
    """Return notes about the prompts of each split that were left out as too long."""
    return [
        f"{count['too_long']} of {count['prompts']} {split} prompts are left out: longer than task.max_prompt_tokens "
        f"({limit}) for a policy"
        for split, count in counts.items()
        if count["too_long"]
    ]


def require_enough(prompts: Sequence[Prompt], needed: int) -> None:
    """Raise DataError when the prompts do not fill one round."""
    if len(prompts) < needed:
        raise DataError(
            f"{len(prompts)} training prompts remain, a round needs {needed}; provide more data or lower round.prompts"
        )


def source_digests(sources: Mapping[str, str]) -> Fingerprint:
    """Return the part of a fingerprint that the sources make: the digest of each one's texts and rewards."""
    return {f"source {name}": digest for name, digest in sources.items()}


def fingerprint(
    recipe: Recipe,
    batch: BatchPlan,
    prompts: Sequence[Prompt],
    validation: Sequence[Prompt],
    sources: Mapping[str, str] = MappingProxyType({}),
) -> Fingerprint:
    """Return the batch plan in comparable form: content and order of the data, digests of the source files of the
    user's code (not of their imports), seed, prompts per round, rollouts per prompt; `sources`: digests of the texts of
    each source and their rewards, by name."""
    code = {}
    parts = parts_of(recipe.regime_name)
    components = [("regime" if len(parts) == 1 else f"regime {number}", name) for number, name in enumerate(parts)]
    for key, name in (*components, ("task", recipe.task.name)):
        group = entry_points(f"mutualrl.{key.partition(' ')[0]}s")
        if is_import_path(name) or name in group:  # changed code makes it a different run
            code[f"{key}_sha256"] = source_digest(group[name].value if name in group else name)
    environment = [] if recipe.task.environment is None else [("environment", recipe.task.environment)]
    for key, path in (*environment, *(("tool", path) for path in recipe.task.tools)):
        code[f"{key} {portable_path(path)}"] = source_digest(path)
    for number, path in enumerate(recipe.task.reward):
        if is_import_path(path):
            suffix = f" {number}" if len(recipe.task.reward) > 1 else ""
            code[f"reward{suffix} {portable_path(path)}"] = source_digest(path)
    return {
        **code,
        **source_digests(sources),
        "task": portable_path(recipe.task.name),
        "data_sha256": content_digest(prompts),
        "validation_sha256": content_digest(validation),
        "prompts": len(prompts),
        "seed": recipe.run.seed,
        "max_prompt_tokens": recipe.task.max_prompt_tokens,
        "prompts_per_round": batch.prompts,
        "rollouts_per_prompt": batch.rollouts,
        "optimizer_steps_per_round": batch.optimizer_steps,
        "steps": recipe.run.steps,
    }


def compare(policy: str, own: Fingerprint, runs: Fingerprint) -> None:
    """Raise PlanMismatchError naming every key in which a policy's plan differs from the run's."""
    different = [
        f"{key}: {own.get(key)!r}, the run has {runs.get(key)!r}"
        for key in sorted({*own, *runs} - {"rollouts_per_prompt"})
        if own.get(key) != runs.get(key)
    ]
    if different:
        raise PlanMismatchError(f"policy {policy!r} has a different batch plan than the run: " + "; ".join(different))


def compare_models(digests: Mapping[str, str], runs: Mapping[str, str]) -> None:
    """Raise PlanMismatchError naming a policy whose base model is not the run's. Models without a digest (not
    downloaded yet) are not compared."""
    for policy, digest in digests.items():
        expected = runs.get(policy)
        if digest and expected and digest != expected:
            raise PlanMismatchError(
                f"policy {policy!r}: the files of its base model have changed: found {digest[:19]}, the run started "
                f"with {expected[:19]}"
            )
