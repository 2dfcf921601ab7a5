"""What a policy runs on, and how its rounds are divided: planned by `mwra`, and stored in run.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: how the processes of one policy share its training; a single process is plain under `ddp` and `fsdp2`
Strategy = Literal["ddp", "zero2", "zero3", "fsdp2"]


@dataclass(frozen=True, slots=True)
class Sharding:
    """What each process of a strategy has, in parts or whole; `launch.strategy` names one."""

    title: str
    """The strategy in messages."""
    weights: bool = False
    """Whether a process has a part of the weights."""
    states: bool = True
    """Whether it has a part of the gradients and of the optimizer."""
    stage: int | None = None
    """DeepSpeed's stage, with its master copy and its buffers; None without DeepSpeed."""
    wraps_layers: bool = False
    """Whether layers are gathered one by one, from weights in fp32 (`fully_shard`)."""

    @property
    def autocasts(self) -> bool:
        """Return whether layers cast whole fp32 weights to bf16."""
        return self.stage is None and not self.wraps_layers


SHARDINGS: dict[Strategy, Sharding] = {
    "ddp": Sharding("DDP", states=False),
    "zero2": Sharding("ZeRO-2", stage=2),
    "zero3": Sharding("ZeRO-3", weights=True, stage=3),
    "fsdp2": Sharding("FSDP2", weights=True, wraps_layers=True),
}


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Batch plan of one policy; a row is one completion. `micro_batches` is TRL's gradient_accumulation_steps,
    `micro_batches * optimizer_steps` its steps_per_generation."""

    prompts: int
    rollouts: int
    per_device: int
    micro_batches: int
    optimizer_steps: int

    def trainer_keys(self) -> dict[str, int]:
        """Return the plan as GRPOConfig keys."""
        return {
            "per_device_train_batch_size": self.per_device,
            "gradient_accumulation_steps": self.micro_batches,
            "steps_per_generation": self.micro_batches * self.optimizer_steps,
            "num_generations": self.rollouts,
        }


@dataclass(frozen=True, slots=True)
class Devices:
    """A member's GPUs (empty on CPU), processes, and threads per process. `policy`: its name, also of a source."""

    policy: str
    gpus: tuple[str, ...]
    processes: int
    threads: int

    @property
    def devices(self) -> str:
        """Return the devices as text."""
        if self.gpus:
            return "GPU " + ",".join(self.gpus)
        threads = f"{self.threads} thread" + ("s" if self.threads > 1 else "")
        return f"CPU, {self.processes} process{'es' if self.processes > 1 else ''} x {threads}"


@dataclass(frozen=True, slots=True)
class Allocation(Devices):
    """One policy's devices, strategy, batch plan, number of policies on each of its GPUs, and fraction of each GPU's
    memory if configured."""

    strategy: Strategy
    batch: BatchPlan
    policies_per_gpu: int = 1
    memory: float | None = None

    @property
    def sharding(self) -> Sharding:
        """Return what each process has."""
        return SHARDINGS[self.strategy]
