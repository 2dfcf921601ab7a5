"""Beginning a run, and resuming one: what is checked before any process is started.

A session is one `mutualrl train` over a run directory: the first makes it, `--resume` starts another.
"""

from __future__ import annotations

import json
import time
import uuid
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mutualrl.errors import PlanMismatchError, RunDirectoryError, UsageError
from mutualrl.mwra.placement import Allocation, Placement
from mutualrl.recipes import Recipe, dump
from mutualrl.recipes.agreement import compare
from mutualrl.recipes.batch_plan import BatchPlan
from mutualrl.regimes.info import RegimeInfo
from mutualrl.see import MissingPeers, open_store
from mutualrl.storage.checkpoints import Checkpoints
from mutualrl.storage.files import read_json, write_atomic, write_json
from mutualrl.storage.run_info import Fingerprint, RunInfo, StoredAllocation
from mutualrl.storage.rundir import FORMAT, RunDirectory, command_line, create, default_path, holder_of, versions


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Options of a start, beside the recipe. `nodes`: how many machines; `node`: which of them this is; `address`:
    where the other nodes reach this one; `device_map`: a file that says which policy runs where."""

    resume: bool = False
    clean: bool = False
    device_map: Path | None = None
    nodes: int = 1
    node: int = 0
    address: str = "127.0.0.1"


#: keys that may change between two sessions: they decide how the run is kept and watched, not what it computes
HARMLESS = frozenset(
    {
        "run.max_restarts",
        "run.peer_timeout",
        "run.round_timeout",
        "run.on_peer_loss",
        "run.keep_checkpoints",
        "run.keep_rounds",
        "run.report_to",
        "run.save_every",
        "run.validate_every",
        "run.dir",
        "hardware.gpus",
        "pool",
    }
)


def changed_keys(old: Recipe, new: Recipe) -> dict[str, tuple[Any, Any]]:
    """Return keys in which two resolved recipes differ, with both values."""
    before, after = _flat(old.model_dump(mode="json")), _flat(new.model_dump(mode="json"))
    return {
        key: (before.get(key), after.get(key))
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key) and key != "run.dir"
    }


def _flat(value: Any, at: str = "") -> dict[str, object]:
    if isinstance(value, dict):
        pairs = [(f"{at}.{key}" if at else key, item) for key, item in value.items()]
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        pairs = [(f"{at}.{item.get('name', i)}", item) for i, item in enumerate(value)]
    else:
        return {at: value}
    return {key: leaf for path, item in pairs for key, leaf in _flat(item, path).items()}


def accept_changes(old: Recipe, new: Recipe) -> list[str]:
    """Return what changed and is harmless, in words. Raises UsageError naming every change that is not."""
    changed = changed_keys(old, new)
    if new.run.epochs is not None:  # to be worked out, and compared then
        changed = {key: values for key, values in changed.items() if key not in ("run.steps", "run.epochs")}
    refused = [
        f"{key}: {after!r}, the run has {before!r}" for key, (before, after) in changed.items() if key not in HARMLESS
    ]
    if refused:
        raise UsageError(
            "--resume: the recipe differs from the run's in what decides its results: " + "; ".join(refused) + ". "
            "Leave these out to go on as before, or start another run with --run-dir"
        )
    return [f"{key} is now {after!r} (was {before!r})" for key, (before, after) in changed.items()]


def same_plan(info: RunInfo, placement: Placement, plan: Fingerprint) -> list[str]:
    """Return what differs between sessions and is harmless, in words. Raises UsageError when the prompts, the batch
    or the number of processes of a policy are not the run's."""
    try:
        compare("resumed", plan, info.fingerprint)
    except PlanMismatchError as error:
        raise UsageError(
            f"--resume: {error}; the data must be what it was, or start another run with --run-dir"
        ) from None
    notes = []
    for allocation in placement.allocations:
        before, now = info.placement[allocation.policy].to_json(), stored(allocation).to_json()
        for key, words in (("processes", "processes"), ("strategy", "strategy"), ("batch", "batch plan")):
            if before[key] != now[key]:
                raise UsageError(
                    f"--resume: policy {allocation.policy!r} ran with {words} {before[key]!r}, here it would be "
                    f"{now[key]!r}; its "
                    "checkpoints are one part a process: give it the devices that it had (--set hardware.gpus=N, "
                    "--set launch.processes=N, --device-map FILE), or start another run with --run-dir"
                )
        for key in ("gpus", "nodes", "threads"):
            if before.get(key, now[key]) != now[key]:
                digits = "; sums may differ in the last digits" if key == "threads" else ""
                notes.append(f"policy {allocation.policy} runs on {key} {now[key]} (before: {before[key]}){digits}")
    for package, version in versions().items():
        if (old := info.versions.get(package)) != version:
            notes.append(f"{package} is {version}, the run began with {old}: results may differ from an unbroken run")
    return notes


def counted(recipe: Recipe, batch: BatchPlan, prompts: int) -> Recipe:
    """Return the recipe with its epochs worked out in optimizer steps. Prompts that turn out too long for some
    policy make an epoch a little shorter than counted here."""
    iterations = int(recipe.trainer_settings(recipe.policies[0].name).get("num_iterations", 1))
    return recipe.with_steps(prompts, batch.prompts, batch.optimizer_steps * iterations)


def start_run(recipe: Recipe, placement: Placement, plan: Fingerprint, launch: Launch, held: ExitStack) -> RunDirectory:
    """Claim a new run's directory, locked as long as `held` is open, and write what the workers read."""
    info = RunInfo(
        format=FORMAT,
        run_id=uuid.uuid4().hex,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        command=command_line(),
        versions=versions(),
        seed=recipe.run.seed,
        regime=recipe.spec.name,
        regime_info=RegimeInfo.of(recipe.spec).model_dump(mode="json"),
        pool=recipe.pool,
        nodes=launch.nodes,
        fingerprint=plan,
        placement=_by_policy(placement),
    )
    run = _claim(recipe, info, held)
    keep_recipe(run, recipe)
    return run


def _by_policy(placement: Placement) -> dict[str, StoredAllocation]:
    return {allocation.policy: stored(allocation) for allocation in placement.allocations}


def stored(allocation: Allocation) -> StoredAllocation:
    """Return an allocation as run.json has it."""
    return StoredAllocation.model_validate(asdict(allocation))


def keep_recipe(run: RunDirectory, recipe: Recipe) -> None:
    """Write the resolved recipe into the run, without its directory: whoever runs it again gets one of their own."""
    stored = recipe.model_copy(update={"run": recipe.run.model_copy(update={"dir": None})})
    write_atomic(run.recipe, f"# {json.dumps(command_line())}\n{dump(stored)}".encode())


def _claim(recipe: Recipe, info: RunInfo, held: ExitStack) -> RunDirectory:
    """Return the run's directory, locked: the one asked for, or a new one under runs/ that no other run has taken."""
    if recipe.run.dir is not None:
        return create(Path(recipe.run.dir), info, held)
    while True:
        path = default_path(recipe.spec.name, recipe.pool or "pool")
        try:
            return create(path, info, held)
        except RunDirectoryError:
            if not path.exists():  # not taken by another run: it cannot be written
                raise


def require_address(placement: Placement, launch: Launch) -> None:
    """Raise UsageError when a policy spans nodes and this one gives the others an address that is their own."""
    spanning = [allocation.policy for allocation in placement.allocations if len(allocation.nodes) > 1]
    if spanning and (launch.address.startswith("127.") or launch.address in ("localhost", "::1", "0.0.0.0")):
        raise UsageError(
            f"policy {spanning[0]!r} spans several nodes, whose processes cannot meet at {launch.address}: give "
            "--master-addr, on each node the address at which the others reach it"
        )


def resumable(path: Path) -> RunDirectory:
    """Return the run in `path`, if there is one to resume. Raises UsageError saying why not."""
    run = RunDirectory(path)
    if path.is_symlink():
        raise UsageError(f"--resume: {path} is a symbolic link; name the directory itself")
    if not path.is_dir():
        raise UsageError(f"--resume: nothing to resume, there is no directory {path}; start a run without --resume")
    info = run.info()
    if not run.recipe.is_file() or info.format < FORMAT:
        what = "recipe.yaml is missing" if not run.recipe.is_file() else "an older mutualrl wrote it"
        raise UsageError(f"--resume: {path} cannot be resumed ({what}); delete it with --clean, or name another")
    if absent := [name for name in ("fingerprint", "placement", "versions") if not getattr(info, name)]:
        raise UsageError(
            f"--resume: {run.run_json} lacks {', '.join(absent)}: it was changed; restore it, or use --clean"
        )
    if (holder := holder_of(run.lock(0))) is not None:
        raise RunDirectoryError(f"--resume: the run in {path} is running now ({holder}); wait for it, or stop it there")
    if run.summary.exists() and not (read_json(run.summary) or {}).get("lost"):
        raise UsageError(
            f"--resume: nothing to resume, the run in {path} is finished (its results: {run.summary}); start another "
            "with --run-dir, or this one again with --clean"
        )
    return run


def resume_run(run: RunDirectory, recipe: Recipe, placement: Placement, launch: Launch) -> None:
    """Write what a new session changes: the recipe's harmless keys, the devices, that lost policies are back; and end
    an earlier request to stop."""
    run.summary.unlink(missing_ok=True)
    for policy in recipe.policies:
        cursor = Checkpoints(run.policy(policy.name).root).newest_cursor()
        MissingPeers(open_store(run.exchange), policy.name).readmit_all(cursor)
    keep_recipe(run, recipe)
    info = run.info()
    moved = info.model_copy(update={"nodes": launch.nodes, "placement": _by_policy(placement)})
    write_json(run.run_json, moved.to_json())
    run.stop_file.unlink(missing_ok=True)


def next_session(run: RunDirectory) -> int:
    """Return the number of this session, from 0; noted with its command, so that people see how the run was made."""
    path = run.root / "supervisor" / "sessions.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    value = read_json(path) or {"sessions": []}
    number = len(value["sessions"])
    entry = {"began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "command": command_line()}
    write_json(path, {"sessions": [*value["sessions"], entry]})
    return number
