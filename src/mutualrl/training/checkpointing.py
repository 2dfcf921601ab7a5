"""Saving a complete checkpoint of a policy: transformers writes the files, every rank computes checksums of a part of
them, the main rank commits."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate.utils import broadcast_object_list, gather_object

from mutualrl.adapter.trl_compat import micro_step, micro_steps_per_round
from mutualrl.errors import DiskError
from mutualrl.storage.artifacts import file_sum, relative_files
from mutualrl.storage.checkpoints import CheckpointMarker, Checkpoints
from mutualrl.storage.files import JsonObject, free_space, is_disk_failure, remedy

if TYPE_CHECKING:
    from trl import GRPOTrainer


@dataclass
class Checkpointer:
    """Writer of a trainer's checkpoints. `saved`: the step of the last checkpoint saved or resumed from; `progress`
    returns the policy's totals across restarts; `on_commit` is called on the main rank when a checkpoint is
    complete."""

    store: Checkpoints
    run_id: str
    policy: str
    attempt: int
    keep: int
    progress: Callable[[], JsonObject]
    saved: int | None = None
    on_commit: Callable[[], None] = lambda: None

    def save(self, trainer: GRPOTrainer, write: Callable[[Path], None]) -> None:
        """Save the trainer after its last step. `write` writes the files into a directory. A step already saved is
        skipped.

        Raises DiskError with the path and the bytes needed when it cannot be written; earlier checkpoints stay intact.
        """
        step, accelerator = trainer.state.global_step, trainer.accelerator
        if step == self.saved:
            return
        staging = self.store.staged(step)
        if accelerator.is_main_process:
            self.store.require_space(step, self.store.size() or estimated_bytes(trainer))
            if staging.exists():
                shutil.rmtree(staging)
        accelerator.wait_for_everyone()
        try:
            write(staging)
            accelerator.wait_for_everyone()
            self._commit(trainer, staging)
        except Exception as error:
            if not is_disk_failure(error):
                raise
            shutil.rmtree(staging, ignore_errors=True)
            raise DiskError(
                f"{self.store.path(step)}: cannot be written ({error}); a checkpoint needs "
                f"{self.store.size() or estimated_bytes(trainer):,} bytes, the disk has "
                f"{free_space(self.store.root)}; earlier checkpoints are intact. "
                f"{remedy(error)} and run: mutualrl train --resume --run-dir DIR"
            ) from error
        self.saved = step
        accelerator.wait_for_everyone()

    def _commit(self, trainer: GRPOTrainer, staging: Path) -> None:
        accelerator = trainer.accelerator
        names = [relative_files(staging)] if accelerator.is_main_process else [None]
        # broadcast one list: on a network file system each rank may see another
        file_names = broadcast_object_list(names, from_process=0)[0]
        assert file_names is not None
        own_names = file_names[accelerator.process_index :: accelerator.num_processes]
        sums = dict(gather_object([(name, file_sum(staging / name)) for name in own_names]))
        if not accelerator.is_main_process:
            return
        if set(sums) != set(relative_files(staging)):
            raise DiskError(
                f"{staging}: its list of files changed while checksums were computed; is the file system's directory "
                "cache stale? (mutualrl doctor --run-dir DIR)"
            )
        marker = CheckpointMarker(
            run_id=self.run_id,
            policy=self.policy,
            step=trainer.state.global_step,
            round=-(-micro_step(trainer) // micro_steps_per_round(trainer)),
            attempt=self.attempt,
            ranks=accelerator.num_processes,
            files=dict(sorted(sums.items())),
            progress=self.progress(),
        )
        self.store.commit(marker)
        self.store.prune(self.keep)
        self.on_commit()


def estimated_bytes(trainer: GRPOTrainer) -> int:
    """Return the size of a first checkpoint: the weights, and two fp32 moments per trainable parameter."""
    total = 0
    for p in trainer.model.parameters():
        count = getattr(p, "ds_numel", p.numel())
        total += count * p.element_size() + (8 * count if p.requires_grad else 0)
    return total
