"""The recipe that a `train` command means: a new one, or that of the run it resumes."""

from __future__ import annotations

from dataclasses import replace

from mutualrl.errors import UsageError
from mutualrl.mwra.session import Launch, resumable
from mutualrl.recipes import Recipe, Request, resolve, revise
from mutualrl.storage.files import user_path


def recipe_of(request: Request, launch: Launch) -> Recipe:
    """Return the resolved recipe of a command. Raises UsageError for flags that contradict each other, and
    RecipeError."""
    if launch.resume and launch.clean:
        raise UsageError("--resume continues a run, --clean deletes it; give one of them")
    if launch.node >= launch.nodes:
        raise UsageError(f"--node-rank {launch.node}: expected 0 to {launch.nodes - 1} (--nnodes {launch.nodes})")
    if launch.nodes > 1 and request.run_dir is None:
        raise UsageError("--nnodes: name the run's directory, on a file system that all nodes share, with --run-dir")
    if launch.clean and request.run_dir is None:
        raise UsageError("--clean: name the run to delete with --run-dir DIR")
    if not launch.resume or launch.node > 0:
        return resolve(request)
    if request.run_dir is None:
        raise UsageError("--resume: name the run with --run-dir DIR (the command that began it printed the directory)")
    path = user_path(request.run_dir)
    return revise(resumable(path), replace(request, run_dir=path))
