"""Atomic writes, and reads of JSON files."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import math
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from mutualrl.errors import DiskError, FileDamagedError

_COPY_BYTES = 2**20  # per read of a copied file
#: parsed JSON object, not validated
JsonObject = dict[str, Any]

_DISK_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.EFBIG}
#: fragments of the messages in which safetensors and torch report a disk error without its errno
_DISK_MESSAGES = ("(os error", "PytorchStreamWriter failed", "No space left", "file write failed")


def is_disk_failure(error: BaseException) -> bool:
    """Return whether an error means that a write failed because of the disk or the limit of open files."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _DISK_ERRNOS
    return any(fragment in str(error) for fragment in _DISK_MESSAGES)


def remedy(error: BaseException) -> str:
    """Return what to do about a failed write: raise the limit on the size of a file, where that ended it, or free some
    space."""
    too_large = isinstance(error, OSError) and error.errno == errno.EFBIG
    if too_large or os.strerror(errno.EFBIG) in str(error):
        return "Raise the limit on the size of a file (ulimit -f)"
    return "Free some space"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory, of the machine or of a GPU, was exhausted."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def is_machine_failure(error: OSError) -> bool:
    """Return whether the machine caused an error (disk, permissions, closed pipe, deleted working directory) and not a
    wrong path in this program."""
    if is_disk_failure(error) or error.errno in (
        errno.EPIPE,
        errno.EACCES,
        errno.EPERM,
        errno.ESTALE,
        errno.ECONNRESET,
    ):
        return True
    try:
        Path.cwd()
    except FileNotFoundError:
        return True
    return False


def write_atomic(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Write `data` to `path` so that a reader sees the old file or the new one, never a part.

    Steps: temporary file in the same directory, write, fsync, rename over the name, fsync of the directory.
    `durable=False` skips both fsyncs (heartbeats may be lost, but not torn). A writer killed in between leaves a `.tmp`
    file, which is not read. Raises DiskError with path and size if the write fails because of the disk."""
    with _temporary(path, io.BytesIO(data), len(data), durable=durable) as temporary:
        temporary.replace(path)
        if durable:
            sync_directory(path.parent)


def copy_atomic(source: Path, path: Path) -> None:
    """Copy a file of any size to `path` as `write_atomic` writes bytes. Raises DiskError, FileNotFoundError."""
    with source.open("rb") as file, _temporary(path, file, source.stat().st_size, durable=True) as temporary:
        temporary.replace(path)
        sync_directory(path.parent)


def create_atomic(path: Path, data: bytes) -> bool:
    """Write `data` to `path` unless it exists; return whether it was written.

    Steps: temporary file in the same directory, write, fsync, hard link to the name (which fails if it is taken), fsync
    of the directory. Raises DiskError as `write_atomic` does.
    """
    with _temporary(path, io.BytesIO(data), len(data), durable=True) as temporary:
        try:
            path.hardlink_to(temporary)
        except FileExistsError:
            return False
        finally:
            temporary.unlink()
        sync_directory(path.parent)
    return True


@contextlib.contextmanager
def _temporary(path: Path, content: BinaryIO, size: int, *, durable: bool) -> Iterator[Path]:
    """Yield a temporary file beside `path` with `size` bytes of `content`; remove it on errors. Raises DiskError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        with temporary.open("wb") as file:
            shutil.copyfileobj(content, file, _COPY_BYTES)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        yield temporary
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if not is_disk_failure(error):
            raise
        raise DiskError(f"{path}: {size:,} bytes cannot be written: {error.strerror}") from error


def remove_temporaries(directory: Path) -> None:
    """Remove the temporary files of killed writers from a directory, which must have no live writer."""
    for path in directory.glob(".*.tmp") if directory.is_dir() else ():
        path.unlink(missing_ok=True)


PROBE_BYTES = 4096


def require_writable(directory: Path) -> None:
    """Raise DiskError with path, size and free space if a small file cannot be written to a directory: the disk is
    full, out of inodes, or failing."""
    probe = directory / "probe"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _temporary(probe, io.BytesIO(bytes(PROBE_BYTES)), PROBE_BYTES, durable=True) as temporary:
            temporary.unlink()
    except (DiskError, OSError) as error:
        if isinstance(error, OSError) and not is_disk_failure(error):
            raise
        raise DiskError(
            f"{directory}: {PROBE_BYTES:,} bytes cannot be written ({free_space(directory)}): {error}"
        ) from None


def free_space(directory: Path) -> str:
    """Return what a file system has left, as text: bytes and files, or that it has no inodes left."""
    try:
        usage = os.statvfs(directory)
    except OSError as error:
        return f"free space unknown: {error.strerror}"
    free = f"{usage.f_bavail * usage.f_frsize:,} bytes"
    if usage.f_files and not usage.f_favail:
        return f"{free} but no inodes free: remove files, however small"
    return f"{free} and {usage.f_favail:,} files free"


def sync_directory(path: Path) -> None:
    """Make the renames in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


SMALL_BYTES = 64 * 2**20  # maximum size of a small file that mutualrl writes


@contextlib.contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """Yield a regular file, open for reading, without blocking on a FIFO or a device.

    Raises FileNotFoundError, FileDamagedError for any other kind of file, OSError.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise FileDamagedError(f"{path}: not a regular file")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(descriptor)


def try_stat(path: Path) -> os.stat_result | None:
    """Return the status of a file, or None if it does not exist. Raises OSError otherwise."""
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None


def read_regular(path: Path, limit: int = SMALL_BYTES) -> bytes:
    """Return the bytes of a regular file of at most `limit` bytes.

    Raises as `open_regular` does, and FileDamagedError for a larger one.
    """
    with open_regular(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise FileDamagedError(f"{path}: over {limit:,} bytes; expected less")
    return data


def strict_json(text: str | bytes) -> Any:
    """Parse strict JSON. Raises ValueError for anything else, and for NaN, an infinity, a number too large for a float,
    too deep nesting, or bytes that are not UTF-8."""
    try:
        return json.loads(
            text if isinstance(text, str) else text.decode("utf-8"),
            parse_constant=_reject_constant,
            parse_float=_finite,
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None


LARGEST_NUMBER = 1e100  # larger than any number that mutualrl writes; sums of larger ones could overflow


def finite_number(value: object) -> float | None:
    """Return a value from a file as a finite float, or None if it is not one."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST_NUMBER:
        return None
    return float(value)


def _reject_constant(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text:.20} is too large for a number")
    return value


def write_json(path: Path, value: object, *, durable: bool = True) -> None:
    """Write `value` as one line of JSON, atomically. Raises ValueError for NaN and infinities."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=False)
    write_atomic(path, (text + "\n").encode(), durable=durable)


CHECKSUM_KEY = "checksum"  # key on disk: sha256 of the rest of the file


PATH_KEY = "relative_path"  # key on disk: the file's path relative to its root


def write_checksummed(path: Path, value: JsonObject, *, root: Path | None = None) -> None:
    """Write a JSON object atomically with its own sha256, so that any changed byte is detected. With `root`, the
    directory that it belongs to, it also has its relative path there, so that a file moved from another place is
    detected."""
    write_atomic(path, checksummed_bytes(_located(path, value, root)))


def create_checksummed(path: Path, value: JsonObject, *, root: Path | None = None) -> bool:
    """Write a JSON object as `write_checksummed` does, unless the file exists; return whether it was written."""
    return create_atomic(path, checksummed_bytes(_located(path, value, root)))


def _located(path: Path, value: JsonObject, root: Path | None) -> JsonObject:
    """Return an object with its path relative to `root`, if there is one."""
    if root is None:
        return value
    relative = path.relative_to(root).as_posix()
    if value.get(PATH_KEY, relative) != relative:
        raise ValueError(f"{PATH_KEY}: found {value[PATH_KEY]!r}, expected {relative!r}")
    return {**value, PATH_KEY: relative}


def read_checksummed(path: Path, *, root: Path | None = None) -> JsonObject | None:
    """Return the object that `write_checksummed` wrote, without its checksum and, with `root`, its path; None if the
    file does not exist. Raises FileDamagedError if a byte was changed, added or lost and, with `root`, for a file
    from another path."""
    try:
        data = read_regular(path)
    except FileNotFoundError:
        return None
    value = parse_checksummed(data, str(path))
    if root is not None:
        stored, expected = value.pop(PATH_KEY, "another path"), path.relative_to(root).as_posix()
        if stored != expected:
            raise FileDamagedError(f"{path}: written for {str(stored)!r:.80}, expected {expected!r}")
    return value


def parse_checksummed(data: bytes, where: str) -> JsonObject:
    """Return the object in checksummed bytes, without its checksum. Raises FileDamagedError if a byte was changed."""
    value = _object(data, where)
    value.pop(CHECKSUM_KEY, None)
    try:
        matches = _with_checksum(value) == data
    except UnicodeEncodeError:  # a lone surrogate, which mutualrl never writes
        matches = False
    if not matches:
        raise FileDamagedError(f"{where}: its bytes do not match its checksum")
    return value


def parse_or_none(data: bytes | None) -> JsonObject | None:
    """Parse a JSON object, or return None if that fails: for transient state, which is rewritten often and not synced
    to disk."""
    try:
        value = None if data is None else strict_json(data)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def checksummed_bytes(value: JsonObject) -> bytes:
    """Encode a JSON object with its own sha256, replacing any it already has."""
    return _with_checksum({key: item for key, item in value.items() if key != CHECKSUM_KEY})


def _with_checksum(rest: JsonObject) -> bytes:
    checksum = hashlib.sha256(json.dumps(rest, ensure_ascii=False, allow_nan=False).encode()).hexdigest()
    return (json.dumps({**rest, CHECKSUM_KEY: checksum}, ensure_ascii=False, allow_nan=False) + "\n").encode()


def read_json(path: Path) -> JsonObject | None:
    """Return the JSON object at `path`, or None if the file does not exist. Raises FileDamagedError otherwise."""
    try:
        return _object(read_regular(path), str(path))
    except FileNotFoundError:
        return None


def _object(data: bytes, where: str) -> JsonObject:
    try:
        value = strict_json(data)
    except ValueError as error:
        raise FileDamagedError(f"{where}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise FileDamagedError(f"{where}: expected a JSON object, found {type(value).__name__}")
    return value


def try_read_bytes(path: Path) -> bytes | None:
    """Return the bytes of a small regular file, or None if it cannot be read."""
    try:
        return read_regular(path)
    except (FileDamagedError, OSError):
        return None


def try_read_json(path: Path) -> JsonObject | None:
    """Return the JSON object at `path`, or None if it cannot be read: for transient state, which is rewritten often and
    not synced to disk."""
    try:
        return read_json(path)
    except (FileDamagedError, OSError):
        return None
