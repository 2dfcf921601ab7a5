"""Trained models of a run, and whose they are."""

from __future__ import annotations

from pathlib import Path

from mutualrl.errors import FileDamagedError, UsageError
from mutualrl.storage.artifacts import MARKER, verify_directory
from mutualrl.storage.files import read_checksummed
from mutualrl.storage.rundir import FORMAT, RunDirectory


def has_trained_model(run: RunDirectory, policy: str) -> bool:
    """Return whether a policy has a trained model that can be loaded; not whether its bytes are what they were."""
    return (run.policy(policy).model / "config.json").is_file()


def trained_model(run: RunDirectory, policy: str, *, verify: bool = False) -> Path:
    """Return the directory of a policy's trained model. Its marker names run and policy; with `verify` every file is
    compared with it, as is done whenever a model is loaded.

    Raises UsageError where there is no trained model, FileDamagedError for another policy's or run's, or a changed one.
    """
    info, path = run.info(), run.policy(policy).model
    if not has_trained_model(run, policy):
        if (path / MARKER).exists():
            verify_directory(path)  # names the file that is gone
        raise UsageError(f"{path}: the run has no trained model of {policy!r} (did it finish?)")
    if info.format < FORMAT:
        return path
    marker = verify_directory(path) if verify else read_checksummed(path / MARKER)
    if marker is None:
        raise FileDamagedError(f"{path / MARKER}: not there; the model is not complete, or is not the run's")
    if (marker.get("run_id"), marker.get("policy")) != (info.run_id, policy):
        raise FileDamagedError(
            f"{path}: of run {marker.get('run_id')!r}, policy {marker.get('policy')!r}; expected run {info.run_id!r}, "
            f"policy {policy!r}"
        )
    return path
