"""Committed sweep results follow from their raw values, and their figures and means match."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import sweep_results as sweeps
from conftest import REPOSITORY
from mutualrl.study.claims import parse_claims, read_claims
from mutualrl.study.comparison import compare, markdown
from mutualrl.study.outcomes import Outcome, Outcomes, PolicyOutcome
from mutualrl.study.sweep_file import Grid

CLAIMS = {path.name.removesuffix("-claims.yaml"): path for path in sweeps.SWEEPS.glob("*-claims.yaml")}
RESULTS = [name for name in CLAIMS if sweeps.has_results(name.replace("-", "_"))]
LATER = "2099-01-01T00:00:00Z"


@pytest.mark.parametrize("name", RESULTS)
def test_committed_results_follow_from_their_pieces(name: str) -> None:
    before = sweeps.stored(name.replace("-", "_"))
    after, comparison = sweeps.of_results(name.replace("-", "_"), CLAIMS[name])
    assert markdown(comparison) == (sweeps.RESULTS / f"{name.replace('-', '_')}.md").read_text().strip()
    assert json.loads(json.dumps(after)) == before
    assert before["comparison"]["claims"]


def outcome(pool: str, arm: str, seed: int, accuracy: float, gate: float) -> Outcome:
    policy = PolicyOutcome(
        after={"all": accuracy}, problems=64, curve=[(0, 0.25), (10, accuracy)], gate=[gate] * 9 + [gate / 2]
    )
    return Outcome(pool, arm, seed, {"ada": policy, "bob": policy})


@pytest.fixture
def outcomes() -> Outcomes:
    pieces = [outcome("p", "grpo", seed, 0.40 + 0.01 * seed, 0.0) for seed in range(3)]
    pieces += [outcome("p", "sgt", seed, 0.50 + 0.01 * seed, 0.1 * seed) for seed in range(3)]
    pieces += [outcome("q", "grpo", seed, 0.50, 0.0) for seed in range(3)]
    return Outcomes(pieces)


def test_differences_are_computed_against_each_reference_in_the_pools_that_have_it(outcomes: Outcomes) -> None:
    against = sweeps.differences(outcomes, ["grpo", "sgt"])
    assert against["sgt"]["p"]["grpo"]["accuracy"]["mean"] == pytest.approx(-0.1)
    assert against["grpo"]["p"]["sgt"]["accuracy"]["mean"] == pytest.approx(0.1)
    assert list(against["sgt"]) == ["p"]


def test_gate_rates_are_means_over_seeds(outcomes: Outcomes) -> None:
    gates = sweeps.gates(outcomes, "sgt")
    assert gates["p"]["bob"] == pytest.approx([0.1] * 9 + [0.05])
    assert gates["q"] == {}


def test_figures_show_every_pool_and_the_values_of_the_table(outcomes: Outcomes, tmp_path: Path) -> None:
    curves = sweeps.curves(outcomes, "c", ["grpo", "sgt"])
    assert [list(panel.lines) for panel in curves.panels] == [["grpo", "sgt"], ["grpo"]]
    assert curves.panels[0].lines["sgt"]["value"].tolist() == pytest.approx([0.25, 0.51])
    bars = sweeps.gains(compare(outcomes, "grpo"), "g").panels[0].bars
    assert {pool: each.index.tolist() for pool, each in bars.items()} == {"p": ["sgt"], "q": []}
    assert bars["p"]["error"].tolist() == pytest.approx([1 / 64])  # equal differences: at least as wide as one problem
    sweeps.draw([curves], tmp_path)
    assert (tmp_path / "c.svg").is_file()
    assert (REPOSITORY / "benchmarks" / "results" / "study_gains.svg").is_file()


def test_grid_run_in_parts_is_merged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Merge one rerun piece and one new one: the others stay, the comparison is redone, and the parts are listed."""
    before = sweeps.stored("paper")
    before["pieces"] = before["pieces"][:-2]
    monkeypatch.setattr(sweeps, "stored", lambda name: before)
    claims = read_claims(CLAIMS["paper"])
    rerun = json.loads(json.dumps(before["pieces"][0]))
    rerun["policies"]["ada"]["after"]["all"] = 0.125
    new_piece = {**json.loads(json.dumps(before["pieces"][1])), "seed": 99}
    pieces_before = len(before["pieces"])
    pools, arms = (tuple(dict.fromkeys(piece[key] for piece in before["pieces"])) for key in ("pool", "arm"))
    monkeypatch.setattr(sweeps, "of_sweep", lambda runs: ({"versions": {}, "pieces": [rerun, new_piece]}, None))
    later = parse_claims(claims.text, claims.name, LATER)
    monkeypatch.setattr(sweeps, "registered_claims", lambda runs: later)
    monkeypatch.setattr(sweeps, "stored_grid", lambda runs: Grid(pools, arms[::-1], (0, 99), "grpo"))
    value, comparison = sweeps.added_to("paper", tmp_path)
    assert len(value["pieces"]) == pieces_before + 1
    of_pool = [piece["arm"] for piece in value["pieces"] if piece["pool"] == pools[0]]
    assert list(dict.fromkeys(of_pool)) == [arm for arm in arms[::-1] if arm in of_pool], "as in the sweep file"
    merged_piece = next(
        piece for piece in value["pieces"] if (piece["arm"], piece["seed"]) == (rerun["arm"], rerun["seed"])
    )
    assert merged_piece["policies"]["ada"]["after"]["all"] == 0.125
    declared = len(pools) * len(arms) * claims.file.seeds
    assert f"{declared - len(value['pieces'])} of {declared} pieces are missing" in comparison.notes
    assert any("were made by an earlier part" in note for note in comparison.notes)
    assert value["comparison"]["registered"]["changed"] == before["comparison"]["registered"]["changed"] < LATER
    other = parse_claims(claims.text.replace("seeds: 10", "seeds: 9"), claims.name, claims.changed)
    monkeypatch.setattr(sweeps, "registered_claims", lambda runs: other)
    with pytest.raises(ValueError, match=r"are not those of paper\.json"):
        sweeps.added_to("paper", tmp_path)


def test_pieces_older_than_their_claims_are_marked_and_left_out() -> None:
    claims = parse_claims(
        "seeds: 6\nclaims: [{text: one above grpo, one: one, other: grpo}]\n", "c.yaml", "2026-02-01T00:00:00Z"
    )
    pieces = []
    for seed in range(6):
        gain = 0.2 if seed < 3 else 0.02 * (seed - 4)  # without the older seeds: -.02, 0, .02
        for arm, accuracy in (("grpo", 0.4), ("one", 0.4 + gain)):
            made = outcome("p", arm, seed, accuracy, 0.0)
            began = "2026-01-01T00:00:00Z" if seed < 2 else "2026-03-01T00:00:00Z"
            pieces.append(replace(made, began=began, known=seed == 2))
    comparison = compare(Outcomes(pieces), "grpo", claims)
    assert comparison.notes[0].startswith("6 of 12 pieces are older than the claims")
    assert "seeds 0, 1, 2 of grpo, one" in comparison.notes[0]
    (seen,), (unseen,) = comparison.claims, comparison.unseen
    assert (seen.estimates["pool"].n, unseen.estimates["pool"].n) == (6, 3)
    assert seen.estimates["pool"].mean == pytest.approx(0.1)
    assert unseen.estimates["pool"].mean == pytest.approx(0.0)
    assert "without the pieces that are older" in markdown(comparison)
    value = comparison.to_json()
    assert (len(value["claims"]), len(value["claims_unseen"])) == (1, 1)
    later = compare(Outcomes([replace(piece, began="", known=False) for piece in pieces]), "grpo", claims)
    assert later.unseen == () and "without the pieces" not in markdown(later)
    assert later.notes[0] == "12 of 12 pieces do not record whether they began after the claims were written"
    known = compare(Outcomes([replace(piece, known=True) for piece in pieces]), "grpo", claims)
    assert known.unseen == () and known.notes[0].startswith("all 12 pieces are older than the claims")


def test_marked_pieces_of_the_papers_claims_are_those_of_the_first_study() -> None:
    content = sweeps.stored("paper")
    known = [(p["pool"], p["arm"], p["seed"]) for p in content["pieces"] if p["known"]]
    assert len(known) == 30
    assert {seed for *_, seed in known} == {0, 1, 2}
    assert len({arm for _, arm, _ in known}) == 5
    assert content["unseen"]["grpo"]["tiny"]["sgt"]["accuracy"]["n"] == 7
