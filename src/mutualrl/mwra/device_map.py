"""Device map: a YAML file that assigns policies to devices.

policies:
  qwen3: {gpus: [0, 1]}
  phi4: {gpus: [2, 3], memory: 0.6}   # fraction of each GPU's memory, if policies share it
  ada: {processes: 2}                 # on CPU: number of processes
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mutualrl.errors import RecipeError
from mutualrl.machine.devices import Machine
from mutualrl.recipes import yaml_file


@dataclass(frozen=True, slots=True)
class DevicePin:
    """Devices of a policy: GPUs or processes on CPU, and its fraction of the GPUs' memory."""

    gpus: tuple[str, ...] = ()
    processes: int | None = None
    memory: float | None = None


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    gpus: Annotated[list[Annotated[int, Field(ge=0)] | str], Field(max_length=1024)] = []
    processes: Annotated[int, Field(ge=1)] | None = None
    memory: Annotated[float, Field(gt=0, le=1)] | None = None


class _Map(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    policies: dict[str, _Entry] = Field(min_length=1)


def read_device_map(path: Path) -> dict[str, DevicePin]:
    """Return the pins of a device map. Raises RecipeError with every schema problem, by file and key."""
    try:
        result = _Map.model_validate(yaml_file.read(path))
    except ValidationError as error:
        raise RecipeError(
            [
                f"{path}: {'.'.join(map(str, e['loc']))}: {e['msg']}; expected policies: {{NAME: {{gpus: [0, 1], "
                "memory: 0.5}}"
                for e in error.errors(include_url=False)
            ]
        ) from None
    pins = {}
    for name, entry in result.policies.items():
        pins[name] = DevicePin(tuple(map(str, entry.gpus)), entry.processes, entry.memory)
    return pins


def pin_problems(policies: Sequence[str], machine: Machine, pins: Mapping[str, DevicePin]) -> list[str]:
    """Return the problems of a device map on this machine, one line each: missing or unknown policies, devices that do
    not exist or are shared without memory fractions, fractions that add up to more than 1."""
    lines = [f"device map: no entry for policy {name!r}" for name in policies if name not in pins]
    lines += [
        f"device map: {name!r} is not a policy of the pool; expected: {', '.join(policies)}"
        for name in pins
        if name not in policies
    ]
    gpus = ", ".join(machine.gpus) or "none"
    for name, pin in pins.items():
        if absent := [gpu for gpu in pin.gpus if gpu not in machine.gpus]:
            lines.append(f"device map: policy {name!r}: no GPU {', '.join(absent)} here (GPUs of this machine: {gpus})")
        if duplicates := sorted({gpu for gpu in pin.gpus if pin.gpus.count(gpu) > 1}):
            lines.append(f"device map: policy {name!r} names GPU {', '.join(duplicates)} twice")
        if pin.gpus and pin.processes is not None:
            lines.append(f"device map: policy {name!r}: processes are for the CPU; on GPUs there is one per GPU")
        if machine.gpus and not pin.gpus:
            lines.append(f"device map: policy {name!r} names no GPU (GPUs of this machine: {gpus})")
    return lines + _sharing_problems(pins)


def _sharing_problems(pins: Mapping[str, DevicePin]) -> list[str]:
    lines = []
    for gpu in sorted({gpu for pin in pins.values() for gpu in pin.gpus}):
        users = {name: pin.memory for name, pin in pins.items() if gpu in pin.gpus}
        if len(users) < 2:
            continue
        fractions = [fraction for fraction in users.values() if fraction is not None]
        if len(fractions) < len(users):
            lines.append(
                f"device map: GPU {gpu} is used by {', '.join(users)}; each policy that shares a GPU needs a "
                "memory fraction, such as memory: 0.5"
            )
        elif sum(fractions) > 1 + 1e-9:
            terms = " + ".join(f"{fraction:g}" for fraction in fractions)
            total = f"{sum(fractions):g}"
            lines.append(f"device map: GPU {gpu}: memory fractions {terms} = {total}, more than 1")
    return lines
