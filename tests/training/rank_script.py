"""Run by test_ranks.py on several ranks: a list of trainings, one after another, in one process group.

python -m torch.distributed.run ... rank_script.py SPEC.json OUT MODEL
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from trl import GRPOTrainer
from trl.models.utils import unwrap_model_for_generation

import training_harness as harness
from mutualrl.adapter.trl_compat import allow_zero_on_cpu
from mutualrl.engines.transformers_engine import load_tokenizer
from mutualrl.training import MutualGRPOTrainer
from mutualrl.training.config import deepspeed_config
from mutualrl.training.worker import leave_group

KINDS = {
    "trl": GRPOTrainer,
    "ours": MutualGRPOTrainer,
    "trl-replayed": harness.ReplayedGRPO,
    "ours-replayed": harness.ReplayedMutual,
    "resampled": harness.ReplayedResampled,
}


def failing(completions: list[str], **_: object) -> list[float]:
    """Return zero rewards, as for a task that the learner cannot do: every prompt that a peer solved is gated."""
    return [0.0] * len(completions)


def weights_digest(trainer: Any) -> str:
    """Return the hash of the weights on this rank."""
    with unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) as model:
        return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def main(spec: list[dict[str, Any]], out: Path, model: Path, bob: Path) -> None:
    """Run every training of `spec`; write the logs of every rank and the weights to `out`."""
    for run in spec:
        keys = dict(run.get("keys", {}))
        if run.get("strategy", "ddp") != "ddp":
            allow_zero_on_cpu()
            keys |= {"use_cpu": False, **deepspeed_config(run["strategy"])}
        sharing = None
        if "regime" in run:
            sources = {}
            if "verified" in run:
                sources = {"sources": [harness.book(out, verified=run["verified"])], "peers": ()}
            sharing = harness.sharing(
                Path(run["exchange"]),
                run["regime"],
                tokenizers={"bob": load_tokenizer(str(bob))},
                **sources,
                **run["settings"],
            )
        trainer = harness.train(
            KINDS[run["kind"]],
            model,
            out / run["name"],
            sharing,
            reward=failing if run.get("failing") else None,
            **keys,
        )
        rank = trainer.accelerator.process_index
        state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
        if rank == 0:
            weights = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in state.items()}
            save_file(weights, out / f"{run['name']}.safetensors")
        record = {
            "kept": trainer.kept,
            "distributed": str(trainer.accelerator.distributed_type),
            "uses": dict(sharing.memory.uses) if sharing else {},
            "digest": weights_digest(trainer),
        }
        (out / f"{run['name']}.{rank}.json").write_text(json.dumps(record))
        trainer.accelerator.wait_for_everyone()
        last = trainer
    leave_group(last)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
