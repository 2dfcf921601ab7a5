"""Safe loading of DeepSpeed checkpoints, which DeepSpeed reads as pickles that may run code: tensors and plain values
only."""

from __future__ import annotations

from typing import Any


def enforce_weights_only_load() -> None:
    """Replace `TorchCheckpointEngine.load` with `weights_only=True` loading that allows DeepSpeed's few classes."""
    import torch
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    def load(self: Any, path: str, map_location: Any = None) -> Any:
        with torch.serialization.safe_globals([LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]):
            return torch.load(path, map_location=map_location, weights_only=True)

    TorchCheckpointEngine.load = load
