"""Importance ratios on responses that the source samples. (Paper, Tables "Token-level ratio statistics ..." and
"THL yields finite sequence-level importance ratios ...".)

The numerator is always the target's log-prob of its own tokens of the response, after its own prompt tokens. The
denominators: the source's trace aligned; the source's trace of the same response after another prompt, aligned
(shuffled); every word given the mass of the word before it (broken); and the paper's map.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mutualrl.diagnostics.thl.traces import OnBatch, Voice
from mutualrl.engines.base import Sampling
from mutualrl.errors import DataError
from mutualrl.thl import BOUND, Anchor, Retokenized, align_logprobs, decode_completion, retokenize
from mutualrl.thl.transfer import transfer
from mutualrl.thl.units import Floats

LOW, HIGH = 0.8, 1.2  # the PPO band at epsilon 0.2
TALL = 10.0
#: bins of the histograms, natural logarithms of ratios
BINS = np.linspace(-6.0, 6.0, 49)


@dataclass(frozen=True)
class Response:
    """A response of the source: its prompt's number, ids, text, and the target's ids."""

    prompt: int
    source_ids: tuple[int, ...]
    text: str
    target_ids: tuple[int, ...]


@dataclass(frozen=True)
class Responses:
    """Responses with the log-probs that the denominators and the numerator need, all in the same order."""

    responses: list[Response]
    behaviour: list[Floats]
    shuffled: list[Floats]
    own: list[Floats]
    left_out: dict[str, int]


def respond(
    prompts: Sequence[str],
    source: Voice,
    target: Voice,
    *,
    samples: int,
    max_new_tokens: int,
    seed: int,
    track: Callable[[str, int], OnBatch],
) -> Responses:
    """Let the source answer the prompts at temperature 1, and score the answers.

    Left out and counted: prompts too long for either context, empty responses, and such as the target's tokenizer
    changes or its context does not hold. Raises DataError when fewer than two prompts are left.
    """
    from mutualrl.engines.prompts import prompt_ids
    from mutualrl.engines.scoring import completion_logprobs, context_length

    source_prompts, target_prompts = (prompt_ids(prompts, voice.tokenizer) for voice in (source, target))
    limits = [context_length(voice.engine.model) for voice in (source, target)]
    fitting = [
        i
        for i in range(len(prompts))
        if source_prompts[i] and target_prompts[i]
        and len(source_prompts[i]) + max_new_tokens <= limits[0]
        and len(target_prompts[i]) + max_new_tokens <= limits[1]
    ]  # fmt: skip
    if len(fitting) < 2:
        raise DataError(
            f"{len(fitting)} of {len(prompts)} prompts leave room for {max_new_tokens} new tokens in contexts of "
            f"{limits[0]} and {limits[1]} tokens, expected 2 or more; lower --max-new-tokens or choose shorter prompts"
        )
    sampling = Sampling(max_new_tokens, temperature=1.0, samples=samples, seed=seed)
    groups = source.engine.generate(
        [prompts[i] for i in fitting], sampling, track(f"{source.name}: sampling", len(fitting))
    )
    responses: list[Response] = []
    left_out = {"prompts": len(prompts) - len(fitting), "empty": 0, "changed": 0, "too_long": 0}
    other = _derangement(fitting, seed)
    for prompt, group in zip(fitting, groups, strict=True):
        for completion in group:
            text = decode_completion(completion.token_ids, source.tokenizer)
            room = limits[1] - len(target_prompts[prompt])
            carried = retokenize(text, target.tokenizer, room, ended=completion.ended)
            reason = _unfit(text, carried)
            if reason:
                left_out[reason] += 1
            else:
                responses.append(Response(prompt, completion.token_ids, text, carried.ids))
    if not responses:
        raise DataError(f"no response of {source.name} can be scored by {target.name}: {left_out}")

    def scored(voice: Voice, of: Sequence[Sequence[int]], prompt_of: Callable[[int], int], ids: Any) -> list[Floats]:
        return completion_logprobs(
            voice.engine.model, [of[prompt_of(r.prompt)] for r in responses], ids,
            track(f"{voice.name}: scoring", len(responses)),
        )  # fmt: skip

    given, learner = [r.source_ids for r in responses], [r.target_ids for r in responses]
    return Responses(
        responses,
        behaviour=scored(source, source_prompts, lambda i: i, given),
        shuffled=scored(source, source_prompts, lambda i: other[i], given),
        own=scored(target, target_prompts, lambda i: i, learner),
        left_out=left_out,
    )


def _unfit(text: str, carried: Retokenized) -> str | None:
    if not text:
        return "empty"
    if not carried.exact:
        return "changed"
    return None if carried.fits else "too_long"


def _derangement(items: Sequence[int], seed: int) -> dict[int, int]:
    """Each item's partner: another one, at random."""
    order = list(items)
    random.Random(seed).shuffle(order)
    return dict(zip(order, [*order[1:], order[0]], strict=True))


def log_ratios(sampled: Responses, source: Voice, target: Voice, anchor: Anchor) -> dict[str, list[Floats]]:
    """Log-ratios of the covered target tokens of every response, by denominator."""

    def aligned(traces: Sequence[Floats], how: Anchor) -> list[Floats]:
        found = []
        for response, trace, own in zip(sampled.responses, traces, sampled.own, strict=True):
            alignment = align_logprobs(
                response.text, response.source_ids, trace, source.tokenizer, target.tokenizer,
                target_ids=response.target_ids, anchor=how,
                source_eos_ids=source.engine.eos_token_ids,
            )  # fmt: skip
            found.append((own - alignment.logprobs)[alignment.covered])
        return found

    return {
        "aligned": aligned(sampled.behaviour, anchor),
        "shuffled prompt": aligned(sampled.shuffled, anchor),
        "broken alignment": [
            _broken(response, trace, own, source, target)
            for response, trace, own in zip(sampled.responses, sampled.behaviour, sampled.own, strict=True)
        ],
        **({} if anchor == "paper" else {"paper's map": aligned(sampled.behaviour, "paper")}),
    }


def _broken(response: Response, trace: Floats, own: Floats, source: Voice, target: Voice) -> Floats:
    """The word map rotated by one word: every word gets the mass of the word before it, the first that of the last."""
    alignment = align_logprobs(
        response.text, response.source_ids, trace, source.tokenizer, target.tokenizer,
        target_ids=response.target_ids, anchor="word", source_eos_ids=source.engine.eos_token_ids,
    )  # fmt: skip
    moved = transfer(alignment.units, np.maximum(trace, -BOUND), len(response.target_ids), rotate=1)
    return (own - moved.logprobs)[moved.covered]


def token_rows(ratios: dict[str, list[Floats]]) -> list[dict[str, Any]]:
    """Per denominator: p99 of the token ratio, share outside [0.8, 1.2], share of responses with a ratio over 10."""
    rows = []
    for name, responses in ratios.items():
        tokens = np.exp(np.concatenate(responses))
        tall = [float(np.exp(r).max(initial=0.0)) > TALL for r in responses]
        rows.append(
            {
                "denominator": name,
                "responses": len(responses),
                "tokens": len(tokens),
                "p99": float(np.quantile(tokens, 0.99)),
                "clip_rate": float(np.mean((tokens < LOW) | (tokens > HIGH))),
                "responses_over_10": float(np.mean(tall)),
                "histogram": np.histogram(np.clip(np.log(tokens), BINS[0], BINS[-1]), BINS)[0].tolist(),
            }
        )
    return rows


def sequence_rows(ratios: dict[str, list[Floats]]) -> list[dict[str, Any]]:
    """Per denominator, over responses: exp(mean log-ratio), TRL's `sequence` level; and the logarithm of exp(sum)."""
    rows = []
    for name, responses in ratios.items():
        some = [r for r in responses if len(r)]
        means, sums = np.array([r.mean() for r in some]), np.array([r.sum() for r in some])
        ratio = np.exp(means)
        rows.append(
            {
                "denominator": name,
                "responses": len(some),
                "median": float(np.median(ratio)),
                "p99": float(np.quantile(ratio, 0.99)),
                "clip_rate": float(np.mean((ratio < LOW) | (ratio > HIGH))),
                "log_sum_median": float(np.median(sums)),
                "log_sum_p99": float(np.quantile(sums, 0.99)),
                "sum_clip_rate": float(np.mean((sums < np.log(LOW)) | (sums > np.log(HIGH)))),
                "histogram": np.histogram(np.clip(means, BINS[0], BINS[-1]), BINS)[0].tolist(),
            }
        )
    return rows
