"""Exported models: whole, checked, with what their base demands."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from conftest import Cli
from made_runs import add_model, edit_recipe, made_run
from mutualrl.reporting.export import license_files
from runs import FinishedRun


def run_with_models(root: Path, base: Path) -> Path:
    run = made_run(root, "sgt")

    def change(recipe: dict[str, Any]) -> None:
        recipe["policies"] = [{"name": name, "model": str(base)} for name in ("ada", "bob")]

    edit_recipe(run, change)
    for name in ("ada", "bob"):
        add_model(run, name)
    return run


@pytest.fixture
def base(tmp_path: Path, tiny: dict[str, Path]) -> Path:
    """Return a base model with a licence and a notice."""
    path = tmp_path / "base"
    shutil.copytree(tiny["ada"], path)
    (path / "LICENSE").write_text("as you please")
    (path / "NOTICE.txt").write_text("made by somebody")
    return path


def test_a_model_goes_with_its_card_the_licence_of_its_base_and_checksums(
    cli_here: Cli, tmp_path: Path, base: Path
) -> None:
    run = run_with_models(tmp_path / "r", base)
    done = cli_here("export", run, "--to", "out", "--json")
    rows = json.loads(done.stdout)["exported"]
    assert [(row["policy"], row["licenses"]) for row in rows] == [
        (n, ["LICENSE", "NOTICE.txt"]) for n in ("ada", "bob")
    ]
    out = tmp_path / "out" / "ada"
    assert sorted(path.name for path in out.iterdir()) == sorted(rows[0]["files"])
    assert (out / "README.md").read_text().startswith("---\nlibrary_name: transformers")
    assert subprocess.run(["sha256sum", "-c", "--strict", "SHA256SUMS"], cwd=out, capture_output=True).returncode == 0
    (out / "config.json").write_text("{ }")
    assert subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=out, capture_output=True).returncode == 1


def test_one_policy_alone_and_nothing_over_what_is_there(cli_here: Cli, tmp_path: Path, base: Path) -> None:
    run = run_with_models(tmp_path / "r", base)
    assert cli_here("export", run, "--to", "out", "--policy", "bob").returncode == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["bob"]
    (tmp_path / "out" / "bob" / "mine").write_text("")
    again = cli_here("export", run, "--to", "out")
    assert again.returncode == 2
    assert "bob already exists" in " ".join(again.stderr.split())
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["bob"]
    assert (tmp_path / "out" / "bob" / "mine").exists()
    assert "the run has ada, bob" in " ".join(cli_here("export", run, "--to", "x", "--policy", "cyd").stderr.split())


def test_a_changed_model_and_a_run_without_models_are_refused(cli_here: Cli, tmp_path: Path, base: Path) -> None:
    run = run_with_models(tmp_path / "r", base)
    (run / "policies" / "bob" / "model" / "config.json").write_text("{} ")
    assert cli_here("export", run, "--to", "out").returncode == 6
    assert not (tmp_path / "out").exists()
    none = made_run(tmp_path / "none", "sgt", finished=False)
    refused = cli_here("export", none, "--to", "out")
    assert (refused.returncode, "has no trained model to export" in refused.stderr) == (2, True)


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_link_or_a_pipe_among_a_model_s_files_is_refused(
    cli_here: Cli, tmp_path: Path, base: Path, kind: str
) -> None:
    run = run_with_models(tmp_path / "r", base)
    (tmp_path / "secret").write_text("mine")
    odd = run / "policies" / "bob" / "model" / "notes.safetensors"
    odd.symlink_to(tmp_path / "secret") if kind == "link" else os.mkfifo(odd)
    done = cli_here("export", run, "--to", "out")
    assert (done.returncode, "not a regular file" in done.stderr) == (4, True)
    assert not (tmp_path / "out").exists()


def test_a_base_that_is_gone_or_unknown_has_no_licence(
    cli_here: Cli, tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_with_models(tmp_path / "r", base)
    shutil.rmtree(base)
    rows = json.loads(cli_here("export", run, "--to", "out", "--policy", "ada", "--policy", "ada", "--json").stdout)
    assert [(row["policy"], row["licenses"]) for row in rows["exported"]] == [("ada", [])]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "LICENSE").write_text("of something else")
    assert license_files("") == []
    (tmp_path / "file").write_text("")
    assert cli_here("export", run, "--to", "file").returncode == 2


def test_a_copy_that_fails_leaves_nothing(
    cli_here: Cli, tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_with_models(tmp_path / "r", base)

    def full(source: Path, target: Path) -> None:
        target.write_text("half")
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(shutil, "copyfile", full)
    done = cli_here("export", run, "--to", "out")
    assert (done.returncode, "No space left on device" in done.stderr) == (4, True)
    assert list((tmp_path / "out").iterdir()) == []


def test_what_is_exported_loads_and_answers_as_the_run_s_model(
    cli_here: Cli, unbroken: FinishedRun, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert cli_here("export", unbroken.path, "--to", "out").returncode == 0
    ours, theirs = (tmp_path / "out" / "ada", unbroken.path / "policies" / "ada" / "model")
    assert (ours / "model.safetensors").read_bytes() == (theirs / "model.safetensors").read_bytes()
    ids = AutoTokenizer.from_pretrained(ours)("3+4+5:", return_tensors="pt")["input_ids"]
    answers = [
        AutoModelForCausalLM.from_pretrained(path).generate(ids, max_new_tokens=5, do_sample=False)
        for path in (ours, theirs)
    ]
    assert answers[0].tolist() == answers[1].tolist()
