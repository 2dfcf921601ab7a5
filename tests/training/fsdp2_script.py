"""Run by test_fsdp2.py on two ranks: a parameter that never has a gradient, through a checkpoint.

python -m torch.distributed.run ... fsdp2_script.py DIRECTORY
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from mutualrl.adapter import fsdp2
from mutualrl.training.worker import leave


class Model(torch.nn.Module):
    """Model with a part that no text reaches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.unused = torch.nn.Linear(5, 3), torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def trainer_of() -> Any:
    """Return what `save` and `load` read of a trainer."""
    model = Model()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.8, 0.9))
    main = SimpleNamespace(is_main_process=dist.get_rank() == 0)
    return SimpleNamespace(model=model, optimizer=optimizer, accelerator=main)


def step(trainer: Any) -> None:
    """Make an optimizer step."""
    trainer.model(torch.arange(10.0).reshape(2, 5)).square().mean().backward()
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()


def weights(trainer: Any) -> list[torch.Tensor]:
    """Return the whole weights."""
    return [parameter.full_tensor() for parameter in trainer.model.parameters()]


def main(directory: Path) -> None:
    """Step, save, load into another trainer, step both."""
    dist.init_process_group("gloo")
    saved, resumed = trainer_of(), trainer_of()
    step(saved)
    saved.optimizer.param_groups[0]["lr"] = 0.05
    fsdp2.save(saved, directory)
    dist.barrier()
    fsdp2.load(resumed, directory)
    assert resumed.optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    assert len(resumed.optimizer.state) == len(saved.optimizer.state) == 2  # of the used layer
    for _ in range(2):
        step(saved)
        step(resumed)
    for one, other in zip(weights(saved), weights(resumed), strict=True):
        assert torch.equal(one, other)
    print("resumed")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    leave(0)  # as a worker does: at the interpreter's shutdown gloo's threads may abort a rank
