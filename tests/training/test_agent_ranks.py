"""Runs with tools on two ranks: they train as one rank does, up to the order of sums."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from agent_harness import PROMPTS, publish_plans
from safetensors.torch import load_file

from conftest import PATIENCE

pytestmark = [pytest.mark.slow, pytest.mark.extended]


def trained(directory: Path, ranks: int, regime: str) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    directory.mkdir()
    publish_plans(directory / "x", [[prompt.id for prompt in PROMPTS]] * 2)
    script = Path(__file__).with_name("agent_rank_script.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    done = subprocess.run(
        [*command, f"--nproc-per-node={ranks}", script, directory, directory / "x", str(32 // ranks), regime],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((directory / "logs.json").read_text()), load_file(directory / "weights.safetensors")


#: by regime: what it must have done, and what must be equal
DONE = {
    "hinted": ("hinted/confirmed", ("hinted/followed", "plan/extra_tokens")),
    "sgt": ("sgt/pairs", ("plan/extra_tokens", "sgt/unrenderable")),
    "guided": ("replays/made", ("guided/prefix_tokens", "guided/guided_accuracy", "guided/unguided_accuracy")),
}


@pytest.mark.parametrize("regime", DONE)
def test_two_ranks_with_tools_change_only_the_order_of_sums(tmp_path: Path, regime: str) -> None:
    alone, one = trained(tmp_path / "one", 1, regime)
    together, two = trained(tmp_path / "two", 2, regime)
    done, equal = DONE[regime]
    assert sum(row[done] for row in alone) > 0
    for left, right in zip(alone, together, strict=True):
        for key in (done, *equal, "tools/turns", "tools/call_frequency"):
            assert left.get(key) == right.get(key), key
        for key in ("loss", "grad_norm"):
            assert left[key] == pytest.approx(right[key], rel=1e-3, abs=1e-6), key
    for name, weight in one.items():
        assert torch.allclose(weight, two[name], atol=2e-4), name
