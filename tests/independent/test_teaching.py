"""CHORD, F-TIS, dynamic sampling, the least hint, replays and SGT on runs, compared with the versions in teaching.py.

Losses go through TRL's own loss on a vocabulary of three tokens (test_three_tokens), whose policy's log-probs do not
depend on the context.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st
from test_three_tokens import P, Policy, Z, own

from conftest import REPOSITORY
from independent import teaching
from mutualrl.records import Rollout
from mutualrl.regimes import GuideView, Plan, Results, Sample, Sampled
from mutualrl.regimes.chord import Chord, mu_at
from mutualrl.regimes.guided import Guided
from mutualrl.regimes.hinted import Hinted
from mutualrl.regimes.hints import KINDS
from mutualrl.regimes.losses import upper_bound_loss
from mutualrl.regimes.prp import PRP
from mutualrl.regimes.resample import batch_scaled, differing, filled, further_rows, missing, order_of
from mutualrl.regimes.round import ExtraRow, UpperBound
from mutualrl.regimes.sgt import SGT
from mutualrl.regimes.transfer import Aligned, EncodedRun
from mutualrl.rollouts import Rollouts
from mutualrl.training.extra_rows import ExtraRows
from mutualrl.training.resampling import Attempts
from mutualrl.traits import SourceTraits
from mutualrl.trajectory import Message, ToolCall, Trajectory
from regime_views import Peer, TextTransfer, view

LOGP = {letter: math.log(p) for letter, p in zip("abc", P, strict=True)}
NAN = math.nan
FEW = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)
TEXTS = st.text("abc", min_size=1, max_size=4)
OWN_TEXTS = st.text("abc", min_size=2, max_size=2)


def ids_of(text: str) -> tuple[int, ...]:
    """Return the tokens of a text in the vocabulary of three."""
    return tuple("abc".index(letter) for letter in text)


def update(rows: Sequence[ExtraRow], inputs: dict[str, Any], loss_type: str = "grpo") -> list[float]:
    """Return value and gradient, by the three logits, of TRL's loss with extra rows."""
    logits = torch.tensor(Z, dtype=torch.float64, requires_grad=True)
    trainer = Policy(logits, len(inputs["advantages"]), loss_type)
    extra = ExtraRows(trainer)
    extra.load(rows, {row.prompt_id: (0,) for row in rows}, inputs)
    loss = extra.loss(None, inputs, lambda batch: trainer._compute_loss(None, batch))
    loss.backward()
    assert logits.grad is not None
    return [loss.item(), *logits.grad.tolist()]


def vector(value: float, texts: Sequence[str], slopes: Sequence[Sequence[float]]) -> np.ndarray:
    """Return a loss's value and its gradient by the logits, from the slopes of the texts' tokens."""
    gradient = np.zeros(3)
    for text, row in zip(texts, slopes, strict=True):
        for token, slope in zip(ids_of(text), row, strict=True):
            gradient += slope * (np.eye(3)[token] - np.array(P))
    return np.array([value, *gradient])


def logps_of(text: str) -> list[float]:
    """Return the policy's log-probs of a text."""
    return [LOGP[letter] for letter in text]


# ---- CHORD


@given(
    st.integers(0, 30) | st.integers(0, 400),
    st.floats(0, 0.99),
    st.floats(0, 1),
    st.integers(0, 60),
    st.integers(0, 300),
)
def test_chord_schedule(number: int, peak: float, part: float, warmup: int, decay: int) -> None:
    ours = mu_at(number, Chord(mu_peak=peak, mu_valley=part * peak, warmup_rounds=warmup, decay_rounds=decay))
    assert ours == pytest.approx(teaching.chord_mu(number, peak, part * peak, warmup, decay), rel=1e-9, abs=1e-12)


def test_last_steps_of_adam_are_the_documented_fractions_of_chords() -> None:
    text = (REPOSITORY / "docs" / "differences.md").read_text("utf-8")
    quoted = re.search(r"are ([\d.]+) of CHORD's after (\d+) rounds of which (\d+) decay", text)
    more = re.findall(r"([\d.]+) after (\d+) \((\d+)\)", text)
    assert quoted is not None
    cases = [(float(share), int(rounds), int(decay)) for share, rounds, decay in [quoted.groups(), *more]]
    assert len(cases) >= 3
    for share, rounds, decay in cases:
        assert round(teaching.adam_step_ratio(rounds, decay), 2) == share


PUBLISHED = st.lists(
    st.tuples(
        st.sampled_from(["book", "tome", "bob"]),
        st.sampled_from("pqr"),
        st.sampled_from([0.0, 1.0, NAN]),
        st.one_of(TEXTS, st.sampled_from([None, "x"])),
    ),
    min_size=1,
    max_size=9,
)


@FEW
@given(
    PUBLISHED,
    st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=6, max_size=6),
    st.lists(OWN_TEXTS, min_size=6, max_size=6),
    st.integers(0, 14),
    st.integers(0, 99),
)
def test_chord_is_the_mixture_of_grpo_and_imitation(
    published: list[Any], rewards: list[float], completions: list[str], number: int, seed: int
) -> None:
    """GRPO + mu / (1 - mu) NLL through TRL's loss, times 1 - mu, is (1 - mu) GRPO + mu NLL, value and gradient."""
    prompts = list("ppqqrr")
    peers = {m: Peer([(p, r, t) for name, p, r, t in published if name == m]) for m in ("book", "tome", "bob")}
    sources = {"book": SourceTraits(), "tome": SourceTraits()}
    fit = lambda text, ended: None if text == "x" else ids_of(text)  # noqa: E731
    rule = Chord(mu_peak=0.9, mu_valley=0.05, warmup_rounds=3, decay_rounds=8)
    round_view = view(
        list(zip(prompts, rewards, strict=True)), peers, sources=sources, fit=fit, round=number, run_seed=seed
    )
    planned = rule.plan(round_view)
    expected = teaching.chord_texts(published, sources, dict.fromkeys(prompts), lambda text: text != "x")
    assume(expected)
    assert [row.prompt_id for row in planned.rows] == sorted(expected)
    assert all(row.trajectory.text in expected[row.prompt_id] for row in planned.rows)
    assert planned.advantages is None
    advantages = [a for i in range(0, 6, 2) for a in teaching.centred(rewards[i : i + 2], "group", 0.0)]
    ours = np.array(update(planned.rows, own([list(ids_of(text)) for text in completions], advantages)))
    value, slopes = teaching.surrogate_on_policy(
        [(logps_of(t), a) for t, a in zip(completions, advantages, strict=True)]
    )
    grpo = vector(value, completions, slopes)
    imitated = []
    for row in planned.rows:
        nll, own_slopes = teaching.nll_of_row(logps_of(row.trajectory.text), [True] * len(row.trajectory.text))
        imitated.append(vector(nll, [row.trajectory.text], [own_slopes]))
    mu = teaching.chord_mu(number, 0.9, 0.05, 3, 8)
    assert (1 - mu) * ours == pytest.approx(teaching.chord_mixture(grpo, imitated, mu), rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_chord_draws_a_text_uniformly(count: int) -> None:
    """Over seeds, each of a prompt's texts is drawn as often as another, within five standard deviations."""
    texts = [f"t{number}" for number in range(count)]
    book = Peer([("p", float(number % 2), text) for number, text in enumerate(texts)])
    drawn = Counter[str]()
    for seed in range(600):
        round_view = view([("p", 1.0), ("p", 0.0)], {"book": book}, sources={"book": SourceTraits()}, run_seed=seed)
        drawn.update(row.trajectory.text for row in Chord().plan(round_view).rows)
    spread = math.sqrt(600 * (1 / count) * (1 - 1 / count))
    assert sorted(drawn) == texts
    assert all(abs(drawn[text] - 600 / count) < 5 * spread for text in texts)


# ---- F-TIS


@given(st.floats(-4, 0), st.floats(-4, 0), st.floats(-2, 2), st.floats(0.3, 3))
def test_ratio_clipped_from_above_only_and_detached(
    logp: float, behaviour: float, advantage: float, cap: float
) -> None:
    logps = torch.tensor([[logp]], dtype=torch.float64, requires_grad=True)
    loss = upper_bound_loss(logps, torch.tensor([[behaviour]]).double(), torch.tensor([[advantage]]).double(), cap)
    loss.sum().backward()
    value, slope = teaching.capped_token(logp, behaviour, advantage, cap)
    assert logps.grad is not None
    assert (loss.item(), logps.grad.item()) == pytest.approx((value, slope), rel=1e-5, abs=1e-6)


PEER_ROWS = st.lists(
    st.tuples(
        st.sampled_from("pq"),
        st.sampled_from([0.0, 0.0, 0.5, 1.0]),
        st.text("abc", min_size=1, max_size=3),
        st.lists(st.tuples(st.floats(-3, -0.05), st.sampled_from([True, True, True, False])), min_size=3, max_size=3),
    ),
    min_size=2,
    max_size=6,
)


@FEW
@given(
    PEER_ROWS,
    st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=4, max_size=4),
    st.lists(OWN_TEXTS, min_size=4, max_size=4),
    st.sampled_from([None, *[0.0, 0.05, 0.1, 0.3] * 3]),
    st.sampled_from([0.5, 1.0, 1.5]),
    st.sampled_from(["group", "batch", "none"]),
    st.sampled_from(["grpo", "dapo", "dr_grpo", "bnpo", "luspo"]),
)
def test_f_tis_drops_far_rows_from_the_loss_and_its_normaliser_only(
    rows: list[Any],
    rewards: list[float],
    completions: list[str],
    most: float | None,
    cap: float,
    scale: Any,
    loss_type: str,
) -> None:
    traces, peer_rows, divergences = {}, {"p": [], "q": []}, {"p": [], "q": []}
    published = []
    for number, (prompt, reward, text, tokens) in enumerate(rows):
        behaviour = [float(np.float32(value)) for value, _ in tokens[: len(text)]]
        covered = [is_covered or place == 0 for place, (_, is_covered) in enumerate(tokens[: len(text)])]
        traces[number] = behaviour, covered
        published.append((prompt, reward, text, list(ids_of(text)), behaviour))
        peer_rows[prompt].append(reward)
        divergences[prompt].append(teaching.divergence(logps_of(text), behaviour, covered))
    assume(most is None or all(abs(far - most) > 1e-5 for each in divergences.values() for far in each))

    def align(rollout: Any, ids: Any, anchor: str) -> Aligned:
        behaviour, covered = traces[rollout.index]
        return Aligned(np.where(covered, behaviour, 0.0), np.array(covered))

    prompts = list("ppqq")
    round_view = view(
        list(zip(prompts, rewards, strict=True)),
        {"bob": Peer(published)},
        scale=scale,
        fit=lambda text, ended: ids_of(text),
        align=align,
    )
    rule = PRP(clip="above", cap=cap, max_negative_kl=most)
    asked = set(rule.requests(round_view).logprobs)
    assert asked == (set() if most is None else {(prompt, ids_of(text)) for prompt, _, text, _ in rows})
    scored = {passage: np.array([LOGP["abc"[token]] for token in passage[1]]) for passage in asked}
    planned = rule.plan(replace(round_view, results=Results(logprobs=scored)))

    own_groups = {"p": rewards[:2], "q": rewards[2:]}
    mine, theirs, stays = teaching.f_tis_rows(own_groups, peer_rows, divergences, scale, most)
    left = sum(not stay for each in stays.values() for stay in each)
    assume(left or planned.metrics.get("prp/dropped") or most is None)  # by either version
    event(f"rows left out: {left}")
    assert planned.advantages == pytest.approx([*mine["p"], *mine["q"]])
    assert planned.metrics.get("prp/dropped") == (None if most is None else left)
    kept, texts = [], []
    places = {"p": 0, "q": 0}
    for place, (prompt, _, text, _) in sorted(enumerate(rows), key=lambda row: row[1][0]):
        number = places[prompt]
        places[prompt] += 1
        if stays[prompt][number]:
            kept.append((logps_of(text), *traces[place], theirs[prompt][number]))
            texts.append((prompt, place, text))
    assert [(row.prompt_id, row.source.rollout) for row in planned.rows] == [each[:2] for each in texts]
    assert [row.advantage for row in planned.rows] == pytest.approx([each[3] for each in kept])
    assert {row.bound for row in planned.rows} <= {UpperBound(cap)}

    own_rows = [(logps_of(t), a) for t, a in zip(completions, planned.advantages or (), strict=True)]
    value, slopes = teaching.f_tis_loss(own_rows, kept, cap, loss_type, max_length=4)
    inputs = own([list(ids_of(text)) for text in completions], list(planned.advantages or ()))
    expected = vector(value, [*completions, *(text for *_, text in texts)], slopes)
    assert update(planned.rows, inputs, loss_type) == pytest.approx(expected, rel=1e-5, abs=1e-6)


# ---- dynamic sampling

EQUAL = st.sampled_from([[0.0] * 3, [1.0] * 3, [NAN] * 3, [NAN, 0.5, 0.5], [1.0, NAN, NAN]])
GROUP = EQUAL | st.lists(st.sampled_from([0.0, 0.0, 1.0, 0.5, NAN]), min_size=3, max_size=3)


@st.composite
def sampled_batches(draw: Any) -> list[list[tuple[str, list[float]]]]:
    """Draw a round's batches of as many groups each, of few prompts, so that they come again."""
    places = draw(st.integers(1, 5))
    group = st.tuples(st.sampled_from("abcdefgh"), GROUP)
    return draw(st.lists(st.lists(group, min_size=places, max_size=places), min_size=1, max_size=4))


@given(sampled_batches())
def test_places_of_groups_that_teach_nothing_are_filled(batches: list[list[tuple[str, list[float]]]]) -> None:
    prompts = [[prompt for prompt, _ in batch] for batch in batches]
    live = [differing([reward for _, rewards in batch for reward in rewards], 3) for batch in batches]
    assert [each.tolist() for each in live] == [[teaching.teaches(rewards) for _, rewards in b] for b in batches]
    places, lacking = teaching.filled_places(batches)
    groups = filled(prompts, live)
    assert [tuple(group) for group in groups] == places
    assert missing(groups, live) == lacking
    rewards = [batches[batch][place][1] for batch, place in places]
    together = [reward for group in rewards for reward in group]
    spread = float(np.nanstd(together, ddof=1)) if np.isfinite(together).sum() > 1 else 0.0
    expected = [a for group in rewards for a in teaching.centred(group, "batch", spread)]
    assert batch_scaled(together, 3).tolist() == pytest.approx(expected)


@settings(max_examples=300)
@given(
    st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=9),
    st.sets(st.sampled_from("abcdefg")),
    st.sets(st.sampled_from("abcdefg")),
    st.integers(1, 6),
    st.randoms(use_true_random=False),
)
def test_prompts_of_an_attempt(ids: list[str], sampled: set[str], chosen: set[str], count: int, random: Any) -> None:
    trained = sampled & chosen
    order = list(range(len(ids)))
    random.shuffle(order)
    rows = further_rows(order, ids.__getitem__, sampled, trained, count)
    expected = teaching.next_prompts([ids[row] for row in order], sampled, trained, count)
    assert [ids[row] for row in rows] == expected


@settings(max_examples=80)
@given(st.integers(1, 4), st.integers(0, 9), st.integers(1, 4), st.integers(0, 99), st.data())
def test_round_of_dynamic_sampling(places: int, more: int, attempts: int, seed: int, data: Any) -> None:
    """The trainer's own attempts, with batches of given rewards, against the whole round."""
    ids = [f"p{number}" for number in range(places + more)]
    hard = data.draw(st.sampled_from([EQUAL | EQUAL | GROUP, GROUP]))
    rewards = cache(lambda batch, place, prompt: data.draw(hard, label=f"{batch} {place} {prompt}"))
    orders = [[ids[row] for row in order_of(len(ids), seed, 2, attempt)] for attempt in range(1, attempts + 1)]
    batches, chosen, lacking = teaching.resampled_round(ids[:places], orders, rewards)
    trainer: Any = SimpleNamespace(
        train_dataset=[{"prompt_id": prompt} for prompt in ids],
        args=SimpleNamespace(seed=seed, steps_per_generation=2),
        num_iterations=3,
        _step=12,  # the third round
    )
    ours = Attempts(trainer)

    def sample(prompts: list[str]) -> None:
        batch = len(ours.prompts)
        values = [reward for place, prompt in enumerate(prompts) for reward in rewards(batch, place, prompt)]
        ours.prompts.append(prompts)
        ours.live.append(differing(values, 3))

    sample(ids[:places])
    for attempt in range(1, attempts + 1):
        rows = ours.next_rows(attempt) if ours.missing() else []
        if not rows:
            break
        sample([ids[row] for row in rows])
    event(f"batches: {len(batches)}, missing: {lacking}")
    assert ours.prompts == [[prompt for prompt, _ in batch] for batch in batches]
    assert [tuple(group) for group in ours.groups()] == chosen
    assert ours.missing() == lacking


# ---- hinted: the least hint that works

WORD = st.sampled_from(["so", "3", "+4=7", "we", "\\boxed{7}", "add"])
SUCCESSES = st.lists(st.lists(WORD, min_size=1, max_size=9), min_size=1, max_size=2)


def own_ids(text: str) -> tuple[int, ...]:
    """Return a text's bytes as tokens."""
    return tuple(text.encode())


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(
    SUCCESSES,
    st.sampled_from([" ", "  ", " \n"]),
    st.integers(1, 3),
    st.sampled_from([0.5, 0.8, 1.0]),
    st.sampled_from(["nll", "policy_gradient"]),
    st.integers(0, 50),
    st.data(),
)
def test_least_hint_that_works(
    successes: list[list[str]], space: str, samples: int, max_copy: float, loss: Any, seed: int, data: Any
) -> None:
    """Answers are drawn as they are asked for; phases, hints, rows and advantages are compared."""
    texts = [space.join([f"s{number}", *words]) for number, words in enumerate(successes)]
    rule = Hinted(hint="least", samples=samples, max_copy=max_copy, loss=loss)
    own_rewards = [0.0, 0.1]
    round_view = view([("p", r) for r in own_rewards], {"bob": Peer([("p", 1.0, t) for t in texts])}, run_seed=seed)
    choices = [*texts, *(t[: len(t) // 2] for t in texts), "we add 3 to 4: \\boxed{7}", "\\boxed{7}", "7", "so 7 it is"]
    written = st.sampled_from([text for text in choices if text.strip()])
    works = data.draw(st.integers(1, 9))  # from this number of the hint's words on answers may be confirmed
    by_sample: dict[Sample, Any] = {}
    phases: list[str] = []
    for _ in range(len(KINDS["least"].shares) + 2):
        asked = rule.requests(round_view).without(round_view.results).samples
        if not asked:
            break
        assert [(sample.prompt_id, sample.number) for sample in asked] == [("p", n) for n in range(samples)]
        assert len({sample.hint for sample in asked}) == 1
        phases.append(asked[0].hint)
        made: dict[Sample, Sampled | None] = {}
        for sample in asked:
            if data.draw(st.integers(0, 19)) == 13:  # no room
                by_sample[sample] = made[sample] = None
                continue
            rewards = [1.0, 1.0, NAN, 0.0] if len(sample.hint.split()) >= works else [0.0, NAN]
            drawn = by_sample[sample] = (
                data.draw(written),
                data.draw(st.sampled_from(rewards)),
                data.draw(st.booleans()),
            )
            text, reward, ended = drawn
            ids = own_ids(text) + ((0,) if ended else ())
            trace = np.zeros(len(ids), dtype=np.float32) if sample.logprobs else None
            made[sample] = Sampled(
                EncodedRun(ids), Trajectory.of_text(text), ended, reward, trace, own_ids(sample.hint)
            )
        round_view = replace(round_view, results=round_view.results.merged(Results(samples=made)))
    planned = rule.plan(round_view)

    success = texts[int(phases[0].split()[0][1:])]
    words = len(success.split())
    by_length = {len(hint.split()): hint for hint in phases}
    assert all(success.startswith(hint) for hint in phases)
    assert phases[-1] == success or len(phases[-1].split()) < words

    def answered(length: int) -> list[Any]:
        return [(s.hint, by_sample[s]) for s in by_sample if s.hint == by_length.get(length) and by_sample[s]]

    def is_taken(answer: Any) -> bool:
        hint, (text, reward, _) = answer
        return bool(teaching.is_learnt(text, own_ids(text), own_ids(hint), reward, max_copy=max_copy))

    shown, taken = teaching.least_hint(words, answered, is_taken)
    left_out = [1 for answer in by_sample.values() if answer and answer[1] > 0.8]
    event(f"phases: {len(shown)}, taken: {len(taken) > 0}")
    event(f"confirmed and left out: {len(left_out) > len(taken)}, {loss}")
    assert [len(hint.split()) for hint in phases] == shown
    if loss == "nll":
        assert [(row.hint, row.trajectory.text) for row in planned.rows] == [
            (hint, text) for _, (hint, (text, *_)) in taken
        ]
        assert {(row.loss, row.weight, row.prompt_id) for row in planned.rows} <= {("nll", 0.1, "p")}
        assert planned.metrics["hinted/confirmed"] == len(taken)
        return
    # of all phases: the failed answers, and the confirmed ones that are neither copies nor bare
    learnable = [
        (hint, answer)
        for length in shown
        for hint, answer in answered(length)
        if not math.isnan(answer[1]) and (answer[1] <= 0.8 or is_taken((hint, answer)))
    ]
    mine, graded = teaching.hinted_group(own_rewards, [reward for _, (_, reward, _) in learnable])
    assert [row.trajectory.text for row in planned.rows] == [text for _, (text, *_) in learnable]
    assert [row.advantage for row in planned.rows] == pytest.approx(graded)
    assert planned.advantages == pytest.approx(mine)


# ---- guided by replays

WHOLE = st.tuples(st.sampled_from([1, 2]), st.sampled_from([["tool"], ["tool", "tool"]]))
ODD = st.sampled_from([(0, []), (0, ["tool"]), (1, []), (1, ["tool", "user"]), (2, ["tool"])])
RUN = st.builds(
    lambda *parts: [turn for part in parts for turn in part],
    st.lists(WHOLE, max_size=5) | st.just([]),
    st.lists(ODD, max_size=1) | ODD.map(lambda turn: [turn]),
    st.lists(WHOLE, max_size=3),
    st.sampled_from([[(0, [])]] * 3 + [[]]),  # its answer; without one, it ends with a result
).filter(bool)
SHARE = st.integers(1, 19).map(lambda n: n / 20)


def run_of(turns: Sequence[tuple[int, Sequence[str]]]) -> str:
    """Return a run with these calls and these roles after each turn, as JSON."""
    messages = []
    for number, (calls, roles) in enumerate(turns):
        made = tuple(ToolCall("look", {"n": number, "m": m}) for m in range(calls))
        messages.append(Message("assistant", f"turn {number}", tool_calls=made, sampled=True))
        messages += [Message(role, f"result {number}", name="look" if role == "tool" else "") for role in roles]
    return Trajectory.of_run(messages).stored


def messages_before_turn(turns: Sequence[tuple[int, Sequence[str]]], number: int) -> int:
    """Return the number of messages of a run's first turns."""
    return sum(1 + len(roles) for _, roles in turns[:number])


@settings(max_examples=200)
@given(
    RUN | st.lists(WHOLE, min_size=3, max_size=9).map(lambda turns: [*turns, (0, [])]),
    st.integers(2, 9),
    SHARE,
    st.one_of(st.none(), st.integers(1, 9)),
    st.integers(1, 19),
    st.integers(1, 30),
    st.one_of(st.none(), st.integers(1, 20)),
    st.integers(0, 50),
)
def test_turns_that_rollouts_begin_with(
    turns: list[Any],
    group: int,
    share: float,
    number: int | None,
    twentieths: int,
    round_index: int,
    decay: int | None,
    seed: int,
) -> None:
    most = twentieths / 20
    left = Fraction(1) if decay is None else max(Fraction(0), 1 - Fraction(round_index, decay))
    exact = left * (Fraction(twentieths, 20) * len(turns) if number is None else number)
    rounded = float(left) if decay is None else max(0.0, 1 - round_index / decay)
    rounded *= most * len(turns) if number is None else number
    # where floats miss a whole number, ours has a turn more or less: test_whole_numbers_of_turns
    assume(exact.denominator > 1 or rounded == exact)
    rule = Guided(share=share, turns=number, max_prefix=most if number is None else 0.5, decay_rounds=decay)
    state = {"hints": {"p": [round_index - 1, run_of(turns)]}}
    guide = GuideView(
        round_index, "ada", seed, ["p", "q"] * group, [n for n in range(group) for _ in "pq"], group, 64, state
    )
    replays = rule.replays(guide)
    assert replays[1::2] == [None] * group  # nothing is remembered on q
    allowed = {
        teaching.replayable(turns, n) for n in teaching.turn_numbers(len(turns), number, most, round_index, decay)
    }
    guided = teaching.guided_places(group, share)
    event(f"replayed: {max(allowed) > 0 and bool(guided)}")
    whole = Trajectory.of_json(run_of(turns)).messages
    for place, replay in enumerate(replays[::2]):
        part = () if replay is None else replay.messages
        if place not in guided:
            assert part == ()
            continue
        assert len(part) in {messages_before_turn(turns, n) for n in allowed}
        assert part == whole[: len(part)]
        assert not part or part[-1].role == "tool"


@settings(max_examples=300)
@given(RUN)
def test_turns_that_can_be_replayed(turns: list[Any]) -> None:
    """As many as are asked for, or the most below that which end with a tool's result."""
    whole = Trajectory.of_json(run_of(turns)).messages
    for most in range(1, len(turns) + 2):
        state = {"hints": {"p": [0, run_of(turns)]}}
        _, replay = Guided(turns=most).replays(GuideView(1, "ada", 0, ["p"] * 2, [0, 1], 2, 64, state))
        part = () if replay is None else replay.messages
        assert part == whole[: messages_before_turn(turns, teaching.replayable(turns, most))]


@given(st.integers(2, 12), st.integers(1, 9), st.integers(1, 15), st.integers(0, 20))
def test_number_of_turns_decays(total: int, turns: int, decay: int, round_index: int) -> None:
    run = run_of([(1, ["tool"])] * (total - 1) + [(0, [])])
    guide = GuideView(round_index, "ada", 0, ["p"] * 2, [0, 1], 2, 64, {"hints": {"p": [round_index - 1, run]}})
    _, replay = Guided(turns=turns, decay_rounds=decay).replays(guide)
    assert [0 if replay is None else len(replay.turns)] == teaching.turn_numbers(total, turns, None, round_index, decay)


@pytest.mark.parametrize(
    ("total", "turns", "most", "round_index", "decay"), [(9, 7, None, 6, 7), (9, 9, None, 1, 3), (4, None, 0.6, 7, 12)]
)
def test_whole_numbers_of_turns(
    total: int, turns: int | None, most: float | None, round_index: int, decay: int
) -> None:
    run = run_of([(1, ["tool"])] * (total - 1) + [(0, [])])
    rule = Guided(turns=turns, max_prefix=most or 0.5, decay_rounds=decay)
    state = {"hints": {"p": [round_index - 1, run]}}
    _, replay = rule.replays(GuideView(round_index, "ada", 0, ["p"] * 2, [0, 1], 2, 64, state))
    numbers = teaching.turn_numbers(total, turns, most, round_index, decay)
    assert replay is not None and len(replay.turns) in numbers


@pytest.mark.parametrize(("total", "most"), [(6, 0.5), (8, 0.9), (4, 0.3)])
def test_number_of_turns_is_drawn_uniformly(total: int, most: float) -> None:
    turns: list[Any] = [(1, ["tool"])] * (total - 1) + [(0, [])]
    rule, drawn = Guided(max_prefix=most), Counter[int]()
    numbers = teaching.turn_numbers(total, None, most, 1, None)
    for seed in range(400):
        guide = GuideView(1, "ada", seed, ["p"] * 2, [0, 1], 2, 64, {"hints": {"p": [0, run_of(turns)]}})
        _, replay = rule.replays(guide)
        drawn[0 if replay is None else len(replay.turns)] += 1
    assert sorted(drawn) == numbers
    spread = math.sqrt(400 / len(numbers))
    assert all(abs(drawn[number] - 400 / len(numbers)) < 5 * spread for number in numbers)


class RunTransfer(TextTransfer):
    """Tokenizer layer whose runs are pieces: the letters of the messages' texts; a run with `x` is unrenderable."""

    def encode_runs(self, runs: Sequence[tuple[str, Trajectory]]) -> list[EncodedRun | None]:
        rows: list[EncodedRun | None] = []
        for _, run in runs:
            ids, mask = [], []
            for message in run.messages:
                ids += ids_of(message.text.replace("x", ""))
                mask += [message.role == "assistant"] * len(message.text.replace("x", ""))
            rows.append(None if "x" in "".join(m.text for m in run.messages) else EncodedRun(tuple(ids), tuple(mask)))
        return rows


LETTER_TRANSFER = RunTransfer()


class AnyTransfer(RunTransfer):
    """Tokenizer layer that keeps every run."""

    def encode_runs(self, runs: Sequence[tuple[str, Trajectory]]) -> list[EncodedRun | None]:
        return [EncodedRun((1,), (True,)) for _ in runs]


# rewards of own rollouts, and the tokens of their prefixes
OWN_OF_A_ROUND = st.sampled_from(
    [
        [(0.0, 0), (0.1, 0)],
        [(0.0, 0), (1.0, 3)],
        [(0.0, 0), (0.0, 3)],
        [(0.0, 0), (0.5, 0)],
        [(0.0, 0), (1.0, 0)],
        [(NAN, 0), (0.0, 0)],
    ]
)


@settings(max_examples=150)
@given(
    st.lists(
        st.fixed_dictionaries(
            {
                prompt: st.tuples(
                    OWN_OF_A_ROUND,
                    st.none()
                    | st.tuples(st.sampled_from([0.0, 1.0, 1.0, 1.0]), RUN | st.just([(1, ["tool"]), (0, [])])),
                )
                for prompt in "pq"
            }
        ),
        min_size=2,
        max_size=6,
    ),
    st.integers(1, 4),
)
def test_runs_that_are_remembered(rounds: list[dict[str, Any]], memory: int) -> None:
    """Own rollouts are (reward, tokens of the prefix); a prompt has at most one run of the peer in a round."""
    rule, state = Guided(memory=memory), {}
    history = [
        {
            prompt: ([reward for reward, prefix in own_rows if not prefix], [] if peer is None else [peer])
            for prompt, (own_rows, peer) in each.items()
        }
        for each in rounds
    ]
    expected = teaching.remembered_runs(history, memory)
    for number, each in enumerate(rounds):
        rollouts = [
            Rollout(prompt, index, reward, True, prefix=prefix)
            for prompt, (own_rows, _) in each.items()
            for index, (reward, prefix) in enumerate(own_rows)
        ]
        published = [
            Rollout(prompt, 0, peer[0], True, trajectory=Trajectory.of_stored("said", run_of(peer[1])))
            for prompt, (_, peer) in each.items()
            if peer is not None
        ]
        peers = {"bob": Rollouts.of(published, "bob")}
        round_view = replace(view([("p", 0.0)], round=number), rollouts=Rollouts.of(rollouts, "ada"), peers=peers)
        planned = rule.plan(replace(round_view, state=state, transfer=AnyTransfer()))
        assert planned.advantages is None
        assert planned.rows == ()
        state = dict(planned.state) if planned.state is not None else state
        remembered = {prompt: (when, run_of(turns)) for prompt, (when, turns) in expected[number + 1].items()}
        assert {prompt: tuple(hint) for prompt, hint in state.get("hints", {}).items()} == remembered
        event(f"remembered: {len(remembered)}")


# ---- sgt on runs with tools

PIECE = st.tuples(TEXTS, TEXTS)


@st.composite
def peer_run(draw: Any) -> tuple[list[tuple[str, str]], bool]:
    """Draw a run as its messages (role, text), and whether it ended."""
    messages = []
    for said, result in draw(st.lists(PIECE, max_size=3)):
        messages += [("assistant", said), ("tool", result)]
    messages.append(("assistant", draw(TEXTS)))
    return messages, draw(st.sampled_from([True, True, False]))


@FEW
@given(
    st.lists(peer_run() | peer_run() | peer_run() | st.none(), min_size=1, max_size=4),
    st.none() | st.integers(1, 4),
    st.sampled_from(["pairs", "prompts"]),
    st.floats(0.01, 2),
    st.lists(OWN_TEXTS, min_size=8, max_size=8),
)
def test_sgt_learns_the_models_own_tokens_of_runs(
    runs: list[Any], turns: int | None, normalize: Any, weight: float, completions: list[str]
) -> None:
    """Through TRL's loss, beside own rows of advantage 0, since all of a gated prompt's rollouts failed."""
    prompts = [f"p{number}" for number in range(4)]
    published = [
        Rollout(
            prompt,
            0,
            1.0,
            run[1],
            trajectory=Trajectory.of_stored(
                "said",
                Trajectory.of_run((Message(role, text, sampled=role == "assistant") for role, text in run[0])).stored,
            ),
        )
        for prompt, run in zip(prompts, runs, strict=False)
        if run is not None
    ]
    round_view = view([(prompt, 0.0) for prompt in prompts for _ in range(2)], {"bob": Rollouts.of(published, "bob")})
    planned = SGT(weight=weight, turns=turns, normalize=normalize).plan(replace(round_view, transfer=LETTER_TRANSFER))
    rows, texts = [], []
    for run in runs:
        if run is None:
            continue
        pieces = [(text, role == "assistant") for role, text in run[0]]
        kept = teaching.learnt_pieces(pieces, turns, run[1])
        if kept is not None:
            letters, mask = teaching.flat(kept)
            texts.append("".join(letters))
            rows.append((logps_of("".join(letters)), mask))
    assume(rows)
    event(f"rows: {len(rows)} of {len(published)}")
    assert ["".join("abc"[token] for token in row.token_ids) for row in planned.rows] == texts
    assert [row.covered.tolist() for row in planned.rows] == [mask for _, mask in rows]
    inputs = own([list(ids_of(text)) for text in completions], [0.0] * 8)
    trainer_rows = update_of_prompts(planned, inputs, groups_of=2)
    value, slopes = teaching.sgt_on_runs(rows, weight, normalize, prompts=4)
    assert trainer_rows == pytest.approx(vector(value, texts, slopes), rel=1e-6, abs=1e-8)


def update_of_prompts(planned: Plan, inputs: dict[str, Any], groups_of: int) -> list[float]:
    """Return value and gradient of TRL's loss with a plan's rows, for a trainer that counts its prompts."""
    logits = torch.tensor(Z, dtype=torch.float64, requires_grad=True)
    trainer: Any = Policy(logits, len(inputs["advantages"]))
    trainer.num_generations = groups_of
    extra = ExtraRows(trainer)
    extra.load(planned.rows, {row.prompt_id: (0,) for row in planned.rows}, inputs)
    loss = extra.loss(None, inputs, lambda batch: trainer._compute_loss(None, batch))
    loss.backward()
    assert logits.grad is not None
    return [loss.item(), *logits.grad.tolist()]


@cache
def rendered_with() -> tuple[Any, Any]:
    """Return the tokenizer of the embedded policy `jan`, and a renderer with its tool."""
    from transformers.utils import get_json_schema

    from mutualrl.adapter.rendering import Renderer, as_trained
    from mutualrl.engines.transformers_engine import load_tokenizer
    from mutualrl.tasks.calculator import calculate
    from mutualrl.tiny import path_of

    tokenizer = load_tokenizer(str(path_of("jan")))
    return tokenizer, Renderer(as_trained(tokenizer), [get_json_schema(calculate)])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(st.integers(0, 99), st.integers(0, 99), st.sampled_from(["", "17"]), st.integers(0, 999)), max_size=3
    ),
    st.integers(0, 999),
)
def test_pieces_of_a_rendered_run(calls: list[tuple[int, int, str, int]], answer: int) -> None:
    """What the policy `jan` would have sampled, from its chat template alone, tokenized apart: ids and mask."""
    tokenizer, renderer = rendered_with()
    messages, pieces = [], []
    for a, b, word, result in calls:
        arguments = {"operation": "times", "a": a, "b": b}
        messages.append(Message("assistant", word, tool_calls=(ToolCall("calculate", arguments),), sampled=True))
        messages.append(Message("tool", str(result), name="calculate"))
        call = json.dumps({"name": "calculate", "arguments": arguments})
        pieces += [(f"{word}<call>{call}</call><eos>", True), (f"<tool>{result}<eos><bot>", False)]
    messages.append(Message("assistant", f"\\boxed{{{answer}}}", sampled=True))
    pieces.append((f"\\boxed{{{answer}}}<eos>", True))
    row = renderer.row([Message("user", "2 times 3?")], messages)
    encoded = [(tokenizer.encode(text, add_special_tokens=False), is_own) for text, is_own in pieces]
    ids, mask = teaching.flat(encoded)
    assert row.ids == ids
    assert [bool(value) for value in row.mask] == mask
    assert tokenizer.decode(row.prompt_ids) == "<user>2 times 3?<eos><bot>"


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.parametrize("stale", [None, 0, 1])
def test_replayed_turns_are_the_prompt_and_the_rest_is_trained_on(tmp_path: Path, stale: int | None) -> None:
    """Train one round after a gate opened; `stale`: the call whose recorded result is not the tool's."""
    from agent_harness import BY_ID, numbers
    from test_trajectory_rows import contexts, guided, two_calls_of

    def recorded(prompt: Any) -> str:
        messages = list(Trajectory.of_json(two_calls_of(prompt)).messages)
        if stale is not None:
            messages[2 * stale + 1] = messages[2 * stale + 1]._replace(text="1")
        return Trajectory.of_run(messages).stored

    trainer = guided(tmp_path, recorded, turns=2)
    _, generation = trainer.batches[1]
    replayed = teaching.guided_places(4, 0.5)
    diverged = 0
    for place, (data, (prompt, completion, mask)) in enumerate(
        zip(generation.inputs, contexts(trainer, 1), strict=True)
    ):
        problem = BY_ID[data["prompt_id"]]
        call = "<call>" + json.dumps({"name": "calculate", "arguments": numbers(problem.text)}) + "</call><eos>"
        now = f"<tool>{problem.answer}<eos><bot>"
        run = [
            (word + call, [(("<tool>1<eos><bot>" if stale == number else now), now)])
            for number, word in enumerate(["", "17"])
        ]
        turns = 2 if place % 4 in replayed else 0
        expected, made = teaching.replayed_context(
            f"<user>{problem.text}<eos><bot>", run, turns, lambda told, told_now: told == told_now
        )
        diverged += bool(turns) and stale is not None and stale < made
        assert prompt == expected
        assert completion == (f"\\boxed{{{problem.answer}}}<eos>" if turns else "\\boxed{0}<eos>")
        assert mask == [1] * len(mask)
    assert trainer.logs[1]["replays/made"] == 8 * len(replayed)
    assert trainer.logs[1]["replays/diverged"] == diverged
