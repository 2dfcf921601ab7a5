"""Typed records of a run: `run.json`, and each policy's `result.json`. One pair of functions reads and
writes each; the keys on disk are the fields."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

Fingerprint = dict[str, str | int]


class Stored(BaseModel):
    """Base of what lies on disk as JSON; keys of a newer version are left aside."""

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)

    def to_json(self) -> dict[str, object]:
        """Return the object as it lies on disk."""
        return self.model_dump(mode="json", by_alias=True)


class StoredBatch(Stored):
    """Policy's batch plan, in completions: see `recipes.batch.BatchPlan`."""

    prompts: int
    rollouts: int
    per_device: int
    micro_batches: int
    optimizer_steps: int


class StoredAllocation(Stored):
    """Devices of a policy: see `mwra.placement.Allocation`."""

    policy: str
    gpus: tuple[str, ...]
    processes: int
    threads: int
    strategy: str
    batch: StoredBatch
    policies_per_gpu: int = Field(1, alias="tenants")
    nodes: tuple[int, ...] = (0,)
    memory: float | None = None


class RunInfo(Stored):
    """`run.json`: how a run began, what every policy of it must agree on, and where each of them runs."""

    format: int = 0
    run_id: str
    created: str = ""
    command: list[str] = []
    versions: dict[str, str] = {}
    seed: int = 0
    regime: str = "unknown"
    regime_info: dict[str, Any] = {}
    pool: str | None = None
    nodes: int = 1
    fingerprint: Fingerprint = {}
    placement: dict[str, StoredAllocation] = {}


class Validation(Stored):
    """Validation: accuracy over `n` prompts, by group; `no_box`: share of completions without a boxed answer."""

    n: int
    accuracy: float
    by_group: dict[str, float]
    no_box: float | None


class PolicyResult(Stored):
    """`result.json`: what a policy reports at its end. Times in seconds, over all its attempts."""

    initial_validation: Validation | None
    validation: Validation
    steps: int
    rescued_pairs: int
    rescued_prompts: int
    train_seconds: float
    wait_seconds: float
    waited_for_seconds: dict[str, float]
    lost_peers: dict[str, int]
    attempts: int
    resumed_from: list[int]
