"""Storage of an exchange's objects: one interface over files, a bucket or memory.

Each policy has its own namespace and is its only writer. Names are flat. Guarantees of a store:

- `put`, `create` and `swap` are atomic, even if the writer is killed;
- `create` succeeds for one writer only; `swap` only if the object still has the bytes that the writer read;
- an object that was put durably survives a crash of the machine and is visible to every reader from then on.
"""

from __future__ import annotations

import errno
import fcntl
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol, TypeVar
from urllib.parse import unquote, urlsplit

from mutualrl.errors import DiskError, ExchangeDamagedError, FileDamagedError, MachineError
from mutualrl.storage.files import copy_atomic, create_atomic, read_regular, sync_directory, write_atomic

LARGEST_OBJECT = 4 * 2**30  # bytes; a round of thousands of long rollouts is a few megabytes


class ExchangeStore(Protocol):
    """Objects by policy and name. A reader pauses `poll_seconds` (first, longest) between two polls for an object, and
    polls the heartbeats every `liveness_seconds`. `rereads`: how often damaged bytes are read again (`reread`)."""

    poll_seconds: tuple[float, float]
    liveness_seconds: float
    rereads: int

    def describe(self, policy: str, name: str = "") -> str:
        """Return an object's location, for messages."""
        ...

    def policies(self) -> list[str]:
        """Return the policies that have a namespace, sorted."""
        ...

    def names(self, policy: str) -> list[str]:
        """Return the names of a policy's objects, in any order; none if it has no namespace."""
        ...

    def get(self, policy: str, name: str) -> bytes | None:
        """Return an object's bytes, or None if it does not exist. Raises OSError if it cannot be read, including
        ExchangeDamagedError."""
        ...

    def size(self, policy: str, name: str) -> int:
        """Return an object's size in bytes; 0 if it does not exist."""
        ...

    def put(self, policy: str, name: str, data: bytes, *, durable: bool = True) -> None:
        """Write an object, replacing an older one. With `durable=False` a crash may lose it, but never leave a part."""
        ...

    def create(self, policy: str, name: str, data: bytes) -> bool:
        """Write an object unless it exists. Return whether it was written."""
        ...

    def swap(self, policy: str, name: str, expected: bytes, data: bytes) -> bool:
        """Replace an object if its bytes are `expected`. Return whether it was replaced."""
        ...

    def delete(self, policy: str, names: Iterable[str]) -> None:
        """Delete objects durably; names that do not exist are ignored."""
        ...


T = TypeVar("T")
REREAD_SECONDS = 0.5  # before the first repeated read; doubled before each further one


def reread(store: ExchangeStore, read: Callable[[], T]) -> T:
    """Return what `read` returns. If it finds damage, repeat it up to `store.rereads` times: a proxy between this
    machine and a bucket may answer once with a page or half an object. Raises ExchangeDamagedError if it stays."""
    for attempt in range(store.rereads):
        try:
            return read()
        except ExchangeDamagedError:
            time.sleep(REREAD_SECONDS * 2.0**attempt)
    return read()


Location = Path | str | ExchangeStore
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class LocalStore:
    """Files below a directory: `<root>/<policy>/<name>`. No pickle, no shared mutable file."""

    poll_seconds = (0.002, 0.05)
    liveness_seconds = 0.5
    rereads = 0

    def __init__(self, root: Path) -> None:
        self.root = root
        self._existed = False

    def describe(self, policy: str, name: str = "") -> str:
        """Return the path."""
        return str(self.root / policy / name)

    def policies(self) -> list[str]:
        """Return the directories below the root, sorted."""
        return sorted(path.name for path in self.root.iterdir() if path.is_dir()) if self.root.is_dir() else []

    def names(self, policy: str) -> list[str]:
        """Return the file names in the policy's directory, except the store's own files."""
        directory = self.root / policy
        if not directory.is_dir():
            return []
        return [path.name for path in directory.iterdir() if not path.name.startswith(".")]

    def get(self, policy: str, name: str) -> bytes | None:
        """Return the file's bytes, or None if it does not exist."""
        try:
            return read_regular(self.root / policy / name, LARGEST_OBJECT)
        except FileNotFoundError:
            return None
        except FileDamagedError as error:
            raise ExchangeDamagedError(str(error)) from None

    def size(self, policy: str, name: str) -> int:
        """Return the file's size; 0 if it does not exist."""
        path = self.root / policy / name
        return path.stat().st_size if path.exists() else 0

    def put(self, policy: str, name: str, data: bytes, *, durable: bool = True) -> None:
        """Write a temporary file and rename it over the name. Raises DiskError."""
        if durable:  # a heartbeat must not recreate a directory that was removed
            self._directory(policy)
        write_atomic(self.root / policy / name, data, durable=durable)

    def create(self, policy: str, name: str, data: bytes) -> bool:
        """Write a temporary file and hard-link it to the name, which fails if the name is taken; on a file system
        without hard links, check and rename under the policy's lock. Raises DiskError."""
        path = self._directory(policy) / name
        try:
            return create_atomic(path, data)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
        with self._locked(policy):  # a file system without hard links
            if path.exists():
                return False
            write_atomic(path, data)
            return True

    def swap(self, policy: str, name: str, expected: bytes, data: bytes) -> bool:
        """Compare and replace under the policy's lock, which the operating system releases when the process ends."""
        with self._locked(policy):
            if self.get(policy, name) != expected:
                return False
            self.put(policy, name, data)
            return True

    def delete(self, policy: str, names: Iterable[str]) -> None:
        """Unlink the files and sync the directory."""
        directory = self.root / policy
        for name in names:
            (directory / name).unlink(missing_ok=True)
        if directory.is_dir():
            sync_directory(directory)

    def _directory(self, policy: str) -> Path:
        if self._existed and not self.root.is_dir():
            raise MachineError(f"{self.root}: the directory is gone; it was renamed or removed while it was in use")
        directory = self.root / policy
        directory.mkdir(parents=True, exist_ok=True)
        self._existed = True
        return directory

    @contextmanager
    def _locked(self, policy: str) -> Iterator[None]:
        self._directory(policy)
        with (self.root / f".{policy}.lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


class RemoteStore(ExchangeStore, Protocol):
    """Store that several machines can reach, with the further operations that `join` requires."""

    url: str

    def probe(self) -> None:
        """Raise MachineError naming the first operation that the store does not support."""
        ...

    def put_file(self, policy: str, name: str, path: Path) -> None:
        """Put a file of any size."""
        ...

    def get_file(self, policy: str, name: str, path: Path) -> None:
        """Write an object of any size to a file. Raises FileNotFoundError if it does not exist."""
        ...


class SharedDirectory(LocalStore):
    """Files below a directory that all machines of a run mount, `file:///mount/runs/one`. The file system must support
    hard links, renames and locks, as NFS 4 and the common cluster file systems do."""

    poll_seconds = (0.05, 1.0)
    liveness_seconds = 5.0
    rereads = 3

    def __init__(self, url: str) -> None:
        super().__init__(Path(unquote(urlsplit(url).path)))
        self.url = url

    def probe(self) -> None:
        """Write, list, read and delete a file; create it twice; swap its current and stale bytes."""
        if not self.root.parent.is_dir():
            raise MachineError(f"{self.url}: directory {self.root.parent} does not exist; is the file system mounted?")
        name = f"probe-{uuid.uuid4().hex}"
        try:
            self._require(self.create("", name, b"first"), "a file cannot be created")
            self._require(not self.create("", name, b"second"), "it accepts a second create")
            self._require(name in self.names(""), "a new file is not listed")
            self._require(self.swap("", name, b"first", b"third"), "a replacement of the current version fails")
            self._require(not self.swap("", name, b"first", b"fourth"), "it accepts a replacement of a stale version")
            self._require(self.get("", name) == b"third", "a read does not return what was written")
        except (OSError, DiskError) as error:
            raise MachineError(f"{self.url}: cannot hold an exchange: {error}") from None
        finally:
            with suppress(OSError):
                self.delete("", [name])

    def _require(self, condition: bool, problem: str) -> None:
        if not condition:
            raise MachineError(f"{self.url}: the file system cannot hold an exchange: {problem}")

    def put_file(self, policy: str, name: str, path: Path) -> None:
        """Copy a file atomically and durably. Raises DiskError."""
        copy_atomic(path, self._directory(policy) / name)

    def get_file(self, policy: str, name: str, path: Path) -> None:
        """Copy an object to a file. Raises FileNotFoundError if it does not exist."""
        shutil.copyfile(self.root / policy / name, path)


def remote_store(url: str, retry_seconds: float | None = None) -> RemoteStore:
    """Return the store at a URL: a shared directory, or a bucket whose failing requests are retried for up to
    `retry_seconds`. Raises UsageError, MachineError."""
    if url.startswith("file://"):
        return SharedDirectory(url)
    from mutualrl.see.bucket import BucketStore

    return BucketStore(url) if retry_seconds is None else BucketStore(url, retry_seconds)


def open_store(location: Location) -> ExchangeStore:
    """Return the store at a location: a directory, or the URL of a bucket. A store is returned unchanged."""
    if isinstance(location, Path):
        return LocalStore(location)
    if isinstance(location, str):
        return remote_store(location)
    return location
