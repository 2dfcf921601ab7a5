"""Where the records of a run are: in its directory, or in the bucket that run.json names."""

from __future__ import annotations

from mutualrl.see.store import ExchangeStore, open_store
from mutualrl.storage.rundir import RunDirectory


def records_of(run: RunDirectory) -> ExchangeStore:
    """Return the store of a run's records. Heartbeats for the run's own supervisor are in its directory in any case.

    Raises as `RunDirectory.info` does; UsageError for a URL that is none, MachineError where it cannot be opened.
    """
    if not run.run_json.exists():  # a directory that is no run yet, and names no bucket
        return open_store(run.exchange)
    return open_store(run.info().exchange or run.exchange)
