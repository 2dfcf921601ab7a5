"""The tour notebook runs from its first cell to its last and draws its figures."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from conftest import PATIENCE, REPOSITORY

TOUR = REPOSITORY / "examples" / "tour.ipynb"


@pytest.mark.release
@pytest.mark.slow
def test_tour_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed (extra dev)")
    client = pytest.importorskip("nbclient", reason="nbclient is not installed (extra dev)")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    notebook = nbformat.read(TOUR, as_version=4)
    train = next(cell for cell in notebook.cells if "run.validate_every=20" in cell.source)
    assert '"100",' in train.source
    assert 'for seed in ("0", "1"):' in train.source
    for stored, short in (('"100",', '"6",'), ("validate_every=20", "validate_every=3"), ('("0", "1"):', '("0",):')):
        train.source = train.source.replace(stored, short)
    own = next(cell for cell in notebook.cells if '"--steps", "20"' in cell.source)
    own.source = own.source.replace('"--steps", "20"', '"--steps", "2"')
    resources = {"metadata": {"path": str(tmp_path)}}
    client.NotebookClient(notebook, timeout=PATIENCE, kernel_name="python3", resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    text = "".join(output.get("text", "") for output in outputs)
    for fragment in ("rescues of ada; the first:", "-> learnt by ada", "sgt", "first"):
        assert fragment in text


def test_stored_outputs_are_of_one_complete_run() -> None:
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed (extra dev)")
    notebook = nbformat.read(TOUR, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    stored = "".join(str(output) for cell in code for output in cell.outputs)
    assert "Traceback" not in stored
    assert "/work/" not in stored and "/home/" not in stored and "/tmp/" not in stored
