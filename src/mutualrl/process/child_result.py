"""Result of a command that calls user code, by a process of its own.

The child writes a file with a checksum; the exit code is this process's. Without a complete file the command has no
result, however its process ended, and a thread that user code left behind keeps nobody waiting.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from mutualrl.errors import FileDamagedError, MutualRLError, RecordedError, RewardError
from mutualrl.process.parent_watch import PARENT
from mutualrl.storage.files import JsonObject, read_checksummed, write_checksummed

RESULT_FILE = "MUTUALRL_RESULT_FILE"  # environment variable with the path of the child's file
POLL_SECONDS = 0.1
GRACE_SECONDS = 5.0  # for a child that has written its result


def result_of_child(arguments: Sequence[str], ended: str) -> JsonObject:
    """Return the result of `mutualrl ARGUMENTS`, run in a child. What it prints goes to stderr. Raises the child's
    error, or RewardError with the message `ended` if it ended without a result."""
    with tempfile.TemporaryDirectory(prefix="mutualrl-result-") as directory:
        path = Path(directory) / "result.json"
        command = [sys.executable, "-m", "mutualrl", *arguments]
        environment = {**os.environ, RESULT_FILE: str(path), PARENT: str(os.getpid())}
        child = subprocess.Popen(command, env=environment, stdout=2, start_new_session=True)
        try:
            code = _waited(child, path)
            value = read_checksummed(path, root=path.parent)
        except FileDamagedError:
            value = None
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    if value is None:
        raise RewardError(f"{ended} (exit code {code})")
    if (error := value.get("error")) is not None:
        raise RecordedError(str(error["kind"]), int(error["exit_code"]), str(error["message"]))
    result: JsonObject = value["result"]
    return result


def write_result(path: Path, work: Callable[[], JsonObject]) -> None:
    """Do the child's work, and write its result or its error."""
    try:
        value: JsonObject = {"result": work()}
    except MutualRLError as error:
        value = {"error": {"kind": error.kind, "exit_code": error.exit_code, "message": str(error)}}
    except Exception as error:  # noqa: BLE001  (of this package or a library: not of the user's code, which is named)
        traceback.print_exc()
        value = {"error": {"kind": MutualRLError.kind, "exit_code": 1, "message": f"{type(error).__name__}: {error}"}}
    write_checksummed(path, value, root=path.parent)


def _waited(child: subprocess.Popen[bytes], path: Path) -> int:
    """Wait for a child's end, or for its result and a while longer. Return its exit code, 0 if it still runs."""
    deadline = None
    while child.poll() is None:
        if deadline is None and path.exists():
            deadline = time.monotonic() + GRACE_SECONDS
        if deadline is not None and time.monotonic() > deadline:
            return 0
        time.sleep(POLL_SECONDS)
    return int(child.returncode)
