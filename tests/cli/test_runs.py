"""`mutualrl runs`, the final output of `train`, trackers, and uploads to the hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from conftest import PATIENCE, Cli
from made_runs import add_model, edit_recipe, made_run, validation
from mutualrl.reporting.card import write_cards
from mutualrl.runs.read import read_run
from mutualrl.storage.rundir import RunDirectory, hold

TRAIN = (
    "train",
    "--regime",
    "sgt",
    "--pool",
    "tiny",
    "--steps",
    "2",
    "--run-dir",
    "r",
    "--set",
    "run.validate_every=1",
    "--set",
    "run.validation_limit=8",
    "--set",
    "round.prompts=8",
    "--set",
    "trainer.per_device_train_batch_size=32",
)


@pytest.mark.extended
@pytest.mark.slow
def test_train_writes_cards_a_report_and_tracked_metrics(cli: Cli, tiny: dict[str, Path], tmp_path: Path) -> None:
    result = cli(*TRAIN, "--report", "--report-to", "tensorboard")
    assert result.returncode == 0, result.stderr
    page = tmp_path / "r" / "report" / "index.html"
    assert f"Report: {page}" in result.stderr
    assert "What was rescued?" in page.read_text()
    for name in ("ada", "bob"):
        card = (tmp_path / "r" / "policies" / name / "model" / "README.md").read_text()
        assert yaml.safe_load(card.split("---")[1])["tags"][-1] == "sgt"
        assert "train --regime sgt --pool tiny" in card
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "r" / "policies" / "ada" / "tensorboard"))
    events.Reload()
    rows = [
        json.loads(line) for line in (tmp_path / "r" / "policies" / "ada" / "metrics.jsonl").read_text().splitlines()
    ]
    for tag, key in (
        ("train/reward", "reward"),
        ("train/sgt/gate_rate", "sgt/gate_rate"),
        ("train/entropy", "entropy"),
    ):
        assert [e.value for e in events.Scalars(tag)] == pytest.approx(
            [row[key] for row in rows if key in row], rel=1e-6
        )
    (validated,) = events.Scalars("train/validation/accuracy")
    assert validated.value == pytest.approx(rows[0]["validation"]["accuracy"])
    assert not list((tmp_path / "r").rglob("*.pkl"))
    again = cli(*TRAIN, "--clean", "--no-report")
    assert again.returncode == 0, again.stderr
    assert not page.exists()
    assert f"mutualrl report {tmp_path / 'r'}" in again.stderr


@pytest.mark.extended
@pytest.mark.parametrize("tracker", ["trackio", "wandb"])
def test_other_trackers_receive_metrics(cli: Cli, tiny: dict[str, Path], tmp_path: Path, tracker: str) -> None:
    if find_spec(tracker) is None:
        pytest.skip(f"{tracker} is not installed")
    result = cli(*TRAIN, "--report-to", tracker, WANDB_MODE="offline", TRACKIO_DIR=str(tmp_path / "trackio"))
    assert result.returncode == 0, result.stderr
    tracker_dir = tmp_path / "trackio" if tracker == "trackio" else tmp_path / "r" / "policies" / "bob" / "wandb"
    assert sum(path.stat().st_size for path in tracker_dir.rglob("*") if path.is_file()) > 1000


def test_trackers_are_checked_before_training(cli_here: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    result = cli_here("train", "--report-to", "mlflow", "--dry-run")
    assert result.returncode == 2
    assert "'trackio', 'wandb' or 'tensorboard'" in result.stderr
    from mutualrl.machine import requirements

    monkeypatch.setattr(requirements, "find_spec", lambda name: None)
    result = cli_here("train", "--report-to", "wandb")
    assert result.returncode == 4
    assert "pip install wandb" in result.stderr
    result = cli_here("train", "--set", "trainer.report_to=wandb", "--dry-run")
    assert "run.report_to (--report-to)" in result.stderr


def test_runs_are_listed_in_every_state(cli_here: Cli, tmp_path: Path) -> None:
    made_run(tmp_path / "runs" / "done", "sgt", created="2026-01-02T00:00:00Z")
    live = made_run(tmp_path / "runs" / "live", finished=False, created="2026-01-03T00:00:00Z")
    (tmp_path / "runs" / "other").mkdir()
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / "run.json").write_text("{")
    with ExitStack() as stack:
        stack.enter_context(hold(RunDirectory(live).lock, "live"))
        listing = json.loads(cli_here("runs", "ls", "--json").stdout)
    assert [(Path(run["run"]).name, run["state"]) for run in listing["runs"]] == [
        ("live", "running"),
        ("done", "finished"),
    ]
    assert listing["runs"][1]["policies"]["bob"] == {"step": 20, "before": 0.3, "last": 0.52}
    assert listing["runs"][0]["policies"]["ada"] == {"step": 20, "before": 0.3, "last": 0.45}
    assert len(listing["unreadable"]) == 1
    metrics = live / "policies" / "ada" / "metrics.jsonl"
    row = {"step": 21, "validation": {**validation(0.0), "by_group": {}}}
    metrics.write_text(metrics.read_text() + json.dumps(row) + "\n")
    (run,) = json.loads(cli_here("runs", "ls", live, "--json").stdout)["runs"]
    assert run["policies"]["ada"] == {"step": 21, "before": 0.3, "last": 0.0}
    shown = cli_here("runs", "ls", "runs")
    assert "0.30 -> 0.50" in shown.stdout
    assert "run.json: not JSON" in shown.stderr
    result = cli_here("runs", "ls", "nowhere")
    assert (result.returncode, "no directory nowhere" in result.stderr) == (2, True)
    for command in (("report", "runs/grpo"), ("compare", "runs/grpo"), ("watch", "runs/grpo")):
        result = cli_here(*command)
        assert result.returncode == 2
        assert "it does not exist; `mutualrl train --run-dir " in result.stderr


def test_watch_ends_with_the_run(cli_here: Cli, tmp_path: Path) -> None:
    run = made_run(tmp_path / "r", "sgt")
    result = cli_here("watch", run)
    assert result.returncode == 0
    assert "dead prompts" in result.stdout
    assert json.loads(cli_here("watch", run, "--json").stdout)["state"] == "finished"
    ended = made_run(tmp_path / "e", finished=False)
    result = cli_here("watch", ended)
    assert (result.returncode, "is ended" in result.stderr) == (1, True)
    assert cli_here("watch", tmp_path).returncode == 2
    (run / "summary.json").write_text("{}")
    result = cli_here("watch", run)
    assert (result.returncode, "summary.json is left out: its bytes do not match its checksum" in result.stderr) == (
        1,
        True,
    )


def test_run_succeeds_if_its_report_cannot_be_written(
    cli_here: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = made_run(tmp_path / "r", "sgt")
    pushed: list[Path] = []

    def raise_disk_full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    summary = read_run(run).summary
    monkeypatch.setattr("mutualrl.launch.supervisor.train", lambda *a: (RunDirectory(run), summary))
    monkeypatch.setattr("mutualrl.cli.report.page_of", raise_disk_full)
    monkeypatch.setattr("mutualrl.reporting.upload.require_hub", lambda owner: None)
    monkeypatch.setattr("mutualrl.cli.run.push", lambda root, owner: pushed.append(root) or [])
    result = cli_here("train", "--report", "--push-to-hub", "someone", "--json")
    assert result.returncode == 0
    assert json.loads(result.stdout)["seconds"] == 12.5
    assert "The report could not be written" in result.stderr
    assert pushed == [run]


def test_live_run_is_watched_until_its_lock_is_released(tmp_path: Path) -> None:
    run = made_run(tmp_path / "r", finished=False)
    environment: dict[str, Any] = {**os.environ, "COLUMNS": "200"}
    with ExitStack() as stack:
        stack.enter_context(hold(RunDirectory(run).lock, "live"))
        watcher = subprocess.Popen(
            [sys.executable, "-m", "mutualrl", "watch", str(run)],
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        with pytest.raises(subprocess.TimeoutExpired):
            watcher.wait(4)
        finished = made_run(tmp_path / "f")
        (finished / "summary.json").rename(run / "summary.json")
    shown, errors = watcher.communicate(timeout=PATIENCE)
    assert watcher.returncode == 0, errors
    assert "0.30 -> 0.50" in shown


def test_model_card_describes_the_training_and_escapes_text(tmp_path: Path) -> None:
    hostile = "`x`\n---\n# Not a head | <script>"
    run = made_run(tmp_path / "r", "sgt", pool=hostile, command=["mutualrl", "train", hostile])
    edit_recipe(run, lambda recipe: recipe["policies"][0].update(model="Qwen/Qwen3-0.6B-Base"))
    model = add_model(run, "ada")
    assert write_cards(run) == [model / "README.md"]  # bob has no model
    card = (model / "README.md").read_text()
    head = yaml.safe_load(card.split("---\n")[1])
    assert head["base_model"] == "Qwen/Qwen3-0.6B-Base"
    assert head["library_name"] == "transformers"
    assert "| all | 0.3000 | 0.5000 |" in card
    assert "| * | 0.2000 | 0.4000 |" in card
    assert "| learning_rate | 0.0005 |" in card
    assert "mutualrl 0.1.0" in card
    assert "Xiaoze Liu and Dhananjay Ram" in card
    assert card.count("\n---\n") == 1
    assert not [line for line in card.splitlines() if line.startswith("# Not")]


def test_hub_access_is_checked_before_training(cli_here: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    result = cli_here("train", "--push-to-hub", "someone", "--steps", "1")
    assert (result.returncode, "the hub cannot be used" in result.stderr) == (4, True)
    from mutualrl.reporting import upload

    result = cli_here("train", "--push-to-hub", "some/one", "--steps", "1")
    assert (result.returncode, "expected a user or organisation" in result.stderr) == (2, True)
    monkeypatch.setattr(upload, "hub_problem", lambda: None)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    result = cli_here("train", "--push-to-hub", "someone", "--steps", "1")
    assert (result.returncode, "hf auth login" in result.stderr) == (4, True)


def test_models_are_pushed_to_the_hub_with_their_cards(
    cli_here: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = made_run(tmp_path / "my run", "sgt")
    for name in ("ada", "bob"):
        add_model(run, name)
    calls: list[tuple[Any, ...]] = []

    class Hub:
        def create_repo(self, repo: str, **options: Any) -> None:
            calls.append(("create", repo, options))

        def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> None:
            assert (folder_path / "README.md").is_file()
            calls.append(("upload", repo_id, folder_path.parent.name))

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_x")
    monkeypatch.setattr("mutualrl.reporting.upload.hub_problem", lambda: None)
    result = cli_here("runs", "push", run, "someone", "--json")
    assert json.loads(result.stdout) == {"pushed": ["someone/my-run-ada", "someone/my-run-bob"]}
    assert calls[0] == ("create", "someone/my-run-ada", {"private": True, "exist_ok": True})
    assert [call[1:] for call in calls if call[0] == "upload"] == [
        ("someone/my-run-ada", "ada"),
        ("someone/my-run-bob", "bob"),
    ]
    from huggingface_hub.utils import validate_repo_id

    from mutualrl.reporting.upload import repository_name

    for run_name in ("lr--1e5", "a..b", "x" * 200, "-odd name.", "\u00e9\u00e9"):
        names = {repository_name(run_name, policy) for policy in ("ada", "bob")}
        assert len(names) == 2
        for name in names:
            validate_repo_id(f"someone/{name}")
    empty = made_run(tmp_path / "empty")
    assert cli_here("runs", "push", empty, "someone").returncode == 2
    calls.clear()
    (run / "policies" / "bob" / "model" / "config.json").write_text("{ }")
    result = cli_here("runs", "push", run, "someone")
    assert (result.returncode, "model/config.json: 3 bytes, expected 2" in result.stderr) == (6, True)
    assert calls == []  # nor ada's


def test_a_run_that_lost_its_run_json_is_named_not_passed_over(cli_here: Cli, tmp_path: Path) -> None:
    made_run(tmp_path / "runs" / "a", "sgt")
    (made_run(tmp_path / "runs" / "b", "sgt") / "run.json").unlink()
    (tmp_path / "runs" / "notes").mkdir()
    listing = json.loads(cli_here("runs", "ls", "--json").stdout)
    assert [Path(run["run"]).name for run in listing["runs"]] == ["a"]
    (line,) = listing["unreadable"]
    assert "runs/b" in line
    assert "run.json" in line
    shown = cli_here("runs", "ls", "runs/b")
    assert "run.json" in shown.stderr


def test_of_two_scripts_the_dead_one_is_named(cli_here: Cli, tmp_path: Path) -> None:
    run = made_run(tmp_path / "r", "sgt", finished=False, scripts=True)
    with hold(RunDirectory(run).policy("ada").lock, "ada"):
        (row,) = json.loads(cli_here("runs", "ls", tmp_path, "--json").stdout)["runs"]
        assert row["state"] == "running"
        assert "the script of bob is not running, and has not finished" in row["notes"]
        assert "bob is not running" in " ".join(cli_here("runs", "ls", tmp_path).stderr.split())
