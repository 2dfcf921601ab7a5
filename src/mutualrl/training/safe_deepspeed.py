"""DeepSpeed reads its checkpoints as pickles that may run code; here they are read as tensors and plain values
alone."""

from __future__ import annotations

from typing import Any


def keep_loads_safe() -> None:
    """Replace `TorchCheckpointEngine.load` by one with `weights_only=True`; DeepSpeed's own few classes are let
    through."""
    import torch
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    def load(self: Any, path: str, map_location: Any = None) -> Any:
        with torch.serialization.safe_globals([LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]):
            return torch.load(path, map_location=map_location, weights_only=True)

    TorchCheckpointEngine.load = load
