"""Stores of the exchange benchmark read back the rows they are given."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import exchange
import harness
import pictures
from conftest import PATIENCE, REPOSITORY


@pytest.mark.parametrize("name", ["mutualrl", "pickle file", "SQLite (WAL, full)"])
def test_benchmark_store_reads_back_a_round(tmp_path: Path, name: str) -> None:
    store = exchange.STORES[name](tmp_path)
    rows = exchange.records(2, 2, 5, 0)
    store.publish(0, rows)
    stored = store.read(0)
    assert len(rows) == 4
    assert (store.size() or 0) > 0
    if name == "mutualrl":
        assert stored.column("y_text").to_pylist() == [row.text for row in rows]
        assert stored.column("token_ids").to_pylist() == [row.token_ids.tolist() for row in rows]
    elif name == "pickle file":
        assert stored["text"] == [row.text for row in rows]
    else:
        assert [row[5] for row in stored] == [row.text for row in rows]


@pytest.mark.release
def test_picture_of_a_rescue_is_of_the_present_page() -> None:
    described = json.loads((pictures.IMAGES / "rescue.json").read_text())
    assert described["sources"] == pictures.sources(), "stale: python benchmarks/pictures.py"
    assert "Next visit" in described["text"]


def scripts_on_pages() -> set[str]:
    """Return the benchmarks that a page or a recipe tells the reader to run."""
    pages = [REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "SKILL.md", "SECURITY.md")]
    pages += [path for name in ("docs", "design") for path in (REPOSITORY / name).rglob("*.md")]
    pages += [path for name in ("benchmarks/sweeps", "recipes") for path in (REPOSITORY / name).rglob("*.yaml")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in pages)
    return set(re.findall(r"benchmarks/([a-z_0-9]+)\.py", text))


#: arguments of each script's smallest form; SHARED, CHAT and TWO are directories made for it
SMOKE: dict[str, tuple[str, ...]] = {
    "anti_alignment": (),
    "bf16_on_cpu": (),
    "bucket": (),
    "continuous_batching": (),
    "dense_prototype": (),
    "diagnostics": (),
    "evaluation": (),
    "exchange": (),
    "fidelity": (),
    "fuzz": (),
    "memory": (),
    "growth": (),
    "gpu_check": ("--cpu",),
    "gpu_step_time": ("--cpu",),
    "agents": (),
    "hints": (),
    "hints_countdown": (),
    "resample": (),
    "kill_matrix": (),
    "paper": (),
    "noise": (),
    "page": (),
    "pictures": (),
    "prediction": (),
    "ray_overhead": (),
    "rivals": (),
    "regime_cost": (),
    "regimes": (),
    "round": (),
    "served": (),
    "sgt_vs_grpo": (),
    "smol": ("--model", "CHAT"),
    "smol_file": ("--model", "CHAT"),
    "minimind_keep": ("--model", "CHAT"),
    "smol_diagnostics": ("--models", "TWO", "--boolq", "BOOLQ"),
    "gpu_smol_pair": ("--models", "TWO"),
    "staleness": (),
    "step_time": (),
    "study": (),
    "one_model": (),
    "text_source": (),
    "thl": ("--data", "SHARED"),
    "thl_speed": ("--data", "SHARED"),
}


def test_every_benchmark_that_a_page_names_has_a_smallest_form() -> None:
    assert scripts_on_pages() - {"board", "rebuild", "registrations"} <= set(
        SMOKE
    )  # tests of their own run these whole


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return inputs of the smallest forms by name: an embedded model with a chat template, alone and as two, and rows
    of BoolQ. The benchmarks' own models are not downloaded in a test."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from mutualrl.tiny import path_of

    root = tmp_path_factory.mktemp("inputs")
    for name, directory in (("ada", "smollm2-135m-instruct"), ("bob", "minimind2-small")):
        tokenizer = AutoTokenizer.from_pretrained(path_of(name))
        tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
        tokenizer.save_pretrained(root / directory)
        AutoModelForCausalLM.from_pretrained(path_of(name)).save_pretrained(root / directory)
    row = {"question": "is water wet", "answer": True, "passage": "Water is wet."}
    (root / "boolq.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps({**row, 'question': 'is fire wet'})}\n")
    shared = REPOSITORY.parent / "shared" / "data"
    chat = str(root / "smollm2-135m-instruct")
    return {"CHAT": chat, "TWO": str(root), "BOOLQ": str(root / "boolq.jsonl"), "SHARED": str(shared)}


#: scripts whose smallest form runs before a release only: those whose parts others run
BEFORE_A_RELEASE = {
    *("agents", "bf16_on_cpu", "evaluation", "fidelity", "gpu_smol_pair", "gpu_step_time", "hints", "hints_countdown"),
    *("resample", "smol_file", "minimind_keep"),
    *("kill_matrix", "one_model", "prediction", "ray_overhead", "regime_cost", "round", "served", "smol", "staleness"),
    *("diagnostics", "growth", "page", "pictures", "step_time", "text_source", "thl", "thl_speed"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.release if name in BEFORE_A_RELEASE else pytest.mark.extended)
        for name in SMOKE
    ],
)
def test_smallest_form_of_a_benchmark_runs_and_names_its_commit(
    name: str, inputs: dict[str, str], tmp_path: Path
) -> None:
    arguments = [inputs.get(argument, argument) for argument in SMOKE[name]]
    if "SHARED" in SMOKE[name] and not Path(inputs["SHARED"]).is_dir():
        pytest.skip("no tokenizers: ../shared/data is absent")
    if name in ("page", "pictures") and not shutil.which("chromedriver"):
        pytest.skip("Chromium's driver is not installed")
    if name == "ray_overhead":
        pytest.importorskip("ray")
    command = [sys.executable, f"benchmarks/{name}.py", "--smoke", "--out", str(tmp_path), *arguments]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE)
    assert result.returncode == 0, result.stderr[-3000:]
    written = {"pictures": "rescue", "noise": "noise-whitened"}.get(name, name)
    content = json.loads((tmp_path / f"{written}.json").read_text())
    if (REPOSITORY / ".git").exists() and name not in ("paper", "study"):  # these have the code of their runs
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
        assert content["code"]["commit"] == head.stdout.strip()
    if name == "fidelity":
        for policy in content["policies"].values():
            assert policy["steps"] == 2
            assert set(policy["largest_difference"].values()) == {0.0}


@pytest.mark.parametrize("name", ["kill_matrix", "fuzz", "gpu_check", "gpu_step_phases"])
def test_a_figure_that_is_seldom_measured_carries_its_date_and_commit(name: str) -> None:
    code = json.loads((harness.RESULTS / f"{name}.json").read_text())["code"]
    commit = code.get("commit") or code["stored_in"]
    page = (REPOSITORY / "docs" / "results.md").read_text()
    assert re.search(rf"Measured on \d+ November 2026 \({commit[:7]}\)", page)


@pytest.mark.parametrize("path", sorted(harness.RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_result_names_the_commit_that_made_it(path: Path) -> None:
    """Results that are older than this rule name the commit that stored them first (`stored_in`)."""
    code = json.loads(path.read_text())["code"]
    commit = code.get("commit") or code["stored_in"]
    assert re.fullmatch("[0-9a-f]{40}", commit)
    if (REPOSITORY / ".git").exists():
        known = subprocess.run(["git", "cat-file", "-e", commit], cwd=REPOSITORY, capture_output=True, check=False)
        assert known.returncode == 0, f"{path.name}: no commit {commit}"
