"""Metrics: what a number is called, in which unit, and where it is shown. Those of a regime are fields of its class;
those of the framework are here, for the rooms that log them and those that read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Metric:
    """Number that is logged per round or optimizer step.

    `panel`: title of its plot in reports; None: logged only. `role`: `gate_rate` (fraction of prompts whose gate
    opened), `rescues` (rows learnt) or `action` (another number that is 0 while the regime changes nothing), by which
    progress lines and reports find it in any regime.
    """

    key: str
    unit: str
    meaning: str
    panel: str | None = None
    role: Literal["gate_rate", "rescues", "action"] | None = None


DEAD = Metric("prompts/dead", "prompts", "whose last group had no reward above 0")
REVIVED = Metric("prompts/revived", "prompts", "dead ones that have a reward above 0 again")

ROUND = Metric("see/round", "round", "number of the round in the exchange")
PEERS = Metric("see/peers", "policies", "whose rollouts were read")
BYTES = Metric("see/bytes", "bytes", "of the shards that were read")
WAIT = Metric(
    "see/wait_seconds", "seconds", "for which peers and sources were awaited", panel="waiting for other members"
)
LAG = Metric("see/lag", "rounds", "by which the slowest peer lagged; with exchange.staleness only")
LATE_ROWS = Metric("see/late_rows", "rows", "of rounds that peers published late; with exchange.staleness only")

EXTRA_ROWS = Metric("plan/extra_rows", "rows", "that join the loss beside own rollouts")
EXTRA_TOKENS = Metric("plan/extra_tokens", "tokens", "of these rows")
TAUGHT = Metric("plan/taught", "rows", "of these whose text the policy is taught")

PASSAGES = Metric("plan/passages", "passages", "that a regime asked to be scored")
PASSAGE_TOKENS = Metric("plan/passage_tokens", "tokens", "of these passages")
TEXTS_SCORED = Metric("plan/texts_scored", "texts", "given to the reward functions for a regime")
SAMPLES = Metric("plan/samples", "samples", "that a regime asked for beside own rollouts")
SAMPLED_TOKENS = Metric("plan/sampled_tokens", "tokens", "of these samples")
SAMPLES_LEFT_OUT = Metric("plan/samples_left_out", "samples", "without room, or with another prompt than the round's")

SAMPLE_SECONDS = Metric("samples/seconds", "seconds", "in which samples.jsonl was written; part of `step_time`")

TOO_LONG = Metric("thl/too_long", "texts", "left out: longer than the learner's completions")
CHANGED = Metric("thl/changed", "texts", "left out: the learner's tokens spell another text")
REASONING = Metric("thl/reasoning", "texts", "left out: they close or open reasoning that the prompt has opened")
#: texts that were left out, by the reason that `training.transfer` counts
LEFT_OUT = {"too_long": TOO_LONG, "changed": CHANGED, "reasoning": REASONING}

TURNS = Metric("tools/turns", "messages", "that the policy wrote per rollout, those with calls included")
INVALID_CALLS = Metric("tools/invalid_calls", "calls", "per rollout that could not be parsed, or name no tool")
OVER_CALLS = Metric(
    "tools/over_calls", "fraction", "with a call, of rollouts on prompts whose row has needs_tool: false"
)
#: TRL's own: calls per rollout, and the fraction of them that failed
CALL_FREQUENCY, FAILURE_FREQUENCY = "tools/call_frequency", "tools/failure_frequency"
#: metrics of rollouts with tools, beside these
TOOLS = (TURNS, INVALID_CALLS, OVER_CALLS)

REPLAYS = Metric("replays/made", "rollouts", "that began with turns of a peer's run, called again")
DIVERGED = Metric("replays/diverged", "rollouts", "of these whose last result was not the run's")
REPLAYS_TOO_LONG = Metric(
    "replays/too_long", "rollouts", "that began without the turns: no room, or not to be rendered"
)
#: metrics of rollouts that begin with replayed turns
REPLAYED = (REPLAYS, DIVERGED, REPLAYS_TOO_LONG)

RESAMPLE_ATTEMPTS = Metric("resample/attempts", "batches", "that the round sampled beside its own")
RESAMPLE_DROPPED = Metric("resample/dropped", "groups", "of equal rewards that were sampled and are not trained on")
RESAMPLE_MISSING = Metric("resample/missing", "groups", "of equal rewards that are left in the batch")
RESAMPLE_TOKENS = Metric("resample/tokens", "tokens", "of completions that the further batches sampled")
#: metrics of `round.resample`
RESAMPLE = (RESAMPLE_ATTEMPTS, RESAMPLE_DROPPED, RESAMPLE_MISSING, RESAMPLE_TOKENS)

#: metrics of what a regime requests in a round
REQUESTED = (PASSAGES, PASSAGE_TOKENS, TEXTS_SCORED, SAMPLES, SAMPLED_TOKENS, SAMPLES_LEFT_OUT)
#: all of them, in the order of the documentation
FRAMEWORK = (
    *(DEAD, REVIVED, ROUND, PEERS, BYTES, WAIT, LAG, LATE_ROWS, EXTRA_ROWS, EXTRA_TOKENS, TAUGHT),
    *(*REQUESTED, TOO_LONG, CHANGED, REASONING, *TOOLS, *REPLAYED, *RESAMPLE, SAMPLE_SECONDS),
)


def of_source(source: str, key: str) -> str:
    """Return the key of a metric of one source: `source/NAME/KEY`."""
    return f"source/{source}/{key}"
