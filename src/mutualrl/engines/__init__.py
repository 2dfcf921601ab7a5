"""Generation outside training. The engines are imported by module: `transformers_engine` needs torch."""

from mutualrl.engines.base import Completion, Engine, Sampling

__all__ = ["Completion", "Engine", "Sampling"]
