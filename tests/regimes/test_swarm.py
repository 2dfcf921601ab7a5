"""SAPO of RL Swarm: kept groups, drawn groups, verification. Values computed by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from mutualrl.errors import DataError
from mutualrl.regimes import RoundView
from mutualrl.regimes.swarm import Swarm, kept_factor
from mutualrl.rollouts import Rollouts
from regime_views import Peer, answered, plan, requests, view

#: p has variance, q has none
OWN = [("p", 1.0), ("p", 0.0), ("q", 0.0), ("q", 0.0)]
PEER = [("p", 1.0, "a"), ("p", 0.0, "bb"), ("q", 1.0, "ccc"), ("q", 0.0, "d"), ("r", 1.0, "e"), ("r", 0.0, "f")]
A = 0.5 / (math.sqrt(0.5) + 1e-4)


def with_answers(round_view: RoundView, settings: Swarm, rewards: list[float] | None = None) -> RoundView:
    """Return the round with the verifier's answers: by default, the published rewards."""
    texts = {text: reward for _, reward, text in PEER}
    scores = rewards or [texts[text] for _, text, _ in requests(round_view, settings).rewards]
    return answered(round_view, settings, rewards=scores)


def test_groups_without_variance_leave_the_mean_and_peer_groups_join() -> None:
    settings = Swarm()
    result = plan(with_answers(view(OWN, {"bob": Peer(PEER)}), settings), settings)
    # one own group is kept, so one of bob's two (on p, q; r is unknown) is drawn; 4 of the trainer's 6 rows count
    assert result.advantages == pytest.approx([1.5 * A, -1.5 * A, 0.0, 0.0])
    assert [row.weight * row.advantage for row in result.rows] == pytest.approx([1.5 * A, -1.5 * A])
    assert {row.logprobs for row in result.rows} == {None}  # snapshot denominator: ratio 1
    assert result.metrics["swarm/local"] == result.metrics["swarm/external"] == 1.0


def test_mean_over_tokens_counts_tokens() -> None:
    settings = Swarm(external=2)
    round_view = with_answers(view(OWN, {"bob": Peer(PEER)}, lengths=[4, 6, 7, 3], mean_over="tokens"), settings)
    result = plan(round_view, settings)
    extra = len("a" + "bb" + "ccc" + "d")
    assert result.advantages is not None
    assert result.advantages[0] == pytest.approx(A * (20 + extra) / (10 + extra))


def test_without_external_or_dropped_groups_advantages_equal_trls_bit_for_bit() -> None:
    own = [("p", 1.0), ("p", 0.0), ("q", 1.0), ("q", 0.25)]
    round_view = view(own, {"bob": Peer(PEER)}, advantages=(0.1, -0.1, 1 / 3, -1 / 3))
    settings = Swarm(external=0)
    assert requests(round_view, settings).rewards == ()
    result = plan(round_view, settings)
    assert result.advantages == (0.1, -0.1, 1 / 3, -1 / 3)
    assert result.rows == ()


def test_groups_that_fail_verification_are_dropped_and_counted() -> None:
    settings = Swarm(external=2)
    round_view = view(OWN, {"bob": Peer(PEER)})
    assert [(p, t) for p, t, _ in requests(round_view, settings).rewards] == [
        ("p", "a"),
        ("p", "bb"),
        ("q", "ccc"),
        ("q", "d"),
    ]
    result = plan(with_answers(round_view, settings, [1.0, 0.0, 0.5, 0.0]), settings)
    assert {row.prompt_id for row in result.rows} == {"p"}
    assert (result.metrics["swarm/denied"], result.metrics["swarm/external"]) == (1.0, 1.0)


def test_peer_groups_may_be_on_other_prompts_of_the_learners_data() -> None:
    settings = Swarm(external=3)
    round_view = with_answers(view(OWN, {"bob": Peer(PEER)}, other_prompts=frozenset({"r"})), settings)
    result = plan(round_view, settings)
    assert {row.prompt_id for row in result.rows} == {"p", "q", "r"}
    assert result.metrics["swarm/other_prompts"] == 1.0
    assert not settings.needs().same_prompts


def test_draw_of_groups_depends_only_on_seed_round_and_learner() -> None:
    own = [(f"p{i}", float(j)) for i in range(6) for j in range(2)]
    rows = [(f"p{i}", float(j), f"{i}{j}") for i in range(6) for j in range(2)]
    settings = Swarm(local=2, external=2, verify=False)

    def draw(**changes: int) -> tuple[list[float], list[str]]:
        result = plan(view(own, {"bob": Peer(rows)}, **changes), settings)
        assert result.advantages is not None
        return list(result.advantages), [row.prompt_id for row in result.rows]

    assert draw() == draw()
    draws = {tuple(draw(round=number)[1]) for number in range(30)}
    assert len(draws) > 5
    assert all(sum(a != 0 for a in draw(round=number)[0]) == 4 for number in range(5))


def test_peer_denominator_is_the_aligned_trace() -> None:
    settings = Swarm(denominator="peer", verify=False, external=1)
    rows = [("p", 1.0, "ab", (1, 2), (-1.0, -2.0), True), ("p", 0.0, "cd", (1, 2), (-3.0, -4.0), True)]
    result = plan(view(OWN, {"bob": Peer(rows)}), settings)
    assert [row.logprobs.tolist() for row in result.rows if row.logprobs is not None] == [[-1.0, -2.0], [-3.0, -4.0]]
    with pytest.raises(
        DataError, match="'bob' published no token_ids and no logprobs of rollout 0 on 'p'; regime swarm needs"
    ):
        plan(view(OWN, {"bob": Peer([("p", 1.0, "ab"), ("p", 0.0, "cd")])}), settings)
    assert "mean per micro-batch" in dict(settings.problems({"loss_type": "bnpo"}))["loss_type"]


def test_masked_truncated_rollouts_count_no_tokens_in_the_mean(caplog: pytest.LogCaptureFixture) -> None:
    round_view = view(OWN, {}, lengths=[4, 6, 7, 3], mean_over="tokens", mask_truncated=True)
    cut = Rollouts.of([replace(r, ended=r.prompt_id == "p") for r in round_view.rollouts])
    assert kept_factor(replace(round_view, rollouts=cut), {"p"}, []) == 1.0
    assert kept_factor(round_view, {"p"}, []) == 2.0
    settings = Swarm()
    plan(with_answers(view(OWN, {"bob": Peer(PEER)}), settings, [0.5] * 4), settings)
    assert "the learner's reward functions reject all 2 groups of the peers" in caplog.text
    with pytest.raises(ValueError, match="local: 0 leaves only the peers' groups"):
        Swarm(local=0)
    with pytest.raises(ValueError, match="denominator and verify have no effect"):
        Swarm(external=0, denominator="peer")
