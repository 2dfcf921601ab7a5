"""The store contract, on files and in memory; a complete exchange over a store that is not a directory."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from conftest import PATIENCE
from fake_clock import Clock
from mutualrl.errors import DiskError, ExchangeDamagedError, ExchangeUnreachableError, FencedError, MachineError
from mutualrl.see import Exchange, ExchangeStore, Heartbeat, LocalStore, open_store
from mutualrl.see.files import PUBLISH_REQUESTS, READ_REQUESTS
from mutualrl.see.liveness import HeartbeatMonitor, clear_heartbeats, last_heartbeat
from mutualrl.see.store import remote_store
from store_contract import ROWS, check_exchange, check_objects


class MemoryStore:
    """Store of objects in a dictionary, behind one lock."""

    poll_seconds = (0.002, 0.05)
    liveness_seconds = 0.5
    rereads = 0

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], bytes] = {}
        self.lock = threading.RLock()

    def describe(self, policy: str, name: str = "") -> str:
        return f"memory:{policy}/{name}"

    def policies(self) -> list[str]:
        return sorted({policy for policy, _ in self.objects})

    def names(self, policy: str) -> list[str]:
        return [name for owner, name in list(self.objects) if owner == policy]

    def get(self, policy: str, name: str) -> bytes | None:
        return self.objects.get((policy, name))

    def size(self, policy: str, name: str) -> int:
        return len(self.objects.get((policy, name), b""))

    def put(self, policy: str, name: str, data: bytes, *, durable: bool = True) -> None:
        with self.lock:
            self.objects[policy, name] = data

    def create(self, policy: str, name: str, data: bytes) -> bool:
        with self.lock:
            if (policy, name) in self.objects:
                return False
            self.put(policy, name, data)
            return True

    def swap(self, policy: str, name: str, expected: bytes, data: bytes) -> bool:
        with self.lock:
            if self.get(policy, name) != expected:
                return False
            self.put(policy, name, data)
            return True

    def delete(self, policy: str, names: Iterable[str]) -> None:
        with self.lock:
            for name in names:
                self.objects.pop((policy, name), None)


@pytest.fixture(params=["files", "memory", "shared directory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ExchangeStore:
    if request.param == "shared directory":
        return open_store(f"file://{tmp_path}/run%20one")
    return LocalStore(tmp_path / "x") if request.param == "files" else MemoryStore()


def test_objects_are_put_created_once_swapped_and_deleted(store: ExchangeStore) -> None:
    check_objects(store)


def test_one_of_many_creators_and_swappers_wins(store: ExchangeStore) -> None:
    winners: list[int] = []

    def compete(number: int) -> None:
        if store.create("bob", "claim", b"%d" % number):
            winners.append(number)

    threads = [threading.Thread(target=compete, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(winners) == 1
    assert store.get("bob", "claim") == b"%d" % winners[0]
    swapped: list[int] = []
    first = b"%d" % winners[0]
    threads = [
        threading.Thread(
            target=lambda n=n: swapped.append(n) if store.swap("bob", "claim", first, b"s%d" % n) else None  # type: ignore[misc]
        )
        for n in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(swapped) == 1


def test_exchange_runs_over_any_store(store: ExchangeStore) -> None:
    check_exchange(store)
    monitor = HeartbeatMonitor(store)
    Heartbeat(store, "bob").beat()
    assert monitor.seconds_since("bob") == (0.0, "starting")
    assert (last_heartbeat(store, "bob") or {})["counter"] == 1
    clear_heartbeats(store, "bob")
    assert last_heartbeat(store, "bob") is None


def test_changed_byte_in_any_store_is_detected(store: ExchangeStore) -> None:
    Exchange(store, "bob", "run").publish(0, ROWS, 0)
    data = store.get("bob", "000000.parquet")
    assert data is not None
    store.put("bob", "000000.parquet", data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ExchangeDamagedError, match="sha256"):
        Exchange(store, "ada", "run").read("bob", 0)


class CountingStore(MemoryStore):
    """Memory store that counts requests as a bucket would."""

    def __init__(self) -> None:
        super().__init__()
        self.gets = self.puts = 0

    def get(self, policy: str, name: str) -> bytes | None:
        self.gets += 1
        return super().get(policy, name)

    def put(self, policy: str, name: str, data: bytes, *, durable: bool = True) -> None:
        self.puts += 1
        super().put(policy, name, data, durable=durable)


def test_requests_of_a_round_match_the_dry_run() -> None:
    store = CountingStore()
    ada, bob = (Exchange(store, name, "run", attempt=1) for name in ("ada", "bob"))
    bob.claim()
    store.gets = store.puts = 0
    bob.publish(0, ROWS, 0)
    assert (store.puts, store.gets) == PUBLISH_REQUESTS
    store.gets = 0
    ada.wait(["bob"], 0)
    assert store.gets == READ_REQUESTS


def test_heartbeats_are_repeated_to_another_store(tmp_path: Path) -> None:
    bucket = MemoryStore()
    heartbeat = Heartbeat(tmp_path, "bob", interval=0.02)
    heartbeat.start()
    heartbeat.mirror_to(bucket, 0.02)
    seen = set()
    deadline = time.monotonic() + PATIENCE
    while len(seen) < 3 and time.monotonic() < deadline:
        beat = last_heartbeat(bucket, "bob")
        assert beat is not None
        seen.add(beat["counter"])
    heartbeat.stop("finished")
    last = last_heartbeat(bucket, "bob")
    assert last is not None
    assert (last["phase"], last["policy"]) == ("finished", "bob")
    assert len(seen) == 3


def test_one_of_two_processes_with_the_same_attempt_is_fenced(store: ExchangeStore) -> None:
    first, second = (Exchange(store, "bob", "run", attempt=1) for _ in range(2))
    first.claim()
    first.claim()  # its own claim
    with pytest.raises(FencedError, match="claimed by another process"):
        second.claim()
    Exchange(store, "bob", "run", attempt=2).claim()


class UnreachableStore(MemoryStore):
    """Memory store that is unreachable while `away`."""

    away = False

    def get(self, policy: str, name: str) -> bytes | None:
        if self.away:
            raise ExchangeUnreachableError("away")
        return super().get(policy, name)


def test_time_during_which_a_reader_could_not_check_is_not_silence(clock: Clock) -> None:
    store = UnreachableStore()
    heartbeat, monitor = Heartbeat(store, "bob"), HeartbeatMonitor(store, 15)
    heartbeat.beat()
    assert monitor.seconds_since("bob")[0] == 0
    clock.sleep(10)
    assert monitor.seconds_since("bob")[0] == 10
    clock.sleep(100)  # a request that was retried, or a machine that slept
    assert monitor.seconds_since("bob")[0] == 10
    store.away = True
    clock.sleep(5)
    assert monitor.seconds_since("bob") == (15, "starting")
    store.away = False
    heartbeat.beat()
    assert monitor.seconds_since("bob")[0] == 0


def test_shared_directory_is_probed_and_transfers_files(tmp_path: Path) -> None:
    store = remote_store(f"file://{tmp_path}/run")
    store.probe()
    assert store.names("") == []
    (tmp_path / "here").write_bytes(b"weights")
    store.put_file("ada", "model", tmp_path / "here")
    store.get_file("ada", "model", tmp_path / "there")
    assert (tmp_path / "there").read_bytes() == b"weights"
    assert store.names("ada") == ["model"]
    with pytest.raises(FileNotFoundError):
        store.get_file("ada", "gone", tmp_path / "nowhere")
    synced: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", synced.append)
        store.put_file("ada", "model", tmp_path / "here")
    assert len(synced) == 2  # the file and its directory
    with pytest.raises(MachineError, match="is the file system mounted"):
        remote_store(f"file://{tmp_path}/not/mounted/run").probe()


def test_failed_copy_to_a_shared_directory_leaves_the_old_file_and_no_temporary(tmp_path: Path) -> None:
    store = remote_store(f"file://{tmp_path}/run")
    (tmp_path / "here").write_bytes(b"old weights")
    store.put_file("ada", "model", tmp_path / "here")
    (tmp_path / "here").write_bytes(b"new weights")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch, pytest.raises(DiskError, match="ada/model: 11 bytes cannot be written"):
        patch.setattr(os, "fsync", full)
        store.put_file("ada", "model", tmp_path / "here")
    assert {path.name: path.read_bytes() for path in (tmp_path / "run" / "ada").iterdir()} == {"model": b"old weights"}


@pytest.mark.parametrize("url", ["file://host/run", "file:///a/../b", "file:///", "file:///a?b"])
def test_url_that_is_not_a_shared_directory_is_rejected(url: str) -> None:
    from mutualrl.storage.bucket_url import require_url

    with pytest.raises(ValueError, match="expected"):
        require_url(url)
