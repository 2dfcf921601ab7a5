"""TRL adapter. `MutualGRPOTrainer` is imported on first use: importing TRL takes seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mutualrl.imported import on_first_use

if TYPE_CHECKING:
    from mutualrl.training.sharing import Sharing
    from mutualrl.training.trainer import MutualGRPOTrainer

__all__ = ["MutualGRPOTrainer", "Sharing"]
__getattr__ = on_first_use(__name__, {"sharing": ("Sharing",), "trainer": ("MutualGRPOTrainer",)})
