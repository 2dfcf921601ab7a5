"""A policy's newest checkpoint in the bucket of its run, from which another machine may go on.

Objects of the policy's namespace: `checkpoint.STEP.N`, the N-th of the checkpoint's files in the order of their names,
then `checkpoint.json`, the checkpoint's own marker with the size and sha256 of each. Before that one the mirror is
written, so that the logs there hold what the checkpoint's marker says of them. Older files are deleted last.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import asdict
from pathlib import Path

from mutualrl.errors import CheckpointDamagedError, ExchangeDamagedError, FileDamagedError
from mutualrl.see.mirror import RUN_JSON, Mirror, mirrored, policy_files
from mutualrl.see.shared_directory import RemoteStore
from mutualrl.storage.artifacts import MARKER
from mutualrl.storage.checkpoints import CheckpointMarker, Checkpoints
from mutualrl.storage.files import checksummed_bytes, parse_checksummed, write_atomic
from mutualrl.storage.rundir import RunDirectory

POINTER = "checkpoint.json"
_FILE = re.compile(r"checkpoint\.([0-9]{6,})\.([0-9]+)")


class CheckpointCopies:
    """Copies of a policy's newest checkpoint. `write` is called again and again, beside the training."""

    def __init__(self, store: RemoteStore, run: RunDirectory, policy: str, mirror: Mirror) -> None:
        self._store = store
        self._policy = policy
        self._checkpoints = Checkpoints(run.policy(policy).root)
        self._links = run.policy(policy).root / ".copying"
        self._mirror = mirror
        self._written: int | None = None

    def write(self) -> None:
        """Write the mirror, and the newest checkpoint if it has not been copied. Raises OSError, MachineError."""
        self._mirror.write()
        step = max(self._checkpoints.steps(), default=None)
        if step is None or step == self._written:
            return
        try:
            marker = self._linked(step)
        except (FileNotFoundError, CheckpointDamagedError):
            return  # a newer one has taken its place
        names = sorted(marker.files)
        for number, name in enumerate(names):
            self._store.put_file(self._policy, _object(step, number), self._links / name)
        self._mirror.write()
        self._store.put(self._policy, POINTER, checksummed_bytes(asdict(marker)))
        self._written = step
        shutil.rmtree(self._links)
        matches = [_FILE.fullmatch(name) for name in self._store.names(self._policy)]
        self._store.delete(self._policy, [match[0] for match in matches if match and int(match[1]) != step])

    def _linked(self, step: int) -> CheckpointMarker:
        """Link a checkpoint's files into a directory of our own, from which the training removes none; return its
        marker."""
        marker, source = self._checkpoints.marker(step), self._checkpoints.path(step)
        shutil.rmtree(self._links, ignore_errors=True)
        for name in marker.files:
            (self._links / name).parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(source / name, self._links / name)
            except FileNotFoundError:
                raise
            except OSError:  # a file system without hard links
                shutil.copyfile(source / name, self._links / name)
        return marker


def _object(step: int, number: int) -> str:
    return f"checkpoint.{step:06d}.{number}"


def restore(store: RemoteStore, policy: str, run_id: str, root: Path) -> int | None:
    """Make the run directory of a policy from what is in the bucket: its files, and its newest checkpoint, compared
    with the checkpoint's marker. Return the checkpoint's step; None, and nothing is made, where there is none of this
    run.

    Raises ExchangeDamagedError, CheckpointDamagedError.
    """
    data, where = store.get(policy, POINTER), store.describe(policy, POINTER)
    run_json = mirrored(store, policy, RUN_JSON)
    if data is None or run_json is None:
        return None
    try:
        marker = CheckpointMarker.from_json(parse_checksummed(data, where))
        info = parse_checksummed(run_json, store.describe(policy, RUN_JSON))
    except (FileDamagedError, KeyError, TypeError, ValueError) as error:
        raise ExchangeDamagedError(f"{where}: not a checkpoint's marker ({error})") from None
    if (marker.run_id, marker.policy, info.get("run_id")) != (run_id, policy, run_id):
        return None
    run = RunDirectory(root)
    checkpoints = Checkpoints(run.policy(policy).root)
    staging = checkpoints.staged(marker.step)
    for number, name in enumerate(sorted(marker.files)):
        target = staging / name
        if not target.resolve().is_relative_to(staging.resolve()) or name == MARKER:
            raise CheckpointDamagedError(f"{where}: names a file outside of the checkpoint: {name!r}")
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            store.get_file(policy, _object(marker.step, number), target)
        except FileNotFoundError:
            raise CheckpointDamagedError(f"{where}: its file {name!r} is not there") from None
    checkpoints.commit(marker)
    checkpoints.verify(marker.step)
    for name, path in policy_files(run.policy(policy)).items():
        if name != run.policy(policy).result.name and (content := mirrored(store, policy, name)) is not None:
            write_atomic(path, content)
    write_atomic(run.recipe, str(info.get("recipe", "")).encode())
    write_atomic(run.run_json, run_json)
    return marker.step
