"""Log-probs of token sequences under a model: one forward pass, no sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from mutualrl.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Floats = npt.NDArray[np.float64]

#: maximum number of logits in memory (0.5 GB in float32)
_LOGITS = 2**27
_ROWS = 64


def context_length(model: PreTrainedModel) -> int:
    """Return a model's context length (its config's `max_position_embeddings`). Raises ModelError if it is less than
    two."""
    config = model.config.get_text_config()
    length = int(getattr(config, "max_position_embeddings", 1 << 20))
    if length < 2:
        raise ModelError(
            f"model {name_of(model)!r} has max_position_embeddings {length} in its config, expected 2 or more"
        )
    return length


def name_of(model: PreTrainedModel) -> str:
    """Return the path or hub id that a model was loaded from, else its class."""
    return str(getattr(model.config, "_name_or_path", "") or type(model).__name__)


def check_vocabulary(model: PreTrainedModel, largest: int) -> None:
    """Raise ModelError unless the model has an embedding for the token id `largest`."""
    embeddings = model.get_input_embeddings()
    rows = getattr(embeddings, "base_layer", embeddings).num_embeddings  # an adapter holds the layer that it adapts
    if largest >= rows:
        raise ModelError(
            f"token id {largest} has no embedding in model {name_of(model)!r}, which has {rows}: its tokenizer belongs "
            "to another model, or was extended without model.resize_token_embeddings"
        )


def completion_logprobs(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    on_batch: Callable[[int], None] | None = None,
    *,
    temperature: float = 1.0,
) -> list[Floats]:
    """Return log p(token | prompt, earlier tokens) of every completion token, nats, at a temperature.

    Every prompt needs at least one token; prompt and completion together must fit the model's context. `on_batch`
    receives the number of rows done. Raises ValueError for a row that does not fit, ModelError for an id without an
    embedding and for log-probs that are not finite."""
    limit = context_length(model)
    rows = [(list(prompt), list(completion)) for prompt, completion in zip(prompts, completions, strict=True)]
    for number, (prompt, completion) in enumerate(rows):
        if not prompt or len(prompt) + len(completion) > limit:
            raise ValueError(
                f"row {number}: found {len(prompt)} prompt and {len(completion)} completion tokens, expected a prompt "
                f"of 1 or more, within the context of {limit}"
            )
    check_vocabulary(model, max((token for row in rows for side in row for token in side), default=0))
    results: list[Floats] = [np.zeros(0)] * len(rows)
    order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]) + len(rows[i][1]))
    for start in range(0, len(order), _ROWS):
        chosen = order[start : start + _ROWS]
        for row, values in zip(chosen, _batch(model, [rows[i] for i in chosen], temperature), strict=True):
            if not np.isfinite(values).all():
                raise ModelError(f"model {name_of(model)!r} returned non-finite log-probs; the weights may be corrupt")
            results[row] = values
        if on_batch is not None:
            on_batch(len(chosen))
    return results


@torch.no_grad()  # type: ignore[untyped-decorator]  # torch is followed as Any
def _batch(model: PreTrainedModel, rows: Sequence[tuple[list[int], list[int]]], temperature: float) -> list[Floats]:
    width = max(len(prompt) + len(completion) for prompt, completion in rows)
    ids = torch.zeros((len(rows), width), dtype=torch.long)
    mask = torch.zeros((len(rows), width), dtype=torch.long)
    for row, (prompt, completion) in enumerate(rows):
        length = len(prompt) + len(completion)
        ids[row, :length] = torch.tensor([*prompt, *completion])
        mask[row, :length] = 1
    scores = _next_token_logprobs(model, ids.to(model.device), mask.to(model.device), temperature).cpu().numpy()
    return [
        scores[row, len(prompt) - 1 : len(prompt) + len(completion) - 1].astype(np.float64)
        for row, (prompt, completion) in enumerate(rows)
    ]


def _next_token_logprobs(
    model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """Return log p of ids[:, 1:], shape (B, W - 1), a few positions at a time so that the logits stay bounded."""
    batch, width = ids.shape
    step = max(16, _LOGITS // (batch * model.config.get_text_config().vocab_size))
    past, logprobs = None, []
    for start in range(0, width - 1, step):
        stop = min(start + step, width - 1)
        output = model(
            input_ids=ids[:, start:stop],
            attention_mask=mask[:, :stop],
            past_key_values=past,
            use_cache=stop < width - 1 or past is not None,
        )
        past = output.past_key_values
        logits = output.logits.float() / temperature
        chosen = ids[:, start + 1 : stop + 1, None]
        logprobs.append(logits.gather(-1, chosen).squeeze(-1) - logits.logsumexp(-1))
    return torch.cat(logprobs, dim=1) if logprobs else torch.zeros((batch, 0))


def text_logprobs(
    model: PreTrainedModel,
    start_id: int,
    texts: Sequence[Sequence[int]],
    on_batch: Callable[[int], None] | None = None,
) -> list[Floats]:
    """Return log p of every token of texts after a start token, nats.

    A text longer than the context is scored in windows, each after its own start token: its tokens attend only to their
    window. `on_batch` receives the number of windows done.
    """
    size = context_length(model) - 1
    windows, owner = [], []
    for number, ids in enumerate(texts):
        for start in range(0, len(ids), size):
            windows.append(list(ids[start : start + size]))
            owner.append(number)
    scores = completion_logprobs(model, [[start_id]] * len(windows), windows, on_batch)
    parts: list[list[Floats]] = [[] for _ in texts]
    for number, values in zip(owner, scores, strict=True):
        parts[number].append(values)
    return [np.concatenate(part) if part else np.zeros(0) for part in parts]


def start_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token that a scored text follows: the beginning of a sequence, or else its end."""
    return int(tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id)
