"""Rivals as settings: CHORD's schedule, F-TIS's filter, the least hint that works; numbers worked by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from test_prp import BOB, OWN

from mutualrl.regimes import Results, RoundView, Sample, Sampled
from mutualrl.regimes.chord import Chord, mu_at
from mutualrl.regimes.hinted import Hinted
from mutualrl.regimes.hints import first_words
from mutualrl.regimes.prp import PRP
from mutualrl.regimes.round import PHASES, UpperBound
from mutualrl.regimes.transfer import EncodedRun
from mutualrl.traits import SourceTraits
from mutualrl.trajectory import Trajectory
from regime_views import Peer, plan, view

# ---- CHORD


def test_mu_rises_and_falls_along_half_a_cosine() -> None:
    settings = Chord(mu_peak=0.8, mu_valley=0.2, warmup_rounds=4, decay_rounds=6)
    assert [mu_at(number, settings) for number in (0, 1, 4, 7, 10, 99)] == pytest.approx([0, 0.2, 0.8, 0.5, 0.2, 0.2])
    assert mu_at(6, settings) == pytest.approx(0.2 + 0.6 * 0.75)  # a third of the way: (1 + cos 60 degrees) / 2
    assert mu_at(0, Chord(decay_rounds=0)) == 0.05
    with pytest.raises(ValidationError, match="mu_valley"):
        Chord(mu_peak=0.1, mu_valley=0.2)


@pytest.mark.parametrize(("rounds", "decay", "quoted"), [(100, 75, 0.29), (160, 120, 0.29), (8, 6, 0.60)])
def test_last_step_of_adam_without_clipping_is_the_quoted_fraction_of_chords(
    rounds: int, decay: int, quoted: float
) -> None:
    """Simulate Adam with gradients of equal size: CHORD's own, and ours, larger by 1 / (1 - mu). With gradients that are
    clipped to one norm the two are the same."""

    def last_step(gradients: list[float]) -> float:
        first = second = 0.0
        for gradient in gradients:
            first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        count = len(gradients)
        return first / (1 - 0.9**count) / math.sqrt(second / (1 - 0.999**count))

    ours = [1 / (1 - mu_at(number, Chord(decay_rounds=decay))) for number in range(rounds)]
    chords = last_step([1.0] * rounds)
    assert last_step(ours) / chords == pytest.approx(quoted, abs=0.005)
    assert last_step([min(1.0, gradient) for gradient in ours]) == pytest.approx(chords)


def test_every_prompt_with_a_text_is_imitated_whatever_its_reward() -> None:
    """The weight is mu / (1 - mu): the loss is (1 - mu) GRPO + mu NLL up to the factor 1 - mu. A peer's text is not
    used."""
    rows = [("a", 0.0), ("a", 1.0), ("b", 0.0), ("b", 0.0), ("c", 1.0), ("c", 1.0)]
    book = Peer([("a", 1.0, "right"), ("b", math.nan, "unjudged"), ("b", 0.0, "wrong"), ("c", 1.0, "long")])
    bob = Peer([("a", 1.0, "of a peer"), ("b", 1.0, "of a peer"), ("c", 1.0, "of a peer")])
    drawn: set[str] = set()
    for seed in range(20):
        round_view = view(
            rows,
            {"book": book, "bob": bob},
            sources={"book": SourceTraits()},
            fit=lambda text, ended: None if text == "long" else tuple(text.encode()),
            run_seed=seed,
        )
        got = plan(round_view, Chord(mu_peak=0.75, mu_valley=0.75))
        assert [(row.prompt_id, row.loss, row.weight, row.mean) for row in got.rows] == [
            ("a", "nll", pytest.approx(3.0), "rows"),
            ("b", "nll", pytest.approx(3.0), "rows"),
        ]
        assert got.advantages is None
        assert (got.metrics["chord/mu"], got.metrics["chord/rows"], got.metrics["chord/unencodable"]) == (0.75, 2, 1)
        drawn.add(got.rows[1].trajectory.text)
    assert drawn == {"unjudged", "wrong"}


# ---- F-TIS

#: the learner's log-probs: mean of log mu - log pi is 1 for ab, 0.6 for c, 0.5 for de, 0.2 for f
PI = {"ab": [-1.5, -2.0], "c": [-0.7], "de": [-2.5, -0.7], "f": [-0.5]}


@pytest.mark.parametrize(
    ("most", "kept"), [(0.61, [0, 1, 2, 3]), (0.59, [0, 2, 3]), (0.1, [0, 2]), (None, [0, 1, 2, 3])]
)
def test_far_peer_rows_of_negative_advantage_are_dropped(most: float | None, kept: list[int]) -> None:
    """Rows of positive advantage stay however far they are; advantages are those of the whole pool."""
    regime = PRP(max_negative_kl=most, clip="above", cap=1.5)
    round_view = view(OWN, {"bob": Peer(BOB)})
    results = {("p" if text in ("ab", "c") else "q", tuple(text.encode())): np.array(PI[text]) for text in PI}
    if most is not None:
        assert set(regime.requests(round_view).logprobs) == set(results)
    got = plan(replace(round_view, results=Results(logprobs=results)), regime)
    whole = plan(view(OWN, {"bob": Peer(BOB)}), PRP())
    assert [row.source.rollout for row in got.rows] == kept
    assert [row.advantage for row in got.rows] == [whole.rows[place].advantage for place in kept]
    assert got.advantages == whole.advantages
    assert {row.bound for row in got.rows} == {UpperBound(1.5)}
    assert got.metrics.get("prp/dropped") == (None if most is None else 4 - len(kept))


# ---- the least hint that works

TEXT = "one two three four five six seven eight"
ROWS = [("a", 0.0), ("a", 0.0), ("b", 0.0), ("b", 0.0)]
PEER = Peer([("a", 1.0, TEXT), ("b", 1.0, "uno")])


def test_first_words() -> None:
    assert [first_words(TEXT, share) for share in (0.25, 0.5, 1.0)] == ["one two", "one two three four", TEXT]
    assert first_words("a b c", 0.25) == "a"
    assert first_words("  spaced   out  ", 0.5) == "  spaced"
    assert first_words("  spaced   out  ", 1.0) == "  spaced   out  "
    assert first_words("", 0.5) == ""


def drawn(round_view: RoundView, regime: Hinted, works: Any) -> tuple[list[list[str]], RoundView]:
    """Answer the regime's requests until it has none; return the hints of each phase, and the view with results."""
    phases: list[list[str]] = []
    for _ in range(PHASES + 1):
        samples = regime.requests(round_view).without(round_view.results).samples
        if not samples:
            break
        phases.append([sample.hint for sample in samples])
        results: dict[Sample, Sampled | None] = {
            sample: Sampled(
                EncodedRun(tuple(b"own")),
                Trajectory.of_text("own \\boxed{7}"),
                True,
                float(works(sample)),
                None,
                tuple(b"zzz"),
            )
            for sample in samples
        }
        round_view = replace(round_view, results=round_view.results.merged(Results(samples=results)))
    return phases, round_view


def test_hints_grow_until_an_answer_is_confirmed() -> None:
    regime = Hinted(hint="least", samples=2)
    phases, seen = drawn(view(ROWS, {"bob": PEER}), regime, lambda s: len(s.hint.split()) >= 6 and s.number == 1)
    half, most = "one two three four", "one two three four five six"
    assert phases == [["one two"] * 2 + ["uno"] * 2, [half] * 2, [most] * 2]
    got = plan(seen, regime)
    assert [(row.prompt_id, row.hint) for row in got.rows] == [("a", most)]
    assert got.metrics["hinted/samples"] == 8


def test_a_prompt_that_no_hint_helps_gets_all_lengths_and_no_row() -> None:
    phases, seen = drawn(view(ROWS, {"bob": PEER}), Hinted(hint="least", samples=1), lambda s: False)
    assert [len(phase) for phase in phases] == [2, 1, 1, 1]  # uno has one length
    assert len(phases) == PHASES
    assert phases[-1] == [TEXT]
    assert plan(seen, Hinted(hint="least", samples=1)).rows == ()
