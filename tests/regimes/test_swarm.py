"""SAPO of RL Swarm: groups kept, groups drawn, the verifier's word. Numbers worked by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from mutualrl.errors import DataError
from mutualrl.regimes import Answers, RoundView, get_regime
from mutualrl.regimes.swarm import SwarmSettings, kept_factor, needs, plan
from regime_views import Peer, view

#: p has variance, q has none
OWN = [("p", 1.0), ("p", 0.0), ("q", 0.0), ("q", 0.0)]
PEER = [("p", 1.0, "a"), ("p", 0.0, "bb"), ("q", 1.0, "ccc"), ("q", 0.0, "d"), ("r", 1.0, "e"), ("r", 0.0, "f")]
A = 0.5 / (math.sqrt(0.5) + 1e-4)


def asked(seen: RoundView, settings: SwarmSettings, rewards: list[float] | None = None) -> RoundView:
    """Return the round with the verifier's answers: the published rewards, unless told."""
    texts = {text: reward for _, reward, text in PEER}
    wanted = needs(seen, settings).rewards
    return replace(seen, answers=Answers(rewards=tuple(rewards or [texts[text] for _, text, _ in wanted])))


def test_groups_without_variance_leave_the_mean_and_peers_groups_join_by_hand() -> None:
    settings = SwarmSettings()
    made = plan(asked(view(OWN, {"bob": Peer(PEER)}), settings), settings)
    # one own group is kept, so one of bob's two (on p, q; r is unknown) is drawn; 6 rows in the trainer's mean, 4 count
    assert made.advantages == pytest.approx([1.5 * A, -1.5 * A, 0.0, 0.0])
    assert [row.weight * row.advantage for row in made.rows] == pytest.approx([1.5 * A, -1.5 * A])
    assert {row.logprobs for row in made.rows} == {None}  # its own snapshot below: ratio 1
    assert made.metrics["swarm/local"] == made.metrics["swarm/external"] == 1.0


def test_a_mean_over_tokens_counts_tokens() -> None:
    settings = SwarmSettings(external=2)
    seen = asked(view(OWN, {"bob": Peer(PEER)}, lengths=[4, 6, 7, 3], mean_over="tokens"), settings)
    made = plan(seen, settings)
    extra = len("a" + "bb" + "ccc" + "d")
    assert made.advantages is not None
    assert made.advantages[0] == pytest.approx(A * (20 + extra) / (10 + extra))


def test_without_external_groups_and_with_variance_everywhere_it_is_trls_advantages_to_the_bit() -> None:
    own = [("p", 1.0), ("p", 0.0), ("q", 1.0), ("q", 0.25)]
    seen = view(own, {"bob": Peer(PEER)}, advantages=(0.1, -0.1, 1 / 3, -1 / 3))
    settings = SwarmSettings(external=0)
    assert needs(seen, settings).rewards == ()
    made = plan(seen, settings)
    assert made.advantages == (0.1, -0.1, 1 / 3, -1 / 3)
    assert made.rows == ()


def test_a_group_whose_reward_the_learners_verifier_denies_is_dropped_and_counted() -> None:
    settings = SwarmSettings(external=2)
    seen = view(OWN, {"bob": Peer(PEER)})
    assert [(p, t) for p, t, _ in needs(seen, settings).rewards] == [("p", "a"), ("p", "bb"), ("q", "ccc"), ("q", "d")]
    made = plan(asked(seen, settings, [1.0, 0.0, 0.5, 0.0]), settings)
    assert {row.prompt_id for row in made.rows} == {"p"}
    assert (made.metrics["swarm/denied"], made.metrics["swarm/external"]) == (1.0, 1.0)


def test_a_peer_may_have_seen_other_prompts_of_the_learners_data() -> None:
    settings = SwarmSettings(external=3)
    seen = asked(view(OWN, {"bob": Peer(PEER)}, other_prompts=frozenset({"r"})), settings)
    made = plan(seen, settings)
    assert {row.prompt_id for row in made.rows} == {"p", "q", "r"}
    assert made.metrics["swarm/other_prompts"] == 1.0
    assert not get_regime("swarm").same_prompts(settings)


def test_the_groups_are_drawn_by_seed_round_and_learner_alone() -> None:
    own = [(f"p{i}", float(j)) for i in range(6) for j in range(2)]
    rows = [(f"p{i}", float(j), f"{i}{j}") for i in range(6) for j in range(2)]
    settings = SwarmSettings(local=2, external=2, verify=False)

    def chosen(**changes: int) -> tuple[list[float], list[str]]:
        made = plan(view(own, {"bob": Peer(rows)}, **changes), settings)
        assert made.advantages is not None
        return list(made.advantages), [row.prompt_id for row in made.rows]

    assert chosen() == chosen()
    draws = {tuple(chosen(round=number)[1]) for number in range(30)}
    assert len(draws) > 5
    assert all(sum(a != 0 for a in chosen(round=number)[0]) == 4 for number in range(5))


def test_with_the_peers_denominator_the_aligned_trace_is_below() -> None:
    settings = SwarmSettings(denominator="peer", verify=False, external=1)
    rows = [("p", 1.0, "ab", (1, 2), (-1.0, -2.0), True), ("p", 0.0, "cd", (1, 2), (-3.0, -4.0), True)]
    made = plan(view(OWN, {"bob": Peer(rows)}), settings)
    assert [row.logprobs.tolist() for row in made.rows if row.logprobs is not None] == [[-1.0, -2.0], [-3.0, -4.0]]
    with pytest.raises(DataError, match="'bob' published no text or trace of rollout 0 on 'p'; regime swarm needs"):
        plan(view(OWN, {"bob": Peer([("p", 1.0, "ab"), ("p", 0.0, "cd")])}), settings)
    assert "mean per micro-batch" in dict(get_regime("swarm").check(settings, {"loss_type": "bnpo"}))["loss_type"]


def test_truncated_rollouts_have_no_tokens_in_the_mean_where_they_are_masked(caplog: pytest.LogCaptureFixture) -> None:
    seen = view(OWN, {}, lengths=[4, 6, 7, 3], mean_over="tokens", mask_truncated=True)
    cut = [replace(r, ended=r.prompt_id == "p") for r in seen.rollouts]
    assert kept_factor(replace(seen, rollouts=cut), {"p"}, []) == 1.0
    assert kept_factor(seen, {"p"}, []) == 2.0
    settings = SwarmSettings()
    plan(asked(view(OWN, {"bob": Peer(PEER)}), settings, [0.5] * 4), settings)
    assert "the learner's reward functions reject all 2 groups of the peers" in caplog.text
    with pytest.raises(ValueError, match="local: 0 leaves only the peers' groups"):
        SwarmSettings(local=0)
    with pytest.raises(ValueError, match="denominator and verify have no effect"):
        SwarmSettings(external=0, denominator="peer")
