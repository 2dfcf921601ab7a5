"""TRL adapter. `MutualGRPOTrainer` is imported on first use: importing TRL takes seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mutualrl.training.sharing import Sharing
    from mutualrl.training.trainer import MutualGRPOTrainer

__all__ = ["MutualGRPOTrainer", "Sharing"]


def __getattr__(name: str) -> Any:
    if name == "MutualGRPOTrainer":
        from mutualrl.training.trainer import MutualGRPOTrainer

        return MutualGRPOTrainer
    if name == "Sharing":
        from mutualrl.training.sharing import Sharing

        return Sharing
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
