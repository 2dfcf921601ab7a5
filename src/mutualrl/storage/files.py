"""One way to write a file safely, and to read JSON back."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import stat
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from mutualrl.errors import DiskError, FileDamagedError, UsageError

#: what json.loads gives of an object; its readers check what is in it
JsonObject = dict[str, Any]

_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.EFBIG}
#: how safetensors and torch report what the system said, without its number
_DISK_WORDS = ("(os error", "PytorchStreamWriter failed", "No space left", "file write failed")


def user_path(text: str | Path) -> Path:
    """Return a path as a user typed it, `~` expanded and absolute; the file need not exist.

    Raises UsageError for what the system could not even look up: a NUL, undecodable bytes, an unknown home, a name that
    is too long, a directory that may not be entered.
    """
    shown = repr(str(text))[:120]
    if "\0" in str(text) or not _encodes(str(text)):
        raise UsageError(f"{shown} is not a path: it holds a NUL, or bytes that are no UTF-8")
    try:
        path = Path(text).expanduser().absolute()
        path.exists()
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return path
    except OSError as error:
        raise UsageError(f"path {shown} cannot be used: {error.strerror or error}") from None
    except RuntimeError as error:  # no such user's home
        raise UsageError(f"path {shown} cannot be used: {error}") from None
    return path


def _encodes(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def is_disk_failure(error: BaseException) -> bool:
    """Return whether an error means that the disk, or the limit of open files, refused a write."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _DISK_ERRORS
    return any(word in str(error) for word in _DISK_WORDS)


def is_machine_failure(error: OSError) -> bool:
    """Return whether an error is the machine's: its disk, its permissions, a closed pipe, a working directory that is
    gone; and not a path that we should not have opened."""
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
    """Put `data` at `path` so that a reader sees the old file, or the new one, never a part.

    Steps: temporary file in the same directory, write, fsync, rename over the name, fsync of the directory. With
    `durable=False` the two fsyncs are left out (heartbeats: torn is forbidden, lost is harmless). A writer killed in
    between leaves a `.tmp` file that no reader looks at. Raises DiskError with the path and the bytes needed when the
    disk refuses."""
    with _temporary(path, data, durable=durable) as temporary:
        temporary.replace(path)
        if durable:
            sync_directory(path.parent)


def create_atomic(path: Path, data: bytes) -> bool:
    """Put `data` at `path` unless something is there; return whether it was put.

    Steps: temporary file in the same directory, write, fsync, link to the name (which fails where it is taken), fsync
    of the directory. Raises DiskError as `write_atomic` does.
    """
    with _temporary(path, data, durable=True) as temporary:
        try:
            path.hardlink_to(temporary)
        except FileExistsError:
            return False
        finally:
            temporary.unlink()
        sync_directory(path.parent)
    return True


@contextlib.contextmanager
def _temporary(path: Path, data: bytes, *, durable: bool) -> Iterator[Path]:
    """Yield a file beside `path` that holds `data`; where the disk refuses anything, it is removed again."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        yield temporary
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if not is_disk_failure(error):
            raise
        raise DiskError(f"{path}: {len(data):,} bytes cannot be written: {error.strerror}") from error


def remove_temporaries(directory: Path) -> None:
    """Remove what killed writers left in a directory. No writer may be at work there."""
    for path in directory.glob(".*.tmp") if directory.is_dir() else ():
        path.unlink(missing_ok=True)


PROBE_BYTES = 4096


def require_writable(directory: Path) -> None:
    """Raise DiskError, with path, bytes and what is free, when a small file cannot be written into a directory: the
    disk is full, has no inodes left, or fails."""
    probe = directory / "probe"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _temporary(probe, bytes(PROBE_BYTES), durable=True) as temporary:
            temporary.unlink()
    except (DiskError, OSError) as error:
        if isinstance(error, OSError) and not is_disk_failure(error):
            raise
        raise DiskError(f"{directory}: {PROBE_BYTES:,} bytes cannot be written ({_free(directory)}): {error}") from None


def _free(directory: Path) -> str:
    try:
        state = os.statvfs(directory)
    except OSError as error:
        return f"what is free cannot be seen: {error.strerror}"
    return f"{state.f_bavail * state.f_frsize:,} bytes and {state.f_favail:,} files free"


def sync_directory(path: Path) -> None:
    """Make the renames in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


SMALL_BYTES = 64 * 2**20  # of a small file of ours, at most: what is larger was not written by us


@contextlib.contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """Yield a regular file, open for reading. A FIFO, a device or a directory is never read, nor waited for.

    Raises FileNotFoundError, FileDamagedError for another kind of file, OSError.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise FileDamagedError(f"{path}: not a regular file")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(descriptor)


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
    """Return the value of a JSON text as we write it. Raises ValueError for anything else: NaN, an infinity, a number
    that is too large for a float, nesting without end, bytes that are no UTF-8."""
    try:
        return json.loads(
            text if isinstance(text, str) else text.decode("utf-8"), parse_constant=_no_number, parse_float=_finite
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None


LARGEST_NUMBER = 1e100  # no figure of ours is larger; sums of larger ones would overflow


def finite_number(value: object) -> float | None:
    """Return a value of a file as a finite number that can be computed with and shown, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST_NUMBER:
        return None
    return float(value)


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text:.20} is too large for a number")
    return value


def write_json(path: Path, value: object, *, durable: bool = True) -> None:
    """Write `value` as one line of JSON, atomically. NaN and infinities are refused."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=False)
    write_atomic(path, (text + "\n").encode(), durable=durable)


CHECKSUM_KEY = "seal"  # the key on disk: sha256 of everything else in the file


PLACE_KEY = "relative_path"  # the key on disk: where below its root the file lies


def write_checksummed(path: Path, value: JsonObject, *, root: Path | None = None) -> None:
    """Write a JSON object, atomically, with a sha256 of itself: a file of which no byte can change unnoticed. With
    `root`, the directory that it belongs to, it also holds its place there, so that no file of another place can take
    its own unnoticed."""
    if root is not None:
        place = path.relative_to(root).as_posix()
        if value.get(PLACE_KEY, place) != place:
            raise ValueError(f"{PLACE_KEY}: found {value[PLACE_KEY]!r}, expected {place!r}")
        value = {**value, PLACE_KEY: place}
    write_atomic(path, checksummed_bytes(value))


def read_checksummed(path: Path, *, root: Path | None = None) -> JsonObject | None:
    """Return the object that `write_checksummed` wrote, without its checksum and, with `root`, its place; None when
    there is no such file. Raises FileDamagedError when a byte was changed, added or lost, and, with `root`, for a file
    of another place."""
    try:
        data = read_regular(path)
    except FileNotFoundError:
        return None
    value = parse_checksummed(data, str(path))
    if root is not None:
        place, expected = value.pop(PLACE_KEY, "another place"), path.relative_to(root).as_posix()
        if place != expected:
            raise FileDamagedError(f"{path}: is the file of {str(place)!r:.80}, expected that of {expected!r}")
    return value


def parse_checksummed(data: bytes, where: str) -> JsonObject:
    """Return the object in checksummed bytes, without its checksum. Raises FileDamagedError when a byte was changed."""
    value = _object(data, where)
    value.pop(CHECKSUM_KEY, None)
    try:
        matches = checksummed_bytes(value) == data
    except UnicodeEncodeError:  # half a surrogate pair, which no writer of ours could have encoded
        matches = False
    if not matches:
        raise FileDamagedError(f"{where}: its bytes do not match its checksum")
    return value


def parse_or_none(data: bytes | None) -> JsonObject | None:
    """Return the JSON object in some bytes, or None where there is none that can be read now: for objects that say how
    things stand, are written often without waiting for the disk, and are worth nothing a second later."""
    try:
        value = None if data is None else strict_json(data)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def checksummed_bytes(value: Mapping[str, Any]) -> bytes:
    """Return a JSON object as bytes with a sha256 of itself, in place of one that it has already."""
    rest = {key: each for key, each in value.items() if key != CHECKSUM_KEY}
    seal = hashlib.sha256(json.dumps(rest, ensure_ascii=False, allow_nan=False).encode()).hexdigest()
    return (json.dumps({**rest, CHECKSUM_KEY: seal}, ensure_ascii=False, allow_nan=False) + "\n").encode()


def read_any_json(path: Path) -> JsonObject | None:
    """Return the JSON object at `path`, its checksum compared where it has one (files of older versions have none), or
    None when there is no such file. Raises FileDamagedError."""
    value = read_json(path)
    return read_checksummed(path) if value is not None and CHECKSUM_KEY in value else value


def read_json(path: Path) -> JsonObject | None:
    """Return the JSON object at `path`, or None when there is no such file. Raises FileDamagedError when it is not
    one."""
    try:
        return _object(read_regular(path), str(path))
    except FileNotFoundError:
        return None


def _object(data: bytes, where: str) -> JsonObject:
    try:
        value = strict_json(data)
    except ValueError as error:
        raise FileDamagedError(
            f"{where}: not JSON ({error}); restore it, or remove it if nothing else is wrong"
        ) from None
    if not isinstance(value, dict):
        raise FileDamagedError(f"{where}: expected a JSON object, found {type(value).__name__}")
    return value


def try_read_bytes(path: Path) -> bytes | None:
    """Return the bytes of a small regular file, or None when there is none that can be read."""
    try:
        return read_regular(path)
    except (FileDamagedError, OSError):
        return None


def try_read_json(path: Path) -> JsonObject | None:
    """Return the JSON object at `path`, or None when there is none that can be read now: for files that say how
    things stand, which are written often, without waiting for the disk, and are worth nothing a second later."""
    try:
        return read_json(path)
    except (FileDamagedError, OSError):
        return None
