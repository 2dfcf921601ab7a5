"""What each sweep declared before its runs, and what was changed after it: computed from git, and as the pages tell it."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from functools import cache

import pytest

import registrations
import sweep_results as sweeps
from conftest import REPOSITORY


def history_is_whole() -> bool:
    command = ["git", "rev-parse", "--is-shallow-repository"]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    return result.stdout.strip() == "false"


needs_history = pytest.mark.skipif(not history_is_whole(), reason="no git history, in which the registrations stand")
history = cache(registrations.history)


@needs_history
@pytest.mark.slow
@pytest.mark.extended
def test_the_page_is_what_git_says() -> None:
    """Of all sets of claims, each with what its sweep lost, gained or changed after its first commit."""
    page = registrations.page([history(name) for name in sweeps.COMMITTED])
    assert page == (REPOSITORY / "docs" / "registrations.md").read_text(), "python benchmarks/registrations.py"


@needs_history
def test_a_pool_that_was_dropped_is_found() -> None:
    paper = history("paper")
    assert (paper.committed, paper.commit) == ("2026-11-23T02:45:07Z", "4d3dfe48")
    change = paper.changed[0]
    assert (change.commit, change.time, change.after) == ("bc39b57d", "2026-11-23T05:26:27Z", False)
    assert change.lines[0] == "paper.pools: left out tiny-countdown"
    assert "-0.045 [-0.073, -0.017]" in paper.known


@needs_history
def test_the_claims_that_held_without_the_dropped_pool_hold_with_it() -> None:
    """Twelve of eighteen, under Holm's correction over all twenty-seven; on the pool itself the four about SGT are refuted."""
    before = registrations.file_at("5c2da904", "benchmarks/results/paper.json")["comparison"]["claims"]
    now = sweeps.stored("paper")["comparison"]["claims"]
    verdicts = {(claim["claim"], claim["pool"]): claim["verdict"] for claim in now}
    held = [(claim["claim"], claim["pool"]) for claim in before if claim["verdict"] == "held"]
    assert (len(before), len(now), len(held)) == (18, 27, 12)
    assert {verdicts[key] for key in held} == {"held"}
    refuted = [key for key, verdict in verdicts.items() if verdict == "refuted"]
    others = ("XGRPO", "PRP", "PRP with the band", "GRPO")
    assert refuted == [(f"SGT ends above {other}", "tiny-countdown") for other in others]


@needs_history
def test_changed_steps_rates_margins_and_missing_seeds_are_found() -> None:
    lines = [line for change in history("smol").changed for line in change.lines]
    assert [line for line in lines if "run.steps" in line] == [
        "pool smol-pool.run.steps: 24 -> 16",
        "pool smol-pool.run.steps: 16 -> 10",
    ]
    assert "pool smol-pool.trainer.learning_rate: 1e-5 -> 2e-5" in lines
    study = history("study")
    assert study.not_run == [f"{pool}: every arm, seeds 3, 4" for pool in ("tiny", "tiny-near", "tiny-three")]
    assert [change.after for change in study.changed] == [True]
    assert "one_model_seeds" in history("one_model_chord").beside


@needs_history
def test_a_comment_is_no_change_and_neither_is_a_sweep_that_was_run_as_registered() -> None:
    assert history("rivals").changed == history("rivals").not_run == []


def test_changes_name_keys_and_values() -> None:
    before = {"pools": ["a", "b"], "arms": {"x": {"regime": "sgt"}}, "seeds": 3, "recipes": {"a": {"x": {"k": 1}}}}
    after = {"pools": ["b", "c"], "arms": {"y": {"regime": "sgt"}}, "seeds": 5, "recipes": {"a": {"x": {"k": 2}}}}
    assert registrations.changes(before, after) == [
        "pools: left out a, added c",
        "arms.x: left out",
        "arms.y: added",
        "seeds: 3 -> 5",
        "k: 1 -> 2 (recipes: 1)",
    ]
    assert registrations.changes(before, before) == []


def test_the_readme_counts_the_claims_as_their_results_do() -> None:
    total, real = Counter[str](), Counter[str]()
    for name in sweeps.COMMITTED:
        verdicts = sweeps.stored(name)["comparison"]["verdicts"]
        if name not in registrations.BOARD["after"]:
            total.update(verdicts)
        if name in registrations.BOARD["real"]:
            real.update(verdicts)
    readme = (REPOSITORY / "README.md").read_text()
    pattern = (
        r"Of (\d+) claims that precede their results (\d+) held \((\d+) more follows?\), (\d+) are refuted, (\d+) "
        r"undecided, (\d+) of (\d+)"
    )
    found = re.search(pattern, readme)
    assert found is not None
    keys = ("held", "implied", "refuted", "undecided")
    assert list(map(int, found.groups())) == [
        total.total(),
        *(total[key] for key in keys),
        real["undecided"],
        real.total(),
    ]
