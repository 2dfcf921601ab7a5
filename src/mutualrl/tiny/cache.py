"""Where embedded models are kept: made once, found again by a fingerprint of everything that went into them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from pathlib import Path

import platformdirs

from mutualrl.errors import MachineError
from mutualrl.storage.files import user_path
from mutualrl.tiny.spec import POLICIES

PREFIX = "tiny:"
_LIBRARIES = ("torch", "transformers", "tokenizers")
_SOURCES = ("tiny/spec.py", "tiny/build.py", "tiny/warmup.py", "tasks/arithmetic.py")


ABANDONED_SECONDS = 3600.0


def cache_root() -> Path:
    """`$MUTUALRL_CACHE`, or the user's cache directory."""
    chosen = os.environ.get("MUTUALRL_CACHE")
    return user_path(chosen) if chosen else Path(platformdirs.user_cache_dir("mutualrl"))


def fingerprint(name: str) -> str:
    """Hash of all that decides an embedded model: its numbers, the code that makes it, the libraries."""
    package = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256(repr(POLICIES[name]).encode())
    for source in _SOURCES:
        digest.update((package / source).read_bytes())
    for library in _LIBRARIES:
        digest.update(f"{library}={metadata.version(library)}".encode())
    return digest.hexdigest()[:16]


def path_of(name: str) -> Path:
    """Where the embedded model lies, or will."""
    return cache_root() / "tiny" / f"{name}-{fingerprint(name)}"


def embedded(models: Iterable[str]) -> list[str]:
    """Names of the embedded models among `models`: `tiny:ada` is `ada`."""
    return [model.removeprefix(PREFIX) for model in models if model.startswith(PREFIX)]


def located(model: str) -> str:
    """Where transformers finds `model`: an embedded one in the cache (made first if need be), another as it is."""
    return str(ensure(model.removeprefix(PREFIX))) if model.startswith(PREFIX) else model


def missing(names: Sequence[str]) -> list[str]:
    """Those of `names` that the cache does not have, each once."""
    return [name for name in dict.fromkeys(names) if not path_of(name).is_dir()]


def require_writable(names: Sequence[str]) -> None:
    """Raise MachineError when models of `names` have yet to be made and the cache cannot take them."""
    if not missing(names):
        return
    root = cache_root() / "tiny"
    try:
        root.mkdir(parents=True, exist_ok=True)
        if not os.access(root, os.W_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise _unwritable(error) from None


def _unwritable(error: OSError) -> MachineError:
    return MachineError(
        f"the cache {cache_root()} cannot be written ({error.strerror}); name another with MUTUALRL_CACHE=DIR"
    )


def ensure(name: str, on_progress: Callable[[float], None] | None = None) -> Path:
    """The directory of an embedded model; made first when the cache does not have it.

    It is made in a temporary directory and renamed, so that it is whole or not there; of two processes
    that make it at the same time, one wins and the other uses the winner's. Raises MachineError when the
    cache cannot be written.
    """
    path = path_of(name)
    if path.is_dir():
        return path
    require_writable([name])
    try:
        for left_over in path.parent.glob(f".{name}-*"):  # of a process that was killed
            if time.time() - left_over.stat().st_mtime > ABANDONED_SECONDS:
                shutil.rmtree(left_over, ignore_errors=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=path.parent))
    except OSError as error:
        raise _unwritable(error) from None
    try:
        from mutualrl.tiny.warmup import make

        with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed, once imported, would log onto a command's result
            make(name, temporary, on_progress or (lambda share: None))
        try:
            temporary.rename(path)
        except OSError:
            if not path.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return path
