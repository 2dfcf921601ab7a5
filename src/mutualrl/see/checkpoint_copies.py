"""Copy of a policy's newest checkpoint in the run's bucket, from which another machine can resume.

Objects in the policy's namespace: `checkpoint.STEP.aATTEMPT.N`, the N-th of the checkpoint's files sorted by name, and
the pointer `checkpoint.json`, which has the names' prefix and the checkpoint's marker (size and sha256 of each file).
The mirror is written before the pointer, so that the mirrored logs match the marker. Older files are deleted last. A
fenced-off attempt writes nothing.

Only data is read from the bucket: files below the checkpoint's directory, and logs. The recipe, and with it all code,
is the user's.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from mutualrl.errors import CheckpointDamagedError, ExchangeDamagedError, FileDamagedError
from mutualrl.see.mirror import PREFIX as MIRROR
from mutualrl.see.mirror import Mirror, mirrored, policy_files
from mutualrl.see.retention import CURSOR
from mutualrl.see.store import ExchangeStore, RemoteStore
from mutualrl.storage.artifacts import MARKER, compare_files
from mutualrl.storage.checkpoints import CheckpointMarker, Checkpoints
from mutualrl.storage.files import checksummed_bytes, parse_checksummed, write_atomic
from mutualrl.storage.rundir import RunDirectory

POINTER = "checkpoint.json"
COPY = "checkpoint."
LARGEST_POINTER = 2**26  # bytes
LOGS = ("before.json", "metrics.jsonl", "rescues.jsonl", "samples.jsonl")  # mirrored files that a resumed policy needs


class CheckpointCopies:
    """Copies of a policy's newest checkpoint. `write` is called periodically during training. `model`: digest of its
    base model. The mirror checks whether a newer attempt of the policy has started."""

    def __init__(
        self,
        store: RemoteStore,
        run: RunDirectory,
        policy: str,
        mirror: Mirror,
        *,
        attempt: int,
        model: str,
    ) -> None:
        self._store = store
        self._policy = policy
        self._checkpoints = Checkpoints(run.policy(policy).root)
        self._links = run.policy(policy).root / ".copying"
        self._mirror = mirror
        self._attempt = attempt
        self._model = model
        self._written: int | None = None

    def write(self) -> None:
        """Write the mirror, and the newest checkpoint unless it has been copied. Raises OSError, MachineError."""
        if not self._mirror.write():
            return
        step = max(self._checkpoints.steps(), default=None)
        if step is None or step == self._written:
            return
        try:
            marker = self._linked(step)
        except (FileNotFoundError, CheckpointDamagedError):
            return  # pruned after a newer checkpoint
        prefix = f"{COPY}{step:06d}.a{self._attempt}."
        for number, name in enumerate(sorted(marker.files)):
            self._store.put_file(self._policy, f"{prefix}{number}", self._links / name)
        if not self._mirror.write():
            return
        pointer = {"prefix": prefix, "model": self._model, "marker": asdict(marker)}
        self._store.put(self._policy, POINTER, checksummed_bytes(pointer))
        self._written = step
        shutil.rmtree(self._links)
        names = [name for name in self._store.names(self._policy) if name.startswith(COPY) and name != POINTER]
        self._store.delete(self._policy, [name for name in names if not name.startswith(prefix)])

    def _linked(self, step: int) -> CheckpointMarker:
        """Link a checkpoint's files into a separate directory, which pruning does not touch; return its marker."""
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


def forget(store: RemoteStore, policy: str) -> None:
    """Delete what a policy said to need, then its checkpoint copies, the pointer first, and its mirror, to train from
    the start."""
    store.delete(policy, [CURSOR, POINTER])
    store.delete(policy, [name for name in store.names(policy) if name.startswith((COPY, MIRROR))])


@dataclass(frozen=True, slots=True)
class Staged:
    """Checkpoint that was fetched into a directory, with its policy's logs. `model`: digest of its base model."""

    directory: Path
    marker: CheckpointMarker
    model: str

    def install(self, run: RunDirectory) -> None:
        """Move the files into a run directory, the checkpoint last, and remove the staging directory."""
        policy = run.policy(self.marker.policy)
        checkpoints = Checkpoints(policy.root)
        policy.root.mkdir(parents=True, exist_ok=True)
        for name, path in policy_files(policy).items():
            if (source := self.directory / "logs" / name).is_file():
                write_atomic(path, source.read_bytes())
        checkpoints.clear_partial()
        staged = checkpoints.staged(self.marker.step)
        staged.parent.mkdir(parents=True, exist_ok=True)
        (self.directory / "files").replace(staged)
        checkpoints.commit(self.marker)
        shutil.rmtree(self.directory)


def copied(store: ExchangeStore, policy: str, run_id: str) -> CheckpointMarker | None:
    """Return the marker of a policy's copy of this run; None if it has none, or none that can be read."""
    if store.size(policy, POINTER) > LARGEST_POINTER or (data := store.get(policy, POINTER)) is None:
        return None
    try:
        value = parse_checksummed(data, store.describe(policy, POINTER))
        marker = _checked(CheckpointMarker.from_json(value["marker"]))
    except (FileDamagedError, AttributeError, KeyError, TypeError, ValueError):
        return None
    return marker if (marker.run_id, marker.policy) == (run_id, policy) else None


def has_copy(store: RemoteStore, policy: str) -> bool:
    """Return whether the bucket has a checkpoint of a policy."""
    return store.size(policy, POINTER) > 0


def stage(store: RemoteStore, policy: str, run_id: str, directory: Path) -> Staged | None:
    """Fetch a policy's newest checkpoint into `directory`, replacing its content, and verify it. Return None if the
    store has no checkpoint of this run. Raises ExchangeDamagedError, CheckpointDamagedError."""
    where = store.describe(policy, POINTER)
    if store.size(policy, POINTER) > LARGEST_POINTER:
        raise ExchangeDamagedError(f"{where}: larger than {LARGEST_POINTER:,} bytes")
    if (data := store.get(policy, POINTER)) is None:
        return None
    try:
        value = parse_checksummed(data, where)
        marker, prefix, model = _checked(CheckpointMarker.from_json(value["marker"])), value["prefix"], value["model"]
        if not isinstance(prefix, str) or not prefix.startswith(COPY) or "/" in prefix or not isinstance(model, str):
            raise ValueError(f"prefix {prefix!r:.80}")
    except (FileDamagedError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ExchangeDamagedError(f"{where}: not a checkpoint's marker ({error})") from None
    if (marker.run_id, marker.policy) != (run_id, policy):
        return None
    shutil.rmtree(directory, ignore_errors=True)
    for number, name in enumerate(sorted(marker.files)):
        target = directory / "files" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if store.size(policy, f"{prefix}{number}") != marker.files[name].bytes:
            raise CheckpointDamagedError(f"{where}: its file {name!r} is missing or has another size")
        store.get_file(policy, f"{prefix}{number}", target)
    try:
        compare_files(directory / "files", marker.files)
    except FileDamagedError as error:
        raise CheckpointDamagedError(f"{where}: {error}") from None
    (directory / "logs").mkdir(parents=True, exist_ok=True)
    for name in LOGS:
        if (content := mirrored(store, policy, name)) is not None:
            (directory / "logs" / name).write_bytes(content)
    return Staged(directory, marker, model)


def _checked(marker: CheckpointMarker) -> CheckpointMarker:
    """Return the marker if its numbers are valid and its files are below the checkpoint. Raises ValueError."""
    for key in ("step", "round", "attempt", "ranks"):
        value = getattr(marker, key)
        if type(value) is not int or value < 0:
            raise ValueError(f"{key}: found {value!r:.80}")
    for name, entry in marker.files.items():
        path = PurePosixPath(name)
        plain = not path.is_absolute() and ".." not in path.parts and "\x00" not in name and "\\" not in name
        if not plain or name == MARKER or path.suffix == ".py" or type(entry.bytes) is not int:
            raise ValueError(f"a file outside the checkpoint, or code: {name!r:.80}")
    return marker
