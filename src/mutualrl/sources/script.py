"""Sources for a user's own script (`Sharing.over(..., sources=[...])`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mutualrl.console.lines import notify
from mutualrl.console.user_path import user_path
from mutualrl.errors import DataError, UsageError
from mutualrl.records import Prompt, row_id
from mutualrl.references import TINY, is_hub
from mutualrl.sources.prepare import claimed_rewards, rollouts_table
from mutualrl.sources.recorded import read_recorded
from mutualrl.sources.section import Columns, Reasoning, ServedSource
from mutualrl.sources.served import key_of, require_client
from mutualrl.sources.source import StoredSource


def recorded_source(
    name: str,
    recorded: str,
    dataset: Iterable[Mapping[str, Any]],
    *,
    columns: Columns | None = None,
    reasoning: Reasoning = "keep",
    turns: bool = False,
) -> StoredSource:
    """Return the texts that a file has for the rows of a training set, as a source.

    `recorded`: a file, a directory, `hub:OWNER/NAME`, or `tiny:book`. `dataset`: the trainer's `train_dataset`, with
    `prompt` and further columns. The reward of a text is that of the trainer's reward functions, computed in the round
    that may draw it: the trainer's may be models, or depend on its state. `turns`: for a trainer with tools or an
    environment; the file's runs of agents are texts, too, with the reward that the file gives them, 1 if it gives none.
    Raises DataError for a file that cannot be read, or that has no text for any row.
    """
    prompts = [_prompt(row) for row in dataset]
    if not prompts:
        raise UsageError(f"recorded_source({name!r}): the dataset has no rows")
    reference = recorded if is_hub(Path(recorded)) or recorded.startswith(TINY) else str(user_path(recorded))
    found = read_recorded(reference, columns or Columns(), reasoning, prompts, (), turns=turns)
    pairs = list(found.responses())
    claimed = zip(pairs, claimed_rewards(pairs), strict=True)
    rewards = [math.nan if each.trajectory.is_text else reward for (_, each), reward in claimed]
    notify(
        f"source {name}: {found.counts['rows']:,} rows ({found.layout}); {len(found.texts):,} of {len(prompts):,} "
        f"prompts (rows) have a text; {len(pairs):,} texts, distinct in each"
    )
    return StoredSource(name, rollouts_table(name, pairs, rewards), verified=False)


@dataclass(frozen=True)
class ServedRows:
    """A served model that is asked about the rows of a training set (`served_source`)."""

    section: ServedSource
    prompts: Mapping[str, Prompt]

    @property
    def name(self) -> str:
        """Return its name."""
        return self.section.name


def served_source(name: str, url: str, dataset: Iterable[Mapping[str, Any]], **keys: Any) -> ServedRows:
    """Return a served model as a source that answers during training.

    `url`: an OpenAI-compatible endpoint. `dataset`: the trainer's `train_dataset`. `keys`: those of a served source in
    a recipe (docs/one-model.md), such as `model`, `samples`, `ask`, `max_tokens`, `api_key_env`, `budget_tokens`.
    Every script of the run passes the same source. One of them asks, for all learners; if it ends, another takes over.
    Each learner judges the answers with its trainer's reward functions, so `after`, which needs one verdict for all, is
    not available; `learners` is neither: who passes the source reads it.
    Raises UsageError for keys that are unknown or wrong, and for a key's variable that is not set.
    """
    if taken := sorted({"after", "weight", "learners"} & keys.keys()):
        raise UsageError(f"served_source({name!r}): found {taken[0]}, which only a recipe can have; leave it out")
    try:
        section = ServedSource(name=name, served=url, **keys)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors(include_url=False)]
        raise UsageError(f"served_source({name!r}): {'; '.join(problems)}") from None
    require_client()
    key_of(section.api_key_env, name)
    prompts = {prompt.id: prompt for prompt in map(_prompt, dataset)}
    if not prompts:
        raise UsageError(f"served_source({name!r}): the dataset has no rows")
    return ServedRows(section, prompts)


def _prompt(row: Mapping[str, Any]) -> Prompt:
    """Return a row as a prompt: its id, its text, and the columns by which a file may name it."""
    value = row.get("prompt")
    messages = value if isinstance(value, list) else []
    if not isinstance(value, str) and not (messages and all(isinstance(each, Mapping) for each in messages)):
        raise DataError(f"dataset: found the prompt {value!r:.80}, expected a string or a list of messages")
    pairs = tuple((str(message.get("role")), str(message.get("content"))) for message in messages)
    text = value if isinstance(value, str) else "\n".join(content for _, content in pairs)
    columns = {key: item for key, item in row.items() if isinstance(item, str)}
    return Prompt(row_id(row), text, "", "all", pairs, columns)
