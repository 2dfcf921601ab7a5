"""Devices of this machine: GPUs from nvidia-smi, CPU cores from the affinity mask. Does not import torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass

from mutualrl.errors import MachineError

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Machine:
    """Usable GPU indices, the number of CPU cores, and the bytes of each GPU's memory, empty if they are not known."""

    gpus: tuple[str, ...]
    cores: int
    memory: tuple[int, ...] = ()


def this_machine() -> Machine:
    """Return the GPUs (CUDA_VISIBLE_DEVICES respected) and the cores that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    gpus, memory = _gpus()
    return Machine(gpus, len(affinity(0)) if affinity is not None else os.cpu_count() or 1, memory)


def _gpus() -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the indices of the GPUs and the bytes of their memory."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    tool = shutil.which("nvidia-smi")
    if tool is None or visible == "":
        return (), ()
    command = [tool, "--query-gpu=index,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        raise MachineError("nvidia-smi did not answer in 20 s; set CUDA_VISIBLE_DEVICES='' to run on the CPU") from None
    if done.returncode != 0:
        return (), ()
    sizes: dict[str, int | None] = {}
    for line in done.stdout.splitlines():
        index, _, total = (part.strip() for part in line.partition(","))
        if index:
            sizes[index] = int(total) * MIB if total.isdecimal() else None
    indices = list(sizes) if visible is None else _visible(visible)
    known = [size for index in indices if (size := sizes.get(index)) is not None]
    return tuple(indices), tuple(known) if len(known) == len(indices) else ()


def _visible(visible: str) -> list[str]:
    """Return the devices in CUDA_VISIBLE_DEVICES, up to the first negative one."""
    indices: list[str] = []
    for index in visible.split(","):
        if index.strip().startswith("-"):
            break
        if index.strip():
            indices.append(index.strip())
    return indices
