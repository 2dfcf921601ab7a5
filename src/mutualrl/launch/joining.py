"""Checks of a run whose exchange is in a bucket, before any process starts: the bucket, and agreement on the run."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from mutualrl.errors import ExchangeDamagedError, PlanMismatchError, UsageError
from mutualrl.launch.session import Launch
from mutualrl.recipes import Recipe
from mutualrl.recipes.agreement import compare
from mutualrl.recipes.differences import decisive, differing
from mutualrl.see import MissingPeers
from mutualrl.see.bucket import PROBE_SECONDS
from mutualrl.see.checkpoint_copies import Staged, copied, forget, has_copy, stage
from mutualrl.see.files import committed_rounds
from mutualrl.see.liveness import Phase, last_heartbeat
from mutualrl.see.location import record_store
from mutualrl.see.manifest import Manifest, read_manifest, write_manifest
from mutualrl.see.section import Bucket
from mutualrl.see.store import RemoteStore, remote_store
from mutualrl.storage.checkpoints import Checkpoints
from mutualrl.storage.run_info import Fingerprint
from mutualrl.storage.rundir import RunDirectory


def claim_exchange(recipe: Recipe, plan: Fingerprint, launch: Launch, console: Console) -> str:
    """Return the id of the bucket's run: a new one or, for a policy that joins, the existing one. Raises MachineError
    if the bucket cannot be used, UsageError if it holds another run."""
    assert recipe.bucket is not None
    store = remote_store(recipe.bucket.url, PROBE_SECONDS)
    store.probe()
    names, run_id, policy = [p.name for p in recipe.policies], uuid.uuid4().hex, launch.member
    manifest = write_manifest(
        store, Manifest(run_id, tuple(names), recipe.regime_class.name, dict(plan), decisive(recipe))
    )
    if policy is None and manifest.run_id != run_id:
        raise UsageError(
            f"exchange.url: {store.url} holds run {manifest.run_id[:8]} ({manifest.regime}, created "
            f"{manifest.created}; {', '.join(manifest.policies)}); give every run its own URL, or delete the run there"
        )
    if policy is not None:
        require_same_run(store.url, manifest, recipe, plan, policy)
        require_not_running(recipe.bucket, policy, console)
        if launch.restart:
            _require_first_rounds(store, recipe, policy)
            forget(store, policy)
        elif (
            launch.policies(recipe) and (rounds := committed_rounds(store, policy)) and not has_copy(store, policy)
        ):  # a source goes on from what is published
            raise UsageError(
                f"policy {policy!r} has published {len(rounds)} rounds in {store.url}, and {recipe.run.dir} holds no "
                "run to resume; name its directory with --run-dir, or train from the start with --restart"
            )
    return manifest.run_id


def _require_first_rounds(store: RemoteStore, recipe: Recipe, policy: str) -> None:
    """Raise UsageError if a policy cannot train from the start, since rounds that it would read were deleted."""
    if not recipe.regime_class().needs().peers:
        return
    peers = [member.name for member in (*recipe.policies, *recipe.asked_sources) if member.name != policy]
    for peer in peers:
        rounds = committed_rounds(store, peer)
        if rounds and rounds[0] > 0:
            raise UsageError(
                f"--restart: {policy!r} would need rounds of {peer!r} from 0 on, and {store.url} has them from "
                f"{rounds[0]} on (run.keep_rounds); resume it without --restart, or give another run its own URL"
            )


def fetch_checkpoint(
    recipe: Recipe, launch: Launch, run_id: str, path: Path, models: Mapping[str, str]
) -> Staged | None:
    """Fetch a joining policy's checkpoint to a directory beside its run directory `path`, unless that has one as new.
    Return None if the bucket has none or the policy trains from the start. Raises UsageError for another base model."""
    if recipe.bucket is None or launch.member not in launch.policies(recipe) or launch.restart:
        return None
    policy, store = launch.member, remote_store(recipe.bucket.url)
    own = max(Checkpoints(RunDirectory(path).policy(policy).root).steps(), default=None)
    copy = copied(store, policy, run_id)
    if own is not None and (copy is None or copy.step <= own):
        return None
    staged = stage(store, policy, run_id, path.with_name(f".{path.name}.fetched"))
    if staged is not None and staged.model and models.get(policy, staged.model) != staged.model:
        raise UsageError(
            f"--policy {policy}: its checkpoint in {recipe.bucket.url} was trained from another base model than "
            f"{recipe.policy(policy).model!r}; use the original model, or train from the start with --restart"
        )
    return staged


def install_checkpoint(staged: Staged, run: RunDirectory) -> str:
    """Install a fetched checkpoint in a run directory, readmit lost peers, and return a note for the user."""
    staged.install(run)
    MissingPeers(record_store(run), staged.marker.policy).readmit_all(staged.marker.round)
    return f"policy {staged.marker.policy} resumes from its checkpoint of step {staged.marker.step} in the bucket"


def require_same_run(url: str, manifest: Manifest, recipe: Recipe, plan: Fingerprint, policy: str) -> None:
    """Raise UsageError if a policy's plan differs from that of the bucket's run."""
    names = tuple(p.name for p in recipe.policies)
    if policy not in (*manifest.policies, *(source.name for source in recipe.asked_sources)):
        raise UsageError(f"--policy {policy}: the run in {url} has {', '.join(manifest.policies)}")
    if names != manifest.policies or recipe.regime_class.name != manifest.regime:
        raise UsageError(
            f"the run in {url} has {manifest.regime} with policies {', '.join(manifest.policies)}; this recipe has "
            f"{recipe.regime_class.name} with {', '.join(names)}"
        )
    if different := differing(manifest.recipe, decisive(recipe)):
        changes = "; ".join(f"{key}: {now!r}, the run has {before!r}" for key, (before, now) in different.items())
        raise UsageError(f"the run in {url} has another recipe: {changes}; give every policy of a run the same recipe")
    try:
        compare(policy, plan, manifest.fingerprint)
    except PlanMismatchError as error:
        raise UsageError(f"{error} in {url}; give every policy of a run the same recipe and data") from None


def require_run(bucket: Bucket, run_id: str, policy: str | None, console: Console) -> None:
    """Raise ExchangeDamagedError if the bucket of a resumed run no longer holds it, UsageError if the joining `policy`
    runs elsewhere."""
    store = remote_store(bucket.url, PROBE_SECONDS)
    manifest = read_manifest(store)
    if manifest is None or manifest.run_id != run_id:
        current = "no run" if manifest is None else f"run {manifest.run_id[:8]}"
        raise ExchangeDamagedError(f"{store.url}: holds {current}, expected the resumed run {run_id[:8]}")
    if policy is not None:
        require_not_running(bucket, policy, console)


def require_not_running(bucket: Bucket, policy: str, console: Console) -> None:
    """Raise UsageError if another process of a policy writes heartbeats to the bucket. Watch for one and a half
    intervals, unless the policy has not started or has finished."""
    store = remote_store(bucket.url, PROBE_SECONDS)
    before = last_heartbeat(store, policy)
    if before is None or before.get("phase") == Phase.FINISHED:
        return
    seconds = 1.5 * bucket.heartbeat_seconds
    console.print(f"Checking for {seconds:.0f} s whether {policy} runs elsewhere", markup=False, highlight=False)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(min(1.0, bucket.heartbeat_seconds))
        now = last_heartbeat(store, policy)
        if now is not None and now.get("counter") != before.get("counter"):
            raise UsageError(
                f"policy {policy!r} is already running: its heartbeat in {store.url} is live (process "
                f"{now.get('pid')}, step {now.get('step')}, {now.get('phase')}); stop it, or wait until it ends"
            )
