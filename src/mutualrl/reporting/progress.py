"""Console progress of a run: one line per policy, from the files that the policies write."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table

from mutualrl.console.display import cell, clean, duration, print_text
from mutualrl.runs.live import LivePolicy, LiveRun
from mutualrl.runs.notes import data_notes, live_after
from mutualrl.see import open_store
from mutualrl.see.liveness import last_heartbeat
from mutualrl.storage.metrics import Metric
from mutualrl.storage.rundir import RunDirectory

PLAIN_SECONDS = 15.0  # between lines when the output is not a terminal
REPEAT_SECONDS = 120.0  # before an unchanged line is printed again


class Progress:
    """Live table on a terminal; otherwise a plain line when something changed, else every two minutes."""

    def __init__(
        self,
        run: RunDirectory,
        policies: list[str],
        steps: int,
        console: Console,
        metrics: Sequence[Metric] = (),
        max_prompt_tokens: int | None = None,
        sources: Sequence[str] = (),
    ) -> None:
        self._live_run = LiveRun(run, policies, metrics)
        self._steps = steps
        self._limit = max_prompt_tokens
        self._sources = sources  # of a session without policies
        self._printed: set[str] = set()
        self._counted: set[str] = set()  # policies whose notes on the data are printed: their file is written once
        self._console = console
        self._live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        self._next_line = time.monotonic() + PLAIN_SECONDS
        self._last_line, self._repeat_at = "", 0.0

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self) -> None:
        """Read the files and show them."""
        self._live_run.update()
        self._print_notes()
        if self._live is not None:
            self._live.update(self._table())
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + PLAIN_SECONDS
            lines = [*map(self._line, self._live_run.policies.values()), *map(self._source_line, self._sources)]
            line = "; ".join([*lines, *self._remaining()])
            if line != self._last_line or time.monotonic() >= self._repeat_at:
                print_text(self._console, line)
                self._last_line, self._repeat_at = line, time.monotonic() + REPEAT_SECONDS

    def _print_notes(self) -> None:
        """Print each note on the data and on learning once: the same one of several policies, too."""
        run = self._live_run.run
        for policy in self._live_run.policies.values():
            notes: list[str] = []
            if policy.name not in self._counted and run.policy(policy.name).prompts.exists():
                self._counted.add(policy.name)
                notes = data_notes(run, policy.name, self._limit)
            if policy.step >= live_after(self._steps):
                notes = [*notes, *(f"{policy.name}: {note}" for note in policy.learning.notes()[:1])]
            for note in notes:
                key = note.partition(" in all ")[0]  # the number of steps grows
                if key not in self._printed:
                    self._printed.add(key)
                    print_text(self._console, f"Note: {note}")

    def _line(self, policy: LivePolicy) -> str:
        reward = "" if policy.reward.last is None else f", reward {policy.reward.last:.2f}"
        gate = "" if policy.gate_rate.last is None else f", gate {policy.gate_rate.last:.2f}"
        return (
            f"{policy.name}: step {policy.step}/{self._steps}{reward}{gate}, waited {policy.waited:.1f} s "
            f"({policy.doing})"
        )

    def _source_line(self, name: str) -> str:
        """Return what an asked source is doing."""
        beat = last_heartbeat(open_store(self._live_run.run.exchange), name) or {}
        return f"{name}: round {beat.get('step', 0)} ({clean(beat.get('phase', 'starting'), 80)})"

    def _remaining(self) -> list[str]:
        """Return the estimated remaining training time; empty until every policy has made a step, and at the end."""
        seconds = self._live_run.seconds_left(self._steps)
        return [f"about {duration(seconds)} of training left"] if seconds > 0 else []

    def _table(self) -> Table:
        caption = next(iter(self._remaining()), None)
        table = Table("policy", "step", "reward", "gate rate", "waited", "validation", "phase", caption=caption)
        for name, policy in self._live_run.policies.items():
            table.add_row(
                name,
                f"{policy.step}/{self._steps}",
                "" if policy.reward.last is None else f"{policy.reward.last:.2f}",
                "" if policy.gate_rate.last is None else f"{policy.gate_rate.last:.2f}",
                f"{policy.waited:.1f} s",
                "  ".join(f"{cell(group)} {accuracy:.2f}" for group, accuracy in policy.by_group.items()),
                cell(policy.phase),
            )
        for name in self._sources:
            table.caption = self._source_line(name)
        return table
