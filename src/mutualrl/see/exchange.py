"""Shared Experience Exchange: publish a round, wait for the peers' rounds, read them.

Each policy's namespace has `<round>.parquet` and, written last, its commit marker `<round>.json`. Source: paper,
Section "Dataflow in One Training Loop", paragraph SEE.
"""

from __future__ import annotations

import hashlib
import math
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mutualrl.errors import (
    ExchangeDamagedError,
    FencedError,
    FileDamagedError,
    PeerLostError,
    RoundAbortedError,
    WaitTimeoutError,
)
from mutualrl.process.status import PolicyState, StatusReader
from mutualrl.records import Rollout, Score
from mutualrl.rollouts import Rollouts
from mutualrl.see.files import committed_rounds, marker_name
from mutualrl.see.liveness import INTERVAL_SECONDS, LONGEST_GAP, HeartbeatMonitor, Phase
from mutualrl.see.schema import SCORES_END, Marker, Part, combined_hash, encode, encode_scores
from mutualrl.see.shard import Shard, load_shard
from mutualrl.see.store import ExchangeStore, LocalStore, Location, open_store, reread
from mutualrl.storage.files import JsonObject, checksummed_bytes, parse_checksummed, parse_or_none
from mutualrl.storage.format import FORMAT, other_format

_SUPERVISED_SECONDS = 3.0  # extra seconds for the peer's supervisor to publish its state
ATTEMPT = "attempt.json"
CLAIM = {"run_id", "attempt", "policy", "owner"}  # keys
_WRITE_ATTEMPTS = 200  # for a claim or a marker, against another writer of the same policy


@dataclass(frozen=True, slots=True)
class WaitTimeouts:
    """Time-outs of a wait, in seconds.

    `peer_timeout`: a peer without a new heartbeat for longer is dead.
    `round_timeout`: a live peer must publish the round within this time.
    `on_peer_loss`: the response to a dead peer: an error (`fail`), a wait until `round_timeout` (`wait`), or a round
    without it (`continue`); a dead peer in `dispensable` is always left out. `late_start`: a peer without any heartbeat
    yet may start later; it is not dead.
    """

    peer_timeout: float = 60.0
    round_timeout: float = 3600.0
    on_peer_loss: Literal["fail", "wait", "continue"] = "fail"
    late_start: bool = False
    dispensable: frozenset[str] = frozenset()


ABSENT_SECONDS = 4.0  # of a wait, after which a peer that has never published is named


@dataclass(frozen=True, slots=True)
class WaitCallbacks:
    """Callbacks of a wait. `waiting`: called with a message naming the peers, and again while it lasts beyond
    `peer_timeout`. `arrived`: called with each peer and the seconds waited for it. `absent`: called once, after
    `ABSENT_SECONDS`, with the peers that have never published. `slow`: called with a message about peers that have
    not published within `peer_timeout`, once for each. `stopping`: called between polls; True ends the wait with
    RoundAbortedError. `meanwhile`: called between polls with the shards that have arrived."""

    waiting: Callable[[str], None] = lambda message: None
    arrived: Callable[[str, float], None] = lambda peer, seconds: None
    absent: Callable[[Sequence[str]], None] = lambda peers: None
    slow: Callable[[str], None] = lambda message: None
    stopping: Callable[[], bool] = lambda: False
    meanwhile: Callable[[Mapping[str, Shard]], None] = lambda arrived: None


class Exchange:
    """One policy's view of a run's exchange.

    `attempt` counts the starts of this policy in the run; a publish is fenced off if a newer attempt has claimed the
    policy or written the round. `status_reader` reads the peers' states that the run's supervisors publish.
    """

    def __init__(
        self,
        root: Location,
        policy: str,
        run_id: str,
        *,
        attempt: int = 0,
        timeouts: WaitTimeouts | None = None,
        status_reader: StatusReader | None = None,
    ) -> None:
        self.store = open_store(root)
        self.policy = policy
        self.run_id = run_id
        self.attempt = attempt
        self.timeouts = timeouts or WaitTimeouts()
        remote = not isinstance(self.store, LocalStore)
        self._heartbeats = HeartbeatMonitor(self.store, LONGEST_GAP if remote else math.inf)
        self._status_reader = status_reader
        self._owner = uuid.uuid4().hex  # two processes may have the same attempt number

    def location(self, policy: str) -> str:
        """Return the location of a policy's rounds, for messages."""
        return self.store.describe(policy)

    def rounds(self, policy: str) -> list[int]:
        """Return the rounds that a policy has committed, in order."""
        return committed_rounds(self.store, policy)

    # ---- publish

    def claim(self) -> None:
        """Claim the policy for this attempt, which fences off older attempts.

        Raises FencedError when a newer attempt has claimed it.
        """
        for _ in range(_WRITE_ATTEMPTS):
            current = self.store.get(self.policy, ATTEMPT)
            self.require_newest()
            claim: JsonObject = {"run_id": self.run_id, "policy": self.policy, "attempt": self.attempt}
            data = checksummed_bytes({**claim, "owner": self._owner})
            if current is not None and self._is_claimed_by_another(current):
                raise FencedError(
                    f"policy {self.policy!r}: attempt {self.attempt} was claimed by another process at the same time; "
                    "this process must stop"
                )
            if current is None:
                if self.store.create(self.policy, ATTEMPT, data):
                    return
            elif self.store.swap(self.policy, ATTEMPT, current, data):
                return
            time.sleep(self.store.poll_seconds[0])
        raise self._unsettled(ATTEMPT)

    def _is_claimed_by_another(self, claim: bytes) -> bool:
        """Return whether another process has claimed the same attempt."""
        value = parse_or_none(claim) or {}
        return value.get("attempt") == self.attempt and value.get("owner") != self._owner

    def _unsettled(self, name: str) -> ExchangeDamagedError:
        where = self.store.describe(self.policy, name)
        return ExchangeDamagedError(f"{where}: exists on write but not on read; the store may be inconsistent")

    def require_newest(self) -> None:
        """Raise FencedError when a newer attempt of this policy has started: a suspended process that resumes must
        stop."""
        newest = self.newest_attempt()
        if newest > self.attempt:
            raise FencedError(
                f"policy {self.policy!r}: attempt {newest} has started; this is attempt {self.attempt} and must stop"
            )

    def newest_attempt(self) -> int:
        """Return the newest attempt that has claimed the policy; 0 if there is none."""
        return newest_attempt(self.store, self.policy)

    def publish(self, round_index: int, records: Iterable[Rollout], policy_step: int) -> Marker:
        """Write and commit a round with one part. See `write_part` and `commit`."""
        return self.commit(round_index, [self.write_part(round_index, records)], policy_step)

    def write_part(self, round_index: int, records: Iterable[Rollout], part: int = 0) -> Part:
        """Write the data file of one rank; it is not read before `commit` names it.

        A part that is already in the committed round, byte for byte, is not written again.
        """
        rollouts = records if isinstance(records, Rollouts) else Rollouts.of(records)
        data = encode(self.policy, round_index, rollouts)
        return self._write(round_index, f".{part}" if part else "", ".parquet", data, len(rollouts))

    def write_scores(self, round_index: int, scores: Sequence[Score]) -> Part:
        """Write a source's scores of a round, a part beside that of its rollouts."""
        return self._write(round_index, "", SCORES_END, encode_scores(scores), len(scores))

    def _write(self, round_index: int, part: str, end: str, data: bytes, rows: int) -> Part:
        self.require_newest()
        name = f"{round_index:06d}{part}{f'.a{self.attempt}' if self.attempt else ''}{end}"
        written = Part(name, hashlib.sha256(data).hexdigest(), len(data), rows)
        current = self.marker_of(self.policy, round_index)
        for existing in () if current is None else current.parts:
            if existing.sha256 == written.sha256:
                return existing
        self._refuse_if_fenced(current)
        self.store.put(self.policy, name, data)
        return written

    def commit(self, round_index: int, parts: Sequence[Part], policy_step: int) -> Marker:
        """Write the marker that names `parts`, which makes the round exist.

        Committing the same content again is a no-op. Raises FencedError when a newer attempt of this policy has
        committed the round, or this attempt has committed it with other content.
        """
        for _ in range(_WRITE_ATTEMPTS):
            self.require_newest()
            before = self.store.get(self.policy, marker_name(round_index))
            current = self.marker_of(self.policy, round_index)
            if current is not None:
                if combined_hash(parts) == current.sha256:
                    return current
                self._refuse_if_fenced(current)
            marker = self._marker(round_index, parts, policy_step)
            data = checksummed_bytes(marker.to_json())
            if before is None:
                if self.store.create(self.policy, marker_name(round_index), data):
                    return marker
            elif self.store.swap(self.policy, marker_name(round_index), before, data):
                return marker
            time.sleep(self.store.poll_seconds[0])
        raise self._unsettled(marker_name(round_index))

    def _marker(self, round_index: int, parts: Sequence[Part], policy_step: int) -> Marker:
        return Marker(
            format=FORMAT,
            run_id=self.run_id,
            policy=self.policy,
            round=round_index,
            policy_step=policy_step,
            attempt=self.attempt,
            sha256=combined_hash(parts),
            bytes=sum(p.bytes for p in parts),
            rows=sum(p.rows for p in parts if not p.is_scores),
            parts=tuple(parts),
            written_at=time.time(),
        )

    def _refuse_if_fenced(self, current: Marker | None) -> None:
        if current is not None and current.attempt >= self.attempt:
            raise FencedError(
                f"policy {self.policy!r}: round {current.round} was committed by attempt {current.attempt}; "
                f"this is attempt {self.attempt} with other content and must stop"
            )

    # ---- read

    def marker_of(self, policy: str, round_index: int) -> Marker | None:
        """Return the commit marker of a policy's round, or None if there is none yet.

        Raises ExchangeDamagedError when the marker cannot be parsed or belongs to another run or round.
        """
        return reread(self.store, lambda: self._marker_of(policy, round_index))

    def _marker_of(self, policy: str, round_index: int) -> Marker | None:
        path = self.store.describe(policy, marker_name(round_index))
        try:
            value = _read_marker(self.store.get(policy, marker_name(round_index)), path)
            marker = None if value is None else Marker.from_json(value)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ExchangeDamagedError(f"{path}: not a commit marker ({error!r})") from None
        if marker is not None and (marker.run_id, marker.policy, marker.round) != (self.run_id, policy, round_index):
            raise ExchangeDamagedError(
                f"{path}: written for run {marker.run_id!r}, policy {marker.policy!r}, round {marker.round}"
            )
        return marker

    def read(self, policy: str, round_index: int) -> Shard | None:
        """Return a policy's round with its hash checked, or None if it is not committed yet."""
        return reread(self.store, lambda: self._read(policy, round_index))

    def _read(self, policy: str, round_index: int) -> Shard | None:
        marker = self._marker_of(policy, round_index)
        while marker is not None:
            try:
                return load_shard(self.store, marker)
            except ExchangeDamagedError:
                newer = self._marker_of(policy, round_index)  # a restarted policy may have replaced the round
                if newer == marker:
                    raise
                marker = newer
        return None

    def wait(self, peers: Sequence[str], round_index: int, callbacks: WaitCallbacks | None = None) -> dict[str, Shard]:
        """Wait until every peer has published a round and return the shards, in the order of `peers`.

        Under `on_peer_loss: continue` lost peers are left out. Raises PeerLostError for a lost peer, WaitTimeoutError
        for one that is alive but late, ExchangeDamagedError for bytes that do not match their marker,
        RoundAbortedError when `callbacks.stopping` returns True.
        """
        callbacks = callbacks or WaitCallbacks()
        shards: dict[str, Shard] = {}
        lost: set[str] = set()
        slow: set[str] = set()
        start = time.monotonic()
        pause, longest = self.store.poll_seconds
        next_check, announced = start + self.store.liveness_seconds, False
        absent_at: float | None = start + ABSENT_SECONDS
        while True:
            self._collect(peers, round_index, shards, callbacks, start)
            missing = [peer for peer in peers if peer not in shards and peer not in lost]
            if not missing:
                return {peer: shards[peer] for peer in peers if peer in shards}
            if not announced:
                callbacks.waiting(f"{Phase.WAITING} for round {round_index} of {', '.join(missing)}")
                announced = True
            if callbacks.stopping():
                raise RoundAbortedError(f"stop requested while waiting for round {round_index} of {', '.join(missing)}")
            if absent_at is not None and time.monotonic() >= absent_at:
                absent_at = None
                if absent := [peer for peer in missing if not self.rounds(peer)]:
                    callbacks.absent(absent)
            if (now := time.monotonic()) >= next_check:
                lost |= self._lost(missing, round_index, now - start)
                if now - start > self.timeouts.peer_timeout and (late := sorted(set(missing) - lost)):
                    report = callbacks.waiting if slow.issuperset(late) else callbacks.slow
                    report(self._describe_wait(late, round_index, now - start))
                    slow.update(late)
                next_check = now + self.store.liveness_seconds
            callbacks.meanwhile(shards)
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _describe_wait(self, peers: Sequence[str], round_index: int, seconds: float) -> str:
        """Return a message about a long wait for peers that may still publish: what each of them does."""
        states = {}
        for peer in peers:
            silent, phase = self._heartbeats.seconds_since(peer)
            if Phase.NOT_STARTED.is_in(phase):
                states[peer] = "it has not started"
            elif silent <= max(10 * INTERVAL_SECONDS, 6 * self.store.liveness_seconds):  # of a bucket it takes longer
                states[peer] = "its heartbeat continues"
            else:
                states[peer] = f"no heartbeat for {silent:.0f} s (last seen: {phase.partition(' for round')[0]})"
        each = [state if len(states) == 1 else f"{peer}: {state}" for peer, state in states.items()]
        return (
            f"{Phase.WAITING} for round {round_index} of {', '.join(peers)} for {seconds:.0f} s; {'; '.join(each)} "
            f"(until run.round_timeout, {self.timeouts.round_timeout:.0f} s)"
        )

    def _collect(
        self, peers: Sequence[str], round_index: int, shards: dict[str, Shard], callbacks: WaitCallbacks, start: float
    ) -> None:
        for peer in peers:
            if peer not in shards and (shard := self.read(peer, round_index)) is not None:
                shards[peer] = shard
                callbacks.arrived(peer, time.monotonic() - start)

    def _lost(self, missing: Sequence[str], round_index: int, waited: float) -> set[str]:
        """Return the peers that are lost and may be left out. Raises PeerLostError or WaitTimeoutError."""
        lost = set()
        for peer in missing:
            reason = self._why_lost(peer)
            if reason is None or self.read(peer, round_index) is not None:  # published in the meantime
                continue
            if self.timeouts.on_peer_loss == "continue" or peer in self.timeouts.dispensable:
                lost.add(peer)
                continue
            raise PeerLostError(
                f"policy {self.policy!r} lost its peer {peer!r}: {reason}, while waiting for round {round_index}"
                f"{_logs_of(self.store, peer)}"
            )
        late = [peer for peer in missing if peer not in lost]
        if waited > self.timeouts.round_timeout:
            lost |= {peer for peer in late if peer in self.timeouts.dispensable}
            late = [peer for peer in late if peer not in lost]
        if late and waited > self.timeouts.round_timeout:
            phases = ", ".join(f"{peer} (last seen: {self._heartbeats.seconds_since(peer)[1]})" for peer in late)
            raise WaitTimeoutError(
                f"policy {self.policy!r} waited {waited:.0f} s for round {round_index} of {phases}, longer than "
                f"run.round_timeout ({self.timeouts.round_timeout:.0f} s)"
            )
        return lost

    def _why_lost(self, peer: str) -> str | None:
        """Return why a peer that has not published the round never will; None if it still may."""
        silent, phase = self._heartbeats.seconds_since(peer)
        limit = self.timeouts.peer_timeout
        if self._status_reader is not None:
            state = self._status_reader.of(peer).state
            if state == PolicyState.LOST:
                return f"its supervisor gave it up (last seen: {phase})"
            if state == PolicyState.RESTARTING or (state == PolicyState.RUNNING and Phase.NOT_STARTED.is_in(phase)):
                self._heartbeats.reset(peer)  # restart its time-out
                return None
            if state == PolicyState.FINISHED:
                return "it finished without publishing the round"
            if state == PolicyState.RUNNING:
                limit += _SUPERVISED_SECONDS
        if silent <= limit or self.timeouts.on_peer_loss == "wait":
            return None
        if self.timeouts.late_start and Phase.NOT_STARTED.is_in(phase):
            return None
        return f"no heartbeat for {silent:.0f} s (last seen: {phase})"


def newest_attempt(store: ExchangeStore, policy: str) -> int:
    """Return the newest attempt that has claimed a policy; 0 if there is none. Raises ExchangeDamagedError."""
    claim = claimed_attempt(store, policy)
    return 0 if claim is None else claim


def claimed_attempt(store: ExchangeStore, policy: str) -> int | None:
    """Return the newest attempt that has claimed a policy; None if there is none. Raises ExchangeDamagedError."""
    return reread(store, lambda: _claimed(store, policy))


def _claimed(store: ExchangeStore, policy: str) -> int | None:
    data, where = store.get(policy, ATTEMPT), store.describe(policy, ATTEMPT)
    if data is None:
        return None
    try:
        claim = parse_checksummed(data, where)
    except FileDamagedError as error:
        raise ExchangeDamagedError(f"{where}: not an attempt's claim ({error})") from None
    if claim.keys() != CLAIM or not _is_count(claim["attempt"]):
        raise ExchangeDamagedError(f"{where}: not an attempt's claim (its keys: {', '.join(claim) or 'none'})")
    if claim["policy"] != policy:
        raise ExchangeDamagedError(f"{where}: a claim of policy {claim['policy']!r}, expected {policy!r}")
    return int(claim["attempt"])


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _logs_of(store: ExchangeStore, peer: str) -> str:
    """Return the location of a peer's logs, for a message; empty unless the exchange is in a run directory."""
    if not isinstance(store, LocalStore):
        return ""
    run = store.root.parent
    files = run / ("sources" if (run / "sources" / peer).is_dir() else "policies") / peer
    return f"; its logs: {files / 'logs'}"


def _read_marker(data: bytes | None, where: str) -> JsonObject | None:
    """Parse a checksummed marker. Raises FileDamagedError for a damaged one, and ExchangeDamagedError for one of
    another format, whether or not its checksum matches."""
    if data is None:
        return None
    named = (parse_or_none(data) or {}).get("format", FORMAT)
    if (problem := other_format(named, where)) is not None:
        raise ExchangeDamagedError(problem)
    return parse_checksummed(data, where)
