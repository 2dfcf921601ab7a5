"""Directories that are complete, or not there at all: a trained model, an adapter, a checkpoint.

The files are written under another name; `complete.json`, written last, has the size and the sha256 of each and a
checksum of itself; one rename puts all of it in its place."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from mutualrl.errors import FileDamagedError
from mutualrl.storage.files import JsonObject, read_checksummed, sync_directory, write_checksummed

FORMAT = 1
MARKER = "complete.json"
CARD = "README.md"  # a model's card is written, and written again, when the model is complete
_SUMS: dict[tuple[str, int, int, int], str] = {}


@dataclass(frozen=True, slots=True)
class FileSum:
    """Size in bytes and sha256 of one file."""

    bytes: int
    sha256: str


def file_sum(path: Path) -> FileSum:
    """Return size and sha256 of a file, after its bytes are on the disk."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileSum(file.tell(), digest)


def prefix_sum(path: Path, length: int | None = None) -> FileSum:
    """Return size and sha256 of a file's first `length` bytes (or fewer, if it is shorter), or of all."""
    digest, left, size = hashlib.sha256(), length, 0
    with path.open("rb") as file:
        while block := file.read(2**20 if left is None else min(2**20, left)):
            digest.update(block)
            size += len(block)
            left = None if left is None else left - len(block)
    return FileSum(size, digest.hexdigest())


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file, in hex. One that has not changed since this process read it (size, time, inode) is
    not read again: models are large, and are looked at more than once."""
    stat = path.stat()
    key = (str(path), stat.st_size, stat.st_mtime_ns, stat.st_ino)
    if key not in _SUMS:
        with path.open("rb") as file:
            _SUMS[key] = hashlib.file_digest(file, "sha256").hexdigest()
    return _SUMS[key]


def relative_files(directory: Path) -> list[str]:
    """Return every file below a directory but the marker, sorted, with `/` between parts."""
    names = (p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file())
    return sorted(name for name in names if name != MARKER)


def commit_directory(staging: Path, final: Path, identity: Mapping[str, object]) -> None:
    """Turn the files in `staging` into the directory `final`, in place of an earlier one. `identity`: what it is, for
    the marker. A kill before the rename leaves what was there before."""
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
    """Return the marker of a directory whose files were all compared with it; its card is left aside. Raises
    FileDamagedError naming the file that is missing, is changed, or does not belong there."""
    path = directory / MARKER
    marker = read_checksummed(path)
    if marker is None:
        raise FileDamagedError(f"{path}: not there; {directory.name} is not complete, or was not written by a run")
    files = marker.get("files")
    if marker.get("format") != FORMAT or not isinstance(files, dict):
        raise FileDamagedError(f"{path}: format {marker.get('format')!r}, this version reads {FORMAT}")
    compare_files(directory, {name: FileSum(**entry) for name, entry in files.items()})
    return marker


def compare_files(directory: Path, expected: Mapping[str, FileSum]) -> None:
    """Raise FileDamagedError naming a file below `directory` that is missing, is changed, or is not expected."""
    names = set(relative_files(directory)) - {CARD}
    for name in sorted(names ^ (set(expected) - {CARD})):
        what = "is missing" if name in expected else "does not belong there"
        raise FileDamagedError(f"{directory / name}: {what}")
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
