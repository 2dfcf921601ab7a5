"""Generation outside training. The engines are imported by module: `transformers_engine` needs torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mutualrl.engines.sampling import Sampling
from mutualrl.imported import on_first_use

if TYPE_CHECKING:
    from mutualrl.engines.base import Engine

__all__ = ["Engine", "Sampling"]
__getattr__ = on_first_use(__name__, {"base": ("Engine",)})
