"""State of a run, from its locks and its supervisor's last status."""

from __future__ import annotations

from collections.abc import Sequence

from mutualrl.errors import RunInterruptedError
from mutualrl.process.status import ELSEWHERE, RunState, status_file
from mutualrl.storage.files import try_read_json
from mutualrl.storage.run_info import Summary
from mutualrl.storage.rundir import RunDirectory, holder_of

RUNNING = "it is still running: this page shows its state at the time of the report"


def state_of(run: RunDirectory, summary: Summary | None, notes: list[str], scripts: Sequence[str] = ()) -> RunState:
    """Return the state of a run, and note why it is not finished. `scripts`: policies that users' own scripts train."""
    if summary is not None:
        return RunState.FINISHED
    if scripts:
        return _state_of_scripts(run, scripts, notes)
    try:
        holder = holder_of(run.lock)
    except OSError as error:
        notes.append(f"cannot determine whether it is running ({error.strerror}: {run.lock.name})")
        return RunState.UNKNOWN
    if holder is not None:
        notes.append(RUNNING)
        return RunState.RUNNING
    outcome = (try_read_json(status_file(run.root)) or {}).get("outcome")
    if not isinstance(outcome, str):
        info = run.info()
        again = f"join {info.exchange} --policy {info.joined}" if info.joined else "train --resume"
        notes.append(
            "it ended without a final status (killed, or on another machine); "
            f"`mutualrl {again} --run-dir {run.root}` resumes it"
        )
        return RunState.ENDED
    if outcome == RunState.FINISHED:
        notes.append("it finished but has no readable summary")
        return RunState.ENDED
    kind, _, message = outcome.partition(": ")
    if kind == ELSEWHERE:
        notes.append(message)
        return RunState.ELSEWHERE
    notes.append(f"it ended before its last step: {message or kind}")
    return RunState.STOPPED if kind == RunInterruptedError.kind else RunState.FAILED


def _state_of_scripts(run: RunDirectory, policies: Sequence[str], notes: list[str]) -> RunState:
    unfinished = [name for name in policies if not run.policy(name).result.exists()]
    if running := [name for name in policies if holder_of(run.policy(name).lock)]:
        notes.append(RUNNING)
        if dead := [name for name in unfinished if name not in running]:
            notes.append(f"the script of {', '.join(dead)} is not running, and has not finished")
        return RunState.RUNNING
    if not unfinished:
        return RunState.FINISHED
    notes.append(
        f"the script of {', '.join(unfinished)} ended before its last step, or has not begun; resume it with "
        "Sharing.over(..., resume=True) and train(resume_from_checkpoint=True)"
    )
    return RunState.ENDED
