"""What is said, or refused, before anything is trained: settings that libraries check in the workers, held-out rows, and
a result that cannot be decided."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conftest import Cli
from mutualrl.tasks import TaskSource, get_task


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        (
            "trainer.reward_weights=[1.0, 2.0]",
            "trainer.reward_weights: found 2 weights, expected one per reward function",
        ),
        ("lora={r: 4, target_modules: [qq_proj]}", "lora.target_modules of 'ada': no layer 'qq_proj' in tiny:ada"),
        ("trainer.lr_scheduler_type=cosine_with_min_lr", "trainer.lr_scheduler_kwargs of 'ada': cosine_with_min_lr"),
        ("trainer.lr_scheduler_kwargs={num_cycles: 1, oops: 2}", "trainer.lr_scheduler_kwargs of 'ada'"),
    ],
)
@pytest.mark.parametrize("dry", [True, False])
def test_what_libraries_refuse_is_refused_before_a_model_is_loaded(
    cli_here: Cli, tmp_path: Path, setting: str, key: str, dry: bool
) -> None:
    command = ["train", "--regime", "grpo", "--pool", "tiny", "--run-dir", tmp_path / "r", "--set", setting]
    result = cli_here(*command, *(["--dry-run"] if dry else []))
    assert (result.returncode, key in result.stderr) == (2, True), result.stderr
    assert not (tmp_path / "r").exists()


def test_a_dry_run_names_every_problem_and_a_start_the_first(cli_here: Cli, tmp_path: Path) -> None:
    few = rows(tmp_path / "rows.jsonl", 8, "Is it {}?")
    settings = ("--set", "lora={r: 4, target_modules: [qq_proj]}", "--set", "round.prompts=128")
    command = ("train", "--regime", "grpo", "--pool", "tiny", "--task", "dataset", "--data", few, *settings)
    start, dry, as_json = cli_here(*command), cli_here(*command, "--dry-run"), cli_here(*command, "--dry-run", "--json")
    assert [result.returncode for result in (start, dry, as_json)] == [2, 2, 2]
    assert start.stderr == dry.stderr
    assert "128" in start.stderr
    assert "Also refused: " in dry.stdout
    assert "no layer 'qq_proj'" in dry.stdout
    assert "qq_proj" not in start.stderr + start.stdout
    assert json.loads(as_json.stdout)["error"]["message"] in start.stderr  # the object is the error


def rows(path: Path, count: int, *forms: str) -> Path:
    lines = [json.dumps({"prompt": form.format(i), "answer": str(i)}) for i in range(count) for form in forms]
    path.write_text("\n".join(lines) + "\n")
    return path


def dry_run(data: Path) -> tuple[str | Path, ...]:
    options = ("--regime", "grpo", "--pool", "tiny", "--task", "dataset")
    return ("train", *options, "--data", data, "--dry-run", "--json")


def test_held_out_rows_are_disjoint_up_to_white_space(tmp_path: Path) -> None:
    path = rows(tmp_path / "rows.jsonl", 200, "Is it {}?", "Is  it {}?", " Is it {}?\r\n")
    read = [get_task("dataset").read(split, TaskSource(data=path)).prompts for split in ("train", "validation")]
    train, held = ({" ".join(prompt.text.split()) for prompt in prompts} for prompts in read)
    assert held and not train & held
    assert sum(map(len, read)) == 600


def test_fraction_held_out_is_the_users(cli_here: Cli, tmp_path: Path) -> None:
    data = rows(tmp_path / "rows.jsonl", 400, "Is it {}?")
    command = dry_run(data)
    sizes = []
    for fraction in ("true", "0.25", "0.5"):
        plan = json.loads(cli_here(*command, "--set", f"task.hold_out={fraction}").stdout)
        sizes.append(plan["data"]["validation"]["prompts"])
        assert plan["data"]["train"]["prompts"] == 400 - sizes[-1]
    assert 10 < sizes[0] < 45
    assert sizes[1:] == [100, 200]
    refused = cli_here(*command[:-1], "--set", "task.hold_out=1.5")
    assert (refused.returncode, "a fraction between 0 and 1" in refused.stderr) == (2, True)


def test_a_result_that_cannot_be_decided_is_said_with_what_to_do(cli_here: Cli, tmp_path: Path) -> None:
    data, other = rows(tmp_path / "rows.jsonl", 160, "Is it {}?"), rows(tmp_path / "other.jsonl", 20, "Is it {} now?")
    command, small = dry_run(data), rows(tmp_path / "small.jsonl", 40, "Is it {}?")

    def few(*sets: str) -> list[str]:
        options = [part for each in sets for part in ("--set", each)]
        notes = json.loads(cli_here(*command, *options).stdout)["notes"]
        return [note for note in notes if "will hardly decide anything" in note]

    assert "hold 30 of the 160 rows out (--set task.hold_out=0.19)" in few()[0]
    assert few("task.hold_out=0.19") == []
    assert "hold 30 of the 160 rows out (--set task.hold_out=0.19)" in few("task.hold_out=0.1")[0]
    assert "the data have 40 rows, too few to hold 30 of them out: give others" in few(f"task.data={small}")[0]
    assert "give more (--set task.validation_data=FILE)" in few(f"task.validation_data={other}")[0]
    (limited,) = few("task.hold_out=0.4", "run.validation_limit=5")
    assert "5 held-out prompts" in limited and "raise run.validation_limit" in limited


def test_validation_prompts_that_are_trained_on_are_counted(cli_here: Cli, tmp_path: Path) -> None:
    data, same = rows(tmp_path / "rows.jsonl", 64, "Is it {}?"), rows(tmp_path / "same.jsonl", 40, "Is  it {}? ")
    options = ("--task", "dataset", "--data", data, "--set", f"task.validation_data={same}", "--dry-run", "--json")
    notes = json.loads(cli_here("train", "--regime", "grpo", "--pool", "tiny", *options).stdout)["notes"]
    assert "40 of 40 validation prompts are training prompts, too (the same text)" in notes


def test_a_frozen_model_is_found_beside_its_recipe(cli_here: Cli, tmp_path: Path, tiny: dict[str, Path]) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "checkpoint").symlink_to(tiny["bob"])
    (tmp_path / "recipes" / "r.yaml").write_text(
        "policies: [{name: a, model: 'tiny:ada'}]\nsources: [{name: old, frozen: ../checkpoint}]\n"
        "regime: {name: sgt}\nround: {prompts: 8}\ntrainer: {num_generations: 4, per_device_train_batch_size: 32}\n"
    )
    result = cli_here("train", "recipes/r.yaml", "--dry-run", "--json")
    assert result.returncode == 0, result.stderr
    (source,) = json.loads(result.stdout)["recipe"]["sources"]
    assert source["frozen"] == str(tiny["bob"].resolve())


def test_a_link_to_itself_is_named(cli_here: Cli, tmp_path: Path) -> None:
    loop = tmp_path / "loop.jsonl"
    loop.symlink_to(loop)
    for command in (
        ("train", "--regime", "grpo", "--pool", "tiny", "--task", "dataset", "--data", loop, "--dry-run"),
        ("report", loop),
        ("eval", "--score", loop),
        ("complementarity", "--rollouts", loop),
    ):
        result = cli_here(*command)
        assert (result.returncode, "symbolic links" in result.stderr) == (2, True), result.stderr


def test_an_url_with_an_impossible_port_is_refused(cli_here: Cli) -> None:
    source = ("--model", "tiny:ada", "--source", "t=served:http://127.0.0.1:99999/v1")
    result = cli_here("train", "--regime", "sgt", *source, "--dry-run")
    assert (result.returncode, "Port out of range" in result.stderr) == (2, True)


def test_a_row_larger_than_memory_would_bear_is_refused(
    cli_here: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mutualrl.tasks.files.LONGEST_LINE", 1000)
    for name, text in (("rows.jsonl", json.dumps({"prompt": "x" * 2000, "answer": "1"})), ("rows.csv", "a" * 2000)):
        (tmp_path / name).write_text(text + "\n")
        options = ("--task", "dataset", "--data", tmp_path / name, "--dry-run")
        result = cli_here("train", "--regime", "grpo", "--pool", "tiny", *options)
        assert (result.returncode, "line 1: over 1,000 bytes" in result.stderr) == (2, True), result.stderr


def test_late_rounds_are_advised_to_regimes_that_can_use_them(cli_here: Cli) -> None:
    """With the words of `regimes show`, and of what is refused."""
    for regime, late in (("sgt", True), ("xgrpo", False)):
        result = cli_here("train", "--regime", regime, "--pool", "tiny", "--dry-run")
        assert "A round waits for each policy of the pool" in result.stdout
        assert ("what other values would have saved" in result.stdout) is late
        refused = cli_here("train", "--regime", regime, "--pool", "tiny", "--dry-run", "--set", "exchange.staleness=1")
        assert (refused.returncode == 0) is late
    shown = cli_here("regimes", "show", "chord").stdout
    assert "Learns from sources, only: recorded texts" in shown
    assert "Peers" not in shown
    late = ("--pool", "tiny-recorded", "--dry-run", "--set", "exchange.staleness=1")
    assert "needs the sources' texts within the round" in cli_here("train", "--regime", "chord", *late).stderr
