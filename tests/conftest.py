"""Shared fixtures: the embedded models, the command line, optional data."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from filelock import FileLock

from fake_clock import Clock

REPOSITORY = Path(__file__).resolve().parents[1]
REAL_DATA = REPOSITORY.parent / "shared" / "data"
#: seconds that a test waits for an event or a process before it fails; no test asserts a duration
PATIENCE = float(os.environ.get("MUTUALRL_TEST_PATIENCE", "1200"))
#: how often tests repeat what only repeats (random schedules, contested writes); a benchmark may raise it
REPEATS = int(os.environ.get("MUTUALRL_TEST_REPEATS", "1"))

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the hardware of the tests is the CPU, whatever the machine has
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the tests run in two processes
os.environ.setdefault("MUTUALRL_REPORT", "0")  # a run's page takes seconds; its tests enable it
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


PRELOADED = Path(__file__).parent / "preloaded"
WORKER_SERVER = "MUTUALRL_TEST_SERVER"


hypothesis.settings.register_profile("tests", deadline=None)  # no test asserts a duration
hypothesis.settings.load_profile("tests")


def pytest_configure(config: pytest.Config) -> None:
    """Start the server of preloaded workers, for all pytest-xdist workers; MUTUALRL_TEST_PRELOAD=0: none."""
    if (
        hasattr(config, "workerinput")
        or not hasattr(os, "pidfd_open")
        or os.environ.get("MUTUALRL_TEST_PRELOAD") == "0"
    ):
        return
    directory = Path(tempfile.mkdtemp(prefix="mutualrl-tests-"))
    paths = [str(PRELOADED / "hooks"), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    os.environ[WORKER_SERVER] = str(directory / "socket")
    arguments = [os.environ[WORKER_SERVER], str(directory / "refused.log")]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # as workers have it without a GPU
    with (directory / "server.log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, str(PRELOADED / "server.py"), *arguments],
            stdin=subprocess.PIPE,
            stderr=log,
            env=environment,
        )

    def stop() -> None:
        assert server.stdin is not None
        server.stdin.close()
        server.wait()
        shutil.rmtree(directory)

    config.add_cleanup(stop)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Install the scheduler of these tests in the place of `--dist loadfile`."""
    if config.getvalue("dist") != "loadfile":
        return None
    from by_module import ByModule

    return ByModule(config, log)


@pytest.fixture
def exec_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start workers as users start them: for tests that freeze, inspect or list their processes."""
    monkeypatch.delenv(WORKER_SERVER, raising=False)


#: modules, or the beginnings of their paths, that continuous integration runs where what they read has changed
LANES = {
    "documents": (
        *("tests/invariants/test_board.py", "tests/invariants/test_claims.py", "tests/invariants/test_readme.py"),
        *("tests/invariants/test_sweep_results.py", "tests/invariants/test_benchmarks.py"),
        "tests/cli/test_printed_commands.py",
    ),
    "thl": ("tests/thl/", "tests/paper/test_thl_check.py"),
}
#: modules that mostly wait, begun first: their tests would otherwise be the last ones, alone on the machine
LONGEST = ("faults/test_ray.py", "faults/test_kills.py", "faults/test_bucket_faults.py", "faults/test_fuzz.py")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark extended and release tests as slow, so that `-m "not slow"` leaves them out, tests of a lane by their files,
    and order the tests: the longest modules first."""
    for item in items:
        module = item.nodeid.partition("::")[0]
        if item.get_closest_marker("extended") or item.get_closest_marker("release"):
            item.add_marker("slow")
        for lane, modules in LANES.items():
            if module.startswith(modules):
                item.add_marker(lane)

    def rank(item: pytest.Item) -> int:
        return next((number for number, name in enumerate(LONGEST) if name in item.nodeid), len(LONGEST))

    items.sort(key=rank)


def pytest_collection_finish() -> None:
    """Leave the imported libraries out of every later collection: TRL's trainers each start with one, a third of a
    second over torch and transformers."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tiny() -> dict[str, Path]:
    """Return the directories of two embedded models."""
    from mutualrl.tiny import path_of

    return {name: path_of(name) for name in ("ada", "bob")}


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Return the directory of real data beside the repository; skip the test if it does not exist."""
    if not REAL_DATA.is_dir():
        pytest.skip(f"no real data at {REAL_DATA}")
    return REAL_DATA


def make_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a directory shared by all pytest-xdist workers, filled by the first that requests it."""
    shared = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent  # above the workers' directories
    directory = shared / name
    with FileLock(directory.with_suffix(".lock")):
        if not (directory / "made").exists():
            directory.mkdir()
            make(directory)
            (directory / "made").touch()
    return directory


@pytest.fixture(scope="session")
def unbroken(tiny: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> object:
    """Return a short undisturbed run of the tiny pool, the reference for disturbed ones."""
    from runs import SHORT, FinishedRun, Run

    def make(directory: Path) -> None:
        run = Run(directory, *SHORT)
        assert run.process.wait(PATIENCE) == 0, run.errors.read_text()

    return FinishedRun(make_once(tmp_path_factory, "unbroken", make))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Install a fake clock in the exchange, heartbeats and supervisors: sleeping takes no time."""
    clock = Clock()
    modules = (
        "see.exchange",
        "see.liveness",
        "process.status",
        "launch.policy_supervisor",
        "reporting.progress",
    )
    for module in modules:
        monkeypatch.setattr(f"mutualrl.{module}.time", clock)
    return clock


#: DeepSpeed compiles a small C++ operator when a process group first starts on CPU.
needs_zero = pytest.mark.skipif(
    find_spec("deepspeed") is None or shutil.which("c++") is None, reason="DeepSpeed or a C++ compiler is missing"
)


def lines_run(work: Callable[[], object]) -> int:
    """Return the number of Python lines that a call executes: a measure of work independent of the machine's load.

    The garbage collector is disabled meanwhile: it runs Python (`gc.callbacks`, finalizers) at arbitrary times.
    """
    count = 0

    def trace(frame: object, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    previous_trace = sys.gettrace()
    gc_enabled = gc.isenabled()
    gc.disable()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(previous_trace)
        if gc_enabled:
            gc.enable()
    return count


HEAVY = frozenset({"torch", "transformers", "trl"})


def imported(importtime: str) -> set[str]:
    """Return the modules that `python -X importtime` listed on stderr."""
    return {line.rpartition("|")[2].strip() for line in importtime.splitlines() if line.startswith("import time:")}


def without_importtime(stderr: str) -> str:
    """Return a command's stderr without the lines of `python -X importtime`."""
    return "".join(line for line in stderr.splitlines(keepends=True) if not line.startswith("import time:"))


@pytest.fixture(scope="session")
def zero_ready() -> None:
    """Compile DeepSpeed's CPU operator once: without a cached build it takes minutes, longer than a test's time-out."""
    builder = "deepspeed.ops.op_builder.cpu"
    code = f"from {builder} import ShareMemCommBuilder; ShareMemCommBuilder().load()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert result.returncode == 0, result.stderr[-3000:]


@contextmanager
def on_core(number: int) -> Iterator[None]:
    """Pin processes started in the block to one core, numbered modulo this process's cores. A policy has one thread per
    core; threads of several processes on the same cores would wait for each other in busy loops."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(cores)[number % len(cores)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def xdist_worker_number() -> int:
    """Return the number of this pytest-xdist worker."""
    return int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))


Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def cli_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Return a function that runs the command line in this process instead of a new one."""
    from typer.testing import CliRunner

    from mutualrl.cli.app import app

    monkeypatch.chdir(tmp_path)

    def run(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
        result = CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200", **environment})
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return subprocess.CompletedProcess(arguments, result.exit_code, result.stdout, result.stderr)

    return run


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Return a function that runs the command line on one core in an empty directory."""

    def run(*arguments: str | Path, timeout: float = PATIENCE, **environment: str) -> subprocess.CompletedProcess[str]:
        with on_core(xdist_worker_number()):
            return subprocess.run(
                [sys.executable, "-m", "mutualrl", *map(str, arguments)],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=timeout,
                env={**os.environ, "COLUMNS": "200", **environment},
            )

    return run
