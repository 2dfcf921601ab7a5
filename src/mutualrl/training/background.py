"""Jobs that training does not wait for, such as writing a log, in one thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Background:
    """One thread that runs jobs in order. `finish`, at the end of each optimizer step, waits for them and raises what
    one has raised: a checkpoint has all of its step."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mutualrl-background")
        self._jobs: list[Future[None]] = []

    def run(self, job: Callable[[], None]) -> None:
        """Run a job after those before."""
        self._jobs.append(self._thread.submit(job))

    def finish(self) -> None:
        """Wait until all jobs are done."""
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            job.result()
