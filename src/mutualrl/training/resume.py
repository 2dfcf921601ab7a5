"""One policy's progress across restarts: where it resumes, what it saves and reports, which rounds it prunes."""

from __future__ import annotations

import hashlib
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from accelerate.utils import broadcast_object_list

from mutualrl.console.lines import notify
from mutualrl.errors import ExchangeDamagedError, FileDamagedError, PlanMismatchError
from mutualrl.recipes import Recipe
from mutualrl.see import retention
from mutualrl.see.checkpoint_copies import copied
from mutualrl.see.location import record_store
from mutualrl.storage.artifacts import FileDigest
from mutualrl.storage.checkpoints import CheckpointMarker, Checkpoints, oldest_needed
from mutualrl.storage.files import JsonObject, write_atomic
from mutualrl.storage.run_info import PolicyResult, Validation
from mutualrl.storage.run_logs import LOGS, current_sums, log_paths, verify_log
from mutualrl.storage.rundir import PolicyFiles
from mutualrl.training.checkpointing import Checkpointer
from mutualrl.training.member import Member
from mutualrl.training.sharing import Sharing

if TYPE_CHECKING:
    from trl import GRPOTrainer


NOTHING = FileDigest(0, hashlib.sha256().hexdigest())


class PolicyProgress:
    """Progress of a policy across restarts: initial validation, training time, checkpoints it resumed from."""

    def __init__(self, member: Member, sharing: Sharing) -> None:
        self.run = member.run
        self.policy = member.name
        self.attempt = member.exchange.attempt
        self.sharing = sharing
        self.initial_validation: Validation | None = None
        self.began: float | None = None
        self._seconds = 0.0
        self.resumed_from: list[int] = []

    def checkpointer(self, recipe: Recipe, run_id: str) -> Checkpointer:
        """Return the writer of this policy's checkpoints. Each checkpoint prunes the policy's rounds, and the sources',
        that no policy needs any more."""

        def prune_rounds() -> None:
            if recipe.run.keep_rounds is None:
                return
            store, needed = record_store(self.run), self._needed(recipe, run_id)
            for name in (self.policy, *(source.name for source in recipe.active_sources)):
                retention.prune_rounds(store, name, needed, recipe.run.keep_rounds)

        return Checkpointer(
            store=Checkpoints(self.run.policy(self.policy).root),
            run_id=run_id,
            policy=self.policy,
            attempt=self.attempt,
            keep=recipe.run.keep_checkpoints,
            progress=self.progress,
            on_commit=prune_rounds,
        )

    def _needed(self, recipe: Recipe, run_id: str) -> int:
        """Return the first round that a policy may still need. Policies that joined a bucket do not see each other's
        checkpoints: each publishes its own need, that of its copy in the bucket included, if the recipe wants one."""
        roots = {policy.name: self.run.policy(policy.name).root for policy in recipe.policies}
        store, staleness, joined = record_store(self.run), recipe.exchange.staleness, bool(self.run.info().joined)
        if joined:
            own = oldest_needed([roots[self.policy]], staleness)
            if recipe.exchange.checkpoints:
                copy = copied(store, self.policy, run_id)
                own = 0 if copy is None else min(own, max(copy.round - staleness, 0))
            retention.publish_cursor(store, self.policy, run_id, own)
        return retention.first_needed(store, run_id, roots, staleness, elsewhere=joined)

    def progress(self) -> dict[str, object]:
        """Return the progress to save in a checkpoint."""
        return {
            "initial_validation": None if self.initial_validation is None else self.initial_validation.to_json(),
            "train_seconds": self.train_seconds,
            "resumed_from": self.resumed_from,
            LOGS: current_sums(self.run.policy(self.policy)),
        }

    def resume(self, marker: CheckpointMarker) -> None:
        """Restore the progress saved in a checkpoint."""
        validation = marker.progress["initial_validation"]
        self.initial_validation = None if validation is None else Validation.model_validate(validation)
        self._seconds = marker.progress["train_seconds"]
        self.resumed_from = [*marker.progress["resumed_from"], marker.step]

    def end(self) -> None:
        """Stop counting training time."""
        self._seconds, self.began = self.train_seconds, None

    @property
    def train_seconds(self) -> float:
        """Return the seconds of training in all attempts so far."""
        return self._seconds + (0.0 if self.began is None else time.monotonic() - self.began)

    def result(self, validation: Validation | None, steps: int) -> JsonObject:
        """Return the policy's result, for the end of training, with the digests of its logs."""
        sharing, link = self.sharing, self.sharing.link
        result = PolicyResult(
            initial_validation=self.initial_validation,
            validation=validation,
            steps=steps,
            rescued_pairs=sum(sharing.memory.uses.values()),
            rescued_prompts=len(sharing.memory.uses),
            train_seconds=self.train_seconds,
            wait_seconds=link.wait_seconds,
            waited_for_seconds=dict(sorted(link.waited_for.items())),
            lost_peers=link.missing_peers.current(),
            attempts=self.attempt + 1,
            resumed_from=self.resumed_from,
        )
        return {**result.to_json(), LOGS: current_sums(self.run.policy(self.policy))}


def resume_point(trainer: GRPOTrainer, progress: PolicyProgress, files: PolicyFiles) -> str | None:
    """Return the checkpoint that all ranks resume from, or None to train from the start; later metrics are removed.

    Raises PlanMismatchError if the checkpoint was written by another number of ranks.
    """
    accelerator = trainer.accelerator
    store, checkpointer = Checkpoints(files.root), trainer.checkpointer
    newest: list[CheckpointMarker | None] = [None]
    if accelerator.is_main_process:
        store.clear_partial()
        newest = [store.newest(checkpointer.run_id, checkpointer.policy, notify)]
        _require_rounds(trainer.sharing, 0 if newest[0] is None else newest[0].round)
        cut_logs(files, newest[0])
    marker = broadcast_object_list(newest, from_process=0)[0]
    if marker is None:
        return None
    if marker.ranks != accelerator.num_processes:
        raise PlanMismatchError(
            f"policy {progress.policy!r}: the checkpoint of step {marker.step} was written by {marker.ranks} ranks, "
            f"found {accelerator.num_processes}; start it with {marker.ranks}"
        )
    progress.resume(marker)
    checkpointer.saved = marker.step
    if accelerator.is_main_process:
        notify(f"policy {progress.policy!r}, attempt {progress.attempt}: resuming from checkpoint step-{marker.step}")
    return str(store.path(marker.step))


def cut_logs(files: PolicyFiles, marker: CheckpointMarker | None) -> None:
    """Truncate the logs (`log_paths`) to their content at a checkpoint, so that a resumed run has each step once. A
    missing file is not recreated.

    Raises FileDamagedError when a file does not begin with its content at the checkpoint.
    """
    sums = {} if marker is None else marker.progress[LOGS]
    for path in log_paths(files):
        if not path.exists():
            if path.name in sums:
                notify(f"{path} is missing: it restarts after step {0 if marker is None else marker.step}")
            continue
        expected = FileDigest(**sums.get(path.name, asdict(NOTHING)))
        try:
            verify_log(path, expected)
        except FileDamagedError as error:
            raise FileDamagedError(f"{error}; restore it, or delete it and lose these lines") from None
        with path.open("rb") as file:
            beginning = file.read(expected.bytes)
        write_atomic(path, beginning)  # a new file: readers that follow the old one notice the truncation


def _require_rounds(sharing: Sharing, cursor: int) -> None:
    """Raise ExchangeDamagedError if a peer's rounds that a policy at round `cursor` needs were deleted."""
    link = sharing.link
    for peer in link.peers if sharing.regime.needs().peers else ():
        rounds, wanted = link.exchange.rounds(peer), link.first_needed(peer, cursor)
        if rounds and rounds[0] > wanted and not link.missing_peers.is_missing(peer, cursor):
            raise ExchangeDamagedError(
                f"policy {link.policy!r} resumes from round {cursor} and needs rounds of {peer!r} from {wanted} on; "
                f"the exchange has them from {rounds[0]} on, earlier ones were deleted. Restore a newer checkpoint, or "
                "train from the start"
            )
