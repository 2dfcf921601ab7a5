"""Runs at a glance: the last step and the last accuracies, read from the ends of the logs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mutualrl.errors import FileDamagedError
from mutualrl.runs.lines import last_steps
from mutualrl.runs.read import read_run, short, validation_of
from mutualrl.runs.record import PolicyRecord, Record, Run
from mutualrl.storage.checkpoints import Checkpoints
from mutualrl.storage.run_info import Validation, measured
from mutualrl.storage.run_logs import recorded_sums, verify_log
from mutualrl.storage.rundir import RunDirectory

TAIL_BYTES = 64 * 1024


class PolicyOverview(Record):
    """Last logged step of a policy, and its greedy accuracy before training and at last."""

    step: int
    before: float | None
    last: float | None


class Overview(Record):
    """A run at a glance. `has_checkpoint`: whether a policy has one to resume from."""

    run: Run
    policies: Mapping[str, PolicyOverview]
    has_checkpoint: bool


def read_overview(path: Path) -> Overview:
    """Read a run without its logs, but for their ends; raises as `read_run`."""
    run = read_run(path)
    directory, notes = RunDirectory(run.root), list(run.notes)
    policies = {}
    for name, policy in run.policies.items():
        files = directory.policy(name)
        try:
            if (recorded := recorded_sums(files).get(files.metrics)) is not None:
                verify_log(files.metrics, recorded)
        except (FileDamagedError, OSError) as error:
            notes.append(f"{files.metrics.relative_to(run.root)} is left out: {short(error, files.metrics)}")
            policies[name] = PolicyOverview(step=0, before=None, last=policy.final)
            continue
        policies[name] = _policy(policy, files.metrics)
    has_checkpoint = any(Checkpoints(directory.policy(name).root).steps() for name in run.policies)
    return Overview(
        run=run.model_copy(update={"notes": tuple(notes)}), policies=policies, has_checkpoint=has_checkpoint
    )


def _policy(policy: PolicyRecord, metrics: Path) -> PolicyOverview:
    before = policy.before if policy.result is None else policy.result.initial_validation or policy.before
    step, last = _ends(metrics, needs_accuracy=policy.final is None)
    known = [value for value in (policy.final, measured(last), measured(before)) if value is not None]
    return PolicyOverview(step=step, before=measured(before), last=known[0] if known else None)


def _ends(path: Path, *, needs_accuracy: bool) -> tuple[int, Validation | None]:
    """Return the last step in a metrics.jsonl and, if needed, the last validation, read from its end."""
    size = TAIL_BYTES
    while True:
        try:
            complete = path.stat().st_size <= size
        except OSError:
            complete = True
        rows = last_steps(path, size)
        validations = [validation_of(row.get("validation")) for row in rows]
        known = [each for each in validations if measured(each) is not None]
        if known or complete or (rows and not needs_accuracy):
            return rows[-1]["step"] if rows else 0, known[-1] if known else None
        size *= 8
