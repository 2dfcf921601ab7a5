"""The Shared Experience Exchange: publish a round, wait for the peers' rounds, read them.

On disk, for each policy: `<run>/exchange/<policy>/<round>.parquet` and, written last, its commit marker
`<round>.json`. No locks, no shared mutable file, no pickle. Source: paper, Section "Dataflow in One Training
Loop", paragraph SEE.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mutualrl.errors import (
    ExchangeDamagedError,
    FencedError,
    FileDamagedError,
    PeerLostError,
    RoundAbortedError,
    WaitTimeoutError,
)
from mutualrl.process.status import Standing
from mutualrl.records import Record
from mutualrl.see.files import marker_name
from mutualrl.see.liveness import NOT_STARTED, PeerWatch
from mutualrl.see.schema import SCHEMA_VERSION, Marker, Part, combined_hash, encode
from mutualrl.see.shard import Shard, load_shard
from mutualrl.storage.files import glance, read_sealed, write_atomic, write_sealed

_POLL_SECONDS = (0.002, 0.05)  # first and longest pause between two looks at the directory
_LIVENESS_SECONDS = 0.5  # a peer's heartbeat is looked at this often while waiting
_SUPERVISED_SECONDS = 3.0  # a supervisor that watches the peer, too, gets so much longer to say what becomes of it
ATTEMPT = "attempt.json"


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a wait may last, in seconds.

    `peer_timeout`: a peer whose heartbeat has not moved for so long is dead.
    `round_timeout`: a peer that is alive must have published the round by then.
    `on_peer_loss`: what a dead peer means: an error (`fail`), patience until `round_timeout` (`wait`), or a round
    without it (`continue`).
    """

    peer_timeout: float = 60.0
    round_timeout: float = 3600.0
    on_peer_loss: Literal["fail", "wait", "continue"] = "fail"


@dataclass(frozen=True, slots=True)
class Listener:
    """Whom a wait tells what. `waiting`: once, in words, whom the wait is for. `arrived`: each peer, and after how many
    seconds. `slow`: once, in words, a peer that is alive and has been waited for longer than `peer_timeout`.
    `stopping`: asked between looks; a true answer ends the wait with RoundAbortedError."""

    waiting: Callable[[str], None] = lambda words: None
    arrived: Callable[[str, float], None] = lambda peer, seconds: None
    slow: Callable[[str], None] = lambda words: None
    stopping: Callable[[], bool] = lambda: False


class Exchange:
    """One policy's door to the exchange of a run.

    `attempt` counts the starts of this policy in the run; a publish by an older attempt than the newest that has
    claimed the policy, or than the one that last wrote the round, is fenced off. `standing` tells what the run's
    supervisors say about a peer.
    """

    def __init__(
        self,
        root: Path,
        policy: str,
        run_id: str,
        *,
        attempt: int = 0,
        patience: Patience | None = None,
        standing: Standing | None = None,
    ) -> None:
        self.root = root
        self.policy = policy
        self.run_id = run_id
        self.attempt = attempt
        self.patience = patience or Patience()
        self.directory.mkdir(parents=True, exist_ok=True)
        self._watch = PeerWatch(root)
        self._standing = standing

    @property
    def directory(self) -> Path:
        """The directory that this policy alone writes."""
        return self.root / self.policy

    # ---- publish

    def claim(self) -> None:
        """Announce this attempt: from here on older attempts of the policy are fenced off.

        Raises FencedError when a newer one has announced itself.
        """
        self.require_newest()
        write_sealed(self.directory / ATTEMPT, {"run_id": self.run_id, "attempt": self.attempt})

    def require_newest(self) -> None:
        """Raise FencedError when a newer attempt of this policy has started: a frozen process that woke up must
        stop."""
        newest = self.newest_attempt()
        if newest > self.attempt:
            raise FencedError(
                f"policy {self.policy!r}: attempt {newest} has started; this is attempt {self.attempt}, and must stop"
            )

    def newest_attempt(self) -> int:
        """The newest attempt that has claimed the policy; 0 where none has."""
        try:
            value = read_sealed(self.directory / ATTEMPT)
            return 0 if value is None else int(value["attempt"])
        except (ValueError, KeyError, TypeError) as error:
            raise ExchangeDamagedError(f"{self.directory / ATTEMPT}: not an attempt's claim ({error!r})") from None

    def publish(self, round_: int, records: Sequence[Record], policy_step: int) -> Marker:
        """Write and commit a round of one part. See `write_part` and `commit`."""
        return self.commit(round_, [self.write_part(round_, records)], policy_step)

    def write_part(self, round_: int, records: Sequence[Record], part: int = 0) -> Part:
        """Write the data file of one rank; nobody reads it before `commit` names it.

        A part that the committed round already has, byte for byte, is not written again.
        """
        self.require_newest()
        suffix = (f".{part}" if part else "") + (f".a{self.attempt}" if self.attempt else "")
        data = encode(self.policy, round_, records)
        name = f"{round_:06d}{suffix}.parquet"
        written = Part(name, hashlib.sha256(data).hexdigest(), len(data), len(records))
        current = self.marker_of(self.policy, round_)
        for existing in () if current is None else current.parts:
            if existing.sha256 == written.sha256:
                return existing
        self._refuse_if_fenced(current)
        write_atomic(self.directory / name, data)
        return written

    def commit(self, round_: int, parts: Sequence[Part], policy_step: int) -> Marker:
        """Write the marker that names `parts`: from here on the round exists.

        Committing the same content again changes nothing. Raises FencedError when a newer attempt of this
        policy has committed the round, or this attempt has with other content.
        """
        self.require_newest()
        current = self.marker_of(self.policy, round_)
        if current is not None:
            if combined_hash(parts) == current.sha256:
                return current
            self._refuse_if_fenced(current)
        marker = Marker(
            schema_version=SCHEMA_VERSION,
            run_id=self.run_id,
            policy=self.policy,
            round=round_,
            policy_step=policy_step,
            attempt=self.attempt,
            sha256=combined_hash(parts),
            bytes=sum(p.bytes for p in parts),
            rows=sum(p.rows for p in parts),
            parts=tuple(parts),
            written_at=time.time(),
        )
        write_sealed(self.directory / marker_name(round_), marker.to_json())
        return marker

    def _refuse_if_fenced(self, current: Marker | None) -> None:
        if current is not None and current.attempt >= self.attempt:
            raise FencedError(
                f"policy {self.policy!r}: round {current.round} was committed by attempt {current.attempt}; "
                f"this is attempt {self.attempt} with other content, and must stop"
            )

    # ---- read

    def marker_of(self, policy: str, round_: int) -> Marker | None:
        """The commit marker of a policy's round, or None while there is none.

        Raises ExchangeDamagedError when the marker cannot be parsed or belongs to another run or round.
        """
        path = self.root / policy / marker_name(round_)
        try:
            value = _read_marker(path)
            marker = None if value is None else Marker.from_json(value)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ExchangeDamagedError(f"{path}: not a commit marker ({error!r})") from None
        if marker is not None and (marker.run_id, marker.policy, marker.round) != (self.run_id, policy, round_):
            raise ExchangeDamagedError(
                f"{path}: written for run {marker.run_id!r}, policy {marker.policy!r}, round {marker.round}"
            )
        return marker

    def read(self, policy: str, round_: int) -> Shard | None:
        """A policy's round with its hash checked, or None while it is not committed."""
        marker = self.marker_of(policy, round_)
        while marker is not None:
            try:
                return load_shard(self.root / policy, marker)
            except ExchangeDamagedError:
                newer = self.marker_of(policy, round_)  # a restart may have replaced the round meanwhile
                if newer == marker:
                    raise
                marker = newer
        return None

    def wait(self, peers: Sequence[str], round_: int, listener: Listener | None = None) -> dict[str, Shard]:
        """The round of every peer, in the order of `peers`; returns as soon as all are there.

        Under `on_peer_loss: continue` a peer that is lost is left out. Raises PeerLostError for a peer that is lost,
        WaitTimeoutError for one that is alive but late, ExchangeDamagedError for bytes that do not match their marker,
        RoundAbortedError when the listener wants to stop.
        """
        listener = listener or Listener()
        shards: dict[str, Shard] = {}
        lost: set[str] = set()
        slow: set[str] = set()
        began = time.monotonic()
        next_look, pause, told = began + _LIVENESS_SECONDS, _POLL_SECONDS[0], False
        while True:
            self._collect(peers, round_, shards, listener, began)
            missing = [peer for peer in peers if peer not in shards and peer not in lost]
            if not missing:
                return {peer: shards[peer] for peer in peers if peer in shards}
            if not told:
                listener.waiting(f"waiting for round {round_} of {', '.join(missing)}")
                told = True
            if listener.stopping():
                raise RoundAbortedError(f"asked to stop while waiting for round {round_} of {', '.join(missing)}")
            if (now := time.monotonic()) >= next_look:
                lost |= self._lost(missing, round_, now - began)
                if now - began > self.patience.peer_timeout and (late := set(missing) - lost - slow):
                    slow |= late
                    listener.slow(
                        f"waiting for round {round_} of {', '.join(sorted(late))} for {now - began:.0f} s; its "
                        f"heartbeat "
                        f"goes on (until run.round_timeout, {self.patience.round_timeout:.0f} s)"
                    )
                next_look = now + _LIVENESS_SECONDS
            time.sleep(pause)
            pause = min(2 * pause, _POLL_SECONDS[1])

    def _collect(
        self, peers: Sequence[str], round_: int, shards: dict[str, Shard], listener: Listener, began: float
    ) -> None:
        for peer in peers:
            if peer not in shards and (shard := self.read(peer, round_)) is not None:
                shards[peer] = shard
                listener.arrived(peer, time.monotonic() - began)

    def _lost(self, missing: Sequence[str], round_: int, waited: float) -> set[str]:
        """The peers that are lost for good and may be left out. Raises where the patience says that one may not."""
        lost = set()
        for peer in missing:
            reason = self._why_lost(peer)
            if reason is None or self.read(peer, round_) is not None:  # published after all
                continue
            if self.patience.on_peer_loss == "continue":
                lost.add(peer)
                continue
            raise PeerLostError(
                f"policy {self.policy!r} lost its peer {peer!r}: {reason}, while waiting for round {round_}; its logs: "
                f"{self.root.parent / 'policies' / peer / 'logs'}"
            )
        late = [peer for peer in missing if peer not in lost]
        if late and waited > self.patience.round_timeout:
            raise WaitTimeoutError(
                f"policy {self.policy!r} waited {waited:.0f} s for round {round_} of {', '.join(late)}, "
                f"longer than run.round_timeout ({self.patience.round_timeout:.0f} s)"
            )
        return lost

    def _why_lost(self, peer: str) -> str | None:
        """Why a peer that owes a round will never publish it, in words; None while it may."""
        silent, phase = self._watch.silence(peer)
        limit = self.patience.peer_timeout
        if self._standing is not None:
            state = self._standing.of(peer).state
            if state == "lost":
                return f"its supervisor gave it up (last seen: {phase})"
            if state == "restarting" or (state == "running" and phase.startswith(NOT_STARTED)):
                self._watch.forget(peer)  # its time runs from the new start
                return None
            if state == "finished":
                return "it finished without publishing it"
            if state == "running":
                limit += _SUPERVISED_SECONDS
        if silent <= limit or self.patience.on_peer_loss == "wait":
            return None
        return f"no heartbeat for {silent:.0f} s (last seen: {phase})"


def _read_marker(path: Path) -> dict[str, Any] | None:
    """A sealed marker, read once. Raises FileDamagedError for a damaged one, and ExchangeDamagedError for one of
    another major version, sealed or not: what follows its version may mean anything."""
    try:
        value = read_sealed(path)
    except FileDamagedError:
        _refuse_another_schema(path, glance(path))
        raise
    _refuse_another_schema(path, value)
    return value


def _refuse_another_schema(path: Path, value: dict[str, Any] | None) -> None:
    version = str((value or {}).get("schema_version", SCHEMA_VERSION))
    if version.partition(".")[0] != SCHEMA_VERSION.partition(".")[0]:
        raise ExchangeDamagedError(
            f"{path}: written with schema {version}, this version reads {SCHEMA_VERSION}; read it with the mutualrl "
            "that wrote it"
        )
