"""How models are sampled: the settings, and the options of every command that has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from mutualrl.console.options import ENGINE, SEED_LIMIT, Option
from mutualrl.errors import UsageError


@dataclass(frozen=True, slots=True)
class Sampling:
    """Decoding settings. `temperature` 0 is greedy; `seed` fixes the sampling noise."""

    max_new_tokens: int
    temperature: float = 0.0
    samples: int = 1
    seed: int = 0


def check_temperature(temperature: float | None) -> None:
    """Raise UsageError for a temperature outside the supported range: the scaled logits could overflow."""
    if temperature is not None and not (temperature == 0 or 0.01 <= temperature <= 10):
        raise UsageError(f"--temperature {temperature:g}: expected 0 (greedy), or 0.01 to 10")


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How responses are sampled; None: the command's default."""

    samples: Annotated[int | None, Option("Responses per prompt.", min=1, max=1024)] = None
    max_new_tokens: Annotated[int | None, Option("Maximum response length in tokens.", min=1)] = None
    temperature: Annotated[float | None, Option("Sampling temperature; 0 is greedy.", min=0.0, max=10.0)] = None
    engine: Annotated[str | None, ENGINE] = None
    seed: Annotated[int, Option("Seed of sampling.", min=0, max=SEED_LIMIT)] = 0

    def sampling(self, *, samples: int, max_new_tokens: int, temperature: float) -> Sampling:
        """Return the settings, with these defaults. Raises UsageError for a temperature outside the supported range,
        and for several greedy responses, which would be equal."""
        check_temperature(self.temperature)
        chosen = temperature if self.temperature is None else self.temperature
        count = self.samples or samples
        if chosen == 0 and count > 1:
            raise UsageError(
                f"--samples {count} at --temperature 0: {count} identical responses; expected a temperature above 0"
            )
        return Sampling(self.max_new_tokens or max_new_tokens, chosen, count, self.seed)
