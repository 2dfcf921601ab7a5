"""Run a regime against recorded rounds and report its errors, before any model is loaded.

The rounds are generated from the arithmetic task, the embedded tokenizers and a hash: a learner that fails on some
prompts and succeeds on others, and two peers with other tokenizers.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from mutualrl.errors import MutualRLError
from mutualrl.process.loading import fast_imports
from mutualrl.records import Prompt, PublishSchema, Rollout, plain_ids
from mutualrl.regimes import Plan, Regime, Requests, Results, RoundView, check_plan, plain_state
from mutualrl.regimes.advantages import group_by_prompt, pool_advantages, ungroup
from mutualrl.regimes.round import PHASES, ExtraRow, Sample, Sampled
from mutualrl.regimes.transfer import EncodedRun
from mutualrl.rollouts import Rollouts
from mutualrl.storage.files import JsonObject
from mutualrl.tasks import TaskSource, get_task
from mutualrl.tasks.boxed import boxed_score
from mutualrl.thl.units import Floats
from mutualrl.tiny import path_of
from mutualrl.training.transfer import TokenTransfer
from mutualrl.traits import SourceTraits
from mutualrl.trajectory import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LEARNER, PEERS, BOOK = "ada", ("bob", "cyd"), "book"
ROUNDS, PROMPTS, ROLLOUTS = 3, 8, 4


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check: its name, whether the regime passes, and the details."""

    check: str
    passed: bool
    found: str = ""


@cache
def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of an embedded model."""
    with fast_imports():
        from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path_of(name))


def recorded_rollouts(policy: str, round_index: int, tokenizer: PreTrainedTokenizerBase) -> list[Rollout]:
    """Return a policy's rollouts of a recorded round, with every field set."""
    prompts = get_task("arithmetic").read("train", TaskSource()).prompts
    rollouts: list[Rollout] = []
    for prompt in prompts[round_index * PROMPTS : (round_index + 1) * PROMPTS]:
        for index in range(ROLLOUTS):
            rollouts.append(_recorded(policy, prompt, index, tokenizer))
    groups = group_by_prompt([r.prompt_id for r in rollouts], [r.reward for r in rollouts])
    group_advantages = {key: pool_advantages(rewards, rewards, scale="group") for key, rewards in groups.items()}
    advantages = ungroup([r.prompt_id for r in rollouts], group_advantages)
    return [replace(r, advantage=a) for r, a in zip(rollouts, advantages, strict=True)]


def _recorded(policy: str, prompt: Prompt, index: int, tokenizer: PreTrainedTokenizerBase) -> Rollout:
    draw = hashlib.sha256(f"{policy}/{prompt.id}/{index}".encode()).digest()
    always_fails = policy == LEARNER and prompt_hash(prompt) < 128
    solved = draw[0] % 3 == 0 and not always_fails
    text = str(prompt.solution) if solved else f" {draw[1]} \\boxed{{{draw[1]}}}"
    ended = draw[2] % 8 != 0
    ids = tokenizer(text, add_special_tokens=False)["input_ids"] + ([tokenizer.eos_token_id] if ended else [])
    trace = tuple(-0.05 - 0.3 * ((place * 7 + index) % 5) for place in range(len(ids)))
    reward = boxed_score(text, prompt.answer)
    return Rollout(
        prompt_id=prompt.id,
        index=index,
        reward=reward,
        ended=ended,
        length=len(ids),
        prompt=prompt.text,
        trajectory=Trajectory.of_text(text),
        token_ids=np.array(ids, dtype=np.int32),
        logprobs=np.array(trace, dtype=np.float32),
    )


def prompt_hash(prompt: Prompt) -> int:
    """Return a number from 0 to 255 that decides whether the learner always fails on a prompt."""
    return hashlib.sha256(prompt.id.encode()).digest()[0]


def recorded_views(schema: PublishSchema, *, with_source: bool = False) -> list[RoundView]:
    """Return the recorded rounds as the learner sees them; of its peers, only the published fields. `with_source`: one
    of them has the data's solution for every other prompt, and learns nothing."""
    tokenizers = {name: load_tokenizer(name) for name in (LEARNER, *PEERS)}
    transfer = TokenTransfer(tokenizers[LEARNER], max_length=40, peers=tokenizers)
    prompts = get_task("arithmetic").read("train", TaskSource()).prompts
    names = {BOOK: SourceTraits()} if with_source else {}
    views = []
    for round_index in range(ROUNDS):
        own_rollouts = []
        for rollout in recorded_rollouts(LEARNER, round_index, tokenizers[LEARNER]):
            written = rollout.trajectory if schema.publishes_text(rollout.reward) else None  # as in training
            own_rollouts.append(replace(rollout, logprobs=None, trajectory=written))
        peers = {}
        for peer in PEERS:
            rollouts = Rollouts.of(recorded_rollouts(peer, round_index, tokenizers[peer]), peer, round_index)
            peers[peer] = rollouts.published(schema)
        if with_source:
            seen = sorted({rollout.prompt_id for rollout in own_rollouts})[::2]
            texts = {prompt.id: prompt.solution for prompt in prompts}
            book = [Rollout(key, 0, 1.0, True, trajectory=Trajectory.of_text(str(texts[key]))) for key in seen]
            peers[BOOK] = Rollouts.of(book, BOOK, round_index)
        own = Rollouts.of(own_rollouts, LEARNER, round_index)
        views.append(RoundView(round_index, LEARNER, 0, own, peers, transfer, sources=names))
    return views


def recorded_results(requests: Requests) -> Results:
    """Return results that depend only on the requests: log-probs from the token ids, rewards from the data, and as
    samples the data's solution or a wrong one, in turn."""
    prompts = {prompt.id: prompt for prompt in get_task("arithmetic").read("train", TaskSource()).prompts}
    answers = {key: prompt.answer for key, prompt in prompts.items()}

    def scored(ids: Sequence[int]) -> Floats:
        return np.array([-0.05 - 0.1 * (token % 7) for token in ids])

    return Results(
        {passage: scored(passage[1]) for passage in requests.logprobs},
        {passage: -float(scored(passage[1]).mean()) for passage in requests.nll},
        {response: boxed_score(response[1], answers[response[0]]) for response in requests.rewards},
        {sample: _recorded_sample(sample, prompts[sample.prompt_id]) for sample in requests.samples},
    )


def _recorded_sample(sample: Sample, prompt: Prompt) -> Sampled:
    """Return a sample in words of its own, right or wrong by its number."""
    text = f" well {prompt.solution}" if sample.number % 2 == 0 else " so \\boxed{-1}"
    tokenizer = load_tokenizer(LEARNER)
    ids = (*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id)
    trace = np.full(len(ids), -0.5, dtype=np.float32) if sample.logprobs else None
    hint_ids = tuple(tokenizer(sample.hint, add_special_tokens=False)["input_ids"])
    return Sampled(EncodedRun(ids), Trajectory.of_text(text), True, boxed_score(text, prompt.answer), trace, hint_ids)


def with_results(regime: Regime, view: RoundView) -> RoundView:
    """Return the view with the results of all of the regime's requests."""
    for _ in range(PHASES):
        requests = regime.requests(view).without(view.results)
        view = replace(view, results=view.results.merged(recorded_results(requests)))
    return view


def check_regime(regime: type[Regime] | Regime) -> list[Finding]:
    """Return the findings for a regime, under its default settings if it is a class."""
    try:
        regime = regime() if isinstance(regime, type) else regime
        schema = regime.needs().reads
    except Exception as error:  # noqa: BLE001  (user code may raise anything)
        return [Finding("its settings have defaults and it declares what it publishes", False, _error_text(error))]
    findings = [Finding("its settings have defaults and it declares what it publishes", True, _published(schema))]
    if not regime.needs().shares:
        return [*findings, Finding("it has no plan: TRL's own GRPO", True)]
    plans: list[Plan] = []
    try:
        for recorded in recorded_views(schema, with_source=regime.source_problem() is None):
            state = plans[-1].state if plans and plans[-1].state is not None else {}
            view = with_results(regime, replace(recorded, state=plain_state(state, regime.name)))
            plans.append(check_plan(regime.plan(view), view, regime.name))
            findings += _purity(regime, view, plans[-1])
    except Exception as error:  # noqa: BLE001  (as above)
        return [*findings, Finding(f"round {len(plans)}: its plan can be executed", False, _error_text(error))]
    findings.append(Finding("its plans can be executed", True, _plans_summary(plans)))
    return [*findings, _metrics_declared(regime, plans)]


def _purity(regime: Regime, view: RoundView, plan: Plan) -> list[Finding]:
    """Check that the plan is deterministic and independent of the peers' order, and that the view is unchanged."""
    first = as_plain(plan)
    rollouts, state = list(view.rollouts), copy.deepcopy(dict(view.state))
    findings = []
    if as_plain(regime.plan(view)) != first:
        findings.append(Finding(f"round {view.round}: the same round gives the same plan", False, "it differs"))
    if list(view.rollouts) != rollouts or dict(view.state) != state:
        findings.append(Finding(f"round {view.round}: the view is not changed", False, "it was changed"))
    reordered = replace(view, peers={name: view.peers[name] for name in sorted(view.peers, reverse=True)})
    if as_plain(regime.plan(reordered)) != first:
        name = f"round {view.round}: the order of the peers does not matter"
        findings.append(Finding(name, False, "the plan differs; sort the peers by name"))
    return findings


def as_plain(plan: Plan) -> tuple[object, ...]:
    """Return a plan in a form that compares by value."""
    rows = []
    names = [field.name for field in fields(ExtraRow) if field.name != "token_ids"]
    for row in plan.rows:
        values = [plain_ids(row.token_ids), *(getattr(row, name) for name in names)]
        rows.append(tuple(v.tolist() if isinstance(v, np.ndarray) else v for v in values))
    return plan.advantages, tuple(rows), dict(plan.metrics), None if plan.state is None else dict(plan.state)


def _metrics_declared(regime: Regime, plans: Sequence[Plan]) -> Finding:
    logged = {key for plan in plans for key in plan.metrics}
    undeclared = sorted(logged - {metric.key for metric in regime.metrics})
    name = "its metrics are declared, so that reports have their units"
    found = f"not in its metrics: {', '.join(undeclared)}" if undeclared else ""
    if not regime.metrics:
        found = found or "it declares none: pages have what is counted for every regime (rows, tokens, texts taught)"
    return Finding(name, not undeclared, found)


def _error_text(error: Exception) -> str:
    if isinstance(error, MutualRLError):
        return str(error)
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = "" if trace is None else f"{trace.tb_frame.f_code.co_filename}, line {trace.tb_lineno}: "
    return f"{where}{type(error).__name__}: {error}"


def _published(schema: PublishSchema) -> str:
    return f"publishes {', '.join(sorted(schema.fields)) or 'rewards only'}"


def _plans_summary(plans: Sequence[Plan]) -> str:
    changed = sum(plan.advantages is not None for plan in plans)
    return f"{len(plans)} rounds: {sum(len(plan.rows) for plan in plans)} extra rows, advantages changed in {changed}"


def summary_of(findings: Sequence[Finding]) -> JsonObject:
    """Return the findings as `{"passed", "checks": [{"check", "passed", "found"}]}`."""
    checks = [{"check": f.check, "passed": f.passed, "found": f.found} for f in findings]
    return {"passed": all(finding.passed for finding in findings), "checks": checks}
