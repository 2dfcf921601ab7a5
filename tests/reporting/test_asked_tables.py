"""Sources that were asked, on the page of a run: their table and notes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conftest import Cli
from made_runs import edit_recipe, made_run
from mutualrl.reporting import report_tables
from mutualrl.runs.logs import read_runs
from mutualrl.see import open_store
from mutualrl.sources.answers import write_account
from mutualrl.storage.accounts import Account

TOOK = "Waiting for source teacher alone took 20% of ada's time and 20% of bob's time"


def asked_run(root: Path, *, cut_off: int = 0, wait_seconds: float = 0.0, rescues: int = 1) -> Path:
    """Write a run of 20 steps whose policies asked a source: per step, 2 prompts, 4 answers of 30 + 10 tokens."""
    run = made_run(root, "sgt", asked_sources={"teacher": {"kind": "served"}})
    edit_recipe(run, lambda recipe: recipe.update(exchange={"staleness": 0}))
    step = {"prompts": 2, "questions": 4, "asked_again": 0, "failed": 1, "cut_off": cut_off, "left_out": 0}
    step |= {"prompt_tokens": 120, "completion_tokens": 40}
    store = open_store(run / "exchange")
    for number in range(20):
        write_account(store, "teacher", number, Account(**step, reasons={"status 500: it is broken": 1}))
    step |= {"confirmed": 3, "rescues": rescues}
    for name in ("ada", "bob"):
        path = run / "policies" / name / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            row |= {f"source/teacher/{key}": value for key, value in step.items()}
            row |= {"source/teacher/wait_seconds": wait_seconds, "completions/mean_length": 10.0}
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def test_the_table_has_the_sums_of_a_run(tmp_path: Path) -> None:
    (run,) = read_runs([asked_run(tmp_path / "r", wait_seconds=0.1)])
    table = report_tables.asked_sources(run)
    (row,) = table.rows
    values = dict(zip(table.head, row, strict=True))
    assert values["source"] == "teacher"
    assert [values[name] for name in ("prompts", "questions sent", "failed", "confirmed")] == ["40", "80", "20", "60"]
    assert (values["tokens asked"], values["tokens returned"]) == ("2,400", "800")
    # two policies, 20 steps, 8 prompts x 4 rollouts x 10 tokens
    assert values["of the policies' tokens"] == f"{3200 / (2 * 20 * 32 * 10):.1%}"
    assert (values["texts taught"], values["tokens per text taught"]) == ("40", "80")
    assert values["waited for it"] == "ada 20%, bob 20%"  # 2 s of 10 s
    assert report_tables.asked_sources(*read_runs([made_run(tmp_path / "none")])).rows == []


@pytest.mark.parametrize(
    ("cut_off", "wait_seconds", "said"),
    [(0, 0.0, ()), (2, 0.0, ()), (3, 0.0, ("60 of 80 answers",)), (0, 0.1, (TOOK,)), (4, 0.1, ("80 of", TOOK))],
)
def test_notes_name_the_setting_that_helps(
    cli: Cli, tmp_path: Path, cut_off: int, wait_seconds: float, said: tuple[str, ...]
) -> None:
    run = asked_run(tmp_path / "r", cut_off=cut_off, wait_seconds=wait_seconds)
    result = cli("report", run, "--json", "--out", tmp_path / "page")
    assert result.returncode == 0, result.stderr
    silent, *notes = [note for note in json.loads(result.stdout)["notes"] if "source teacher" in note]
    assert silent == "source teacher: 20 of its 80 questions have no answer (status 500: it is broken)"
    assert len(notes) == len(said)
    for note, words in zip(notes, said, strict=True):
        assert words in note
        assert ("sources.teacher.max_tokens" if "cut off" in note else "exchange.staleness: 1") in note
