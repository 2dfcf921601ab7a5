"""Fixtures of all tests: the embedded models, the real command line, data that may be absent."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from fake_clock import Clock

REPOSITORY = Path(__file__).resolve().parents[1]
REAL_DATA = REPOSITORY.parent / "shared" / "data"
#: seconds that a test waits for an event or a process before it gives up; no test asserts how long something took
PATIENCE = float(os.environ.get("MUTUALRL_TEST_PATIENCE", "1200"))

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the tests run on two processes
os.environ.setdefault("MUTUALRL_REPORT", "0")  # a run's page takes seconds; the tests of it ask for it
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def tiny() -> dict[str, Path]:
    """Return the directories of two embedded models."""
    from mutualrl.tiny import path_of

    return {name: path_of(name) for name in ("ada", "bob")}


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Return real data beside the repository; tests that need it are skipped where it is not."""
    if not REAL_DATA.is_dir():
        pytest.skip(f"no real data at {REAL_DATA}")
    return REAL_DATA


def make_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a directory that the first process of pytest-xdist that asks for it fills, and all of them read."""
    together = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        together = together.parent  # of the processes' own directories
    directory = together / name
    with FileLock(directory.with_suffix(".lock")):
        if not (directory / "made").exists():
            directory.mkdir()
            make(directory)
            (directory / "made").touch()
    return directory


@pytest.fixture(scope="session")
def unbroken(tiny: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> object:
    """Return a short run of the tiny pool that nobody disturbs: what disturbed ones are compared with."""
    from runs import SHORT, FinishedRun, Run

    def make(directory: Path) -> None:
        run = Run(directory, *SHORT)
        assert run.process.wait(PATIENCE) == 0, run.errors.read_text()

    return FinishedRun(make_once(tmp_path_factory, "unbroken", make))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock for the exchange, heartbeats and supervisors: sleeping takes no time."""
    clock = Clock()
    modules = (
        "see.exchange",
        "see.liveness",
        "process.status",
        "mwra.policy_supervisor",
        "reporting.progress",
    )
    for module in modules:
        monkeypatch.setattr(f"mutualrl.{module}.time", clock)
    return clock


#: DeepSpeed builds a small C++ operator when a process group first starts on CPU.
needs_zero = pytest.mark.skipif(
    find_spec("deepspeed") is None or shutil.which("c++") is None, reason="DeepSpeed or a C++ compiler is missing"
)


def lines_run(work: Callable[[], object]) -> int:
    """Return how many lines of Python a call runs: a measure of work that no other load on the machine changes.

    The garbage collector rests meanwhile: it calls Python (`gc.callbacks`, finalizers) at moments of its own.
    """
    count = 0

    def trace(frame: object, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    collecting = gc.isenabled()
    gc.disable()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
        if collecting:
            gc.enable()
    return count


HEAVY = frozenset({"torch", "transformers", "trl"})


def imported(importtime: str) -> set[str]:
    """Return modules named in what `python -X importtime` wrote to stderr."""
    return {line.rpartition("|")[2].strip() for line in importtime.splitlines() if line.startswith("import time:")}


def without_importtime(stderr: str) -> str:
    """Return what a command itself wrote to stderr under `python -X importtime`."""
    return "".join(line for line in stderr.splitlines(keepends=True) if not line.startswith("import time:"))


@pytest.fixture(scope="session")
def zero_ready() -> None:
    """Compile DeepSpeed's CPU operator: minutes in a fresh home, which no test's own time-out should have to hold."""
    builder = "deepspeed.ops.op_builder.cpu"
    code = f"from {builder} import ShareMemCommBuilder; ShareMemCommBuilder().load()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-3000:]


Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def cli_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Return the same command line in this process: for what does not depend on a process of its own, without its
    start."""
    from typer.testing import CliRunner

    from mutualrl.cli.app import app

    monkeypatch.chdir(tmp_path)

    def run(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
        done = CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200", **environment})
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)

    return run


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Run the real command line in an empty directory; returns exit code, stdout and stderr."""

    def run(*arguments: str | Path, timeout: float = PATIENCE, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "mutualrl", *map(str, arguments)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=timeout,
            env={**os.environ, "COLUMNS": "200", **environment},
        )

    return run
