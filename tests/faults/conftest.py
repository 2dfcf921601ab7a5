from __future__ import annotations

from pathlib import Path

import pytest
from runs import SHORT, Run


@pytest.fixture(scope="session")
def unbroken(tiny: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run that nobody disturbed."""
    run = Run(tmp_path_factory.mktemp("unbroken"), *SHORT)
    assert run.process.wait(120) == 0, run.errors.read_text()
    return run
