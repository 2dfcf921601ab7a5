"""Run whose policies joined a bucket, reassembled from the files that each mirrors there."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from mutualrl.console.user_path import user_path
from mutualrl.errors import FileDamagedError, UsageError
from mutualrl.process.status import ELSEWHERE, status_file
from mutualrl.runs.facts import accounts_of, facts_of_sources, finished_policies, values_of
from mutualrl.runs.lines import last_steps
from mutualrl.runs.read import read_run
from mutualrl.see.bucket import PROBE_SECONDS
from mutualrl.see.liveness import HEARTBEAT, last_heartbeat
from mutualrl.see.manifest import read_manifest
from mutualrl.see.mirror import RUN_JSON, mirrored, policy_files
from mutualrl.see.store import RemoteStore, remote_store
from mutualrl.storage.bucket_url import is_bucket, redacted, require_url
from mutualrl.storage.files import JsonObject, parse_checksummed, write_atomic, write_checksummed, write_json
from mutualrl.storage.run_info import RunInfo, Summary
from mutualrl.storage.rundir import RunDirectory, holder_of

LOCAL_SECONDS = 0.5  # between two looks
REMOTE_SECONDS = 10.0  # between two looks at a bucket


class RunPlace(NamedTuple):
    """Where a run is read. `root`: its directory, or a copy of what a bucket has; `shown`: what to call it; `name`: of
    its page, None for that of the run itself; `page`: directory of its report; `seconds`: between two looks; `look`:
    returns whether it goes on, after bringing a copy up to date; `is_here`: it can be stopped from here."""

    root: Path
    shown: str
    name: str | None
    page: Path
    seconds: float
    look: Callable[[], bool]
    is_here: bool


@contextmanager
def run_place(where: str) -> Iterator[RunPlace]:
    """Yield where a run is read: its directory or, for a bucket URL, a temporary copy (`fetch_run`)."""
    if not is_bucket(where):
        run = RunDirectory(user_path(Path(where)))

        def is_held() -> bool:
            """Return whether a supervisor, or a script of a policy, holds its lock."""
            locks = [run.lock, *(run.policy(path.name).lock for path in run.root.glob("policies/*/"))]
            return any(holder_of(lock) is not None for lock in locks)

        yield RunPlace(run.root, str(run.root), None, run.root / "report", LOCAL_SECONDS, is_held, True)
        return
    name = where.rstrip("/").rpartition("/")[2]
    with tempfile.TemporaryDirectory() as directory:
        copy = fetch_run(where, Path(directory) / name)

        def goes_on() -> bool:
            fetch_run(where, copy.root)
            return not copy.summary.exists()

        yield RunPlace(copy.root, where, name, Path(f"{name}-report"), REMOTE_SECONDS, goes_on, False)


def fetch_run(url: str, root: Path) -> RunDirectory:
    """Write the files that a run's policies mirror in a bucket to `root`, as a run directory for reports; a finished
    run gets its summary. No code from the bucket is run.

    Raises UsageError if the bucket has no run, or no policy of it has started; FileDamagedError.
    """
    try:
        store = remote_store(require_url(url), PROBE_SECONDS)
    except ValueError as error:
        raise UsageError(f"{redacted(url)!r}: {error}") from None
    manifest = read_manifest(store)
    if manifest is None:
        raise UsageError(f"{store.url}: contains no run (no {RUN_JSON}); `mutualrl join` creates one")
    run, infos = RunDirectory(root), []
    for policy in manifest.policies:
        if (info := _info(store, policy)) is None or info.run_id != manifest.run_id:
            continue
        infos.append(info)
        files = run.policy(policy)
        files.root.mkdir(parents=True, exist_ok=True)
        for name, path in policy_files(files).items():
            if (data := mirrored(store, policy, name)) is not None:
                _bring_up_to_date(path, data)
        if (beat := last_heartbeat(store, policy)) is not None:
            (run.exchange / policy).mkdir(parents=True, exist_ok=True)
            write_json(run.exchange / policy / HEARTBEAT, beat, durable=False)
    if not infos:
        raise UsageError(
            f"{store.url}: no policy of run {manifest.run_id[:8]} ({', '.join(manifest.policies)}) has started"
        )
    placement = {policy: allocation for info in infos for policy, allocation in info.placement.items()}
    models = {policy: digest for info in infos for policy, digest in info.models.items()}
    asked = {name: _asked(store, name, stored) for name, stored in infos[0].asked_sources.items()}
    merged = infos[0].model_copy(update={"placement": placement, "models": models, "asked_sources": asked})
    write_checksummed(run.run_json, merged.to_json(), root=run.root)
    write_atomic(run.recipe, merged.recipe.encode(), durable=False)
    _write_outcome(run, merged, manifest.policies, store)
    return run


def _bring_up_to_date(path: Path, data: bytes) -> None:
    """Set a file's content to `data`; one that has only grown is appended to, for readers that follow it."""
    before = path.read_bytes() if path.is_file() else None
    if before is None or not data.startswith(before):
        write_atomic(path, data, durable=False)
    elif len(data) > len(before):
        with path.open("ab") as file:
            file.write(data[len(before) :])


def _info(store: RemoteStore, policy: str) -> RunInfo | None:
    """Return the run.json that a policy mirrored; None if it has not started. Raises FileDamagedError."""
    data, where = mirrored(store, policy, RUN_JSON), store.describe(policy, RUN_JSON)
    if data is None:
        return None
    try:
        return RunInfo.model_validate(parse_checksummed(data, where))
    except ValidationError as error:
        raise FileDamagedError(
            f"{where}: not a file that `mutualrl join` mirrors ({error.errors()[0]['msg']})"
        ) from None


def _asked(store: RemoteStore, source: str, stored: JsonObject) -> JsonObject:
    """Return what run.json says of a source that is asked: its own process's, which knows its first question, where it
    joined alone."""
    info = _info(store, source)
    return stored if info is None else info.asked_sources.get(source, stored)


def _write_outcome(run: RunDirectory, info: RunInfo, policies: Sequence[str], store: RemoteStore) -> None:
    """Write the summary of a run whose policies have all finished, else its status."""
    record, notes = read_run(run.root), list[str]()
    values = {name: values_of(last_steps(run.policy(name).metrics)) for name in policies}
    finished = finished_policies(run, values, teaches=record.rule.teaches)
    if len(finished) == len(policies):
        plan = info.fingerprint
        accounts = accounts_of(store, info.asked_sources, notes)
        asked = dict.fromkeys(accounts, (policies, None))
        summary = Summary(
            regime=info.regime,
            mean_reward=not record.measures_accuracy,
            pool=info.pool,
            task=str(plan.get("task")),
            seed=info.seed,
            steps=int(plan.get("steps", 0)),
            seconds=max(result.train_seconds for result in finished.values()),
            policies=finished,
            source_facts=facts_of_sources(values, asked, accounts),
            notes=notes,
        )
        write_checksummed(run.summary, summary.to_json(), root=run.root)
        return
    status_file(run.root).parent.mkdir(parents=True, exist_ok=True)
    message = f"its policies joined {store.url}; state as of {time.strftime('%Y-%m-%d %H:%M:%S')}"
    write_json(status_file(run.root), {"outcome": f"{ELSEWHERE}: {message}"}, durable=False)
