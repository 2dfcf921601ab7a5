"""What a trainer knows beyond transformers' own checkpoint, as plain tensors, numbers and texts: the generation batch
that is being used up, the round's plan, the counters. Saved with it and restored, a killed run goes on as if it had not
been."""

from __future__ import annotations

import re
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch

from mutualrl.errors import CheckpointDamagedError
from mutualrl.regimes.base import Pair, PeerRow, RoundPlan
from mutualrl.training.sharing import SharedRound

FORMAT = 1

# transformers maps a checkpoint to the rank's device, which over several CPU hosts is called `cpu:0`; torch knows `cpu`
# only.
torch.serialization.register_package(
    30, lambda storage: None, lambda storage, where: storage if re.fullmatch(r"cpu:[0-9]+", where) else None
)


def state_file(directory: str | Path, rank: int) -> Path:
    """Where a rank's state lies in a checkpoint."""
    return Path(directory) / f"mutualrl_state_{rank}.pt"


def save_state(trainer: Any, directory: str | Path) -> None:
    """Write this rank's state into a checkpoint."""
    Path(directory).mkdir(parents=True, exist_ok=True)
    torch.save(trainer_state(trainer), state_file(directory, trainer.accelerator.process_index))


def load_state(trainer: Any, directory: str | Path) -> None:
    """Read this rank's state back (tensors and plain values only). A checkpoint of plain TRL has none: nothing is done.

    Raises CheckpointDamagedError for a file of another format.
    """
    path = state_file(directory, trainer.accelerator.process_index)
    if not path.is_file():
        return
    state = torch.load(path, weights_only=True, map_location="cpu")
    if state.get("format") != FORMAT:
        raise CheckpointDamagedError(f"{path}: format {state.get('format')!r}, this version reads {FORMAT}")
    restore(trainer, state)


def trainer_state(trainer: Any) -> dict[str, Any]:
    """The state: TRL's micro-batch count and buffered batch, the plan of the round in use, SGT's counters."""
    every = trainer.args.steps_per_generation * trainer.num_iterations
    in_use = trainer._step % every != 0
    state: dict[str, Any] = {
        "format": FORMAT,
        "step": trainer._step,
        "buffered": trainer._buffered_inputs if in_use else None,
    }
    if (sharing := trainer.sharing) is not None:
        shared = trainer._pair_term.shared
        state["uses"] = dict(sharing.uses)
        state["wait_seconds"] = sharing.wait_seconds
        state["waited_for"] = dict(sharing.waited_for)
        state["shared"] = pack(shared) if in_use and shared is not None else None
        state["snapshot"] = trainer._peer_rows.snapshot if in_use else {}
    return state


def restore(trainer: Any, state: dict[str, Any]) -> None:
    """Put a state back."""
    device = trainer.accelerator.device
    trainer._step = state["step"]
    buffered = state["buffered"]
    trainer._buffered_inputs = None if buffered is None else [_on(device, batch) for batch in buffered]
    if trainer.sharing is None or "uses" not in state:
        return
    sharing = trainer.sharing
    sharing.uses.clear()
    sharing.uses.update(state["uses"])
    sharing.waited_for.clear()
    sharing.waited_for.update(state["waited_for"])
    sharing.wait_seconds = state["wait_seconds"]
    if state["shared"] is not None:
        shared = unpack(state["shared"])
        trainer._pair_term.load(shared)
        trainer._peer_rows.resume(shared, state["snapshot"])


def _on(device: torch.device, batch: dict[str, Any]) -> dict[str, Any]:
    return {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


def pack(shared: SharedRound) -> dict[str, Any]:
    """A round's plan as plain values and tensors. Its advantages are in the batch already, its metrics in the log."""
    plan = {f.name: getattr(shared.plan, f.name) for f in fields(RoundPlan) if f.name not in ("advantages", "metrics")}
    plan["pairs"] = [asdict(pair) for pair in shared.plan.pairs]
    plan["rows"] = [
        {
            **{f.name: getattr(row, f.name) for f in fields(PeerRow)},
            "advantage": float(row.advantage),
            "logprobs": None if row.logprobs is None else torch.from_numpy(row.logprobs),
            "covered": torch.from_numpy(row.covered),
        }
        for row in shared.plan.rows
    ]
    return {"plan": plan, "prompt_tokens": dict(shared.prompt_tokens)}


def unpack(value: dict[str, Any]) -> SharedRound:
    """The plan that `pack` was given."""
    plan = RoundPlan(**{**value["plan"], "pairs": (), "rows": ()})
    rows = (
        PeerRow(
            **{
                **row,
                "logprobs": None if row["logprobs"] is None else row["logprobs"].numpy(),
                "covered": row["covered"].numpy(),
            }
        )
        for row in value["plan"]["rows"]
    )
    plan = replace(plan, pairs=tuple(Pair(**pair) for pair in value["plan"]["pairs"]), rows=tuple(rows))
    return SharedRound(plan, value["prompt_tokens"])
