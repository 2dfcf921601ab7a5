"""FSDP2 (torch's `fully_shard`, through accelerate): on a CPU, while sampling, and in checkpoints.

A checkpoint has, beside transformers' files, the directory `fsdp2`: every rank's part of the trained weights and of
the optimizer's state as safetensors, written and read by torch's distributed checkpoint. Its own format has a pickle,
as have accelerate's checkpoints; this one has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from accelerate.state import AcceleratorState, DistributedType, PartialState
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import FSDPModule

from mutualrl.errors import CheckpointDamagedError
from mutualrl.storage.files import JsonObject, read_json, write_json

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from trl import GRPOTrainer

DIRECTORY = "fsdp2"
GROUPS = "optimizer.json"
WRAPPER = "_checkpoint_wrapped_module."  # of activation checkpointing, in names of parameters
OPTIMIZER = "optimizer."  # begins the names of its tensors; "model." those of the weights


def allow_fsdp2_on_cpu() -> None:
    """Make accelerate use FSDP2 over gloo on CPU. Must precede GRPOConfig.

    accelerate 1.15 takes FSDP for GPU-like devices only; on a CPU it silently trains with DDP. This affects only
    processes that request FSDP.
    """
    original = AcceleratorState.__init__
    if getattr(original, "fsdp2_on_cpu", False):
        return

    def initialize(self: AcceleratorState, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    initialize.fsdp2_on_cpu = True  # type: ignore[attr-defined]
    AcceleratorState.__init__ = initialize


def is_sharded(model: torch.nn.Module) -> bool:
    """Return whether FSDP2 shards a model: from the start of training, not before."""
    return isinstance(model, FSDPModule)


@contextmanager
def whole_weights(model: torch.nn.Module) -> Iterator[None]:
    """Keep the whole weights on every rank, gathered once, as TRL does under ZeRO-3 for sampling.

    Else each token's forward gathers them, and ranks whose rollouts end at different lengths wait for each other
    forever.
    """
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    states = [module._get_fsdp_state() for module in sharded]
    groups = [group for state in states for group in state._fsdp_param_groups]
    roots = [state._auto_reshard_after_forward for state in states]
    targets = [group.post_forward_mesh_info for group in groups]
    for module in sharded:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for state, root in zip(states, roots, strict=True):
            state._auto_reshard_after_forward = root
        for group, target in zip(groups, targets, strict=True):
            group.post_forward_mesh_info = target
        for module in sharded:
            module.reshard()


@contextmanager
def readable_weights(trainer: GRPOTrainer) -> Iterator[None]:
    """Let TRL load the weights into its vLLM engine before training starts: under FSDP2 it reads sharded ones, which
    they are from then on only."""
    if not trainer.accelerator.is_fsdp2 or is_sharded(trainer.model):
        yield
        return
    backend = trainer.vllm_generation._dist
    version, backend.fsdp_version = backend.fsdp_version, None
    try:
        yield
    finally:
        backend.fsdp_version = version


def save(trainer: GRPOTrainer, directory: Path) -> None:
    """Write this rank's part of the trained weights and of the optimizer's state into a checkpoint."""
    model, optimizer = trainer.model, plain_optimizer(trainer)
    state = get_optimizer_state_dict(model, optimizer)
    tensors = {**trained_weights(model), **optimizer_tensors(state)}
    writer = HuggingFaceStorageWriter(str(directory / DIRECTORY), save_distributed=True)
    dcp.save(tensors, storage_writer=writer)
    if trainer.accelerator.is_main_process:
        write_json(directory / DIRECTORY / GROUPS, {"groups": state["param_groups"]})


def load(trainer: GRPOTrainer, directory: Path) -> None:
    """Read them into the trainer's model and optimizer. A parameter that had no state, as it never had a gradient, has
    none again."""
    model, optimizer = trainer.model, plain_optimizer(trainer)
    state = get_optimizer_state_dict(model, optimizer)  # with zeros for every parameter, to be filled
    reader = HuggingFaceStorageReader(str(directory / DIRECTORY))
    stored = reader.read_metadata().state_dict_metadata
    tensors = {**trained_weights(model), **optimizer_tensors(state)}
    absent = {name for name in tensors if name not in stored and name.startswith(OPTIMIZER)}
    dcp.load({name: tensor for name, tensor in tensors.items() if name not in absent}, storage_reader=reader)
    groups = read_json(directory / DIRECTORY / GROUPS)
    if groups is None:
        raise CheckpointDamagedError(f"{directory / DIRECTORY / GROUPS}: missing")
    pairs = zip(groups["groups"], state["param_groups"], strict=True)
    state["param_groups"] = [as_written(group, own) for group, own in pairs]
    set_optimizer_state_dict(model, optimizer, state)
    without = {name.removeprefix(OPTIMIZER).rpartition(".")[0] for name in absent}
    for name, parameter in model.named_parameters():
        if name.replace(WRAPPER, "") in without:
            optimizer.state.pop(parameter, None)


def plain_optimizer(trainer: GRPOTrainer) -> Optimizer:
    """Return the optimizer without accelerate's wrapper."""
    wrapped = trainer.optimizer
    return getattr(wrapped, "optimizer", wrapped)


def trained_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return this rank's part of the trained weights, by name, sharing memory with the model."""
    return {f"model.{name}": p.detach() for name, p in model.named_parameters() if p.requires_grad}


def optimizer_tensors(state: JsonObject) -> dict[str, torch.Tensor]:
    """Return this rank's part of an optimizer's state, by parameter and key."""
    return {f"{OPTIMIZER}{name}.{key}": tensor for name, row in state["state"].items() for key, tensor in row.items()}


def as_written(stored: JsonObject, own: JsonObject) -> JsonObject:
    """Return a group's settings as the optimizer has them: JSON knows no tuples."""
    return {key: tuple(value) if isinstance(own.get(key), tuple) else value for key, value in stored.items()}
