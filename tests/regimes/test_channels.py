"""Combinations of regimes."""

from __future__ import annotations

import pytest

from mutualrl.errors import RegimeError
from mutualrl.regimes import RoundView, get_regime, is_open, parts_of
from mutualrl.regimes.sgt import SGT
from mutualrl.regimes.xgrpo import XGRPO
from regime_views import Peer, answered, plan, requests, view

OWN = [("p", 0.0), ("p", 0.0), ("q", 1.0), ("q", 0.0)]
PEERS = {"bob": Peer([("p", 1.0, "yes"), ("p", 0.0, None), ("q", 0.0, None), ("q", 0.0, None)])}


def test_combined_plan_chains_advantages_and_concatenates_rows() -> None:
    both = get_regime("xgrpo+sgt")(sgt={"weight": 0.3, "max_uses_per_prompt": 5})
    result = plan(view(OWN, PEERS), both)
    xgrpo_result = plan(view(OWN, PEERS), XGRPO())
    sgt_result = plan(view(OWN, PEERS), SGT(weight=0.3, max_uses_per_prompt=5))
    assert result.advantages == xgrpo_result.advantages
    assert result.rows == sgt_result.rows or [r.trajectory.text for r in result.rows] == [
        r.trajectory.text for r in sgt_result.rows
    ]
    assert result.rows[0].weight == 0.3
    assert result.metrics == {**xgrpo_result.metrics, **sgt_result.metrics}
    assert result.state == {"sgt": {"uses": {"p": 1}}}
    second_round = plan(view(OWN, PEERS, state=result.state), both)
    assert second_round.state == {"sgt": {"uses": {"p": 2}}}


def test_each_regime_receives_the_advantages_of_the_previous_one() -> None:
    both = get_regime("prp+xgrpo")
    trace = ((1,), (-1.0,), True)
    peers = {"bob": Peer([(p, r, "x", *trace) for p, r in [("p", 1.0), ("p", 0.0), ("q", 0.0), ("q", 0.0)]])}
    pooled = plan(view(OWN, peers), get_regime("prp")())
    assert pooled.advantages is not None
    expected = plan(view(OWN, peers, advantages=pooled.advantages), XGRPO()).advantages
    assert plan(view(OWN, peers), both()).advantages == pytest.approx(expected)


def test_each_regime_gets_the_answers_to_its_own_requests() -> None:
    both = get_regime("swarm+sgt")(swarm={"external": 1}, sgt={"pick": "lowest_nll"})
    peers = {"bob": Peer([("p", 1.0, "long"), ("p", 1.0, "yes"), ("q", 1.0, "a"), ("q", 0.0, "b")])}
    round_view: RoundView = view(OWN, peers)
    made = requests(round_view, both)
    assert [text for _, text, _ in made.rewards] == ["a", "b"]
    assert [bytes(ids) for _, ids in made.nll] == [b"long", b"yes"]
    result = plan(answered(round_view, both, nll=(0.1, 0.2), rewards=(1.0, 0.0)), both)
    assert [row.trajectory.text for row in result.rows if row.loss == "nll"] == ["long"]  # lower NLL, although longer
    assert result.metrics["swarm/external"] == 1.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("xgrpo+prp", "'prp' would discard the advantages of 'xgrpo'; put it first"),
        ("prp+hacpo", "'prp' and 'hacpo' each build the whole batch; expected one of them"),
        ("grpo+sgt", "'grpo' shares nothing; leave it out"),
        ("guided+prp", "'guided' prefixes rollouts, and 'prp' treats them as sampled in full"),
        ("swarm+xgrpo", "'xgrpo' would discard or change the advantages of 'swarm'"),
        ("xgrpo+grpo-noise", "'grpo-noise' would discard or change the advantages of 'xgrpo'"),
        ("sgt+sgt", "the same regime twice"),
        ("sgt+nothing", "unknown regime 'nothing'"),
    ],
)
def test_invalid_combinations_are_rejected_naming_the_regimes(name: str, message: str) -> None:
    with pytest.raises(RegimeError) as error:
        get_regime(name)
    assert message in str(error.value)


def test_settings_are_nested_by_regime_and_labels_show_non_defaults() -> None:
    both = get_regime("xgrpo+sgt")
    assert both().describe() == "xgrpo+sgt"
    assert both(sgt={"weight": 0.3}).describe() == "xgrpo+sgt (sgt.weight=0.3)"
    assert both(sgt={"margin": 0.5}).ineffective_settings()[0][0] == "sgt.margin"
    assert not is_open("xgrpo+sgt")
    assert is_open("xgrpo+mine.py:SPEC")
    assert parts_of("xgrpo+/a/c++/own.py:SPEC+sgt") == ["xgrpo", "/a/c++/own.py:SPEC", "sgt"]
    assert parts_of("own.py:SPEC+sgt") == ["own.py:SPEC", "sgt"]
    assert parts_of("/a/c++/own.py:SPEC") == ["/a/c++/own.py:SPEC"]
    assert both.metric("gate_rate") == "sgt/gate_rate"
