"""The verdict that opens a report: the gain over the baseline, its certainty, the next command."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

import made_runs
from conftest import Cli
from made_runs import edit_recipe, made_run
from mutualrl.reporting.comparability import comparisons
from mutualrl.reporting.page import Dead, Verdict
from mutualrl.runs.logs import read_runs
from mutualrl.runs.read import read_run
from mutualrl.storage.files import read_checksummed, write_checksummed
from mutualrl.storage.run_info import PolicyResult
from mutualrl.study.verdict import verdicts
from runs import FinishedRun


def verdicts_of(*runs: Path) -> list[Verdict]:
    return verdicts(comparisons(read_runs(runs)))


def test_single_run_without_a_baseline_gets_the_command_for_one(tmp_path: Path) -> None:
    command = [
        "mutualrl",
        "train",
        "--regime",
        "sgt",
        "--set",
        "regime.weight=0.3",
        "--run-dir",
        "old",
        "--steps",
        "20",
    ]
    run = made_run(tmp_path / "r", "sgt", command=command)
    (verdict,) = verdicts_of(run)
    assert "it has no baseline" in verdict.answer
    assert (verdict.word, verdict.number, verdict.interval) == ("No baseline yet", "0.300 → 0.510", "")
    assert verdict.basis == "accuracy (greedy, mean of the pool), 64 problems; one seed"
    baseline_command = shlex.split(verdict.commands[0])
    assert baseline_command == ["mutualrl", "train", "--steps", "20", "--run-dir", f"{run}-grpo", "--regime", "grpo"]
    assert shlex.split(verdict.commands[1]) == ["mutualrl", "report", str(run), f"{run}-grpo"]


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["__main__.py", "train", "--regime=sgt", "--pool", "tiny"], ["--pool", "tiny"]),
        (["mutualrl", "train", "r.yaml", "--set=regime.weight=0.3", "--clean", "--run-dir=x"], ["r.yaml"]),
        (
            ["mutualrl", "train", "--set", "policies.ada.regime.weight=1", "--set", "run.steps=3"],
            ["--set", "run.steps=3"],
        ),
        (["mutualrl", "train", "--json", "--set", "run.dir=elsewhere", "--seed", "4"], ["--seed", "4"]),
    ],
)
def test_next_command_is_the_runs_own_with_another_regime(
    tmp_path: Path, typed: list[str], expected: list[str]
) -> None:
    run = made_run(tmp_path / "r", "sgt", command=typed)
    (verdict,) = verdicts_of(run)
    added = ["--run-dir", f"{run}-grpo", "--regime", "grpo"]
    assert shlex.split(verdict.commands[0]) == ["mutualrl", "train", *expected, *added]


@pytest.mark.parametrize("model", ["tiny:ada", "Qwen/Qwen3-0.6B"])
@pytest.mark.parametrize("source", ["book=recorded:tiny:book", "own=recorded:task", "book=recorded:texts"])
def test_references_to_models_and_texts_are_no_code(tmp_path: Path, model: str, source: str) -> None:
    typed = ["mutualrl", "train", "--regime", "sgt", "--model", model, f"--source={source}"]
    (verdict,) = verdicts_of(made_run(tmp_path / "r", "sgt", command=typed))
    assert shlex.split(verdict.commands[0])[2:5] == ["--model", model, f"--source={source}"]


def test_arms_of_a_sweep_keep_the_users_names_but_for_the_baseline(tmp_path: Path) -> None:
    pieces = tmp_path / "out" / "pieces" / "tiny"
    for name, regime in (("my-rule-0", "sgt"), ("plain-0", "grpo"), ("unfinished-0", "sgt")):
        made_run(pieces / name, regime)
        if name != "unfinished-0":
            outcome = {"outcome": {"arm": name.removesuffix("-0").replace("my-rule", "my rule")}}
            write_checksummed(pieces / f"{name}.json", outcome, root=pieces)
    arms = [read_run(pieces / name).arm for name in ("my-rule-0", "plain-0", "unfinished-0")]
    assert arms == ["my rule", "grpo", "sgt"]


def test_run_over_a_bucket_gets_no_command_that_would_reuse_the_bucket(tmp_path: Path) -> None:
    joined = made_run(tmp_path / "joined", "sgt", command=["mutualrl", "join", "s3://b/r", "--policy", "ada"])
    shared = made_run(tmp_path / "shared", "sgt")
    edit_recipe(shared, lambda recipe: recipe.update(exchange={"url": "s3://b/r"}))
    assert [*verdicts_of(joined)[0].commands, *verdicts_of(shared)[0].commands] == []


def test_run_with_results_of_some_policies_names_the_missing_ones(tmp_path: Path) -> None:
    run = made_run(tmp_path / "r", "sgt")
    (run / "policies" / "bob" / "result.json").unlink()
    summary = read_checksummed(run / "summary.json")
    assert summary is not None
    del summary["policies"]["bob"]
    write_checksummed(run / "summary.json", summary, root=run)
    (verdict,) = verdicts_of(run)
    assert "no result of bob here" in verdict.answer
    assert (verdict.word, verdict.number) == ("Not measured", "")
    assert not verdict.commands


@pytest.mark.parametrize(
    "command",
    [
        5,
        ["mutualrl", "train", "--task", "/x/evil.py:TASK"],
        ["mutualrl", "train", "--set", "task.tools=[/x/evil.py:f]"],
        ["mutualrl", "train", "--set=task.reward=evil:f"],
        ["mutualrl", "train", "--set", "policies.ada.trust_remote_code=true"],
    ],
)
def test_command_that_names_code_or_is_malformed_is_not_offered(tmp_path: Path, command: Any) -> None:
    (verdict,) = verdicts_of(made_run(tmp_path / "r", "sgt", command=command))
    assert not verdict.commands


def test_per_policy_settings_and_pools_of_one_get_no_baseline_command(tmp_path: Path) -> None:
    per_policy = made_run(tmp_path / "own", "sgt")

    def change(recipe: dict[str, Any]) -> None:
        recipe["policies"] = [{"name": name, "model": "m", "regime": {"weight": 1.0}} for name in ("ada", "bob")]

    edit_recipe(per_policy, change)
    alone = made_run(tmp_path / "alone", "grpo", policies=("ada",))
    assert [*verdicts_of(per_policy)[0].commands, *verdicts_of(alone)[0].commands] == []


def test_custom_rewards_are_not_called_accuracy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    boxed = made_runs.validation
    monkeypatch.setattr(made_runs, "validation", lambda accuracy: {**boxed(accuracy), "no_box": None})
    run = made_run(tmp_path / "r", "sgt")
    assert verdicts_of(run)[0].basis.startswith("accuracy (greedy"), "runs with tools have no box, and are judged"
    edit_recipe(run, lambda recipe: recipe["task"].update(reward="rewards.py:mine"))
    assert verdicts_of(run)[0].basis.startswith("mean reward (greedy")


def test_baseline_alone_suggests_a_regime_that_shares(tmp_path: Path) -> None:
    (verdict,) = verdicts_of(made_run(tmp_path / "r", "grpo"))
    assert "This is a baseline" in verdict.answer
    assert verdict.word == "Baseline only"
    assert "--regime sgt" in verdict.commands[0]


def test_unfinished_run_has_no_result(tmp_path: Path) -> None:
    (verdict,) = verdicts_of(made_run(tmp_path / "r", "sgt", finished=False))
    assert verdict.word == "No result yet"
    assert "--resume" in verdict.commands[0]


@pytest.mark.parametrize(
    ("gains", "word", "number", "interval"),
    [
        ([(0.2, 0.1), (0.3, 0.21), (0.25, 0.14)], "Helped", "+0.100", "95 % interval +0.075 to +0.125"),
        ([(0.1, 0.2), (0.21, 0.3), (0.14, 0.25)], "Hurt", "-0.100", "95 % interval -0.125 to -0.075"),
        ([(0.3, 0.1), (0.1, 0.3), (0.2, 0.1)], "Not decided", "+0.033", "95 % interval -0.484 to +0.550"),
        ([(0.3, 0.1)], "Not decided", "+0.200", "no interval: 3 seeds are needed"),
        ([(0.3, 0.1), (0.31, 0.11)], "Not decided", "+0.200", "no interval: 3 seeds are needed"),
    ],
)
def test_arms_are_paired_by_seed_and_the_word_follows_the_interval(
    tmp_path: Path, gains: list[tuple[float, float]], word: str, number: str, interval: str
) -> None:
    """The intervals by hand: mean ± 4.3027 s / sqrt(3)."""
    runs = []
    for seed, (shared, plain) in enumerate(gains):
        settings = {"weight": 0.3}
        runs.append(made_run(tmp_path / f"sgt-{seed}", "sgt", seed=seed, gain=shared, settings=settings))
        runs.append(made_run(tmp_path / f"grpo-{seed}", "grpo", seed=seed, gain=plain))
    (verdict,) = verdicts_of(*runs)
    assert (verdict.word, verdict.number, verdict.interval) == (word, number, interval)
    assert verdict.basis.endswith(f"64 problems; seeds: {len(gains)}")
    assert bool(verdict.commands) == (word == "Not decided")
    if word == "Not decided":
        assert [f"--seed {len(gains)}" in command for command in verdict.commands] == [True, True]


def test_the_next_seeds_are_those_that_one_arm_has_already(tmp_path: Path) -> None:
    runs = [made_run(tmp_path / f"grpo-{seed}", "grpo", seed=seed) for seed in (0, 1)]
    (verdict,) = verdicts_of(*runs, made_run(tmp_path / "sgt-0", "sgt", seed=0))
    assert ["--seed 2" in verdict.commands[0], "--seed 1" in verdict.commands[1]] == [True, True]
    assert "More seeds would give an interval; a sweep file runs many (mutualrl sweep)." in verdict.cautions
    (tmp_path / "sgt-0-1").mkdir()  # the second command could not run: one arm alone decides nothing
    (verdict,) = verdicts_of(*runs, tmp_path / "sgt-0")
    assert not verdict.commands


def test_arms_without_a_baseline_or_a_common_seed_are_not_compared(tmp_path: Path) -> None:
    sgt, xgrpo = made_run(tmp_path / "a", "sgt"), made_run(tmp_path / "b", "xgrpo")
    (verdict,) = verdicts_of(sgt, xgrpo)
    assert "No finished run of the baseline (grpo)" in verdict.answer
    (verdict,) = verdicts_of(sgt, made_run(tmp_path / "c", "grpo", seed=5))
    assert "have no finished runs with a common seed" in verdict.answer


def test_arms_that_differ_in_more_than_the_regime_get_a_caution(tmp_path: Path) -> None:
    (verdict,) = verdicts_of(made_run(tmp_path / "a", "sgt"), made_run(tmp_path / "b", "grpo", steps=30))
    assert any("differ in more than the regime" in caution for caution in verdict.cautions)


def test_page_begins_with_the_verdict(cli_here: Cli, tmp_path: Path) -> None:
    run = made_run(tmp_path / "r", "sgt")
    assert cli_here("report", run, "--out", "page").returncode == 0
    page = (tmp_path / "page" / "index.html").read_text()
    main = page.split('<main id="main">')[1]
    assert main.index('class="verdict"') < main.index("<table")
    assert "it has no baseline" in main


def test_verdict_on_a_run_of_train_has_the_command_of_its_baseline(unbroken: FinishedRun) -> None:
    (verdict,) = verdicts_of(unbroken.path)
    (again, report) = verdict.commands
    assert again.startswith("mutualrl train ")
    assert again.endswith("--regime grpo")
    assert report == f"mutualrl report {unbroken.path} {unbroken.path}-grpo"


def counted(run: Path, dead: dict[str, list[float]]) -> Path:
    """Write the counts of dead prompts of each policy's steps, and that three came back at the last of them."""
    for policy, counts in dead.items():
        path = run / "policies" / policy / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row, count in zip(rows, counts, strict=False):
            row |= {"prompts/dead": count, "prompts/revived": 0.0}
        rows[len(counts) - 1]["prompts/revived"] = 3.0
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def test_verdict_says_what_happened_to_dead_prompts(tmp_path: Path) -> None:
    run = counted(made_run(tmp_path / "r", "sgt"), {"ada": [4.0, 9.0, 2.0]})  # bob did not count them
    (verdict,) = verdicts_of(run)
    assert verdict.dead == [Dead("ada", 4, 9, 2, "came back 3 times; taught 40 texts")]
    prompts = {"prompts_per_round": 8, "prompts": 24}
    once = counted(made_run(tmp_path / "once", "prp", fingerprint=prompts), {"ada": [4.0, 9.0, 2.0]})
    assert verdicts_of(once)[0].dead == [Dead("ada", 4, 9, 2, "no prompt came a second time")], "3 rounds of 8 of 24"
    alone = counted(made_run(tmp_path / "g", "grpo"), {"ada": [4.0], "bob": [8.0]})
    both = verdicts_of(run, alone)
    mean = "mean per policy and run"
    assert [verdict.dead for verdict in both] == [[Dead("grpo", 6, 6, 6, mean), Dead("sgt", 4, 9, 2, mean)]]
    assert verdicts_of(made_run(tmp_path / "old"))[0].dead == []


def test_dead_prompts_under_dynamic_sampling_are_not_compared_with_those_without(tmp_path: Path) -> None:
    alone = counted(made_run(tmp_path / "g", "grpo"), {"ada": [4.0], "bob": [8.0]})
    resampled = counted(made_run(tmp_path / "s", "grpo"), {"ada": [9.0], "bob": [9.0]})
    edit_recipe(resampled, lambda recipe: recipe.update(round={"resample": {"max_attempts": 3}}))
    (verdict,) = verdicts_of(alone, resampled)
    mean = "mean per policy and run"
    assert verdict.dead == [Dead("grpo", 6, 6, 6, mean), Dead("grpo resampled", 9, 9, 9, mean)]
    assert any("its number is not to be compared with one without" in caution for caution in verdict.cautions)


def test_baseline_of_dynamic_sampling_is_sampled_once(tmp_path: Path) -> None:
    """The command drops the setting, and turns off that of a recipe file."""
    command = ["mutualrl", "train", "r.yaml", "--set", "round.resample.max_attempts=5"]
    run = made_run(tmp_path / "r", "grpo", command=command)
    edit_recipe(run, lambda recipe: recipe.update(round={"resample": {"max_attempts": 5}}))
    (verdict,) = verdicts_of(run)
    assert verdict.word == "No baseline yet"
    assert "One run does not show what grpo resampled (max_attempts=5) gave" in verdict.answer
    added = ["--set", "round.resample=false", "--run-dir", f"{run}-grpo", "--regime", "grpo"]
    assert shlex.split(verdict.commands[0]) == ["mutualrl", "train", "r.yaml", *added]


def test_baseline_of_a_run_that_waited_for_peers_does_not_wait(tmp_path: Path) -> None:
    """`grpo` refuses the setting."""
    command = ["mutualrl", "train", "r.yaml", "--set", "exchange.staleness=1"]
    run = made_run(tmp_path / "r", "sgt", command=command)
    edit_recipe(run, lambda recipe: recipe.update(exchange={"staleness": 1}))
    (verdict,) = verdicts_of(run)
    added = ["--set", "exchange.staleness=0", "--run-dir", f"{run}-grpo", "--regime", "grpo"]
    assert shlex.split(verdict.commands[0]) == ["mutualrl", "train", "r.yaml", *added]


def test_words_for_one_policy_with_a_source_and_for_a_run_that_was_killed(tmp_path: Path) -> None:
    one = made_run(tmp_path / "g", "grpo", policies=("ada",))
    edit_recipe(one, lambda recipe: recipe.update(sources=[{"name": "book", "recorded": "book.jsonl"}]))
    assert "with a regime that learns from book, and compare" in verdicts_of(one)[0].answer
    killed = made_run(tmp_path / "k", "sgt", finished=False)
    assert verdicts_of(killed)[0].answer == "k has not finished (killed, or on another machine)."


def test_hurt_stands_before_not_decided_and_helped(tmp_path: Path) -> None:
    runs = []
    for seed in range(3):
        for name, gain in (("grpo", 0.2), ("sgt", 0.3 + 0.01 * seed), ("xgrpo", 0.1), ("prp", 0.2 + 0.1 * (seed - 1))):
            runs.append(made_run(tmp_path / f"{name}-{seed}", name, seed=seed, gain=gain))
    found = [(verdict.word, verdict.subject.partition(" ")[0]) for verdict in verdicts_of(*runs)]
    assert found == [("Hurt", "xgrpo"), ("Not decided", "prp"), ("Helped", "sgt")]
    assert all("3 arms are compared" in " ".join(verdict.cautions) for verdict in verdicts_of(*runs))


def test_finished_baseline_without_accuracy_is_not_denied(tmp_path: Path) -> None:
    runs = []
    for name in ("grpo", "sgt"):
        run = made_run(tmp_path / name, name, scripts=True, finished=False)
        for policy in ("ada", "bob"):
            result = PolicyResult(initial_validation=None, validation=None, steps=20)
            write_checksummed(run / "policies" / policy / "result.json", result.to_json(), root=run)
        runs.append(run)
    (verdict,) = verdicts_of(*runs)
    assert verdict.word == "Not measured"
    assert "The finished runs of grpo have no accuracy here" in verdict.answer


def test_repeated_command_has_the_new_seed_only(tmp_path: Path) -> None:
    command = ["mutualrl", "train", "--pool", "tiny", "--set", "run.seed=1", "--set", "run.steps=20"]
    runs = [made_run(tmp_path / name, name, seed=1, command=command) for name in ("grpo", "sgt")]
    (verdict,) = verdicts_of(*runs)
    assert verdict.commands
    for repeated in verdict.commands:
        words = shlex.split(repeated)
        assert "run.seed=1" not in words
        assert "run.steps=20" in words
        assert words[words.index("--seed") + 1] == "2"


def test_run_without_a_recorded_seed_is_paired_with_none(tmp_path: Path) -> None:
    plain, other = made_run(tmp_path / "g"), made_run(tmp_path / "s", "sgt")
    info = read_checksummed(other / "run.json", root=other)
    assert info is not None
    del info["seed"]
    write_checksummed(other / "run.json", info, root=other)
    (verdict,) = verdicts_of(plain, other)
    assert "have no finished runs with a common seed" in verdict.answer


def test_one_model_with_a_source_is_told_to_train_without_it(tmp_path: Path) -> None:
    """A source counts: the run has a baseline to train, whatever kind of source it is."""
    for name, stored in (("book", {"sources": {"book": {"texts": 3}}}), ("t", {"asked_sources": {"t": {}}})):
        run = made_run(tmp_path / name, "sgt", policies=("ada",), **stored)
        (verdict,) = verdicts_of(run)
        assert "nobody to share with" not in verdict.answer
        assert f"One run does not show what {name} gave" in verdict.answer
        assert "mean of the pool" not in verdict.basis
        assert shlex.split(verdict.commands[0])[-2:] == ["--regime", "grpo"]
    alone = made_run(tmp_path / "alone", "grpo", policies=("ada",))
    (verdict,) = verdicts_of(alone)
    assert "ada trained alone: there is nobody to share with, no other policy and no source" in verdict.answer
    unread = made_run(tmp_path / "unread", "grpo", policies=("ada",))
    edit_recipe(unread, lambda recipe: recipe.update(sources=[{"name": "book", "recorded": "tiny:book"}]))
    (verdict,) = verdicts_of(unread)
    assert "This is a baseline" in verdict.answer


def test_more_seeds_are_no_advice_for_a_few_held_out_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = made_runs.validation
    monkeypatch.setattr(made_runs, "validation", lambda accuracy: {**whole(accuracy), "n": 5})
    runs = [made_run(tmp_path / name, name, gain=gain) for name, gain in (("grpo", 0.1), ("sgt", 0.2))]
    (verdict,) = verdicts_of(*runs)
    assert any("5 held-out prompts will hardly decide anything" in caution for caution in verdict.cautions)
    assert not any("More seeds" in caution for caution in verdict.cautions)
    assert not verdict.commands


def test_no_command_writes_into_the_directory_of_a_sweep(tmp_path: Path) -> None:
    pieces = tmp_path / "sweep" / "pieces" / "tiny"
    runs = [made_run(pieces / f"{name}-0", name, gain=gain) for name, gain in (("grpo", 0.1), ("sgt", 0.2))]
    assert verdicts_of(*runs)[0].commands
    (tmp_path / "sweep" / "sweep.json").write_text("{}")
    assert [*verdicts_of(*runs)[0].commands, *verdicts_of(runs[1])[0].commands] == []
