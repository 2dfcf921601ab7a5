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

from mutualrl.errors import ExchangeDamagedError, FencedError, PeerLostError, WaitTimeoutError
from mutualrl.files import read_json, write_atomic, write_json
from mutualrl.records import Record
from mutualrl.see.liveness import PeerWatch
from mutualrl.see.schema import SCHEMA_VERSION, Marker, Part, combined_hash, encode
from mutualrl.see.shard import Shard, load_shard

_POLL_SECONDS = (0.002, 0.05)  # first and longest pause between two looks at the directory
_LIVENESS_SECONDS = 0.5  # a peer's heartbeat is looked at this often while waiting


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a wait may last, in seconds.

    `peer_timeout`: a peer whose heartbeat has not moved for so long is dead.
    `round_timeout`: a peer that is alive must have published the round by then.
    """

    peer_timeout: float = 60.0
    round_timeout: float = 3600.0


class Exchange:
    """One policy's door to the exchange of a run.

    `attempt` counts the starts of this policy in the run; a publish by an older attempt than the one that
    last wrote the round is fenced off.
    """

    def __init__(
        self, root: Path, policy: str, run_id: str, *, attempt: int = 0, patience: Patience | None = None
    ) -> None:
        self.root = root
        self.policy = policy
        self.run_id = run_id
        self.attempt = attempt
        self.patience = patience or Patience()
        self.directory.mkdir(parents=True, exist_ok=True)
        self._watch = PeerWatch(root)

    @property
    def directory(self) -> Path:
        """The directory that this policy alone writes."""
        return self.root / self.policy

    # ---- publish

    def publish(self, round_: int, records: Sequence[Record], policy_step: int) -> Marker:
        """Write and commit a round of one part. See `write_part` and `commit`."""
        return self.commit(round_, [self.write_part(round_, records)], policy_step)

    def write_part(self, round_: int, records: Sequence[Record], part: int = 0) -> Part:
        """Write the data file of one rank; nobody reads it before `commit` names it.

        A part that the committed round already has, byte for byte, is not written again.
        """
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
        write_json(self.directory / f"{round_:06d}.json", marker.to_json())
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
        path = self.root / policy / f"{round_:06d}.json"
        try:
            value = read_json(path)
            marker = None if value is None else Marker.from_json(value)
        except (ValueError, KeyError, TypeError) as error:
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

    def wait(self, peers: Sequence[str], round_: int, on_wait: Callable[[str], None] | None = None) -> dict[str, Shard]:
        """The round of every peer, in the order of `peers`; returns as soon as all are there.

        `on_wait` is told once, in words, whom the wait is for. Raises PeerLostError for a peer whose
        heartbeat stopped, WaitTimeoutError for one that is alive but late, ExchangeDamagedError for bytes
        that do not match their marker.
        """
        shards: dict[str, Shard] = {}
        began = time.monotonic()
        next_look, pause, told = began + _LIVENESS_SECONDS, _POLL_SECONDS[0], False
        while True:
            for peer in peers:
                if peer not in shards and (shard := self.read(peer, round_)) is not None:
                    shards[peer] = shard
            missing = [peer for peer in peers if peer not in shards]
            if not missing:
                return {peer: shards[peer] for peer in peers}
            if on_wait is not None and not told:
                on_wait(f"waiting for round {round_} of {', '.join(missing)}")
                told = True
            if (now := time.monotonic()) >= next_look:
                self._check_alive(missing, round_, now - began)
                next_look = now + _LIVENESS_SECONDS
            time.sleep(pause)
            pause = min(2 * pause, _POLL_SECONDS[1])

    def _check_alive(self, missing: Sequence[str], round_: int, waited: float) -> None:
        for peer in missing:
            silent, phase = self._watch.silence(peer)
            if silent > self.patience.peer_timeout:
                raise PeerLostError(
                    f"policy {self.policy!r} lost its peer {peer!r}: no heartbeat for {silent:.0f} s while "
                    f"waiting for round {round_} (last seen: {phase}); its logs: "
                    f"{self.root.parent / 'policies' / peer / 'logs'}"
                )
        if waited > self.patience.round_timeout:
            raise WaitTimeoutError(
                f"policy {self.policy!r} waited {waited:.0f} s for round {round_} of {', '.join(missing)}, "
                f"longer than run.round_timeout ({self.patience.round_timeout:.0f} s)"
            )
