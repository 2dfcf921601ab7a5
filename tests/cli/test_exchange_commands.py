"""`mutualrl exchange` over a run's files, written without training."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pyarrow.parquet as pq
import pytest

from conftest import Cli
from mutualrl.recipes import Request, dump, resolve
from mutualrl.records import Rollout
from mutualrl.see import Exchange
from mutualrl.storage.artifacts import file_sum
from mutualrl.storage.checkpoints import CheckpointMarker, Checkpoints
from mutualrl.storage.files import write_checksummed
from mutualrl.trajectory import Message, ToolCall, Trajectory

NAMES = ("ada", "bob")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run with eight rounds of two policies; ada has checkpoints after 2 and 6 of them, bob after 4 and 8."""
    root = tmp_path / "r"
    root.mkdir()
    recipe = dump(resolve(Request(regime="sgt")))
    write_checksummed(root / "run.json", {"format": 1, "run_id": "x", "recipe": recipe}, root=root)
    (root / "recipe.yaml").write_text(recipe)
    for name in NAMES:
        for round_index in range(8):
            rows = [
                Rollout(
                    f"p{round_index}",
                    n,
                    float(n),
                    True,
                    trajectory=Trajectory.of_stored("\x1b[31mtext\u2028" if n else None, None),
                )
                for n in (0, 1)
            ]
            rows += [Rollout(f"p{round_index}", 2, float("nan"), False)]
            Exchange(root / "exchange", name, "x").publish(round_index, rows, round_index)
        store = Checkpoints(root / "policies" / name)
        for cursor in (2, 6) if name == "ada" else (4, 8):
            weights = store.staged(cursor) / "w"
            weights.parent.mkdir(parents=True)
            weights.write_bytes(b"w")
            store.commit(CheckpointMarker("x", name, cursor, cursor, 0, 1, {"w": file_sum(weights)}))
    return root


def test_ls_counts_rounds_and_rows(cli: Cli, run: Path) -> None:
    result = cli("exchange", "ls", run, "--json")
    assert result.returncode == 0, result.stderr
    policies = {p["policy"]: p for p in json.loads(result.stdout)["policies"]}
    assert {name: (p["rounds"], p["rows"], p["gaps"]) for name, p in policies.items()} == {
        n: (8, 24, []) for n in NAMES
    }
    size = sum(p.stat().st_size for p in (run / "exchange" / "ada").glob("*.parquet"))
    assert policies["ada"]["bytes"] == size


def test_show_prints_texts_and_turns_cleaned_and_cut(cli: Cli, run: Path) -> None:
    turns = [
        Message("assistant", "", tool_calls=(ToolCall("search", {"query": "a\u202eb"}),), sampled=True),
        Message("tool", "\x1b[31mred " + "long " * 4_000, name="search"),
        Message("assistant", "\\boxed{4}", sampled=True),
    ]
    row = Rollout("p8", 0, 1.0, True, trajectory=Trajectory.of_stored("\\boxed{4}", Trajectory.of_run(turns).stored))
    Exchange(run / "exchange", "bob", "x").publish(8, [Rollout("p8", 1, 0.0, True), row], 8)
    result = cli("exchange", "show", run)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "ada, round 7, p7, rollout 1: reward 1"
    assert "ada, round 7, p7, rollout 2: no reward" in lines
    assert "bob, round 8, p8, rollout 0: reward 1" in lines  # the one with a text comes first
    assert '  [assistant] -> search {"query": "a\ufffdb"}' in lines
    (found,) = [line for line in lines if line.startswith("  [tool search] ")]
    assert found.endswith("more characters]")
    assert len(found) < 5_000
    assert "\x1b" not in result.stdout
    shown = json.loads(cli("exchange", "show", run, "--policy", "bob", "--round", "8", "--json").stdout)["rollouts"]
    assert [(each["rollout"], "turns" in each) for each in shown] == [(0, True), (1, False)]
    assert shown[0]["turns"][1]["content"] == turns[1].text  # whole, for a program
    only = json.loads(cli("exchange", "show", run, "--prompt", "p9", "--json").stdout)
    assert only == {"rollouts": []}
    absent = cli("exchange", "show", run, "--round", "8")
    assert "ada has no round 8" in absent.stderr
    wrong = cli("exchange", "show", run, "--policy", "eve")
    assert wrong.returncode == 2
    assert "no such policy in the exchange; expected one of: ada, bob" in wrong.stderr


def test_damage_is_named_with_exit_code_6(cli: Cli, run: Path) -> None:
    shard = run / "exchange" / "bob" / "000005.parquet"
    shard.write_bytes(shard.read_bytes()[:-1])
    (run / "exchange" / "ada" / "000003.json").unlink()
    (run / "policies" / "ada" / "checkpoints" / "step-000006" / "w").write_bytes(b"v")
    result = cli("runs", "verify", run, "--json")
    assert result.returncode == 6
    lines = json.loads(result.stdout)["damaged"]
    for message in (str(shard), "policy ada: round 3 is missing between others", "step-000006/w: sha256"):
        assert any(message in line for line in lines), lines
    result = cli("exchange", "export", run, "--out", "all.parquet")
    assert result.returncode == 6
    assert str(shard) in result.stderr
    assert not list(run.parent.glob("all*"))
    assert not list(run.parent.glob(".all*"))


def test_export_reports_missing_rounds(cli: Cli, run: Path, tmp_path: Path) -> None:
    for policy, number in (("ada", 0), ("bob", 2)):
        (run / "exchange" / policy / f"{number:06d}.json").unlink()
    result = cli("exchange", "export", run, "--out", tmp_path / "all.jsonl", "--json")
    assert result.returncode == 0, result.stderr
    notes = json.loads(result.stdout)["notes"]
    assert "policy ada: rounds before 1 are missing (pruned, or lost)" in notes
    assert any(
        note.startswith("policy bob: 1 published round(s)") and note.endswith("missing (2)") for note in notes
    ), notes
    assert "Note: policy bob" in result.stderr


def test_exported_files_load_with_datasets(cli: Cli, run: Path, tmp_path: Path) -> None:
    for name, kind in (("all.parquet", "parquet"), ("all.jsonl", "json")):
        result = cli("exchange", "export", run, "--out", tmp_path / name, "--json")
        assert result.returncode == 0, result.stderr
        assert json.loads(result.stdout)["records"] == 48
        rows = datasets.load_dataset(kind, data_files=str(tmp_path / name), cache_dir=str(tmp_path / "cache"))["train"]
        assert len(rows) == 48
        assert rows[0]["policy"] == "ada"
        assert [r["y_text"] for r in rows][:3] == [None, "\x1b[31mtext\u2028", None]
    one = cli("exchange", "export", run, "--out", tmp_path / "one.parquet", "--policy", "bob")
    assert one.returncode == 0
    assert set(pq.read_table(tmp_path / "one.parquet").column("policy").to_pylist()) == {"bob"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--out", "all.csv"), "expected a file name ending in .parquet or .jsonl"),
        (("--out", "there.parquet"), "the file already exists"),
        (("--out", "no/where.parquet"), "no directory"),
        (("--out", "x.parquet", "--policy", "eve"), "no such policy in the exchange; expected one of: ada, bob"),
    ],
)
def test_invalid_exports_are_rejected(
    cli: Cli, run: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    (tmp_path / "there.parquet").write_bytes(b"mine")
    result = cli("exchange", "export", run, *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert (tmp_path / "there.parquet").read_bytes() == b"mine"


def test_gc_frees_rounds_that_every_kept_checkpoint_has_passed(cli: Cli, run: Path) -> None:
    before = cli("exchange", "gc", run, "--dry-run", "--json")
    plan = json.loads(before.stdout)
    assert plan["needed_from"] == 2
    assert {name: entry["rounds"] for name, entry in plan["deleted"].items()} == {"ada": 2, "bob": 2}
    assert len(list((run / "exchange" / "ada").glob("*.json"))) == 8
    result = cli("exchange", "gc", run, "--json")
    assert {**json.loads(result.stdout), "dry_run": True} == plan
    assert sorted(p.name for p in (run / "exchange" / "bob").glob("*.json"))[0] == "000002.json"
    assert cli("runs", "verify", run).returncode == 0
    Checkpoints(run / "policies" / "ada").prune(1)
    assert (
        json.loads(cli("exchange", "gc", run, "--keep-rounds", "7", "--json").stdout)["deleted"]["ada"]["rounds"] == 0
    )
    assert json.loads(cli("exchange", "gc", run, "--json").stdout)["needed_from"] == 4
    (run / "exchange" / "ada" / "000006.json").unlink()
    assert cli("runs", "verify", run).returncode == 6
