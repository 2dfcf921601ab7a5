"""Section `exchange` of a recipe."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from pydantic import AfterValidator, Field, model_validator

from mutualrl.section import MACHINES, UPKEEP, Section
from mutualrl.storage.bucket_url import require_url


class Bucket(NamedTuple):
    """Bucket of a run's exchange. `checkpoints`: whether each policy's newest checkpoint is copied to it."""

    url: str
    heartbeat_seconds: float
    checkpoints: bool = False


class ExchangeSection(Section):
    """Section `exchange`: location of the exchange, and the staleness allowed between policies.

    `url`: a bucket in place of the run directory; one run per URL. Credentials come from the environment.
    `staleness`: rounds that a peer may be behind before the learner waits for it.
    """

    url: Annotated[Annotated[str, AfterValidator(require_url)] | None, MACHINES] = None
    heartbeat_seconds: Annotated[float, UPKEEP] = Field(
        10.0, ge=1, description="seconds between a policy's heartbeats in the bucket"
    )
    checkpoints: Annotated[bool, UPKEEP] = Field(
        False, description="copy each policy's newest checkpoint to the bucket, so that another machine can resume"
    )
    staleness: int = Field(0, ge=0, description="rounds that a peer may be behind before the learner waits for it")

    @model_validator(mode="after")
    def _bucket_keys(self) -> ExchangeSection:
        for key in ("heartbeat_seconds", "checkpoints"):
            if self.url is None and getattr(self, key) != ExchangeSection.model_fields[key].default:
                raise ValueError(f"{key} requires an exchange in a bucket; set url or omit {key}")
        return self

    @property
    def bucket(self) -> Bucket | None:
        """Return the bucket; None for the run directory."""
        return None if self.url is None else Bucket(self.url, self.heartbeat_seconds, self.checkpoints)
