"""Live view of a run: tails the files of its policies, in bounded memory."""

from __future__ import annotations

import math
import re
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from mutualrl.console.display import clean
from mutualrl.errors import FileDamagedError
from mutualrl.runs.lines import LOOK_BYTES, NewLines, steps_in
from mutualrl.runs.notes import LearningNotes
from mutualrl.runs.read import validation_of
from mutualrl.see import open_store
from mutualrl.see.liveness import Phase, last_heartbeat
from mutualrl.storage.files import JsonObject, finite_number, parse_or_none, read_checksummed
from mutualrl.storage.metrics import WAIT, Metric
from mutualrl.storage.run_info import measured
from mutualrl.storage.rundir import RunDirectory

MOST_POINTS = 512  # per curve
MOST_RESCUES = 20
MOST_LINES = 200  # per log
LONGEST_PHASE = 200  # characters
SLOW_SECONDS = 10.0  # without progress, after which it is said for how long
SILENT_SECONDS = 45.0  # without a heartbeat, of a process or in a bucket, after which it is said for how long
LONGEST_LINE = 500
LOG_BYTES = 64 * 2**10  # at the end of a log, for the first read
RECENT = 20  # steps whose mean time predicts the remaining time
_ATTEMPT = re.compile(r"attempt-(\d+)\.log")


@dataclass(slots=True)
class Curve:
    """Values by step, thinned out evenly to at most `MOST_POINTS`; always includes the newest."""

    points: list[tuple[int, float]] = field(default_factory=list)
    _stride: int = 1
    _until_next: int = 0

    def add(self, step: int, value: float) -> None:
        """Add a value, dropping those of this and later steps: a restarted policy repeats them."""
        while self.points and self.points[-1][0] >= step:
            self.points.pop()
        if self._until_next > 0 and len(self.points) > 1:
            self.points[-1] = (step, value)
            self._until_next -= 1
            return
        self.points.append((step, value))
        self._until_next = self._stride - 1
        if len(self.points) > MOST_POINTS:
            del self.points[1::2]
            self._stride *= 2

    @property
    def last(self) -> float | None:
        """Return the newest value."""
        return self.points[-1][1] if self.points else None


class LivePolicy:
    """State of one policy while it trains. `waited`, `seconds`: totals over its steps so far."""

    def __init__(self, run: RunDirectory, name: str, metrics: Sequence[Metric] = (), *, recipe: bool = True) -> None:
        self.name = name
        self._run = run
        self._declared, self._recipe = metrics, recipe
        self._gate_key = next((metric.key for metric in metrics if metric.role == "gate_rate"), None)
        self._metrics = NewLines(run.policy(name).metrics)
        self._rescues = NewLines(run.policy(name).rescues, LOOK_BYTES)
        self._log: NewLines | None = None
        self._before: float | None = None
        self.phase = "starting"
        self._progress: object = None
        self._counter: object = None
        self._since = self._beat_at = self._step_at = time.monotonic()
        self.log: deque[str] = deque(maxlen=MOST_LINES)
        self.rescues: deque[JsonObject] = deque(maxlen=MOST_RESCUES)
        self._reset()

    def _reset(self) -> None:
        self.step = 0
        self.reward, self.accuracy, self.gate_rate = Curve(), Curve(), Curve()
        self.by_group: dict[str, float] = {}
        self.waited = self.seconds = 0.0
        self._recent: deque[float] = deque(maxlen=RECENT)
        self.learning = LearningNotes(self._declared, recipe=self._recipe)
        if self._before is not None:
            self.accuracy.add(0, self._before)

    def _read_before(self) -> None:
        """Read the validation before training, once it exists."""
        try:
            before = validation_of(read_checksummed(self._run.policy(self.name).before, root=self._run.root))
        except (FileDamagedError, OSError):  # `report` shows the problem
            return
        self._before = measured(before)
        if self._before is not None:
            self.accuracy.points.insert(0, (0, self._before))

    def update(self) -> None:
        """Read new metrics, rescues and the heartbeat of the policy."""
        state = last_heartbeat(open_store(self._run.exchange), self.name)
        if state is not None:
            self.phase = clean(str(state.get("phase", self.phase)), LONGEST_PHASE)
            if state.get("progress") != self._progress:
                self._progress, self._since = state.get("progress"), time.monotonic()
            if state.get("counter") != self._counter:
                self._counter, self._beat_at = state.get("counter"), time.monotonic()
        if self._before is None:
            self._read_before()
        lines = self._metrics.read()
        if self._metrics.restarted:  # a restarted policy has truncated the file
            self._reset()
        while lines:
            for row in steps_in(lines):  # `report` lists damaged lines
                self._add_row(row)
            lines = self._metrics.read()
        lines = self._rescues.read()
        if self._rescues.restarted:
            self.rescues.clear()
        rows = (parse_or_none(line) for line in lines[-MOST_RESCUES:])
        self.rescues.extend(row for row in rows if row is not None)

    def _add_row(self, row: JsonObject) -> None:
        self.step, self._step_at = row["step"], time.monotonic()
        self.learning.add(row)
        pairs = ((self.reward, "reward"), (self.gate_rate, self._gate_key))
        for curve, key in pairs:
            if key is not None and (value := finite_number(row.get(key))) is not None:
                curve.add(self.step, value)
        self.waited += finite_number(row.get(WAIT.key)) or 0.0
        if (seconds := finite_number(row.get("step_time"))) is not None:
            self.seconds += seconds
            self._recent.append(seconds)
        validation = validation_of(row.get("validation"))
        if validation is not None and (accuracy := measured(validation)) is not None:
            self.accuracy.add(self.step, accuracy)
            self.by_group = validation.by_group

    def update_log(self) -> None:
        """Read new lines of the log of the policy's latest attempt."""
        attempts = {}
        for path in self._run.policy(self.name).logs.glob("attempt-*.log"):
            if (match := _ATTEMPT.fullmatch(path.name)) is not None:
                attempts[int(match[1])] = path
        if not attempts:
            return
        newest = attempts[max(attempts)]
        if self._log is None or self._log.path != newest:
            self._log = NewLines(newest, LOG_BYTES)
            self.log.clear()
        for line in self._log.read()[-MOST_LINES:]:
            text = line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]  # the last state of a progress bar
            if text.strip():
                self.log.append(clean(text, LONGEST_LINE))

    @property
    def doing(self) -> str:
        """Return the phase; of a process whose heartbeat stopped, or of code of the user's that makes no progress (a
        tool, a reward), also for how long, as seen here."""
        if (silent := self._silent) >= SILENT_SECONDS:
            return f"no heartbeat for {silent:.0f} s, last seen: {self.phase}"
        seconds = time.monotonic() - self._since
        users_code = Phase.CALLING.is_in(self.phase) or Phase.SCORING.is_in(self.phase)
        return f"{self.phase}, for {seconds:.0f} s" if users_code and seconds >= SLOW_SECONDS else self.phase

    @property
    def _silent(self) -> float:
        """Return for how long a process that has not ended has shown no heartbeat, in seconds, as seen here."""
        ended = self._counter is None or any(phase.is_in(self.phase) for phase in (Phase.TRAINED, Phase.FINISHED))
        return 0.0 if ended else time.monotonic() - self._beat_at

    @property
    def waiting(self) -> float | None:
        """Return the fraction of time spent waiting for peers; None before the first step."""
        return self.waited / self.seconds if self.seconds > 0 else None

    def seconds_left(self, steps: int) -> float:
        """Return the time of the remaining steps at the mean time of the recent ones, without validation; NaN before
        the first step, and where the next one takes so long that the mean says nothing about it."""
        if not self._recent:
            return math.nan
        mean = sum(self._recent) / len(self._recent)
        if self.step < steps and time.monotonic() - self._step_at > max(SILENT_SECONDS, 5 * mean):
            return math.nan
        return max(0, steps - self.step) * mean


class LiveRun:
    """Live run: its policies. `recipe`: whether it has one, as runs of users' own scripts do not."""

    def __init__(
        self, run: RunDirectory, policies: Sequence[str], metrics: Sequence[Metric] = (), *, recipe: bool = True
    ) -> None:
        self.run = run
        self.policies = {name: LivePolicy(run, name, metrics, recipe=recipe) for name in policies}

    def update(self, *, logs: bool = False) -> None:
        """Read new data from the policies' files, with `logs` also from their logs."""
        for policy in self.policies.values():
            policy.update()
            if logs:
                policy.update_log()

    def seconds_left(self, steps: int) -> float:
        """Return the estimated seconds until the slowest policy's last step; NaN until each has made a step."""
        remaining = [policy.seconds_left(steps) for policy in self.policies.values()]
        return math.nan if any(map(math.isnan, remaining)) else max(remaining, default=math.nan)
