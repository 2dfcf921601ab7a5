"""Regimes, aligners and diagnostics compared with the independent versions beside this file.

Those are written from the paper's formulas and docs/differences.md, and the first test checks that they do not import
the package.
"""

from __future__ import annotations

import ast
import itertools
import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_three_tokens import P, own, pooled, row

from independent import aligners, diagnostics, regimes, rivals
from mutualrl.diagnostics.gates import Thresholds
from mutualrl.diagnostics.rollouts import to_arrays
from mutualrl.diagnostics.specs.complementarity import complementarity
from mutualrl.diagnostics.specs.sgt_check import activation
from mutualrl.paper.specs.channels import decomposed
from mutualrl.records import Rollout
from mutualrl.regimes import hacpo
from mutualrl.regimes.advantages import pool_advantages, standard_deviation
from mutualrl.regimes.gating import Candidate, DrawKey, EncodedCandidate, draw_candidate, gate
from mutualrl.regimes.losses import band_loss, nll_loss, row_nll, stepwise_loss
from mutualrl.regimes.prp import RatioMoments, chi_square, effective_sample_size, pool, sequence_ratio
from mutualrl.regimes.regime import advantage_metrics
from mutualrl.regimes.round import PPO, ExtraRow, RowSource, Stepwise
from mutualrl.regimes.sgt import SGT
from mutualrl.regimes.swarm import Swarm
from mutualrl.regimes.xgrpo import XGRPO
from mutualrl.rollouts import Rollouts
from mutualrl.thl import align_logprobs, retokenize
from mutualrl.training.memory import Memory
from mutualrl.trajectory import Trajectory
from regime_views import Peer, view
from thl_tokenizers import synthetic

HERE = Path(__file__).parent
REWARDS = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=2, max_size=5)
SCALES = st.sampled_from(["group", "batch", "none"])
BATCH_STD = 0.4


@pytest.mark.parametrize("name", ["aligners", "diagnostics", "regimes", "rivals", "teaching"])
def test_independent_versions_import_the_standard_library_only(name: str) -> None:
    imported = set()
    for node in ast.walk(ast.parse((HERE / f"{name}.py").read_text("utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(str(node.module).partition(".")[0])
    assert imported <= sys.stdlib_module_names | {"numpy"}
    assert "mutualrl" not in imported


# ---- regimes


@given(REWARDS, REWARDS, SCALES)
def test_pooled_advantages(learner_rewards: list[float], peer_rewards: list[float], scale: str) -> None:
    rows = [
        (ExtraRow("p", RowSource("bob", i, 0), (1,), "policy_gradient", mean="pool"), reward)
        for i, reward in enumerate(peer_rewards)
    ]
    advantages, peer_rows = pool({"p": learner_rewards}, rows, scale)
    expected = regimes.prp_advantages(
        learner_rewards, peer_rewards, scale, standard_deviation([*learner_rewards, *peer_rewards])
    )
    assert advantages["p"] == pytest.approx(expected[0])
    assert [r.advantage for r in peer_rows] == pytest.approx(expected[1])


@given(REWARDS, REWARDS, SCALES, st.floats(0, 1), st.floats(0, 1), st.floats(0.1, 3), st.data())
def test_xgrpo_advantages(
    learner_rewards: list[float],
    peer_rewards: list[float],
    scale: Any,
    mix: float,
    correction: float,
    clip: float,
    data: Any,
) -> None:
    lengths = data.draw(st.lists(st.integers(0, 20), min_size=len(learner_rewards), max_size=len(learner_rewards)))
    stds = standard_deviation(learner_rewards), standard_deviation([*learner_rewards, *peer_rewards])
    settings_ = XGRPO(mix=mix, length_correction=correction, advantage_clip=clip, scale=scale)
    round_ = view(
        [("p", r) for r in learner_rewards],
        {"bob": Peer([("p", r) for r in peer_rewards])},
        scale=scale,
        lengths=lengths,
    )
    local = regimes.xgrpo_advantages(learner_rewards, peer_rewards, lengths, 0.0, 0.0, math.inf, scale, stds[0])
    assert round_.advantages == pytest.approx(local)
    # else the local and pooled parts have different batches; the independent version takes one number for both
    assume(scale != "batch" or stds[0] == stds[1])
    expected = regimes.xgrpo_advantages(learner_rewards, peer_rewards, lengths, mix, correction, clip, scale, stds[0])
    assert settings_.plan(round_).advantages == pytest.approx(expected)


@given(REWARDS, st.floats(-1, 1), SCALES, st.booleans())
def test_noise_advantages(rewards: list[float], shift: float, scale: str, exempt: bool) -> None:
    advantages = pool_advantages(
        rewards, rewards, scale=scale, batch_standard_deviation=BATCH_STD, shift=shift, exempt_equal=exempt
    )
    assert advantages == pytest.approx(regimes.noise_advantages(rewards, shift, scale, BATCH_STD, exempt), rel=1e-6)


@settings(max_examples=40)
@given(st.integers(0, 2), st.floats(-3, 0), st.sampled_from([-1.5, 0.5, 2.0]), st.sampled_from([1.5, 3.0, 4.0]))
def test_two_sided_surrogate_of_a_peer_token(token: int, behaviour: float, advantage: float, dual: float) -> None:
    """Compute it through TRL's loss, as the trainer does: a learner row with advantage 0 beside the peer row."""
    behaviour = float(np.float32(behaviour))
    ratio = P[token] / math.exp(behaviour)
    assume(min(abs(ratio - edge) for edge in (0.8, 1.2, dual)) >= 1e-3)  # at a kink either derivative is valid
    value, gradient = pooled([row((token,), advantage, [behaviour])], own([[2]], [0.0]), bound=PPO(dual))
    expected, slope = regimes.ppo_token_loss(math.log(P[token]), behaviour, advantage, 0.2, 0.2, dual)
    assert value == pytest.approx(expected / 2)  # the mean over both rows
    assert gradient == pytest.approx([slope / 2 * (float(j == token) - P[j]) for j in range(3)], abs=1e-9)


@given(st.floats(-4, 0), st.floats(-4, 0), st.floats(-2, 2), st.floats(0.05, 0.9))
def test_band_loss(logp: float, behaviour: float, advantage: float, epsilon: float) -> None:
    logps = torch.tensor([[logp]], dtype=torch.float64, requires_grad=True)
    traces, advantages = torch.tensor([[behaviour]], dtype=torch.float64), torch.tensor([[advantage]])
    loss = band_loss(logps, traces, advantages.double(), epsilon, epsilon).sum()
    loss.backward()
    assert logps.grad is not None
    assert logps.grad.item() == pytest.approx(
        regimes.band_token_loss(logp, behaviour, advantage, epsilon, epsilon)[1], abs=1e-6
    )


@given(
    st.lists(st.sampled_from([0.0, 0.1, 0.2, 0.5, math.nan]), min_size=1, max_size=5),
    st.lists(st.sampled_from([0.0, 0.8, 0.9, 1.0, math.nan]), max_size=5),
    st.booleans(),
)
def test_sgt_gate(learner_rewards: list[float], peer_rewards: list[float], any_failure: bool) -> None:
    result = gate(learner_rewards, peer_rewards, SGT(gate="any" if any_failure else "all"))
    assert result == regimes.sgt_gate(learner_rewards, peer_rewards, 0.8, 0.2, any_failure)


@given(
    st.lists(st.lists(st.floats(-6, 0), min_size=1, max_size=4), min_size=1, max_size=4),
    st.integers(4, 9),
    st.sampled_from(["pairs", "prompts"]),
)
def test_nll_of_pairs(pairs: list[list[float]], prompts: int, normalize: str) -> None:
    width = max(map(len, pairs))
    logps = torch.tensor([[*pair, *[0.0] * (width - len(pair))] for pair in pairs], dtype=torch.float64)
    mask = torch.tensor([[True] * len(pair) + [False] * (width - len(pair)) for pair in pairs])
    count = len(pairs) if normalize == "pairs" else prompts
    loss = nll_loss(row_nll(logps, mask), weight=0.1, count=count, ranks=1).item()
    assert loss == pytest.approx(regimes.sgt_loss(pairs, 0.1, normalize, prompts))


# ---- rules of rival methods

FRACTIONS = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=7)


@given(REWARDS, REWARDS, FRACTIONS, FRACTIONS, st.integers(1, 6), st.booleans())
def test_hacpo_advantages(
    learner_rewards: list[float],
    peer_rewards: list[float],
    learner_fractions: list[float],
    peer_fractions: list[float],
    window: int,
    warm: bool,
) -> None:
    fractions = {"ada": learner_fractions, "bob": peer_fractions}
    capabilities = {name: rivals.capability(values, window) for name, values in fractions.items()}
    assert {name: hacpo.capability(values, window) for name, values in fractions.items()} == pytest.approx(capabilities)
    settings = hacpo.HACPO(window=window)
    weight = 1.0 if warm else hacpo.discrepancy(capabilities["ada"], capabilities["bob"], settings)
    weights = np.array([1.0] * len(learner_rewards) + [weight] * len(peer_rewards))
    result = hacpo.pooled_advantages(
        np.array([*learner_rewards, *peer_rewards]), weights, len(learner_rewards), "released"
    )
    expected = rivals.hacpo_advantages({"ada": learner_rewards, "bob": peer_rewards}, "ada", capabilities, warm)
    assert result.tolist() == pytest.approx([*expected["ada"], *expected["bob"]])


LOGPS = st.lists(st.floats(-6, -0.01), min_size=1, max_size=5)


@given(LOGPS, LOGPS, st.floats(-2, 2), st.floats(0.1, 10), st.integers(0, 9), st.sampled_from([0.0, 1.0, 2.5]))
def test_hacpo_row_loss(
    logps: list[float], source: list[float], advantage: float, weight: float, step: int, alpha: float
) -> None:
    behaviour = float(np.mean(source))  # the plan assigns it to every token
    ratio = math.exp(float(np.mean(logps)) - behaviour)
    edges = (1.0, min(1.0, 0.8 + 0.025 * step))
    assume(min(abs(ratio - edge) for edge in edges) >= 1e-6)  # at a kink either one-sided derivative is valid
    logps_tensor = torch.tensor([logps], dtype=torch.float64, requires_grad=True)
    behaviour_tensor = torch.full_like(logps_tensor, behaviour)
    advantages = torch.tensor([[advantage * weight]], dtype=torch.float64)
    loss = stepwise_loss(
        logps_tensor,
        behaviour_tensor.detach(),
        advantages,
        torch.ones_like(logps_tensor).bool(),
        Stepwise(alpha=alpha),
        step,
    ).mean()
    loss.backward()
    expected, slope = rivals.hacpo_row_loss(logps, source, advantage, weight, step, alpha=alpha)
    assert loss.item() == pytest.approx(expected, abs=1e-9)
    assert logps_tensor.grad is not None
    assert logps_tensor.grad.sum().item() == pytest.approx(slope, abs=1e-9)


@given(
    st.lists(REWARDS, min_size=1, max_size=3),
    st.lists(st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=3), max_size=2),
    st.sampled_from(["group", "none"]),
)
def test_swarm_advantages(groups: list[list[float]], peer_groups: list[list[float]], scale: str) -> None:
    learner_groups = {f"p{i}": group for i, group in enumerate(groups)}
    external = peer_groups[: len(groups)]
    rows = [(f"p{i}", reward, f"{i}{j}") for i, group in enumerate(external) for j, reward in enumerate(group)]
    round_view = view([(p, r) for p, group in learner_groups.items() for r in group], {"bob": Peer(rows)}, scale=scale)
    planned = Swarm(external=9, verify=False).plan(round_view)
    learner_expected, peer_expected = rivals.swarm_advantages(learner_groups, external, scale)
    kept_rows = sum(len(group) for group in learner_expected.values()) + sum(map(len, peer_expected))
    all_rows = sum(map(len, groups)) + sum(map(len, peer_expected))
    factor = all_rows / kept_rows if kept_rows else 1.0
    flat = [a * factor for p, group in learner_groups.items() for a in learner_expected[p] or [0.0] * len(group)]
    assert planned.advantages == pytest.approx(flat)
    peers = [a * factor for group in peer_expected for a in group]
    assert [row.advantage * row.weight for row in planned.rows] == pytest.approx(peers)


@given(
    st.lists(st.sampled_from([0.0, 0.25, 0.5, math.nan]), min_size=1, max_size=4),
    st.lists(st.sampled_from([0.0, 0.5, 0.75, math.nan]), max_size=4),
    st.sampled_from([0.0, 0.25, 0.3]),
)
def test_relative_gate(learner_rewards: list[float], peer_rewards: list[float], margin: float) -> None:
    assert gate(learner_rewards, peer_rewards, SGT(gate="relative", margin=margin)) == rivals.relative_gate(
        learner_rewards, peer_rewards, margin
    )


@given(st.lists(st.lists(st.floats(-6, 0), min_size=1, max_size=4), min_size=1, max_size=4))
def test_fit_pick_and_sum_over_tokens(candidates: list[list[float]]) -> None:
    fitted = [EncodedCandidate(Candidate("bob", i, Trajectory.of_text(""), True), (i,)) for i in range(len(candidates))]
    nll = {(i,): -float(np.mean(logps)) for i, logps in enumerate(candidates)}
    key = DrawKey(0, 0, "p", "ada")
    drawn = draw_candidate(fitted, SGT(pick="lowest_nll"), key, nll)
    assert nll[drawn.ids] == pytest.approx(-float(np.mean(candidates[rivals.fit_pick(candidates)])))
    width = max(map(len, candidates))
    logps = torch.tensor([[*row, *[0.0] * (width - len(row))] for row in candidates], dtype=torch.float64)
    mask = torch.tensor([[True] * len(row) + [False] * (width - len(row)) for row in candidates])
    loss = nll_loss(row_nll(logps, mask, reduce="sum"), weight=0.1, count=len(candidates), ranks=1).item()
    assert loss == pytest.approx(rivals.sgt_sum_loss(candidates, 0.1, "pairs", 9))


@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from("pq"), st.sampled_from(["bob", "cyd"]), st.sampled_from([0.0, 1.0]))),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 4),
)
def test_remembered_successes(history: list[list[tuple[str, str, float]]], memory: int) -> None:
    """The newest success of each peer on a prompt is kept, the first one within a round."""
    settings, state, records = SGT(memory=memory), {}, []
    for number, entries in enumerate(history):
        peers = {
            name: Peer([(p, r, "x") for p, policy_name, r in entries if policy_name == name]) for name in ("bob", "cyd")
        }
        planned = settings.plan(view([("p", 0.0), ("q", 0.0)], peers, round=number, state=state))
        state = dict(planned.state or {})
        records.append(
            [
                (p, name, rollout_index, r)
                for name in ("bob", "cyd")
                for rollout_index, (p, r) in enumerate((p, r) for p, policy_name, r in entries if policy_name == name)
            ]
        )
    now = len(history) - 1
    expected = rivals.remembered(records, now, memory, 0.8)
    for prompt, hits in expected.items():
        newest: dict[str, tuple[str, int, int]] = {}
        for policy, when, rollout in hits:
            newest.setdefault(policy, (policy, when, rollout))
        memories = [(policy, when, rollout) for policy, rollout, when, *_ in state["memory"][prompt]]
        assert memories == sorted(newest.values())
    assert set(state["memory"]) == {prompt for prompt, hits in expected.items() if hits}


@given(st.lists(st.tuples(st.floats(-3, 0), st.floats(-3, 0), st.booleans()), min_size=1, max_size=5))
def test_trust_band(tokens: list[tuple[float, float, bool]]) -> None:
    logps, behaviour, covered = (list(column) for column in zip(*tokens, strict=True))
    behaviour = [float(np.float32(value)) for value in behaviour]
    entry = ExtraRow(
        "p",
        RowSource("bob", 0, 0),
        tuple(range(len(tokens))),
        "policy_gradient",
        mean="pool",
        mask=np.array(covered),
        logprobs=np.array(behaviour, dtype=np.float32),
    )
    ratio = sequence_ratio(np.array(logps), entry)
    assume(not any(covered) or min(abs(ratio - 0.8), abs(ratio - 1.2)) >= 1e-9)
    assert (0.8 <= ratio <= 1.2) == rivals.trusted(logps, behaviour, covered)


@given(st.lists(st.floats(0.01, 5), min_size=1, max_size=20))
def test_effective_sample_size_and_chi_square(ratios: list[float]) -> None:
    values = np.array(ratios)
    assert effective_sample_size(values) == pytest.approx(rivals.effective_sample_size(ratios))
    assert chi_square(np.log(values)) == pytest.approx(rivals.chi_square(ratios))
    assert RatioMoments.of(values).chi_square == pytest.approx(rivals.chi_square(ratios))


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from("pqr"), st.lists(st.sampled_from([0.0, 1.0, math.nan]), min_size=1, max_size=3)
        ),
        max_size=6,
    )
)
def test_revived_prompts(history: list[dict[str, list[float]]]) -> None:
    memory = Memory()
    counts = []
    for groups in history:
        rollouts = [Rollout(p, i, r, True) for p, group in groups.items() for i, r in enumerate(group)]
        counts.append(memory.follow(Rollouts.of(rollouts))["prompts/revived"])
    assert counts == rivals.revived(history)


# ---- aligners

WORDS = st.lists(
    st.sampled_from(["3", "+", "42", "=", "So", "\\boxed{7}", "it", "is,", "well", "a.b", "(x)"]),
    min_size=1,
    max_size=9,
)
PAIRS = [("ada", "bob"), ("bob", "sentencepiece"), ("ada", "unigram")]


#: how byte-level and metaspace tokenizers write white space, and byte fallback a byte
WRITTEN = {"\u0120": " ", "\u010a": "\n", "\u2581": " ", **{f"<0x{byte:02X}>": chr(byte) for byte in range(128)}}


def ends_of(text: str, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the ids of an ASCII text and the byte at which each token ends, by the strings of the tokens."""
    ids = list(retokenize(text, tokenizer).ids)
    marks = re.compile("|".join(WRITTEN))
    pieces = [marks.sub(lambda mark: WRITTEN[mark[0]], piece) for piece in tokenizer.convert_ids_to_tokens(ids)]
    assume("<unk>" not in pieces)
    assert "".join(pieces) == text
    return ids, list(itertools.accumulate(map(len, pieces)))


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@settings(max_examples=60)
@given(WORDS, st.sampled_from([" ", "  ", "\n"]), st.data())
def test_alignments(pair: tuple[str, str], words: list[str], space: str, data: Any) -> None:
    text, (source, target) = space.join(words), (synthetic(name) for name in pair)
    (source_ids, source_ends), (target_ids, target_ends) = ends_of(text, source), ends_of(text, target)
    trace = data.draw(st.lists(st.floats(-9, 0), min_size=len(source_ids), max_size=len(source_ids)))
    for anchor, expected in (
        ("span", aligners.span_align(source_ends, target_ends, trace)),
        ("word", aligners.word_align(text, source_ends, target_ends, trace, "word")),
        ("char", aligners.word_align(text, source_ends, target_ends, trace, "char")),
    ):
        alignment: Any = align_logprobs(
            text, source_ids, trace, source, target, target_ids=target_ids, anchor=anchor, unit="word"
        )
        values = [
            value if is_covered else None
            for value, is_covered in zip(alignment.logprobs, alignment.covered, strict=True)
        ]
        assert [v is None for v in values] == [v is None for v in expected], anchor
        assert [v for v in values if v is not None] == pytest.approx([v for v in expected if v is not None]), anchor
        assert alignment.residual == pytest.approx(aligners.residual(trace, expected), abs=1e-9), anchor


# ---- diagnostics

POLICIES = ("a", "b", "c")


@given(
    st.lists(
        st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2, max_size=2), min_size=3, max_size=3),
        min_size=2,
        max_size=3,
    )
)
@settings(max_examples=40)
def test_successes_rescues_and_gates(values: list[list[list[float]]]) -> None:
    rewards = {POLICIES[m]: {f"p{i}": group for i, group in enumerate(row)} for m, row in enumerate(values)}
    table = pa.Table.from_pylist(
        [
            {"policy": policy, "round": 0, "prompt_id": prompt, "rollout": i, "reward": value}
            for policy, prompts in rewards.items()
            for prompt, group in prompts.items()
            for i, value in enumerate(group)
        ]
    )
    rollouts, thresholds = to_arrays(table, "test"), Thresholds(0.8, 0.2)
    profile = activation(rollouts, thresholds)
    for profile_row in profile.rows:
        expected = diagnostics.gate_profile(rewards, profile_row.learner, 0.8, 0.2)
        assert (profile_row.gated, profile_row.gate_rate) == (expected["open"], pytest.approx(expected["share"]))
    for success, solved in (
        ("first", diagnostics.first_success(rewards, 0.8)),
        ("any", diagnostics.any_success(rewards, 0.8)),
    ):
        pairs = complementarity(rollouts, thresholds, success, [2], 0).pairs
        for pair in pairs:
            a, b = solved[pair.learner], solved[pair.peer]
            assert pair.learner_success == pytest.approx(len(a) / 3)
            assert pair.jaccard == pytest.approx(diagnostics.overlap(a, b)["jaccard"], nan_ok=True)
            expected_rescues = diagnostics.rescue_rate(a, b, set(rewards["a"]))
            assert pair.rescue == pytest.approx(expected_rescues, nan_ok=True)


@given(st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2)), min_size=1, max_size=20))
def test_advantage_changes(pairs: list[tuple[float, float]]) -> None:
    before, after = [a for a, _ in pairs], [b for _, b in pairs]
    metrics = advantage_metrics("x", before, after)
    assert metrics["x/sign_flips"] == pytest.approx(diagnostics.sign_flips(before, after))
    assert metrics["x/advantage_change"] == pytest.approx(diagnostics.mean_abs_change(before, after))


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=30))
def test_channels(units: list[tuple[bool, bool, bool]]) -> None:
    names = [diagnostics.channel(*unit) for unit in units]
    channel_rows = decomposed(*(np.array(column)[None] for column in zip(*units, strict=True)))
    assert {row.usable: row.units for row in channel_rows if row.units} == {n: names.count(n) for n in names}
