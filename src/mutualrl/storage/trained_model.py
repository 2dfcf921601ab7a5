"""Trained models of a run, and checks of their identity."""

from __future__ import annotations

from pathlib import Path

from mutualrl.errors import FileDamagedError, UsageError
from mutualrl.storage.artifacts import MARKER, verify_directory
from mutualrl.storage.files import read_checksummed
from mutualrl.storage.rundir import RunDirectory


def has_trained_model(run: RunDirectory, policy: str) -> bool:
    """Return whether a policy has a trained model. Its files are not verified."""
    return (run.policy(policy).model / "config.json").is_file()


def trained_model(run: RunDirectory, policy: str, *, verify: bool = False) -> Path:
    """Return the directory of a policy's trained model, after a check of the run and policy in its marker; `verify`
    also checks every file against the marker, as any load of a model must.

    Raises UsageError if there is no trained model, FileDamagedError if it is another policy's or run's, or was changed.
    """
    info, path = run.info(), run.policy(policy).model
    if not has_trained_model(run, policy):
        if (path / MARKER).exists():
            verify_directory(path)  # raises, naming the missing file
        raise UsageError(f"{path}: the run has no trained model of {policy!r} (did it finish?)")
    marker = verify_directory(path) if verify else read_checksummed(path / MARKER)
    if marker is None:
        raise FileDamagedError(f"{path / MARKER}: missing; the model is incomplete or not of this run")
    if (marker.get("run_id"), marker.get("policy")) != (info.run_id, policy):
        raise FileDamagedError(
            f"{path}: written for run {marker.get('run_id')!r}, policy {marker.get('policy')!r}; expected run "
            f"{info.run_id!r}, policy {policy!r}"
        )
    return path
