"""Location of a run's records: its directory, or the bucket in run.json."""

from __future__ import annotations

from mutualrl.see.store import ExchangeStore, open_store
from mutualrl.storage.rundir import RunDirectory


def record_store(run: RunDirectory) -> ExchangeStore:
    """Return the store of a run's records. Heartbeats for the run's supervisor are always in its directory.

    Raises as `RunDirectory.info` does, UsageError for an invalid URL, MachineError if the store cannot be opened.
    """
    if not run.run_json.exists():  # not a run yet, hence without a bucket
        return open_store(run.exchange)
    return open_store(run.info().exchange or run.exchange)
