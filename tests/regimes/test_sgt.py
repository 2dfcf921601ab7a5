from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mutualrl.records import PublishSchema
from mutualrl.regimes.gating import Candidate, DrawKey, EncodedCandidate, draw_candidate, gate, gated_prompts
from mutualrl.regimes.losses import nll_loss, row_nll
from mutualrl.regimes.microbatches import MicrobatchSlot, assign_to_microbatches
from mutualrl.regimes.sgt import SGT
from mutualrl.rollouts import Rollouts
from mutualrl.traits import SourceTraits
from mutualrl.trajectory import Trajectory
from regime_views import Peer as PeerInMemory
from regime_views import answered, plan, requests, view

DEFAULT = SGT()


@pytest.mark.parametrize(
    ("own", "peers", "open_"),
    [
        ([0, 0, 0], [0, 1], True),
        ([0, 0, 1], [1, 1], False),  # one own success closes the gate
        ([0, 0, 0], [0, 0], False),  # no peer success
        ([0, 0, 0], [0.8], False),  # both thresholds are exclusive
        ([0.2, 0, 0], [1], False),
        ([0.19, 0], [0.81], True),
        ([math.nan, 0], [1], False),  # an unscorable rollout is not a failure
        ([0, 0], [math.nan], False),  # nor a success
        ([], [1], False),
    ],
)
def test_gate_opens_on_total_failure_and_a_peer_success(own: list[float], peers: list[float], open_: bool) -> None:
    assert gate(own, peers, DEFAULT) is open_


def test_gate_any_needs_one_failure() -> None:
    settings = SGT(gate="any")
    assert gate([1, 0, 1], [1], settings)
    assert not gate([1, 1], [1], settings)


def encoded(policy: str, rollout: int, length: int = 3) -> EncodedCandidate:
    return EncodedCandidate(
        Candidate(policy, rollout, Trajectory.of_text(f"{policy}{rollout}"), True), tuple(range(length))
    )


@given(st.permutations([encoded("a", 0), encoded("a", 1), encoded("b", 0), encoded("c", 2)]), st.integers(0, 10**6))
def test_draw_does_not_depend_on_the_order_of_peers(order: list[EncodedCandidate], seed: int) -> None:
    key = DrawKey(seed, 3, "p", "z")
    assert draw_candidate(order, DEFAULT, key) == draw_candidate(sorted(order, key=str), DEFAULT, key)


def test_draw_is_uniform_over_the_multiset() -> None:
    pool = [encoded("a", 0), encoded("a", 1), encoded("b", 0)]
    counts = Counter(
        draw_candidate(pool, DEFAULT, DrawKey(0, r, "p", "z")).candidate.trajectory.text for r in range(6000)
    )
    assert all(abs(count - 2000) < 200 for count in counts.values())  # 200 is 5.5 standard deviations
    assert len(counts) == 3


def test_draw_shortest_takes_the_fewest_tokens_then_the_first() -> None:
    pool = [encoded("b", 0, 2), encoded("a", 1, 2), encoded("a", 0, 5)]
    chosen = draw_candidate(pool, SGT(pick="shortest"), DrawKey(0, 0, "p", "z"))
    assert chosen.candidate.trajectory.text == "a1"


def test_prompts_are_gated_and_counted() -> None:
    own = {"p1": [0.0, 0.0], "p2": [1.0, 0.0], "p3": [0.0, 0.0], "p4": [0.0, 0.0]}
    peers = {"p1": [1.0], "p2": [1.0], "p3": [0.0], "p4": [1.0, 1.0]}
    requested: list[str] = []

    def successes(prompt: str) -> list[Candidate]:
        requested.append(prompt)
        return [Candidate("bob", 0, Trajectory.of_stored("long" if prompt == "p4" else "ok", None), True)]

    got = gated_prompts(
        own,
        peers,
        successes,
        lambda cs: [None if c.trajectory.text == "long" else EncodedCandidate(c, (1, 2)) for _, c in cs],
        DEFAULT,
        uses={},
    )
    assert requested == ["p1", "p4"]  # texts are fetched only for gated prompts
    ((prompt_id, (candidate,)),) = got.encoded
    assert (prompt_id, candidate.candidate.policy, candidate.ids) == ("p1", "bob", (1, 2))
    assert (got.prompts, got.gated, got.unencodable, got.spent) == (4, 2, 1, 0)


def test_prompt_at_its_use_cap_is_skipped() -> None:
    rule = SGT(max_uses_per_prompt=2)
    success = [Candidate("b", 0, Trajectory.of_text("t"), True)]
    for used, pairs in ((1, 1), (2, 0)):
        got = gated_prompts(
            {"p": [0.0]},
            {"p": [1.0]},
            lambda _: success,
            lambda cs: [EncodedCandidate(c, (1,)) for _, c in cs],
            rule,
            uses={"p": used},
        )
        assert len(got.encoded) == pairs
        assert got.spent == 1 - pairs


@given(st.integers(0, 40), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_every_pair_is_assigned_to_one_slot_and_slots_are_balanced(
    pairs: int, steps: int, micro: int, ranks: int
) -> None:
    table = assign_to_microbatches(pairs, steps=steps, micro_batches=micro, ranks=ranks)
    assert sorted(i for indices in table.values() for i in indices) == list(range(pairs))
    assert len(table) == steps * micro * ranks
    per_step = [sum(len(v) for k, v in table.items() if k.step == s) for s in range(steps)]
    assert max(per_step) - min(per_step) <= 1
    for step in range(steps):
        sizes = [len(v) for k, v in table.items() if k.step == step]
        assert max(sizes) - min(sizes) <= 1


def test_assignment_fills_ranks_before_micro_batches() -> None:
    table = assign_to_microbatches(5, steps=2, micro_batches=2, ranks=2)
    assert table[MicrobatchSlot(0, 0, 0)] == [0]
    assert table[MicrobatchSlot(1, 0, 0)] == [1]
    assert table[MicrobatchSlot(0, 0, 1)] == [2]
    assert table[MicrobatchSlot(1, 0, 1)] == [3]
    assert table[MicrobatchSlot(0, 1, 0)] == [4]


def test_nll_loss_and_gradient_match_hand_computed_values() -> None:
    # Vocabulary {0, 1, 2}, logits z = (ln 1, ln 2, ln 5): probabilities 1/8, 2/8, 5/8.
    # Pair A is (1, 2): NLL = (ln 4 + ln 8/5) / 2. Pair B is (0): NLL = ln 8.
    logits = torch.log(torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)).requires_grad_()
    logp = torch.log_softmax(logits, dim=0)
    logps = torch.stack([logp[[1, 2]], logp[[0, 0]]])
    mask = torch.tensor([[True, True], [True, False]])
    nll = row_nll(logps, mask)
    assert nll.tolist() == pytest.approx([(math.log(4) + math.log(1.6)) / 2, math.log(8)])
    loss = nll_loss(nll, weight=0.1, count=2, ranks=1)
    assert loss.item() == pytest.approx(0.05 * (nll[0].item() + nll[1].item()))
    loss.backward()
    # d NLL_A / dz = p - (0, 1/2, 1/2); d NLL_B / dz = p - (1, 0, 0)
    p = [1 / 8, 2 / 8, 5 / 8]
    by_hand = [0.05 * (2 * p[0] - 1), 0.05 * (2 * p[1] - 0.5), 0.05 * (2 * p[2] - 0.5)]
    assert logits.grad is not None
    assert logits.grad.tolist() == pytest.approx(by_hand)


def test_masked_row_has_zero_loss_and_gradient_even_at_minus_infinity() -> None:
    logps = torch.tensor([[-math.inf, -1.0]], requires_grad=True)
    loss = nll_loss(row_nll(logps, torch.tensor([[False, False]])), weight=0.1, count=3, ranks=2)
    loss.backward()
    assert loss.item() == 0.0
    assert logps.grad is not None
    assert logps.grad.tolist() == [[0.0, 0.0]]


@given(st.integers(1, 4), st.integers(1, 4), st.lists(st.floats(0.1, 5), min_size=1, max_size=12))
def test_losses_of_ranks_and_micro_batches_sum_to_the_mean(ranks: int, micro: int, values: list[float]) -> None:
    table = assign_to_microbatches(len(values), steps=1, micro_batches=micro, ranks=ranks)
    total = 0.0
    for slot in table:
        nll = torch.tensor([values[i] for i in table[slot]], dtype=torch.float64)
        total += nll_loss(nll, weight=0.1, count=len(values), ranks=ranks).item() / ranks  # averaged over ranks
    assert total == pytest.approx(0.1 * sum(values) / len(values))


class RecordedTexts(Rollouts):
    """Rollouts that record the rows whose texts are decoded."""

    decoded: list[int]

    def trajectories(self, rows: Sequence[int] | None = None) -> list[Trajectory | None]:
        assert rows is not None
        self.decoded = [*getattr(self, "decoded", []), *rows]
        return super().trajectories(rows)


def test_plan_decodes_texts_of_gated_prompts_only_and_reports_metrics() -> None:
    peer = RecordedTexts(PeerInMemory([("p1", 1.0, "yes"), ("p1", 0.0, None), ("p2", 1.0, "also")]).table())
    round_view = view([("p1", 0.0), ("p1", 0.0), ("p2", 1.0), ("p2", 0.0)], {"bob": peer})
    got = plan(round_view, SGT())
    assert [(row.prompt_id, row.trajectory.text, row.token_ids) for row in got.rows] == [("p1", "yes", tuple(b"yes"))]
    assert peer.decoded == [0]
    assert got.metrics["sgt/gate_rate"] == 0.5
    assert sum(len(row.token_ids) for row in got.rows) == 3


def test_contradictory_settings_are_rejected() -> None:
    with pytest.raises(ValueError, match="must not exceed"):
        SGT(failure_below=0.9, success_above=0.5)
    with pytest.raises(ValueError, match="weight"):
        SGT(weight=-1)


def test_source_teacher_has_the_policies_gate_and_trains_on_the_sources_text() -> None:
    own = [("p", 0.0), ("p", 0.0), ("q", 0.0), ("q", 1.0), ("r", 0.0), ("r", 0.0)]
    bob = PeerInMemory([("p", 1.0, "peer's"), ("q", 1.0, "peer's"), ("r", 0.0, None)])
    book = PeerInMemory([("p", 1.0, "gold p"), ("p", 0.0, "wrong"), ("q", 1.0, "gold q"), ("r", 1.0, "gold r")])
    round_view = view(own, {"bob": bob, "book": book}, sources={"book": SourceTraits()})
    rows = plan(round_view, SGT(teacher="source")).rows
    assert [(r.prompt_id, r.source.policy, r.trajectory.text, r.token_ids) for r in rows] == [
        ("p", "book", "gold p", tuple(b"gold p"))  # nobody but the source succeeded on r: the gate is the policies'
    ]
    both = plan(round_view, SGT()).rows
    assert [(r.prompt_id, r.source.policy in ("bob", "book")) for r in both] == [("p", True), ("r", True)]
    assert both[1].trajectory.text == "gold r"
    assert {r.trajectory.text for r in plan(round_view, SGT(gate="none")).rows} >= {"gold r"}
    assert len(plan(round_view, SGT(gate="none")).rows) == 3  # also q, which the learner solved
    assert SGT().needs().reads == PublishSchema.of("text", text_above=0.8)
    assert not SGT().needs().source
    assert SGT(teacher="source").needs().source
    with pytest.raises(ValueError, match="teacher: own expects memory"):
        SGT(teacher="own")


# ---- beyond the paper

OWN = [("p", 0.0), ("p", 0.0)]
TWICE = PeerInMemory([("p", 1.0, "long one"), ("p", 1.0, "one")])


def test_peer_success_is_reused_for_memory_rounds() -> None:
    settings = SGT(memory=2, gate="all")
    empty = PeerInMemory([("p", 0.0, None)])
    result = plan(view(OWN, {"bob": PeerInMemory([("p", 0.0, None), ("p", 1.0, "yes")])}, round=3), settings)
    assert result.state == {"memory": {"p": [["bob", 1, 3, 1.0, "yes", True, None]]}}
    for number, count in ((4, 1), (5, 1), (6, 0)):
        later = plan(view(OWN, {"bob": empty}, round=number, state=result.state), settings)
        assert len(later.rows) == count
        if count:
            assert later.rows[0].source == ("bob", 1, 3)
            assert later.metrics["sgt/remembered"] == 1.0
    expired = plan(view(OWN, {"bob": empty}, round=6, state=result.state), settings)
    assert expired.state == {"memory": {}}


def test_newer_success_of_a_peer_replaces_its_older_one() -> None:
    settings = SGT(memory=9)
    first = plan(view(OWN, {"bob": PeerInMemory([("p", 1.0, "old")])}), settings)
    second = plan(view(OWN, {"bob": PeerInMemory([("p", 1.0, "new")])}, round=1, state=first.state), settings)
    assert second.state == {"memory": {"p": [["bob", 0, 1, 1.0, "new", True, None]]}}


@pytest.mark.parametrize(
    ("own", "peers", "margin", "is_open"),
    [
        ([0.25, 0.5], [0.75], 0.0, True),
        ([0.25, 0.5], [0.75], 0.25, False),  # must exceed the margin
        ([0.25, 0.5], [0.5], 0.0, False),
        ([math.nan, 0.5], [0.6, math.nan], 0.0, True),
        ([math.nan], [1.0], 0.0, False),
    ],
)
def test_relative_gate_opens_if_a_peer_beats_the_learner_by_more_than_the_margin(
    own: list[float], peers: list[float], margin: float, is_open: bool
) -> None:
    settings = SGT(gate="relative", margin=margin)
    assert gate(own, peers, settings) is is_open
    assert settings.needs().reads.text_above == -math.inf  # any text may beat the learner's


def test_relative_gate_trains_only_on_texts_that_beat_the_learner() -> None:
    peer = PeerInMemory([("p", 0.5, "worse"), ("p", 0.9, "better")])
    result = plan(view([("p", 0.5), ("p", 0.0)], {"bob": peer}), SGT(gate="relative"))
    assert [row.trajectory.text for row in result.rows] == ["better"]


def test_pick_lowest_nll_takes_the_lowest_nll_and_requests_it_only_for_several_candidates() -> None:
    settings = SGT(pick="lowest_nll")
    own = [*OWN, ("q", 0.0), ("q", 0.0)]
    peer = PeerInMemory([("p", 1.0, "long one"), ("p", 1.0, "one"), ("q", 1.0, "only")])
    round_view = view(own, {"bob": peer})
    made = requests(round_view, settings)
    assert [(prompt, bytes(ids)) for prompt, ids in made.nll] == [("p", b"long one"), ("p", b"one")]
    for answers, expected in (((0.1, 0.2), "long one"), ((0.2, 0.1), "one")):
        result = plan(answered(round_view, settings, nll=answers), settings)
        assert [row.trajectory.text for row in result.rows] == [expected, "only"]
    assert requests(round_view, SGT()).passages == 0


def test_own_teacher_is_the_learners_later_success_after_the_gate_opened() -> None:
    settings = SGT(teacher="own", memory=2)
    assert settings.needs().reads == PublishSchema()
    gated = plan(view(OWN, {"bob": TWICE}, round=1), settings)
    assert (gated.rows, gated.state) == ((), {"open": {"p": 1}})
    solved = [("p", 1.0), ("p", 0.0)]
    later = plan(view(solved, {"bob": TWICE}, round=2, state=gated.state), settings)
    assert [(row.source, row.token_ids) for row in later.rows] == [(("ada", 0, 2), tuple(b"own"))]
    assert later.state == {"open": {}}
    too_late = plan(view(solved, {"bob": TWICE}, round=4, state=gated.state), settings)
    assert too_late.rows == ()
    with pytest.raises(ValueError, match="teacher: own expects memory"):
        SGT(teacher="own")


def test_rows_carry_reduce_and_idle_settings_are_reported() -> None:
    assert plan(view(OWN, {"bob": TWICE}), SGT(reduce="sum")).rows[0].reduce == "sum"
    idle = dict(SGT(margin=0.5, memory=3, teacher="source").ineffective_settings())
    assert set(idle) == {"margin", "memory"}
    assert "only with peer or own" in idle["memory"]


def test_own_teacher_respects_the_use_cap_and_skips_guided_rollouts() -> None:
    settings = SGT(teacher="own", memory=9, max_uses_per_prompt=1)
    solved = view([("p", 1.0), ("p", 0.0)], {"bob": TWICE}, round=2, state={"open": {"p": 1}})
    (row,) = plan(solved, settings).rows
    assert row.source == ("ada", 0, 2)
    used = replace(solved, state={"open": {"p": 1}, "uses": {"p": 1}})
    assert plan(used, settings).rows == ()
    guided = replace(solved, rollouts=Rollouts.of([replace(rollout, prefix=1) for rollout in solved.rollouts]))
    assert plan(guided, settings).rows == ()
    with pytest.raises(ValueError, match="teacher: own has no candidates to compare"):
        SGT(teacher="own", memory=1, pick="lowest_nll")
