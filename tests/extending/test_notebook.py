"""The notebooks run from the first cell to the last and draw their figures."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import PATIENCE, REPOSITORY

EXAMPLES = REPOSITORY / "examples"
#: by notebook: what makes a short form of it, the number of its figures, and what its outputs say
NOTEBOOKS: dict[str, tuple[dict[str, str], int, tuple[str, ...]]] = {
    "tour": (
        {
            '"100",': '"6",',
            "validate_every=20": "validate_every=3",
            '("0", "1"):': '("0",):',
            '"--steps", "20"': '"--steps", "2"',
        },
        2,
        ("rescues of ada; the first:", "-> learnt by ada", "sgt", "first"),
    ),
    "one_model": (
        {'"--steps", "100"': '"--steps", "6"', "validate_every=20": "validate_every=3"},
        1,
        ("Recorded texts, verified", "-> learnt", "one-model-page/index.html"),
    ),
}


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_runs_from_top_to_bottom(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed (extra dev)")
    client = pytest.importorskip("nbclient", reason="nbclient is not installed (extra dev)")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    shorter, figures, fragments = NOTEBOOKS[name]
    source = "".join(cell.source for cell in notebook.cells)
    assert all(stored in source for stored in shorter)
    for cell in notebook.cells:
        for stored, short in shorter.items():
            cell.source = cell.source.replace(stored, short)
    resources = {"metadata": {"path": str(tmp_path)}}
    client.NotebookClient(notebook, timeout=PATIENCE, kernel_name="python3", resources=resources).execute()
    outputs: list[Any] = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == figures
    text = "".join(output.get("text", "") for output in outputs)
    assert all(fragment in text for fragment in fragments), text


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_stored_outputs_are_of_one_complete_run(name: str) -> None:
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed (extra dev)")
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    stored = "".join(str(output) for cell in code for output in cell.outputs)
    assert "Traceback" not in stored
    assert "/work/" not in stored and "/home/" not in stored and "/tmp/" not in stored
