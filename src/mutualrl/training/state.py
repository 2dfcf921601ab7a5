"""The file of a rank's state in a checkpoint, beyond transformers': plain tensors, numbers and texts.

With it, a killed run resumes exactly as if it had not been interrupted.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from mutualrl.errors import CheckpointDamagedError
from mutualrl.storage.files import JsonObject
from mutualrl.storage.format import FORMAT, other_format

# transformers maps a checkpoint to the rank's device, `cpu:0` over several CPU hosts; torch accepts only `cpu`.
torch.serialization.register_package(
    30, lambda storage: None, lambda storage, where: storage if re.fullmatch(r"cpu:[0-9]+", where) else None
)


def state_file(directory: str | Path, rank: int) -> Path:
    """Return the path of a rank's state in a checkpoint."""
    return Path(directory) / f"mutualrl_state_{rank}.pt"


def write_state(directory: str | Path, rank: int, state: JsonObject) -> None:
    """Write a rank's state into a checkpoint."""
    Path(directory).mkdir(parents=True, exist_ok=True)
    torch.save({"format": FORMAT, **state}, state_file(directory, rank))


def read_state(directory: str | Path, rank: int) -> JsonObject | None:
    """Return a rank's state (tensors and plain values only); None for a checkpoint of plain TRL.

    Raises CheckpointDamagedError for an unknown format.
    """
    path = state_file(directory, rank)
    if not path.is_file():
        return None
    state: JsonObject = torch.load(path, weights_only=True, map_location="cpu")
    if (problem := other_format(state.get("format"), path)) is not None:
        raise CheckpointDamagedError(problem)
    return state
