"""Checkpoints of FSDP2."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import PATIENCE


@pytest.mark.slow
def test_parameter_without_a_gradient_is_saved_and_loaded_without_state(tmp_path: Path) -> None:
    """As of a vision tower in training on texts."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    command += ["--nproc-per-node=2", str(Path(__file__).with_name("fsdp2_script.py")), str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count("resumed") == 2
    assert sorted(path.suffix for path in (tmp_path / "fsdp2").iterdir()) == [".json", ".safetensors", ".safetensors"]
