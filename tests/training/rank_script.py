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
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from trl import GRPOTrainer

import training_harness as harness
from mutualrl.adapter.fsdp2 import is_sharded
from mutualrl.adapter.trl_compat import whole_model
from mutualrl.engines.transformers_engine import load_tokenizer
from mutualrl.training import MutualGRPOTrainer
from mutualrl.training.config import on_cpu, strategy_keys
from mutualrl.training.validation import Validator
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
    with whole_model(trainer) as model:
        return hashlib.sha256(b"".join(p.detach().clone().numpy().tobytes() for p in model.parameters())).hexdigest()


class Watch(TrainerCallback):
    """Keep the whole gradient of each optimizer step before it is clipped, and count the gradients that a rank holds
    whole before each pass over extra rows."""

    def __init__(self, kept: list[dict[str, torch.Tensor]] | None) -> None:
        self.trainer: Any = None
        self.kept = kept
        self.whole: list[int] = []
        self.sampled: list[list[list[int]]] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Begin: the model is sharded from here on."""
        if is_sharded(self.trainer.model) and hasattr(self.trainer, "extra_rows"):
            self.watch_chunks()
        if self.kept is not None:
            self.keep_gradients()

    def watch_chunks(self) -> None:
        rows = self.trainer.extra_rows
        chunk_loss = rows._chunk_loss

        def watched(model: torch.nn.Module, *arguments: Any) -> Any:
            sharded = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
            held = [p for state in sharded for group in state._fsdp_param_groups for p in group.fsdp_params]
            assert held
            self.whole.append(sum(is_held_whole(parameter) for parameter in held))
            return chunk_loss(model, *arguments)

        rows._chunk_loss = watched

    def keep_gradients(self) -> None:
        trainer = self.trainer
        owner, name = (
            (trainer.deepspeed, "step") if trainer.is_deepspeed_enabled else (trainer.accelerator, "clip_grad_norm_")
        )
        original = getattr(owner, name)

        def kept(*arguments: Any, **keys: Any) -> Any:
            names = trainer.accelerator.unwrap_model(trainer.model_wrapped).named_parameters()
            self.kept.append({name: whole_gradient(p) for name, p in names if p.requires_grad})
            return original(*arguments, **keys)

        setattr(owner, name, kept)


def is_held_whole(parameter: Any) -> bool:
    """Return whether this rank holds the whole gradient of a parameter that FSDP2 shards."""
    whole = getattr(parameter, "_unsharded_param", None)
    return parameter.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None)


def watching(kind: type[Any], watch: Watch) -> type[Any]:
    """Return a kind of trainer that is watched."""

    class Watching(kind):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **keys: Any) -> None:
            super().__init__(*arguments, **keys)
            watch.trainer = self
            self.add_callback(watch)

        def _generate_single_turn(self, *arguments: Any, **keys: Any) -> Any:
            sampled = super()._generate_single_turn(*arguments, **keys)
            watch.sampled.append(sampled[0])
            return sampled

    return Watching


def whole_gradient(parameter: Any) -> torch.Tensor:
    """Return a parameter's gradient, gathered from all ranks."""
    if hasattr(parameter, "ds_id"):
        from deepspeed.utils import safe_get_full_grad

        return safe_get_full_grad(parameter).float().cpu().clone()
    gradient = parameter.grad
    return (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).float().cpu().clone()


def main(spec: list[dict[str, Any]], out: Path, model: Path, bob: Path) -> None:
    """Run every training of `spec`; write the logs of every rank and the weights to `out`."""
    for run in spec:
        keys = dict(run.get("keys", {}))
        strategy = run.get("strategy", "ddp")
        keys |= {**on_cpu(strategy), **strategy_keys(strategy, {})}
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
        watch = Watch([] if run.get("gradients") else None)
        trainer = harness.train(
            watching(KINDS[run["kind"]], watch),
            model,
            out / run["name"],
            sharing,
            reward=failing if run.get("failing") else None,
            **keys,
        )
        validation = Validator(trainer, harness.PROMPTS)() if run.get("validated") else None
        rank = trainer.accelerator.process_index
        state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
        if rank == 0:
            weights = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in state.items()}
            save_file(weights, out / f"{run['name']}.safetensors")
            for step, gradient in enumerate(watch.kept or ()):
                save_file(gradient, out / f"{run['name']}.{step}.gradient.safetensors")
        record = {
            "kept": trainer.kept,
            "distributed": str(trainer.accelerator.distributed_type),
            "uses": dict(sharing.memory.uses) if sharing else {},
            "digest": weights_digest(trainer),
            "sharded": is_sharded(trainer.model) and all(isinstance(p, DTensor) for p in trainer.model.parameters()),
            "whole": watch.whole,
            "accuracy": None if validation is None else validation.accuracy,
            "longest": [max(map(len, batch)) for batch in watch.sampled],
        }
        (out / f"{run['name']}.{rank}.json").write_text(json.dumps(record))
        trainer.accelerator.wait_for_everyone()
        last = trainer
    leave_group(last)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
