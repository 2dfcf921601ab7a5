"""Devices of this machine: GPUs from nvidia-smi, CPU cores from the affinity mask. Does not import torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass

from mutualrl.errors import MachineError


@dataclass(frozen=True, slots=True)
class Machine:
    """Usable GPU indices, and the number of CPU cores."""

    gpus: tuple[str, ...]
    cores: int


def this_machine() -> Machine:
    """Return the GPUs (CUDA_VISIBLE_DEVICES respected) and the cores that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    return Machine(_gpus(), len(affinity(0)) if affinity is not None else os.cpu_count() or 1)


def _gpus() -> tuple[str, ...]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    tool = shutil.which("nvidia-smi")
    if tool is None or visible == "":
        return ()
    command = [tool, "--query-gpu=index", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        raise MachineError("nvidia-smi did not answer in 20 s; set CUDA_VISIBLE_DEVICES='' to run on the CPU") from None
    if done.returncode != 0:
        return ()
    if visible is None:
        return tuple(line.strip() for line in done.stdout.splitlines() if line.strip())
    indices = []
    for index in visible.split(","):
        if index.strip().startswith("-"):
            break
        if index.strip():
            indices.append(index.strip())
    return tuple(indices)
