"""Copies of a policy's small files in the bucket of its run, so that the run can be followed from anywhere.

Objects `mirror.NAME` in the policy's namespace: run.json, what it validated before training, its metrics and rescues,
its result. They are for users: no training process reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mutualrl.see.store import ExchangeStore
from mutualrl.storage.files import read_regular
from mutualrl.storage.rundir import PolicyFiles, RunDirectory

PREFIX = "mirror."
RUN_JSON = "run.json"
LARGEST = 2**30  # bytes of a file
#: heartbeats in the bucket between two looks at the files
BEATS = 6


def policy_files(files: PolicyFiles) -> dict[str, Path]:
    """Return the files of a policy's directory that are mirrored, by name."""
    return {path.name: path for path in (files.before, files.metrics, files.rescues, files.result)}


class Mirror:
    """Small files of a policy; changed ones are uploaded again."""

    def __init__(
        self, store: ExchangeStore, run: RunDirectory, policy: str, is_newest: Callable[[], bool] = lambda: True
    ) -> None:
        self._store = store
        self._is_newest = is_newest
        self._policy = policy
        self._files = {RUN_JSON: run.run_json, **policy_files(run.policy(policy))}
        self._written: dict[str, tuple[int, int]] = {}

    def write(self) -> bool:
        """Put the files that are new or have changed, unless a newer attempt of the policy has started; return whether
        none has. Raises OSError, MachineError where one cannot be put."""
        if not self._is_newest():
            return False
        for name, path in self._files.items():
            try:
                state = path.stat()
                changed = (state.st_mtime_ns, state.st_size)
                if changed == self._written.get(name) or state.st_size > LARGEST:
                    continue
                data = read_regular(path, LARGEST)
            except FileNotFoundError:
                continue
            self._store.put(self._policy, PREFIX + name, data, durable=False)
            self._written[name] = changed
        return True


def mirrored(store: ExchangeStore, policy: str, name: str) -> bytes | None:
    """Return a policy's newest copy of a file; None where there is none, or it is larger than any upload."""
    if store.size(policy, PREFIX + name) > LARGEST:
        return None
    return store.get(policy, PREFIX + name)
