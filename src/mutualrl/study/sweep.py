"""Execution of a sweep: pieces in parallel on the available cores, each its own command, none run twice.

An interrupted piece resumes from its checkpoints. When the sweep is killed, its pieces are stopped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from rich.console import Console

from mutualrl.console.display import print_text
from mutualrl.errors import FileDamagedError, RunInterruptedError, UsageError
from mutualrl.machine.devices import this_machine
from mutualrl.process.parent_watch import PARENT
from mutualrl.process.stop_signals import StopSignals, stop_signals
from mutualrl.runs.logs import read_logged
from mutualrl.storage.files import JsonObject, read_checksummed, remove_temporaries, write_checksummed
from mutualrl.storage.rundir import RunDirectory, command_line, hold, holder_of, versions
from mutualrl.study.comparison import Compared
from mutualrl.study.outcomes import of_distillation, of_run
from mutualrl.study.registration import changes, registration
from mutualrl.study.sweep_directory import SWEEP, beside, outcome_file, stored_grid, write_results
from mutualrl.study.sweep_file import Piece, Sweep
from mutualrl.study.sweep_plan import (
    SweepPlan,
    cores_needed,
    estimate_minutes,
    identity,
    max_jobs,
    planned,
    require_capacity,
)

LOCK = ".sweep.lock"
_POLL_SECONDS = 0.1


@dataclass(slots=True)
class _Running:
    """Running piece and its cores."""

    piece: Piece
    process: subprocess.Popen[bytes]
    cores: tuple[int, ...]
    began: float
    evaluates: bool = False


@dataclass(frozen=True, slots=True)
class SweepEnd:
    """Result of a call of `sweep`: failed pieces with the last log line of each, pieces not started, and why."""

    failed: Mapping[str, str]
    left: tuple[Piece, ...]
    results: Compared | None = None
    why: str = field(default="")


def run_sweep(sweep: Sweep, root: Path, jobs: int | None, console: Console) -> SweepEnd:
    """Run the missing pieces, then write the results. A signal stops the pieces; the same command resumes the sweep.

    Raises UsageError (directory of another sweep, no disk space), RunDirectoryError (a sweep is running in it),
    RunInterruptedError.
    """
    plan = planned(sweep, root, jobs)
    require_capacity(plan, root, sweep.file.budget.gigabytes)
    root.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        stack.enter_context(hold(root / LOCK, f"{root} (a sweep)"))
        for directory in (root, *(root / "pieces").glob("*/")):
            remove_temporaries(directory)
        _begin(sweep, root)
        scheduler = _Scheduler(sweep, plan, root, console)
        with stop_signals() as request:
            why = scheduler.run(request)
        if request.received:
            raise RunInterruptedError(f"stopped by {request.name}; the same command resumes it")
        return SweepEnd(scheduler.failed, tuple(scheduler.waiting), write_results(sweep, root), why)


def _begin(sweep: Sweep, root: Path) -> None:
    """Write the grid and the start of the sweep, with its claims and all that it declares as they were before the first
    result, and what a later call of it changed in these."""
    stored = read_checksummed(root / SWEEP, root=root)
    declared, now = registration(sweep), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    if stored is None:
        stored = {
            "began": now,
            "command": command_line(),
            "versions": versions(),
            "claims": None if sweep.claims is None else sweep.claims.to_json(),
            "registration": declared,
        }
    else:
        before = stored_grid(root)
        if not (set(before.arms) <= set(sweep.grid.arms) and set(before.pools) <= set(sweep.grid.pools)):
            raise UsageError(
                f"--out {root} holds another sweep (pools {', '.join(before.pools)}; arms {', '.join(before.arms)}); "
                "name another directory"
            )
        latest: JsonObject | None = stored.get("registration_now", stored.get("registration"))
        if latest is not None and (changed := changes(latest, declared)):  # None: begun by an earlier version
            later = [*stored.get("changes", ()), {"at": now, "changes": changed}]
            stored = {**stored, "changes": later, "registration_now": declared}
    write_checksummed(root / SWEEP, {**stored, "grid": asdict(sweep.grid)}, root=root)


class _Scheduler:
    """Scheduler of the missing pieces of a sweep."""

    def __init__(self, sweep: Sweep, plan: SweepPlan, root: Path, console: Console) -> None:
        self.sweep, self.plan, self.root, self.console = sweep, plan, root, console
        self.waiting = list(plan.missing)
        self.running: list[_Running] = []
        self.done = set(plan.seconds)
        self.failed: dict[str, str] = {}
        self.seconds = dict(plan.seconds)
        self.owners = Counter[int](dict.fromkeys(_cores(), 0))
        self.limit = plan.jobs or max_jobs(sweep)
        self.announced: set[Piece] = set()

    def run(self, request: StopSignals) -> str:
        """Run pieces until all have ended, a signal arrives or the budget is spent. Return why any are left."""
        began, limit, why = time.monotonic(), self.sweep.file.budget.minutes, ""
        while True:
            if limit is not None and time.monotonic() - began > 60 * limit and self.waiting:
                why = f"the budget of {limit:g} minutes is spent"
            held_elsewhere = False if why or request.received else self._begin()
            if not self.running and not held_elsewhere:
                return why
            time.sleep(_POLL_SECONDS)
            if request.received:
                self._stop(request)
                return why
            for ended in [piece for piece in self.running if piece.process.poll() is not None]:
                self._end(ended)

    def _begin(self) -> bool:
        """Start the pieces whose sources are done, while cores are free. Return whether another process runs one of
        the waiting pieces."""
        held_elsewhere = False
        for piece in list(self.waiting):
            need = cores_needed(self.sweep, piece)
            if len(self.running) >= self.limit or not (self._has_room(need) or self.plan.jobs):
                break
            if not all(other in self.done for other in _sources(self.sweep, piece)):
                continue
            holder = holder_of(RunDirectory(self.root / piece.place).lock)
            if holder is not None:
                held_elsewhere = True
                if piece not in self.announced:
                    self.announced.add(piece)
                    message = f"{piece} is being run by {holder}: waiting for it"
                    print_text(self.console, message)
                continue
            cores = tuple(sorted(core for core, _ in self.owners.most_common()[::-1][:need]))
            self.owners.update(cores)
            self.waiting.remove(piece)
            self.running.append(_start(self.sweep, piece, self.root, cores))
        return held_elsewhere

    def _has_room(self, need: int) -> bool:
        """Return whether `need` cores are free, or all cores for a piece that needs more."""
        free = sum(count == 0 for count in self.owners.values())
        return free >= min(need, len(self.owners))

    def _end(self, ended: _Running) -> None:
        """Record the end of a piece, after its evaluation. Pieces that depend on a failed one are not run."""
        self.running.remove(ended)
        command = self.sweep.evaluation(ended.piece, self.root)
        evaluated = any(RunDirectory(self.root / ended.piece.place).evaluations.glob("*.json"))
        if command and not ended.evaluates and not evaluated and ended.process.returncode == 0:
            process = _launch(self.sweep, ended.piece, self.root, command, ended.cores)
            self.running.append(replace(ended, process=process, evaluates=True))
            return
        self.owners.subtract(ended.cores)
        problem = _finish(self.sweep, ended, self.root)
        if problem is None:
            self.done.add(ended.piece)
            self.seconds[ended.piece] = time.monotonic() - ended.began
        else:
            self.failed[str(ended.piece)] = problem
        count = f"{len(self.done) + len(self.failed)}/{len(self.sweep.pieces)}"
        _report(
            self.console,
            ended,
            problem,
            count,
            estimate_minutes(self.sweep, self.waiting, self.seconds, self.plan.jobs),
        )

    def _stop(self, request: StopSignals) -> None:
        """Terminate the pieces and wait while each saves a checkpoint. A further signal is forwarded and ends them
        immediately."""
        forwarded = 0
        while any(piece.process.poll() is None for piece in self.running):
            if len(request.received) > forwarded:
                forwarded = len(request.received)
                for piece in self.running:
                    piece.process.terminate()
            time.sleep(_POLL_SECONDS)


def _sources(sweep: Sweep, piece: Piece) -> list[Piece]:
    """Return the pieces that a piece depends on."""
    arm = sweep.file.arms[piece.arm]
    return [Piece(piece.pool, name, piece.seed) for name in (arm.distill, *arm.beside) if name is not None]


def _start(sweep: Sweep, piece: Piece, root: Path, cores: tuple[int, ...]) -> _Running:
    """Start or resume a piece, restricted to these cores; it stops when this process ends."""
    place = root / piece.place
    place.parent.mkdir(parents=True, exist_ok=True)
    run = RunDirectory(place)
    command = sweep.command(piece, root)
    if command[0] == "train" and run.run_json.exists():
        command = ["train", "--resume", "--run-dir", str(place), "--no-report"]
        if run.summary.exists() and not (read_checksummed(run.summary, root=place) or {}).get("lost"):
            command = ["runs", "verify", str(place)]  # finished, but its outcome is not written
    elif not place.exists():
        write_checksummed(beside(root, piece, ".began.json"), {"command": identity(sweep, piece)}, root=root)
    return _Running(piece, _launch(sweep, piece, root, command, cores), cores, time.monotonic())


def _launch(
    sweep: Sweep, piece: Piece, root: Path, command: Sequence[str], cores: tuple[int, ...]
) -> subprocess.Popen[bytes]:
    """Start a `mutualrl` command for a piece on these cores, appending to the piece's log. Where it is not pinned to
    them, as many threads: the commands of many pieces would otherwise wait for each other in busy loops."""
    place = root / piece.place
    with place.with_name(f"{place.name}.log").open("ab") as log, _pinned_to(cores):
        return subprocess.Popen(
            [sys.executable, "-m", "mutualrl", *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=sweep.path.parent,
            start_new_session=True,
            env={"OMP_NUM_THREADS": str(len(cores)), **os.environ, PARENT: str(os.getpid())},
        )


@contextmanager
def _pinned_to(cores: tuple[int, ...]) -> Iterator[None]:
    """Restrict this process, and processes started in the block, to these cores where supported (Linux); not on GPU
    machines, where a run chooses its own number of processes."""
    if not hasattr(os, "sched_setaffinity") or this_machine().gpus:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _cores() -> tuple[int, ...]:
    """Return the cores that this process may run on; 0 to the CPU count if the system does not report them."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def _finish(sweep: Sweep, ended: _Running, root: Path) -> str | None:
    """Write the outcome of a piece and remove its checkpoints. Return the problem; None on success."""
    place = root / ended.piece.place
    if ended.process.returncode != 0:
        return _last_line(place.with_name(f"{place.name}.log")) or f"exit code {ended.process.returncode}"
    arm, piece = sweep.file.arms[ended.piece.arm], ended.piece
    try:
        if arm.distill is None:
            outcome = of_run(read_logged(place), piece.pool, piece.arm)
        else:
            outcome = of_distillation(place, piece.pool, piece.arm, piece.seed)
    except (UsageError, FileDamagedError) as error:
        return str(error)
    if sweep.evaluation(piece, root) and not any(policy.pass_at for policy in outcome.policies.values()):
        return f"its evaluation was not stored in the run; see {place.with_name(f'{place.name}.log')}"
    durations = [policy.seconds or 0.0 for policy in outcome.policies.values()]  # over all sessions of a piece
    value: JsonObject = {
        "command": identity(sweep, piece),
        "seconds": max([time.monotonic() - ended.began, *durations]),
        "outcome": outcome.to_json(),
    }
    write_checksummed(outcome_file(root, piece), value, root=root)
    for checkpoints in place.glob("policies/*/checkpoints"):
        shutil.rmtree(checkpoints)  # a finished run needs none
    return None


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return next((line for line in reversed(lines) if line.startswith("mutualrl:")), lines[-1] if lines else "")


def _report(console: Console, ended: _Running, problem: str | None, count: str, minutes: float | None) -> None:
    result = f"failed: {problem}" if problem else f"{time.monotonic() - ended.began:.0f} s"
    message = f"{count} {ended.piece}: {result}"
    if minutes:
        message += f"; about {max(1, round(minutes))} min left"
    print_text(console, message)
