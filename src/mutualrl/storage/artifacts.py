"""Directories that are complete or absent: a trained model, an adapter, a checkpoint.

The files are written to a staging directory; `complete.json`, written last, has the size and sha256 of each file and
its own checksum; one rename commits the directory."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from mutualrl.errors import FileDamagedError
from mutualrl.storage.files import JsonObject, read_checksummed, sync_directory, write_checksummed
from mutualrl.storage.format import FORMAT, other_format

MARKER = "complete.json"
CARD = "README.md"  # a model's card is rewritten after the model is complete
_SHA256_CACHE: dict[tuple[str, int, int, int], str] = {}


@dataclass(frozen=True, slots=True)
class FileDigest:
    """Size in bytes and sha256 of a file."""

    bytes: int
    sha256: str


def file_sum(path: Path) -> FileDigest:
    """Sync a file to disk and return its size and sha256."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileDigest(file.tell(), digest)


def prefix_digest(path: Path, length: int | None = None) -> FileDigest:
    """Return size and sha256 of a file's first `length` bytes (fewer if it is shorter), or of the whole file."""
    digest, remaining, size = hashlib.sha256(), length, 0
    with path.open("rb") as file:
        while block := file.read(2**20 if remaining is None else min(2**20, remaining)):
            digest.update(block)
            size += len(block)
            remaining = None if remaining is None else remaining - len(block)
    return FileDigest(size, digest.hexdigest())


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file, in hex. Cached while its size, modification time and inode stay the same: models are
    large, and are verified more than once."""
    stat = path.stat()
    key = (str(path), stat.st_size, stat.st_mtime_ns, stat.st_ino)
    if key not in _SHA256_CACHE:
        with path.open("rb") as file:
            _SHA256_CACHE[key] = hashlib.file_digest(file, "sha256").hexdigest()
    return _SHA256_CACHE[key]


def relative_files(directory: Path) -> list[str]:
    """Return every file below a directory except the marker, sorted, as POSIX paths."""
    names = (p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file())
    return sorted(name for name in names if name != MARKER)


def commit_directory(staging: Path, final: Path, identity: Mapping[str, object]) -> None:
    """Turn `staging` into the directory `final`, replacing an earlier one. `identity`: marker fields that identify the
    content. A kill before the rename leaves the earlier directory unchanged."""
    sums = {name: asdict(file_sum(staging / name)) for name in relative_files(staging)}
    for directory in {(staging / name).parent for name in sums}:
        sync_directory(directory)
    write_checksummed(staging / MARKER, {"format": FORMAT, **identity, "files": sums})
    aside = final.with_name(f".{final.name}.before")
    shutil.rmtree(aside, ignore_errors=True)
    if final.exists():
        final.replace(aside)
    staging.replace(final)
    sync_directory(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def verify_directory(directory: Path) -> JsonObject:
    """Verify a directory's files, except its card, against its marker and return the marker. Raises FileDamagedError
    naming a missing, changed or unexpected file."""
    path = directory / MARKER
    marker = read_checksummed(path)
    if marker is None:
        raise FileDamagedError(f"{path}: missing; {directory.name} is incomplete or was not written by a run")
    files = marker.get("files")
    if (problem := other_format(marker.get("format"), path)) is not None:
        raise FileDamagedError(problem)
    if not isinstance(files, dict):
        raise FileDamagedError(f"{path}: not the marker of a directory (it names no files)")
    compare_files(directory, {name: FileDigest(**entry) for name, entry in files.items()})
    return marker


def compare_files(directory: Path, expected: Mapping[str, FileDigest]) -> None:
    """Raise FileDamagedError naming a file below `directory` that is missing, changed or unexpected."""
    names = set(relative_files(directory)) - {CARD}
    for name in sorted(names ^ (set(expected) - {CARD})):
        problem = "is missing" if name in expected else "unexpected file"
        raise FileDamagedError(f"{directory / name}: {problem}")
    for name in sorted(names):
        path, entry = directory / name, expected[name]
        if path.stat().st_size != entry.bytes:
            raise FileDamagedError(
                f"{path}: {path.stat().st_size} bytes, expected {entry.bytes} according to its marker"
            )
        digest = sha256_of(path)
        if digest != entry.sha256:
            raise FileDamagedError(
                f"{path}: sha256 {digest[:12]}..., expected {entry.sha256[:12]}... according to its marker"
            )
