"""Heartbeats: a counter that a policy increments, and a monitor on the reader's clock.

Liveness is not progress. The heartbeat counter increases as long as the process is alive, the progress counter only
when the policy begins a phase or runs its model. A reward function that never returns sends heartbeats but makes no
progress."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from dataclasses import dataclass
from enum import StrEnum

from mutualrl.console.lines import notify
from mutualrl.errors import DiskError
from mutualrl.process.repeating import Repeater
from mutualrl.see.store import ExchangeStore, Location, open_store
from mutualrl.storage.files import JsonObject, parse_or_none

HEARTBEAT = "heartbeat.json"
INTERVAL_SECONDS = 1.0
LONGEST_GAP = 15.0  # seconds between two polls of a bucket; see `HeartbeatMonitor`


class Phase(StrEnum):
    """Phase of a policy, as its heartbeat reports it. A phase may be followed by a detail (`waiting for round 3`,
    `scoring: reward function judge`): ask `is_in`."""

    NOT_STARTED = "not started"  # to a reader: no heartbeat
    STARTING = "starting"
    LOADING = "loading"  # before the trainer is built
    VALIDATING = "validating"
    TRAINING = "training"
    GENERATING = "generating"
    CALLING = "calling"  # a tool
    SCORING = "scoring"
    WAITING = "waiting"  # for peers
    UPDATING = "updating"
    SAVING = "saving"
    TRAINED = "trained"
    FINISHED = "finished"

    def is_in(self, reported: str) -> bool:
        """Return whether a reported phase is this one, with or without a detail."""
        return reported.startswith(self)


_WITHOUT_PROGRESS = (Phase.WAITING, Phase.LOADING, Phase.NOT_STARTED)  # these have other time-outs


class Heartbeat:
    """Writer of a policy's heartbeat: a daemon thread increments a counter in `heartbeat.json`
    (`heartbeat.<rank>.json` for further ranks) once per second.

    The file also reports the policy's `phase`, `step` and `progress`, for users and the supervisor. Readers use the
    counter only, never the writer's clock.
    """

    def __init__(self, exchange: Location, policy: str, interval: float = INTERVAL_SECONDS, rank: int = 0) -> None:
        self._store = open_store(exchange)
        self._name = f"heartbeat.{rank}.json" if rank else HEARTBEAT
        self._policy = policy
        self.rank = rank
        self._interval = interval
        self._counter = 0
        self._phase: str = Phase.STARTING
        self._step = 0
        self._progress = 0
        self._written = True  # the last one
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._repeater: Repeater | None = None

    def start(self) -> None:
        """Write the first heartbeat, then one per interval until `stop`. A second call is a no-op."""
        if self._thread.ident is not None:
            return
        self.beat()
        self._thread.start()

    def mirror_to(self, store: ExchangeStore, interval: float) -> None:
        """Also write the newest heartbeat to another store, every `interval` seconds from a separate thread: a bucket
        that does not respond must not delay the heartbeats that the run's supervisor watches."""
        subject = f"the heartbeat of {self._policy!r} in the bucket"
        self._repeater = Repeater(subject, lambda: self.write_to(store), interval)
        self._repeater.start()

    def set(self, phase: str, step: int | None = None, *, at_once: bool = False) -> None:
        """Set the policy's phase, published with the next heartbeat, or at once: before code that may end the process.
        A new phase counts as progress."""
        self._phase = phase
        self._progress += 1
        if step is not None:
            self._step = step
        if at_once and self._thread.is_alive():
            self._beat_if_possible()

    def advance(self) -> None:
        """Record progress within the phase."""
        self._progress += 1

    def beat(self) -> None:
        """Increment the counter and write the heartbeat."""
        with self._lock:
            self._counter += 1
            self._store.put(self._policy, self._name, self._state(), durable=self._counter == 1)

    def write_to(self, store: ExchangeStore) -> None:
        """Write the newest heartbeat to another store."""
        store.put(self._policy, self._name, self._state(), durable=False)

    def _state(self) -> bytes:
        state = {
            "policy": self._policy,
            "pid": os.getpid(),
            "counter": self._counter,
            "phase": self._phase,
            "step": self._step,
            "progress": self._progress,
        }
        return json.dumps(state, ensure_ascii=False, allow_nan=False).encode() + b"\n"

    def stop(self, phase: str) -> None:
        """Stop the thread; the last heartbeat has `phase` (such as 'finished')."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        self.set(phase)
        self.beat()
        if self._repeater is not None:
            self._repeater.stop()

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self._beat_if_possible()

    def _beat_if_possible(self) -> None:
        """Write the heartbeat; say once if it cannot be written, e.g. on a full disk: the next one may succeed."""
        try:
            self.beat()
            self._written = True
        except (OSError, DiskError) as error:
            if self._written:
                notify(f"the heartbeat of {self._policy!r} cannot be written: {error}")
            self._written = False


@dataclass(slots=True)
class _Seen:
    """Heartbeat as last read: `at` and `progress_at` are the times of its last new counter and progress."""

    counter: int
    at: float
    phase: str
    progress: int
    progress_at: float


class HeartbeatMonitor:
    """Time since each peer's last heartbeat, on this reader's monotonic clock. `longest_gap`: if two polls are
    further apart, in seconds, the reader was suspended and the time between them does not count."""

    def __init__(self, exchange: Location, longest_gap: float = math.inf) -> None:
        self._store = open_store(exchange)
        self._longest_gap = longest_gap
        self._seen: dict[tuple[str, str], _Seen] = {}
        self._polled_at: dict[str, float] = {}

    def seconds_since(self, peer: str) -> tuple[float, str]:
        """Return the seconds since the last new counter of the peer's most silent rank, as seen here, and that rank's
        last phase.

        A rank without a heartbeat counts from the first call.
        """
        names = sorted({HEARTBEAT, *heartbeats(self._store, peer)})
        self._exclude_own_gap(peer)
        return max((self._of(peer, name) for name in names), key=lambda entry: entry[0])

    def seconds_without_progress(self, peer: str) -> tuple[float, str]:
        """Return the seconds since the peer's main rank last made progress, as seen here, and its phase; if a rank runs
        a reward function or a tool, which the others wait for, that rank's phase. 0 while the peer waits for its own
        peers, which has other time-outs, and while it loads.
        """
        self.seconds_since(peer)
        seen = self._seen.get((peer, HEARTBEAT))
        if seen is None or any(phase.is_in(seen.phase) for phase in _WITHOUT_PROGRESS):
            return 0.0, Phase.NOT_STARTED if seen is None else seen.phase
        phases = [each.phase for (policy, _), each in sorted(self._seen.items()) if policy == peer]
        users_code = (each for each in phases if Phase.SCORING.is_in(each) or Phase.CALLING.is_in(each))
        phase = next(users_code, seen.phase)
        return time.monotonic() - seen.progress_at, phase

    def _exclude_own_gap(self, peer: str) -> None:
        """Exclude a long gap between this reader's polls: it was suspended, or waited for an unreachable store, which
        the peer's heartbeats could not reach either."""
        now = time.monotonic()
        gap = now - self._polled_at.get(peer, now)
        self._polled_at[peer] = now
        if gap <= self._longest_gap:
            return
        for (policy, _), seen in self._seen.items():
            if policy == peer:
                seen.at += gap
                seen.progress_at += gap

    def _of(self, peer: str, name: str) -> tuple[float, str]:
        now = time.monotonic()
        before = self._seen.get((peer, name))
        try:
            data = self._store.get(peer, name)
        except OSError:  # no new information: keep counting from the last heartbeat
            return (0.0, Phase.NOT_STARTED) if before is None else (now - before.at, before.phase)
        state = parse_or_none(data) or {}
        counter, progress = (_count(state.get(key)) for key in ("counter", "progress"))
        phase = str(state.get("phase", Phase.NOT_STARTED))
        seen = self._seen.get((peer, name))
        if seen is None or seen.counter != counter:
            progress_at = now if seen is None or seen.progress != progress else seen.progress_at
            self._seen[peer, name] = _Seen(counter, now, phase, progress, progress_at)
            return 0.0, phase
        rank = name.removeprefix("heartbeat").removesuffix("json").strip(".")
        return now - seen.at, seen.phase + (f", rank {rank}" if rank else "")

    def reset(self, peer: str) -> None:
        """Restart the count of a peer's silence at the next call."""
        self._polled_at.pop(peer, None)
        for key in [key for key in self._seen if key[0] == peer]:
            del self._seen[key]


def _count(value: object) -> int:
    return value if type(value) is int else 0


def heartbeats(store: ExchangeStore, policy: str) -> list[str]:
    """Return the names of the heartbeats of a policy's ranks."""
    return [name for name in store.names(policy) if name.startswith("heartbeat") and name.endswith(".json")]


def last_heartbeat(store: ExchangeStore, policy: str, name: str = HEARTBEAT) -> JsonObject | None:
    """Return a policy's newest heartbeat (`phase`, `step`, `counter`), or None if it cannot be read."""
    try:
        return parse_or_none(store.get(policy, name))
    except OSError:
        return None


def clear_heartbeats(exchange: Location, policy: str) -> None:
    """Remove the heartbeats of a policy's earlier attempts, so that a new attempt that is still loading does not look
    frozen."""
    store = open_store(exchange)
    store.delete(policy, heartbeats(store, policy))
