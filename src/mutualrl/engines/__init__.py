"""Generation outside training. The engines are imported by module: `transformers_engine` needs torch."""

from mutualrl.engines.base import Engine, Sampling

__all__ = ["Engine", "Sampling"]
