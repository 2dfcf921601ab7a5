"""Start and resumption of a run: the checks before any process is started.

A session is one `mutualrl train` on a run directory: the first creates it, `--resume` starts another.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from mutualrl.errors import (
    DirectoryTakenError,
    FileDamagedError,
    PlanMismatchError,
    RecipeError,
    RunDirectoryError,
    UsageError,
)
from mutualrl.mwra.placement import Placement
from mutualrl.recipes import Recipe, dump
from mutualrl.recipes.agreement import compare, compare_models
from mutualrl.recipes.differences import by_dotted_key, changed_keys, differing
from mutualrl.recipes.free import may_differ
from mutualrl.recipes.yaml_file import parse
from mutualrl.storage.allocation import Allocation, BatchPlan
from mutualrl.storage.files import (
    read_checksummed,
    read_regular,
    remove_temporaries,
    write_atomic,
    write_checksummed,
)
from mutualrl.storage.run_info import Fingerprint, RunInfo, policy_result
from mutualrl.storage.rundir import (
    RunDirectory,
    command_line,
    create,
    default_path,
    holder_of,
    versions,
    wrong_kinds,
)
from mutualrl.storage.trained_model import trained_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Options of a start besides the recipe. `member`: the policy, or the source that is asked, that joins an exchange
    alone; None starts all. `restart`: a policy trains from the start although the exchange has rounds of it.
    `device_map`: file that assigns policies to devices. `ray`: address of the Ray cluster that runs the policies; None:
    this machine."""

    resume: bool = False
    clean: bool = False
    device_map: Path | None = None
    member: str | None = None
    restart: bool = False
    ray: str | None = None

    def policies(self, recipe: Recipe) -> list[str]:
        """Return the policies that this session starts: all, or the one that joins."""
        return [policy.name for policy in recipe.policies if self.member in (None, policy.name)]

    def sources(self, recipe: Recipe) -> list[str]:
        """Return the asked sources that this session starts: all, or the one that joins."""
        return [source.name for source in recipe.asked_sources if self.member in (None, source.name)]


def accept_changes(old: Recipe, new: Recipe) -> list[str]:
    """Return messages about harmless changes. Raises UsageError naming every other change."""
    changed = changed_keys(old, new)
    if new.run.epochs is not None:  # compared once the epochs are converted to steps
        changed = {key: values for key, values in changed.items() if key not in ("run.steps", "run.epochs")}
    refused = [
        f"{key}: {after!r}, the run has {before!r}"
        for key, (before, after) in changed.items()
        if not may_differ(Recipe, key, "resume")
    ]
    if refused:
        raise UsageError(
            "--resume: the recipe differs from the run's in settings that affect results: " + "; ".join(refused) + ". "
            "Leave these out to resume, or start another run with --run-dir"
        )
    return [f"{key} is now {after!r} (was {before!r})" for key, (before, after) in changed.items()]


def require_same_plan(info: RunInfo, placement: Placement, plan: Fingerprint, models: Mapping[str, str]) -> list[str]:
    """Return messages about harmless differences between sessions. Raises UsageError if the data, the user's code, the
    base models, the batch or a policy's number of processes differ from the run's."""
    try:
        compare("resumed", plan, info.fingerprint)
        compare_models(models, info.models)
    except PlanMismatchError as error:
        raise UsageError(
            f"--resume: {error}; restore the run's data, code and models, or start another run with --run-dir"
        ) from None
    notes = []
    for allocation in placement.allocations:
        before, now = asdict(info.placement[allocation.policy]), asdict(allocation)
        for key, label in (("processes", "processes"), ("strategy", "strategy"), ("batch", "batch plan")):
            if before[key] != now[key]:
                raise UsageError(
                    f"--resume: policy {allocation.policy!r} ran with {label} {before[key]!r}, here it would be "
                    f"{now[key]!r}; its checkpoints have one part per process: use the same devices "
                    "(--set hardware.gpus=N, --set launch.processes=N, --device-map FILE), or start another run with "
                    "--run-dir"
                )
        for key in ("gpus", "threads"):
            if before.get(key, now[key]) != now[key]:
                effect = "; sums may differ in the last digits" if key == "threads" else ""
                notes.append(f"policy {allocation.policy} runs on {key} {now[key]} (before: {before[key]}){effect}")
    for package, version in versions().items():
        if (old := info.versions.get(package)) != version:
            notes.append(
                f"{package} is {version}, the run began with {old}: results may differ from an uninterrupted run"
            )
    return notes


def counted(recipe: Recipe, batch: BatchPlan, prompts: int) -> Recipe:
    """Return the recipe with its epochs converted to optimizer steps. Prompts that are later dropped as too long for a
    policy make an epoch slightly shorter than this."""
    return recipe.with_steps(prompts, batch.prompts, recipe.steps_per_round(batch.optimizer_steps))


def start_run(recipe: Recipe, info: RunInfo, held: ExitStack) -> RunDirectory:
    """Claim a new run directory, locked while `held` is open: the requested one, or an unused one under runs/."""
    if recipe.run.dir is not None:
        return create(Path(recipe.run.dir), info, held)
    while True:
        path = default_path(recipe.regime_class.name, recipe.pool or "pool")
        with contextlib.suppress(DirectoryTakenError):  # by a run that started at the same time
            return create(path, info, held)


def by_policy(placement: Placement) -> dict[str, Allocation]:
    """Return the allocations by policy."""
    return {allocation.policy: allocation for allocation in placement.allocations}


def recipe_text(recipe: Recipe) -> str:
    """Return the resolved recipe as a run stores it, without the run directory, so that another run gets its own."""
    without_dir = recipe.model_copy(update={"run": recipe.run.model_copy(update={"dir": None})})
    return f"# {json.dumps(command_line())}\n{dump(without_dir)}"


def sha256_of(text: str) -> str:
    """Return the sha256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def open_resumable_run(path: Path, *, joining: bool = False) -> RunDirectory:
    """Return the run in `path` if it can be resumed; that of one member only `joining`. Raises UsageError with the
    reason otherwise."""
    run = RunDirectory(path)
    if path.is_symlink():
        raise UsageError(f"--resume: {path} is a symbolic link; name the directory itself")
    if not path.is_dir():
        raise UsageError(f"--resume: nothing to resume, there is no directory {path}; start a run without --resume")
    info = run.info()
    needed = ("fingerprint", *(() if info.joined_source else ("placement",)), "versions", "recipe")
    if missing := [name for name in needed if not getattr(info, name)]:
        raise UsageError(
            f"--resume: {run.run_json} lacks {', '.join(missing)}: it was changed; restore it, or use --clean"
        )
    if (holder := holder_of(run.lock)) is not None:
        raise RunDirectoryError(f"--resume: the run in {path} is running now ({holder}); wait for it, or stop it there")
    if problems := wrong_kinds(run):
        raise FileDamagedError(f"--resume: {problems[0]}")
    verify_recipe(run, info)
    if info.joined and not joining:
        raise UsageError(
            f"--resume: the directory has only {info.joined}, which joined an exchange; resume with: mutualrl join "
            f"{info.exchange} --policy {info.joined} --run-dir {path}"
        )
    if run.summary.exists() and not (read_checksummed(run.summary, root=run.root) or {}).get("lost"):
        raise UsageError(
            f"--resume: nothing to resume, the run in {path} is finished (its results: {run.summary}); start another "
            "with --run-dir, or this one again with --clean"
        )
    return run


def verify_recipe(run: RunDirectory, info: RunInfo) -> None:
    """Raise FileDamagedError if recipe.yaml was changed. The session rewrites a missing one, and one from before the
    newest session: a kill came between the writes of run.json and recipe.yaml."""
    try:
        data = read_regular(run.recipe)
    except FileNotFoundError:
        return
    if hashlib.sha256(data).hexdigest() not in (info.recipe_sha256, info.recipe_before_sha256):
        raise FileDamagedError(
            f"{run.recipe}: changed since the run wrote it{_changes(info.recipe, data)}. Change settings of a resumed "
            "run on the command line (--set KEY=VALUE); remove the file to restore the run's recipe"
        )


def _changes(text: str, data: bytes) -> str:
    """Return the keys in which two recipes differ, as text; an empty string if they cannot be parsed."""
    try:
        before, now = by_dotted_key(parse(text, "")), by_dotted_key(parse(data.decode("utf-8"), ""))
    except (RecipeError, UnicodeDecodeError):
        return ""
    lines = [
        f"{key}: {repr(after)[:60]}, the run has {repr(value)[:60]}"
        for key, (value, after) in differing(before, now).items()
    ]
    return f" ({'; '.join(lines[:5])})" if lines else ""


def verify_finished_policies(run: RunDirectory, recipe: Recipe) -> None:
    """Raise FileDamagedError if a finished policy's result or model was changed."""
    for policy in recipe.policies:
        if policy_result(run.policy(policy.name).result, run.root) is not None:
            trained_model(run, policy.name, verify=True)


def resume_run(
    run: RunDirectory, recipe: Recipe, placement: Placement, models: Mapping[str, str], launch: Launch
) -> None:
    """Write a new session's changes: the recipe's harmless keys, devices; clear an earlier stop request."""
    for directory in (run.root, run.root / "supervisor", run.evaluations):
        remove_temporaries(directory)
    run.summary.unlink(missing_ok=True)
    info, text = run.info(), recipe_text(recipe)
    changes = {
        "placement": by_policy(placement),
        "models": {**models, **{policy: digest for policy, digest in info.models.items() if digest}},
        "recipe": text,
        "recipe_sha256": sha256_of(text),
        "recipe_before_sha256": info.recipe_sha256,
    }
    write_checksummed(run.run_json, info.model_copy(update=changes).to_json(), root=run.root)
    write_atomic(run.recipe, text.encode())
    run.stop_file.unlink(missing_ok=True)


def next_session(run: RunDirectory) -> int:
    """Return the number of this session, from 0, after recording its start and command for users."""
    path = run.root / "supervisor" / "sessions.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    sessions = (read_checksummed(path, root=run.root) or {"sessions": []})["sessions"]
    entry = {"began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "command": command_line()}
    write_checksummed(path, {"sessions": [*sessions, entry]}, root=run.root)
    return len(sessions)
