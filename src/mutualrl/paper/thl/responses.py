"""Responses sampled by a pair's source; scored by the source after their and another prompt, and by the target."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mutualrl.diagnostics.lazy_model import LazyModel, OnBatch
from mutualrl.engines.sampling import Sampling
from mutualrl.errors import DataError
from mutualrl.tasks.prompting import prompt_ids
from mutualrl.thl import Retokenized, decode_completion, retokenize
from mutualrl.thl.units import Floats

Track = Callable[[str, int], OnBatch]


@dataclass(frozen=True)
class Response:
    """Response of the source: its prompt's index, its ids and text, and the target's ids."""

    prompt: int
    source_ids: tuple[int, ...]
    text: str
    target_ids: tuple[int, ...]


@dataclass(frozen=True)
class Responses:
    """Responses with the log-probs that the denominators and the numerator need, all in the same order.

    `behaviour`, `shuffled`: the source's, after the prompt and after another prompt; `own`: the target's, of its own
    tokens. `left_out`: counts of unusable prompts and responses, by reason.
    """

    responses: list[Response]
    behaviour: list[Floats]
    shuffled: list[Floats]
    own: list[Floats]
    left_out: dict[str, int]


@dataclass(frozen=True)
class Prompts:
    """Token ids of every prompt on both sides; `fitting`: indices of those that leave room for a response on both."""

    source: list[list[int]]
    target: list[list[int]]
    fitting: list[int]
    target_context: int


def respond(
    prompts: Sequence[str], source: LazyModel, target: LazyModel, sampling: Sampling, track: Track
) -> Responses:
    """Sample the source on the prompts, which must be distinct, and score its responses.

    Left out and counted: prompts too long for either context, empty responses, and those that the target's tokenizer
    changes or that exceed its context. Raises DataError when fewer than two prompts, or no response, remain.
    """
    requested = _fitting(prompts, source, target, sampling.max_new_tokens)
    first = requested.source[requested.fitting[0]]
    _score(source, [first[:1]], [first[1:]], track)  # fail early on a model with non-finite log-probs
    responses, left_out = _sample(prompts, requested, source, target, sampling, track)
    if not responses:
        raise DataError(f"no response of {source.name} can be scored by {target.name}; left out: {left_out}")
    other = _derangement(requested.fitting, sampling.seed)
    source_ids, target_ids = [r.source_ids for r in responses], [r.target_ids for r in responses]
    return Responses(
        responses,
        behaviour=_score(source, [requested.source[r.prompt] for r in responses], source_ids, track),
        shuffled=_score(source, [requested.source[other[r.prompt]] for r in responses], source_ids, track),
        own=_score(target, [requested.target[r.prompt] for r in responses], target_ids, track),
        left_out={"prompts": len(prompts) - len(requested.fitting), **left_out},
    )


def _fitting(prompts: Sequence[str], source: LazyModel, target: LazyModel, new_tokens: int) -> Prompts:

    ids = [prompt_ids(prompts, model.tokenizer) for model in (source, target)]
    limits = [model.engine.context for model in (source, target)]
    fitting = []
    for index in range(len(prompts)):
        lengths = [len(side[index]) for side in ids]
        if all(0 < length <= limit - new_tokens for length, limit in zip(lengths, limits, strict=True)):
            fitting.append(index)
    if len(fitting) < 2:
        raise DataError(
            f"{len(fitting)} of {len(prompts)} different prompts leave room for {new_tokens} new tokens in contexts of "
            f"{limits[0]} and {limits[1]} tokens, expected 2 or more; lower --max-new-tokens or choose shorter prompts"
        )
    return Prompts(ids[0], ids[1], fitting, limits[1])


def _sample(
    prompts: Sequence[str], requested: Prompts, source: LazyModel, target: LazyModel, sampling: Sampling, track: Track
) -> tuple[list[Response], dict[str, int]]:
    on_batch = track(f"{source.name}: sampling", len(requested.fitting))
    ids = [requested.source[index] for index in requested.fitting]
    groups = source.engine.generate_ids(ids, sampling, on_batch)
    responses: list[Response] = []
    left_out = {"empty": 0, "changed": 0, "too_long": 0}
    for index, group in zip(requested.fitting, groups, strict=True):
        room = requested.target_context - len(requested.target[index])
        for completion in group:
            text = decode_completion(completion.token_ids, source.tokenizer)
            retokenized = retokenize(
                text, target.tokenizer, room, ended=completion.ended, end_token_id=target.end_token
            )
            reason = _why_unencodable(text, retokenized)
            if reason:
                left_out[reason] += 1
            else:
                responses.append(Response(index, completion.token_ids, text, retokenized.ids))
    return responses, left_out


def _why_unencodable(text: str, retokenized: Retokenized) -> str | None:
    if not text:
        return "empty"
    if not retokenized.exact:
        return "changed"
    return None if retokenized.fits else "too_long"


def _derangement(items: Sequence[int], seed: int) -> dict[int, int]:
    """Return a random partner for each item, never itself."""
    order = list(items)
    random.Random(seed).shuffle(order)
    return dict(zip(order, [*order[1:], order[0]], strict=True))


def _score(
    model: LazyModel, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], track: Track
) -> list[Floats]:
    on_batch = track(f"{model.name}: scoring", len(completions))
    return model.engine.logprobs(prompts, completions, on_batch)
