"""What this machine has: GPUs by nvidia-smi, CPU cores by affinity. No torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Machine:
    """GPU indices that may be used, and the number of CPU cores."""

    gpus: tuple[str, ...]
    cores: int


def this_machine() -> Machine:
    """The GPUs (CUDA_VISIBLE_DEVICES respected) and the cores that this process may run on."""
    return Machine(_gpus(), len(os.sched_getaffinity(0)))


def _gpus() -> tuple[str, ...]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    tool = shutil.which("nvidia-smi")
    if tool is None or visible == "":
        return ()
    answer = subprocess.run(
        [tool, "--query-gpu=index", "--format=csv,noheader"], capture_output=True, text=True, timeout=20, check=False
    )
    if answer.returncode != 0:
        return ()
    found = tuple(line.strip() for line in answer.stdout.splitlines() if line.strip())
    return found if visible is None else tuple(g.strip() for g in visible.split(",") if g.strip())
