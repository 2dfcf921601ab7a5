"""Copies of a policy's small files in the run's bucket, so that the run can be followed from anywhere.

Objects `mirror.NAME` in the policy's namespace: run.json, the validation before training, metrics, rescues,
samples, and the result. They are for users: no training process reads them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from mutualrl.console.display import last_parts
from mutualrl.see.store import ExchangeStore
from mutualrl.storage.files import checksummed_bytes, read_checksummed, read_regular
from mutualrl.storage.run_logs import log_paths
from mutualrl.storage.rundir import PolicyFiles, RunDirectory

PREFIX = "mirror."
RUN_JSON = "run.json"
LARGEST = 2**30  # bytes of a file
#: heartbeats in the bucket between two checks of the files
BEATS = 6


def policy_files(files: PolicyFiles) -> dict[str, Path]:
    """Return the files of a policy's directory that are mirrored, by name."""
    return {path.name: path for path in (files.before, *log_paths(files), files.result)}


class Mirror:
    """Mirror of a policy's small files, which uploads changed ones."""

    def __init__(
        self, store: ExchangeStore, run: RunDirectory, policy: str, is_newest: Callable[[], bool] = lambda: True
    ) -> None:
        self._store = store
        self._is_newest = is_newest
        self._policy = policy
        self._files = {RUN_JSON: run.run_json, **policy_files(run.policy(policy))}
        self._written: dict[str, tuple[int, int]] = {}

    def write(self) -> bool:
        """Upload new and changed files, unless a newer attempt of the policy has started; return False if one has.
        Raises OSError or MachineError if an upload fails."""
        if not self._is_newest():
            return False
        for name, path in self._files.items():
            try:
                state = path.stat()
                version = (state.st_mtime_ns, state.st_size)
                if version == self._written.get(name) or state.st_size > LARGEST:
                    continue
                data = _without_directories(path) if name == RUN_JSON else read_regular(path, LARGEST)
            except FileNotFoundError:
                continue
            self._store.put(self._policy, PREFIX + name, data, durable=False)
            self._written[name] = version
        return True


def _without_directories(run_json: Path) -> bytes:
    """Return run.json with absolute paths cut to their last part: the bucket may have other readers than this
    machine."""
    value = read_checksummed(run_json, root=run_json.parent)
    if value is None:
        raise FileNotFoundError(run_json)
    for key in ("recipe", "command"):
        if key in value:
            value[key] = json.loads(last_parts(json.dumps(value[key], ensure_ascii=False)))
    return checksummed_bytes(
        {**value, "recipe_sha256": hashlib.sha256(str(value.get("recipe", "")).encode()).hexdigest()}
    )


def mirrored(store: ExchangeStore, policy: str, name: str) -> bytes | None:
    """Return a policy's newest copy of a file, or None if it does not exist or exceeds the size of any upload."""
    if store.size(policy, PREFIX + name) > LARGEST:
        return None
    return store.get(policy, PREFIX + name)
