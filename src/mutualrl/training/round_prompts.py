"""The prompts of a round: their token ids by id, and what a shared round requires of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np

from mutualrl.adapter.trl_compat import Inputs
from mutualrl.errors import PlanMismatchError, UsageError
from mutualrl.records import Ids, row_id
from mutualrl.rollouts import Rollouts

Prompts = dict[str, Ids]  # token ids of the learner's prompts, by prompt id


def remember(prompts: Prompts, prompt_id: str, ids: Ids, environment: str = "") -> None:
    """Store a prompt's token ids under its id. Raises UsageError when another prompt has the same id. `environment`:
    that has added what it observes."""
    if not np.array_equal(prompts.setdefault(prompt_id, ids), ids):
        if environment:
            raise UsageError(
                f"environment {environment} shows different prompts for one row ({prompt_id!r}): the rollouts of a "
                "group would answer different questions; expected a reset that depends on its row only (seed it by a "
                "column)"
            )
        raise UsageError(f"two different prompts have the id {prompt_id!r}; give every prompt a unique id")


def require_one_group_per_id(rollouts: Rollouts) -> None:
    """Raise UsageError if two groups of a round have the same prompt id: they would be pooled as one."""
    counts = Counter(zip(rollouts.prompt_ids, rollouts.indices, strict=True))
    duplicates = sorted({prompt_id for (prompt_id, _), count in counts.items() if count > 1})
    if duplicates:
        raise UsageError(
            f"two rows of a round have the prompt id {duplicates[0]!r}: they would be pooled as one prompt; give every "
            "row a unique id (column prompt_id), and remove duplicate rows"
        )


def require_same_prompts(learner: str, round_index: int, prompts: Iterable[str], peers: Mapping[str, Rollouts]) -> None:
    """Raise PlanMismatchError naming the first peer that saw other prompts."""
    own = set(prompts)
    for peer, rollouts in peers.items():
        other = set(rollouts.prompt_ids)
        if own != other:
            example = sorted(own ^ other)[0]
            raise PlanMismatchError(
                f"round {round_index}: {learner!r} and {peer!r} did not see the same prompts ({len(own - other)} only "
                f"here, {len(other - own)} only there, such as {example!r}); give both the same data, seed and batch"
            )


def id_or_prompt(example: Inputs) -> str:
    """Return the id of a data row (`row_id`); where a column has none, such as an open file, that of its prompt: a
    policy that shares nothing accepts any data."""
    try:
        return row_id(example)
    except UsageError:
        return row_id({"prompt": example.get("prompt")})


def prompt_text(example: Inputs) -> str:
    """Return the text of a data row's prompt; of a conversation, the contents of its messages."""
    prompt = example["prompt"]
    return prompt if isinstance(prompt, str) else "\n".join(str(message["content"]) for message in prompt)
