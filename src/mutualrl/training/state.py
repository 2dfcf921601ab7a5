"""Trainer state beyond transformers' checkpoint, as plain tensors, numbers and texts: the generation batch in use, the
round's extra rows, the regime's state. With it, a killed run resumes exactly as if it had not been interrupted."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mutualrl.errors import CheckpointDamagedError
from mutualrl.records import Rollout
from mutualrl.regimes import BOUNDS, Bound, ExtraRow, RowSource
from mutualrl.training.sharing import PastRound
from mutualrl.training.trl_compat import buffered_batches, micro_step, restore_position, round_in_use

if TYPE_CHECKING:
    from mutualrl.training.trainer import MutualGRPOTrainer

FORMAT = 2  # 1: v0.1, with one regime per plan

# transformers maps a checkpoint to the rank's device, `cpu:0` over several CPU hosts; torch accepts only `cpu`.
torch.serialization.register_package(
    30, lambda storage: None, lambda storage, where: storage if re.fullmatch(r"cpu:[0-9]+", where) else None
)


def state_file(directory: str | Path, rank: int) -> Path:
    """Return the path of a rank's state in a checkpoint."""
    return Path(directory) / f"mutualrl_state_{rank}.pt"


def save_state(trainer: MutualGRPOTrainer, directory: str | Path) -> None:
    """Write this rank's state into a checkpoint."""
    Path(directory).mkdir(parents=True, exist_ok=True)
    torch.save(trainer_state(trainer), state_file(directory, trainer.accelerator.process_index))


def load_state(trainer: MutualGRPOTrainer, directory: str | Path) -> None:
    """Restore this rank's state (tensors and plain values only). Does nothing for a checkpoint of plain TRL.

    Raises CheckpointDamagedError for an unknown format.
    """
    path = state_file(directory, trainer.accelerator.process_index)
    if not path.is_file():
        return
    state = torch.load(path, weights_only=True, map_location="cpu")
    if state.get("format") != FORMAT:
        raise CheckpointDamagedError(f"{path}: format {state.get('format')!r}, this version reads {FORMAT}")
    restore(trainer, state)


def trainer_state(trainer: MutualGRPOTrainer) -> dict[str, object]:
    """Return the state: TRL's micro-batch count and buffered batch, the rows of the round in use, the regime's
    state."""
    state: dict[str, Any] = {"format": FORMAT, "step": micro_step(trainer), "buffered": buffered_batches(trainer)}
    if (sharing := trainer.sharing) is not None:
        extra = trainer.extra_rows
        in_use = round_in_use(trainer)
        state["regime_state"] = json.dumps(sharing.state, allow_nan=False)
        state["uses"] = dict(sharing.uses)
        state["dead"] = sorted(sharing.dead)
        state["end_tokens"] = dict(sharing.end_tokens)
        state["past"] = [_pack_past(past) for past in sharing.past.values()]
        state["wait_seconds"] = sharing.link.wait_seconds
        state["waited_for"] = dict(sharing.link.waited_for)
        state["rows"] = [pack(row) for row in extra.rows] if in_use else []
        state["prompts"] = dict(extra.prompts) if in_use else {}
        state["snapshot"] = extra.snapshot if in_use else {}
    return state


def restore(trainer: MutualGRPOTrainer, state: Mapping[str, Any]) -> None:
    """Restore a state."""
    restore_position(trainer, state["step"], state["buffered"])
    if trainer.sharing is None or "regime_state" not in state:
        return
    sharing = trainer.sharing
    sharing.state = json.loads(state["regime_state"])
    sharing.uses = Counter(state["uses"])
    sharing.dead = set(state.get("dead", ()))
    sharing.end_tokens = Counter(state.get("end_tokens", {}))
    sharing.past = {past.number: past for past in map(_unpack_past, state.get("past", ()))}
    sharing.link.waited_for = Counter(state["waited_for"])
    sharing.link.wait_seconds = state["wait_seconds"]
    rows = [unpack(row) for row in state["rows"]]
    trainer.extra_rows.restore(rows, state["prompts"], state["snapshot"])


def _pack_past(past: PastRound) -> dict[str, object]:
    """Return an own past round as plain values."""
    rollouts = []
    for rollout in past.rollouts:
        values = {field.name: getattr(rollout, field.name) for field in fields(Rollout)}
        rollouts.append({**values, "token_ids": torch.tensor(rollout.token_ids or (), dtype=torch.int64)})
    return {"number": past.number, "rollouts": rollouts, "taught": list(past.taught)}


def _unpack_past(packed: Mapping[str, Any]) -> PastRound:
    """Invert `_pack_past`."""
    rollouts = []
    for values in packed["rollouts"]:
        rollouts.append(Rollout(**{**values, "token_ids": tuple(values["token_ids"].tolist())}))
    return PastRound(packed["number"], tuple(rollouts), tuple(packed["taught"]))


_BOUNDS: dict[str, type[Bound]] = {kind.__name__: kind for kind in BOUNDS}


def pack(row: ExtraRow) -> dict[str, object]:
    """Return a row as plain values and tensors."""
    packed = {field.name: getattr(row, field.name) for field in fields(ExtraRow)}
    packed["source"] = tuple(row.source)
    packed["advantage"], packed["weight"] = float(row.advantage), float(row.weight)
    packed["mask"] = None if row.mask is None else torch.from_numpy(row.mask)
    packed["logprobs"] = None if row.logprobs is None else torch.from_numpy(row.logprobs)
    packed["bound"] = {"kind": type(row.bound).__name__, **asdict(row.bound)}
    return packed


def unpack(packed: Mapping[str, Any]) -> ExtraRow:
    """Invert `pack`."""
    bound = dict(packed["bound"])
    kind = _BOUNDS[bound.pop("kind")]
    arrays = {name: None if packed[name] is None else packed[name].numpy() for name in ("mask", "logprobs")}
    return ExtraRow(**{**packed, **arrays, "source": RowSource(*packed["source"]), "bound": kind(**bound)})
