"""Several regimes at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mutualrl.errors import RegimeError
from mutualrl.regimes import Answers, RoundView, get_regime, is_open, parts_of
from mutualrl.regimes.sgt import SGTSettings
from mutualrl.regimes.xgrpo import XGRPOSettings
from regime_views import Peer, view

OWN = [("p", 0.0), ("p", 0.0), ("q", 1.0), ("q", 0.0)]
PEERS = {"bob": Peer([("p", 1.0, "yes"), ("p", 0.0, None), ("q", 0.0, None), ("q", 0.0, None)])}


def test_advantages_are_combined_in_order_and_rows_put_together() -> None:
    both = get_regime("xgrpo+sgt")
    settings = both.settings(sgt={"weight": 0.3, "max_uses_per_prompt": 5})
    assert both.plan is not None
    made = both.plan(view(OWN, PEERS), settings)
    alone = {name: get_regime(name).plan for name in ("xgrpo", "sgt")}
    assert alone["xgrpo"] is not None
    assert alone["sgt"] is not None
    graded = alone["xgrpo"](view(OWN, PEERS), XGRPOSettings())
    rescued = alone["sgt"](view(OWN, PEERS), SGTSettings(weight=0.3, max_uses_per_prompt=5))
    assert made.advantages == graded.advantages
    assert made.rows == rescued.rows or [r.text for r in made.rows] == [r.text for r in rescued.rows]
    assert made.rows[0].weight == 0.3
    assert made.metrics == {**graded.metrics, **rescued.metrics}
    assert made.state == {"sgt": {"uses": {"p": 1}}}
    again = both.plan(view(OWN, PEERS, state=made.state), settings)
    assert again.state == {"sgt": {"uses": {"p": 2}}}


def test_a_regime_sees_the_advantages_of_the_one_before_it() -> None:
    both = get_regime("prp+xgrpo")
    trace = ((1,), (-1.0,), True)
    peers = {"bob": Peer([(p, r, "x", *trace) for p, r in [("p", 1.0), ("p", 0.0), ("q", 0.0), ("q", 0.0)]])}
    first, second = get_regime("prp").plan, get_regime("xgrpo").plan
    assert both.plan is not None
    assert first is not None
    assert second is not None
    pooled = first(view(OWN, peers), get_regime("prp").settings())
    assert pooled.advantages is not None
    expected = second(view(OWN, peers, advantages=pooled.advantages), XGRPOSettings()).advantages
    assert both.plan(view(OWN, peers), both.settings()).advantages == pytest.approx(expected)


def test_each_gets_the_answers_to_what_it_asked() -> None:
    both = get_regime("swarm+sgt")
    settings = both.settings(swarm={"external": 1}, sgt={"pick": "fit"})
    peers = {"bob": Peer([("p", 1.0, "long"), ("p", 1.0, "yes"), ("q", 1.0, "a"), ("q", 0.0, "b")])}
    seen: RoundView = view(OWN, peers)
    needs = both.needs(seen, settings)
    assert [text for _, text, _ in needs.rewards] == ["a", "b"]
    assert [bytes(ids) for _, ids in needs.nll] == [b"long", b"yes"]
    assert both.plan is not None
    made = both.plan(replace(seen, answers=Answers(nll=(0.1, 0.2), rewards=(1.0, 0.0))), settings)
    assert [row.text for row in made.rows if row.loss == "nll"] == ["long"]  # of lower NLL, though longer
    assert made.metrics["swarm/external"] == 1.0


@pytest.mark.parametrize(
    ("name", "problem"),
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
def test_what_cannot_be_combined_is_refused_by_name(name: str, problem: str) -> None:
    with pytest.raises(RegimeError) as refused:
        get_regime(name)
    assert problem in str(refused.value)


def test_settings_stand_below_the_names_and_labels_show_what_acts() -> None:
    both = get_regime("xgrpo+sgt")
    assert both.describe(both.settings()) == "xgrpo+sgt"
    assert both.describe(both.settings(sgt={"weight": 0.3})) == "xgrpo+sgt (sgt.weight=0.3)"
    assert both.idle_settings(both.settings(sgt={"margin": 0.5}))[0][0] == "sgt.margin"
    assert not is_open("xgrpo+sgt")
    assert is_open("xgrpo+mine.py:SPEC")
    assert parts_of("xgrpo+/a/c++/own.py:SPEC+sgt") == ["xgrpo", "/a/c++/own.py:SPEC", "sgt"]
    assert parts_of("own.py:SPEC+sgt") == ["own.py:SPEC", "sgt"]
    assert parts_of("/a/c++/own.py:SPEC") == ["/a/c++/own.py:SPEC"]
    assert both.metric("gate_rate") == "sgt/gate_rate"
