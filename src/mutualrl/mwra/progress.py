"""Progress of a run on the console: a line per policy, from the files the policies write."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table

from mutualrl.console.display import cell, clean
from mutualrl.see import open_store
from mutualrl.see.liveness import last_beat
from mutualrl.storage.files import JsonObject, finite_number, parse_or_none
from mutualrl.storage.rundir import RunDirectory

LONGEST_PHASE = 200  # characters
PLAIN_SECONDS = 15.0  # between two lines where there is no terminal to redraw
REPEAT_SECONDS = 120.0  # before a line that says nothing new is printed again


@dataclass(slots=True)
class DisplayState:
    """What is shown of one policy."""

    phase: str = "starting"
    step: int = 0
    reward: float | None = None
    gate_rate: float | None = None
    gate_key: str | None = None
    waited: float = 0.0
    validation: dict[str, float] = field(default_factory=dict)
    offset: int = 0
    file: int = 0

    def update(self, run: RunDirectory, policy: str) -> None:
        """Read what is new in the policy's metrics and heartbeat."""
        state = last_beat(open_store(run.exchange), policy)
        if state is not None:
            self.phase = clean(str(state.get("phase", self.phase)), LONGEST_PHASE)
        try:
            with run.policy(policy).metrics.open("rb") as file:
                if self.file != (inode := os.fstat(file.fileno()).st_ino):  # a restarted policy has cut it
                    self.file, self.offset, self.waited = inode, 0, 0.0
                file.seek(self.offset)
                text = file.read()
        except FileNotFoundError:
            return
        end = text.rfind(b"\n") + 1  # a line that is being written is left for the next look
        self.offset += end
        for line in text[:end].splitlines():
            row = parse_or_none(line)
            if row is not None and type(row.get("step")) is int:  # a damaged line: `report` says which
                self._take(row)

    def _take(self, row: JsonObject) -> None:
        self.step = row["step"]
        self.reward = finite_number(row.get("reward"))
        if self.gate_key in row:
            self.gate_rate = finite_number(row[self.gate_key])
        self.waited += finite_number(row.get("see/wait_seconds")) or 0.0
        validation = row.get("validation")
        groups = validation.get("by_group") if isinstance(validation, dict) else None
        if isinstance(groups, dict):
            accuracy = {str(group): finite_number(value) for group, value in groups.items()}
            self.validation = {group: value for group, value in accuracy.items() if value is not None}


class Progress:
    """Live progress on a terminal; elsewhere a plain line every few seconds."""

    def __init__(
        self, run: RunDirectory, policies: list[str], steps: int, console: Console, gate_key: str | None = None
    ) -> None:
        self._run = run
        self._steps = steps
        self._console = console
        self._states = {name: DisplayState(gate_key=gate_key) for name in policies}
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
        """Read the files and show what they say."""
        for name, state in self._states.items():
            state.update(self._run, name)
        if self._live is not None:
            self._live.update(self._table())
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + PLAIN_SECONDS
            line = "; ".join(map(self._line, self._states))
            if line != self._last_line or time.monotonic() >= self._repeat_at:
                self._console.print(line, markup=False, highlight=False, soft_wrap=True)
                self._last_line, self._repeat_at = line, time.monotonic() + REPEAT_SECONDS

    def _line(self, name: str) -> str:
        state = self._states[name]
        reward = "" if state.reward is None else f", reward {state.reward:.2f}"
        gate = "" if state.gate_rate is None else f", gate {state.gate_rate:.2f}"
        return f"{name}: step {state.step}/{self._steps}{reward}{gate}, waited {state.waited:.1f} s ({state.phase})"

    def _table(self) -> Table:
        table = Table("policy", "step", "reward", "gate rate", "waited", "validation", "doing")
        for name, state in self._states.items():
            table.add_row(
                name,
                f"{state.step}/{self._steps}",
                "" if state.reward is None else f"{state.reward:.2f}",
                "" if state.gate_rate is None else f"{state.gate_rate:.2f}",
                f"{state.waited:.1f} s",
                "  ".join(f"{cell(group)} {accuracy:.2f}" for group, accuracy in state.validation.items()),
                cell(state.phase),
            )
        return table
