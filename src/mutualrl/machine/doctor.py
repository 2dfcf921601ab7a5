"""`mutualrl doctor`: checks of whether this machine is ready for a run, one row per check, each with advice."""

from __future__ import annotations

import fcntl
import os
import platform
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from mutualrl.engines.vllm_engine import installed
from mutualrl.errors import DiskError, MachineError
from mutualrl.machine.devices import this_machine
from mutualrl.machine.extensions import build_locks, lock_note
from mutualrl.process.ports import free_port
from mutualrl.see.bucket import PROBE_SECONDS
from mutualrl.see.store import remote_store
from mutualrl.storage.files import sync_directory, write_atomic
from mutualrl.storage.hub import hub_problem

GIB = 2**30
_PROBES = 20
_SLOW_FSYNC_MS = 100.0
_SLOW_VISIBILITY_MS = 1000.0


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of one check. `advice`: what to do if the status is not ok."""

    check: str
    status: Literal["ok", "warn", "fail"]
    found: str
    advice: str = ""


def run_checks(directory: Path, exchange: str | None = None) -> Iterator[CheckResult]:
    """Yield all rows. The probed file system is that of `directory`, which must exist. `exchange`: URL of a bucket to
    probe."""
    yield _python()
    yield from _packages()
    yield from _devices()
    yield _hub()
    yield _shared_memory()
    yield _ports()
    yield _open_files()
    yield from _file_system(directory)
    if exchange is not None:
        yield _bucket(exchange)


def _bucket(url: str) -> CheckResult:
    """Check whether a bucket can hold an exchange: permissions, conditional puts."""

    try:
        remote_store(url, PROBE_SECONDS).probe()
    except MachineError as error:
        return CheckResult("exchange", "fail", str(error), "see docs/operations.md, A bucket")
    return CheckResult("exchange", "ok", f"{url}: put, list, get, delete, create once, replace if unchanged")


def _python() -> CheckResult:
    """Return the Python version; pip already rejects an older one."""
    return CheckResult("python", "ok", platform.python_version())


def _packages() -> Iterator[CheckResult]:
    """Check the installed packages against the versions in mutualrl's metadata."""
    try:
        lines = metadata.requires("mutualrl") or ()
    except metadata.PackageNotFoundError:
        yield CheckResult(
            "mutualrl", "warn", "not installed, only imported", "its requirements are unknown: pip install ."
        )
        return
    for line in lines:
        requirement = Requirement(line)
        marker = requirement.marker
        extra = marker is not None and not marker.evaluate({"extra": ""})
        if extra and (marker is None or not marker.evaluate({"extra": "node"})):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            if extra:
                advice = "only GPU nodes need it: pip install 'mutualrl[node]'"
                yield CheckResult(requirement.name, "warn", "not installed", advice)
            else:
                yield CheckResult(
                    requirement.name,
                    "fail",
                    "not installed",
                    f"pip install '{requirement.name}{requirement.specifier}'",
                )
            continue
        if requirement.specifier.contains(version.partition("+")[0], prereleases=True):
            yield CheckResult(requirement.name, "ok", version)
        else:
            advice = f"pip install '{requirement.name}{requirement.specifier}'"
            yield CheckResult(requirement.name, "fail", f"{version}, expected {requirement.specifier}", advice)


def _devices() -> Iterator[CheckResult]:
    try:
        machine = this_machine()
    except MachineError as error:
        yield CheckResult("GPUs", "fail", str(error), "check the driver: nvidia-smi")
        return
    yield CheckResult("CPU cores", "ok", str(machine.cores))
    import torch

    if not machine.gpus:
        yield CheckResult("GPUs", "ok", "none: policies run on the CPU (the tiny pool is sized for it)")
    elif not torch.cuda.is_available():
        advice = "install a CUDA build of torch: pip install torch --index-url https://download.pytorch.org/whl/cu130"
        yield CheckResult("GPUs", "fail", f"{len(machine.gpus)}, but torch {torch.__version__} cannot use them", advice)
    else:
        names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
        yield CheckResult("GPUs", "ok", f"{torch.cuda.device_count()} ({', '.join(sorted(names))})")
    yield _nccl(bool(machine.gpus))
    yield _vllm(bool(machine.gpus))
    if shutil.which("c++") is None:
        yield CheckResult("C++ compiler", "warn", "none", "DeepSpeed compiles an operator at start-up: apt install g++")
    else:
        yield CheckResult("C++ compiler", "ok", str(shutil.which("c++")))
    for lock in build_locks():
        yield CheckResult("C++ operator", "warn", f"lock of a build: {lock.parent.name}", lock_note(lock))


def _nccl(gpus: bool) -> CheckResult:
    import torch

    if torch.distributed.is_nccl_available():
        return CheckResult("NCCL", "ok", ".".join(map(str, torch.cuda.nccl.version())) if gpus else "available")
    if gpus:
        return CheckResult(
            "NCCL", "fail", "torch was built without it", "several GPUs need it: install a CUDA build of torch"
        )
    return CheckResult("NCCL", "ok", "not available, and not needed on the CPU (gloo is used)")


def _vllm(gpus: bool) -> CheckResult:
    if installed():
        return CheckResult("vLLM engine", "ok", "installed")
    if gpus:
        return CheckResult("vLLM engine", "warn", "not installed: sampling is slow", "pip install 'mutualrl[node]'")
    return CheckResult("vLLM engine", "ok", "not installed: transformers samples")


def _hub() -> CheckResult:
    problem = hub_problem()
    if problem is None:
        return CheckResult("model hub", "ok", "answers")
    return CheckResult(
        "model hub", "warn", problem, "only models and data on disk can be used (the tiny pool needs none)"
    )


def _shared_memory() -> CheckResult:
    path = Path("/dev/shm")
    if not path.is_dir():
        return CheckResult("shared memory", "ok", "no /dev/shm on this system")
    free = shutil.disk_usage(path).free
    if free < GIB:
        return CheckResult(
            "shared memory", "warn", f"{free / GIB:.2f} GiB free", "NCCL and vLLM need 1 GiB: docker --shm-size=8g"
        )
    return CheckResult("shared memory", "ok", f"{free / GIB:.1f} GiB free")


def _ports() -> CheckResult:
    """Check that a free port accepts a connection over the loopback address, as a process group's rendezvous does."""
    try:
        with socket.create_server(("127.0.0.1", free_port())) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=3):
                return CheckResult("free ports", "ok", f"loopback port {port} accepts connections")
    except OSError as error:
        return CheckResult(
            "free ports", "fail", f"loopback: {error.strerror or error}", "ranks of a policy rendezvous over 127.0.0.1"
        )


def _open_files() -> CheckResult:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit < 1024:
        return CheckResult("open files", "warn", f"limit {limit}", "ulimit -n 4096")
    return CheckResult("open files", "ok", f"limit {limit}")


def _file_system(directory: Path) -> Iterator[CheckResult]:
    """Check what the exchange and the checkpoints rely on, in a temporary directory."""
    free = shutil.disk_usage(directory).free
    status: Literal["ok", "warn"] = "ok" if free >= GIB else "warn"
    yield CheckResult(
        "disk space", status, f"{free / GIB:.1f} GiB free in {directory}", "" if status == "ok" else "free some space"
    )
    try:
        with tempfile.TemporaryDirectory(prefix=".mutualrl-doctor-", dir=directory) as name:
            scratch = Path(name)
            for check, probe in (
                ("rename", _rename),
                ("O_EXCL", _exclusive),
                ("file locks", _locks),
                ("fsync", _fsync),
                ("visibility", _visibility),
            ):
                yield _run_probe(check, probe, scratch)
    except OSError as error:
        advice = "set a writable directory with --run-dir"
        yield CheckResult("file system", "fail", f"{directory}: {error.strerror or error}", advice)


def _run_probe(check: str, probe: Callable[[Path], CheckResult], scratch: Path) -> CheckResult:
    try:
        return probe(scratch)
    except (OSError, DiskError) as error:
        message = str(getattr(error, "strerror", None) or error)
        return CheckResult(check, "fail", message, "runs need it: put the run directory on another file system")


def _rename(scratch: Path) -> CheckResult:
    """Check a rename over an open file: its reader keeps the old bytes, the name has the new ones."""
    path = scratch / "renamed"
    path.write_bytes(b"old")
    with path.open("rb") as reader:
        write_atomic(path, b"new")
        if reader.read() != b"old" or path.read_bytes() != b"new":
            return CheckResult(
                "rename", "fail", "a rename over a file is not atomic", "put the run directory elsewhere"
            )
    return CheckResult("rename", "ok", "atomic over an open file")


def _exclusive(scratch: Path) -> CheckResult:
    path = scratch / "exclusive"
    path.open("x").close()
    try:
        path.open("x").close()
    except FileExistsError:
        return CheckResult("O_EXCL", "ok", "a second exclusive create fails")
    return CheckResult(
        "O_EXCL",
        "fail",
        "two processes can both create a file",
        "two runs could claim one directory: put the run directory elsewhere",
    )


def _locks(scratch: Path) -> CheckResult:
    path = scratch / "lock"
    with path.open("w") as first, path.open("w") as second:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return CheckResult("file locks", "ok", "a second lock is refused")
    return CheckResult(
        "file locks",
        "fail",
        "two processes can hold one lock",
        "two supervisors could start one run: put the run directory elsewhere",
    )


def _fsync(scratch: Path) -> CheckResult:
    times = []
    for _ in range(_PROBES):
        start = time.perf_counter()
        write_atomic(scratch / "durable", os.urandom(4096))
        times.append(1000 * (time.perf_counter() - start))
    sync_directory(scratch)
    median = statistics.median(times)
    result = f"a durable write of 4 KiB takes {median:.1f} ms (median of {_PROBES})"
    if median > _SLOW_FSYNC_MS:
        return CheckResult("fsync", "warn", result, "every round waits for several: use a faster disk")
    return CheckResult("fsync", "ok", result)


_WATCH = """
import os, sys, time
for name in sys.stdin.read().split():
    while name not in os.listdir(sys.argv[1]):
        time.sleep(0.0005)
    print(time.monotonic(), flush=True)
"""


def _visibility(scratch: Path) -> CheckResult:
    """Measure how long another process takes to see a renamed file. (It may take longer between two machines: run
    doctor on each.)"""
    names = [f"seen-{i}" for i in range(5)]
    with subprocess.Popen(
        [sys.executable, "-I", "-c", _WATCH, str(scratch)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as watcher:
        assert watcher.stdin is not None and watcher.stdout is not None
        watcher.stdin.write(" ".join(names))
        watcher.stdin.close()
        time.sleep(0.2)  # until the watcher polls
        delays = []
        try:
            for name in names:
                write_atomic(scratch / name, b"x")
                renamed = time.monotonic()
                delays.append(1000 * (float(watcher.stdout.readline()) - renamed))
        finally:
            watcher.kill()  # it would poll forever for a file that could not be written
    slowest = max(0.0, *delays)
    result = f"another process sees a new file within {slowest:.1f} ms"
    if slowest > _SLOW_VISIBILITY_MS:
        return CheckResult(
            "visibility", "warn", result, "a network file system that caches names: mount it with a short cache time"
        )
    return CheckResult("visibility", "ok", result)
