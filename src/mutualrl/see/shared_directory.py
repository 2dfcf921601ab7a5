"""Exchange in a directory that several machines mount: `file:///mount/runs/one`. It does what a bucket does for `join`.

The file system must keep links, renames and locks as NFS 4 and the common cluster file systems do.
"""

from __future__ import annotations

import os
import shutil
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from mutualrl.errors import DiskError, MachineError
from mutualrl.see.bucket import RETRY_SECONDS, BucketStore
from mutualrl.see.store import ExchangeStore, LocalStore


class RemoteStore(ExchangeStore, Protocol):
    """Store that policies on several machines reach: what `join` asks of one beyond an exchange's objects."""

    url: str

    def probe(self) -> None:
        """Raise MachineError naming what the store does not do."""
        ...

    def put_file(self, policy: str, name: str, path: Path) -> None:
        """Put a file of any size."""
        ...

    def get_file(self, policy: str, name: str, path: Path) -> None:
        """Write an object of any size to a file. Raises FileNotFoundError where there is none."""
        ...


class SharedDirectory(LocalStore):
    """Files below a directory that is mounted by all machines of the run."""

    poll_seconds = (0.05, 1.0)
    liveness_seconds = 5.0

    def __init__(self, url: str) -> None:
        super().__init__(Path(unquote(urlsplit(url).path)))
        self.url = url

    def probe(self) -> None:
        """Write, list, read and delete a file; create it twice; replace it by who has read it, and by who has not."""
        if not self.root.parent.is_dir():
            raise MachineError(f"{self.url}: there is no directory {self.root.parent}; is the file system mounted?")
        name = f"probe-{uuid.uuid4().hex}"
        try:
            self._require(self.create("", name, b"first"), "a file cannot be created")
            self._require(not self.create("", name, b"second"), "it accepts a second create")
            self._require(name in self.names(""), "what was put is not listed")
            self._require(self.swap("", name, b"first", b"third"), "who has read a file cannot replace it")
            self._require(not self.swap("", name, b"first", b"fourth"), "it accepts a replacement that is out of date")
            self._require(self.get("", name) == b"third", "what was put is not what is read")
        except (OSError, DiskError) as error:
            raise MachineError(f"{self.url}: cannot hold an exchange: {error}") from None
        finally:
            with suppress(OSError):
                self.delete("", [name])

    def _require(self, kept: bool, problem: str) -> None:
        if not kept:
            raise MachineError(f"{self.url}: its file system cannot hold an exchange: {problem}")

    def put_file(self, policy: str, name: str, path: Path) -> None:
        """Copy a file beside its place, and rename it."""
        target = self._directory(policy) / name
        temporary = target.with_name(f".{name}.{os.getpid()}.tmp")
        shutil.copyfile(path, temporary)
        temporary.replace(target)

    def get_file(self, policy: str, name: str, path: Path) -> None:
        """Copy an object to a file. Raises FileNotFoundError where there is none."""
        shutil.copyfile(self.root / policy / name, path)


def remote_store(url: str, retry_seconds: float = RETRY_SECONDS) -> RemoteStore:
    """Return the store at a URL: a shared directory, or a bucket. Raises UsageError, MachineError."""
    return SharedDirectory(url) if url.startswith("file://") else BucketStore(url, retry_seconds)
