from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import PATIENCE
from fake_clock import Clock
from mutualrl.errors import ExchangeDamagedError, FencedError, PeerLostError, WaitTimeoutError
from mutualrl.records import Rollout
from mutualrl.see import Exchange, Heartbeat, WaitCallbacks, WaitTimeouts
from mutualrl.storage.files import CHECKSUM_KEY, write_checksummed
from mutualrl.trajectory import Trajectory

RUN = "run-1"


def record(n: int, **fields: object) -> Rollout:
    values = {"trajectory": Trajectory.of_text(f"text {n}"), **fields}
    return Rollout(f"prompt-{n // 2}", n % 2, float(n % 2), True, **values)  # type: ignore[arg-type]


RECORDS = [record(n) for n in range(6)]

texts = st.text(max_size=20)
records = st.builds(
    Rollout,
    prompt_id=texts,
    index=st.integers(0, 100),
    reward=st.floats(allow_nan=False),
    ended=st.booleans(),
    prompt=st.none() | texts,
    trajectory=st.none() | st.builds(Trajectory.of_text, texts),
    advantage=st.none() | st.floats(allow_nan=False),
    token_ids=st.none() | st.lists(st.integers(0, 2**31 - 1), max_size=5).map(tuple),
    logprobs=st.none() | st.lists(st.floats(-50, 0, width=32), max_size=5).map(tuple),
)


def open_exchange(root: Path, policy: str = "bob", **options: object) -> Exchange:
    return Exchange(root, policy, RUN, **options)  # type: ignore[arg-type]


@settings(max_examples=40, deadline=None)
@given(st.lists(records, max_size=8))
def test_published_rounds_are_read_back(tmp_path_factory: pytest.TempPathFactory, rows: list[Rollout]) -> None:
    root = tmp_path_factory.mktemp("exchange")
    open_exchange(root).publish(0, rows, policy_step=0)
    shard = open_exchange(root, "ada").read("bob", 0)
    assert shard is not None
    assert len(shard) == len(rows)
    for read, row in zip(shard, rows, strict=True):
        for field in ("prompt_id", "index", "reward", "ended", "prompt", "text", "advantage", "length", "prefix"):
            assert getattr(read, field) == getattr(row, field), field
        for field in ("token_ids", "logprobs"):
            one, other = getattr(read, field), getattr(row, field)
            assert (one is None) == (other is None)
            assert one is None or (one.dtype == other.dtype and one.tolist() == other.tolist())
        assert (read.policy, read.round) == ("bob", 0)
    assert shard.texts() == shard.texts(range(len(rows))) == [row.text for row in rows]


def test_layout_on_disk(tmp_path: Path) -> None:
    import hashlib

    open_exchange(tmp_path).publish(3, RECORDS, policy_step=7)
    marker = json.loads((tmp_path / "bob" / "000003.json").read_text())
    data = (tmp_path / "bob" / "000003.parquet").read_bytes()
    assert marker["sha256"] == hashlib.sha256(data).hexdigest()
    assert (marker["bytes"], marker["rows"]) == (len(data), 6)
    assert (marker["format"], marker["policy_step"], marker["run_id"], marker["attempt"]) == (1, 7, RUN, 0)
    assert pq.read_table(tmp_path / "bob" / "000003.parquet").column("y_text").to_pylist() == [r.text for r in RECORDS]
    assert sorted(p.name for p in (tmp_path / "bob").iterdir()) == ["000003.json", "000003.parquet"]


def test_bytes_depend_only_on_the_records(tmp_path: Path) -> None:
    first = open_exchange(tmp_path / "a").publish(0, RECORDS, 0)
    time.sleep(0.01)
    second = open_exchange(tmp_path / "b", attempt=4).publish(0, RECORDS, 9)
    assert first.sha256 == second.sha256


def test_publishing_again_is_a_no_op_and_other_content_needs_a_new_attempt(tmp_path: Path) -> None:
    open_exchange(tmp_path).publish(0, RECORDS, 0)
    before = (tmp_path / "bob" / "000000.json").stat().st_mtime_ns
    open_exchange(tmp_path).publish(0, RECORDS, 0)
    open_exchange(tmp_path, attempt=1).publish(0, RECORDS, 0)
    assert (tmp_path / "bob" / "000000.json").stat().st_mtime_ns == before

    other = [record(0, trajectory=Trajectory.of_text("another"))]
    open_exchange(tmp_path, attempt=1).publish(0, other, 0)
    shard = open_exchange(tmp_path, "ada").read("bob", 0)
    assert shard is not None
    assert shard.marker.attempt == 1
    assert shard.texts() == ["another"]
    with pytest.raises(FencedError, match="committed by attempt 1; this is attempt 0"):
        open_exchange(tmp_path).publish(0, RECORDS, 0)
    assert open_exchange(tmp_path, "ada").read("bob", 0).texts() == ["another"]  # type: ignore[union-attr]


def test_one_marker_covers_the_parts_of_several_ranks(tmp_path: Path) -> None:
    writer = open_exchange(tmp_path)
    parts = [writer.write_part(0, RECORDS[:2], 0), writer.write_part(0, RECORDS[2:], 1)]
    assert open_exchange(tmp_path, "ada").read("bob", 0) is None  # written, not committed
    marker = writer.commit(0, parts, 0)
    assert (marker.rows, marker.bytes) == (6, sum(p.bytes for p in parts))
    shard = open_exchange(tmp_path, "ada").read("bob", 0)
    assert shard is not None
    assert shard.texts() == [r.text for r in RECORDS]
    assert shard.texts([0, 5]) == ["text 0", "text 5"]


def test_restart_that_changes_one_part_keeps_the_other(tmp_path: Path) -> None:
    first = open_exchange(tmp_path)
    first.commit(0, [first.write_part(0, RECORDS[:2], 0), first.write_part(0, RECORDS[2:4], 1)], 0)
    second = open_exchange(tmp_path, attempt=1)
    second.commit(0, [second.write_part(0, RECORDS[:2], 0), second.write_part(0, RECORDS[4:], 1)], 0)
    shard = open_exchange(tmp_path, "ada").read("bob", 0)
    assert shard is not None
    assert shard.texts() == ["text 0", "text 1", "text 4", "text 5"]


def stages() -> list[str]:
    """Return every point at which a publish can be killed: before and after each step of each of its two files."""
    shard = [f"{step} 1" for step in ("write", "fsync", "rename", "sync_directory")]
    return [*shard, "write 2", "fsync 2", "link 1", "sync_directory 2"]


@pytest.mark.parametrize("stage", stages())
def test_publish_killed_at_any_stage_is_read_completely_or_not_at_all(tmp_path: Path, stage: str) -> None:
    """Kill a real process with SIGKILL at the stage; the reader sees nothing, or everything if all was written."""
    step, number = stage.split()
    code = f"""
import os, signal, sys
from pathlib import Path
import mutualrl.storage.files as files
from tests_records import RECORDS
from mutualrl.see import Exchange
count = {{"fsync": 0, "rename": 0, "sync_directory": 0, "write": 0, "link": 0}}
def killing(name, real):
    def step(*a, **k):
        count[name] += 1
        if name == {step!r} and count[name] == {number}:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*a, **k)
    return step
class Half:
    "The first half of the data reaches the disk, then the process dies."
    def __init__(self, file): self.file = file
    def __enter__(self): self.file.__enter__(); return self
    def __exit__(self, *a): return self.file.__exit__(*a)
    def fileno(self): return self.file.fileno()
    def flush(self): self.file.flush()
    def write(self, data):
        count["write"] += 1
        if {step!r} == "write" and count["write"] == {number}:
            self.file.write(data[: len(data) // 2]); self.file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.file.write(data)
real_open = Path.open
Path.open = lambda self, mode="r", *a, **k: Half(real_open(self, mode, *a, **k)) if mode == "wb" else real_open(self, mode, *a, **k)
real_fsync, real_sync = os.fsync, files.sync_directory
in_sync = [False]
def sync_directory(path):
    count["sync_directory"] += 1
    if {step!r} == "sync_directory" and count["sync_directory"] == {number}:
        os.kill(os.getpid(), signal.SIGKILL)
    in_sync[0] = True
    real_sync(path)
    in_sync[0] = False
files.sync_directory = sync_directory
os.fsync = lambda fd: real_fsync(fd) if in_sync[0] else killing("fsync", real_fsync)(fd)
Path.replace = killing("rename", Path.replace)
Path.hardlink_to = killing("link", Path.hardlink_to)
Exchange(Path({str(tmp_path)!r}), "bob", {RUN!r}).publish(0, RECORDS, 0)
"""
    (tmp_path / "tests_records.py").write_text(
        "from mutualrl.records import Rollout\n"
        "from mutualrl.trajectory import Trajectory\n"
        "TEXTS = [Trajectory.of_text(f'text {n}') for n in range(6)]\n"
        "RECORDS = [Rollout(f'prompt-{n // 2}', n % 2, float(n % 2), True, trajectory=TEXTS[n]) for n in range(6)]\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, timeout=60
    )
    assert result.returncode == -9, "the stage was never reached"
    shard = open_exchange(tmp_path, "ada").read("bob", 0)
    committed = stage == "sync_directory 2"  # the marker was renamed: the round exists
    assert (shard is not None) == committed
    if shard is not None:
        assert shard.texts() == [r.text for r in RECORDS]
    open_exchange(tmp_path).publish(0, RECORDS, 0)  # the restarted writer publishes it
    assert open_exchange(tmp_path, "ada").read("bob", 0).texts() == [r.text for r in RECORDS]  # type: ignore[union-attr]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_single_flipped_bit_is_always_detected(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    root = tmp_path_factory.mktemp("exchange")
    open_exchange(root).publish(0, RECORDS, 0)
    path = root / "bob" / "000000.parquet"
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    with pytest.raises(ExchangeDamagedError, match="according to its marker"):
        open_exchange(root, "ada").read("bob", 0)


def truncate_shard(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def remove_shard(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [truncate_shard, remove_shard])
def test_truncated_or_missing_shard_is_named(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    open_exchange(tmp_path).publish(0, RECORDS, 0)
    damage(tmp_path / "bob" / "000000.parquet")
    with pytest.raises(ExchangeDamagedError, match=r"000000\.parquet"):
        open_exchange(tmp_path, "ada").read("bob", 0)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"parts": []}', '{"parts": [{"file": "../x", "sha256": "", "bytes": 1, "rows": 1}]}']
)
def test_malformed_marker_is_named(tmp_path: Path, text: str) -> None:
    open_exchange(tmp_path).publish(0, RECORDS, 0)
    (tmp_path / "bob" / "000000.json").write_text(text)
    with pytest.raises(ExchangeDamagedError, match=r"000000\.json"):
        open_exchange(tmp_path, "ada").read("bob", 0)


def edit_marker(root: Path, **values: object) -> None:
    path = root / "bob" / "000000.json"
    write_checksummed(path, {**{k: v for k, v in json.loads(path.read_text()).items() if k != CHECKSUM_KEY}, **values})


def test_markers_of_another_run_format_or_directory_are_rejected(tmp_path: Path) -> None:
    open_exchange(tmp_path).publish(0, RECORDS, 0)
    marker = json.loads((tmp_path / "bob" / "000000.json").read_text())
    edit_marker(tmp_path, run_id="other")
    with pytest.raises(ExchangeDamagedError, match="written for run 'other'"):
        open_exchange(tmp_path, "ada").read("bob", 0)
    edit_marker(tmp_path, run_id=RUN, format=2)
    with pytest.raises(ExchangeDamagedError, match="format 2, this version reads 1; use the mutualrl that wrote it"):
        open_exchange(tmp_path, "ada").read("bob", 0)
    for name in ("../bob/000000.parquet", "..", "", "/etc/passwd", "000000.json"):
        edit_marker(tmp_path, format=1, parts=[{**marker["parts"][0], "file": name}])
        with pytest.raises(ExchangeDamagedError, match="outside its directory"):
            open_exchange(tmp_path, "ada").read("bob", 0)


def test_attempt_cannot_commit_a_round_again_with_other_content(tmp_path: Path) -> None:
    """Committing the same content again is a no-op; other content means that two processes write as one attempt."""
    first = open_exchange(tmp_path).publish(0, RECORDS, 0)
    assert open_exchange(tmp_path).publish(0, RECORDS, 0) == first
    with pytest.raises(FencedError, match="round 0 was committed by attempt 0; this is attempt 0 with other content"):
        open_exchange(tmp_path).publish(0, RECORDS[:2], 0)
    shard = open_exchange(tmp_path, "ada").read("bob", 0)
    assert shard is not None
    assert len(shard) == len(RECORDS)


def test_two_processes_exchange_over_one_directory(tmp_path: Path) -> None:
    """Publish ten rounds with pauses in another process; wait for each and read it completely."""
    code = f"""
import time
from pathlib import Path
from mutualrl.records import Rollout
from mutualrl.see import Exchange, Heartbeat
from mutualrl.trajectory import Trajectory
exchange = Exchange(Path({str(tmp_path)!r}), "bob", {RUN!r})
Heartbeat(exchange.store, "bob").start()
for r in range(10):
    time.sleep(0.02)
    texts = [Trajectory.of_text(f"{{r}}-{{i}}") for i in range(200)]
    exchange.publish(r, [Rollout(f"p{{i}}", 0, 1.0, True, trajectory=text) for i, text in enumerate(texts)], r)
"""
    process = subprocess.Popen([sys.executable, "-c", code])
    reader = open_exchange(tmp_path, "ada", timeouts=WaitTimeouts(PATIENCE, PATIENCE))
    for round_index in range(10):
        shard = reader.wait(["bob"], round_index)["bob"]
        assert shard.texts() == [f"{round_index}-{i}" for i in range(200)]
    assert process.wait(PATIENCE) == 0


def test_peer_without_a_heartbeat_is_lost_at_the_timeout(tmp_path: Path, clock: Clock) -> None:
    reader = open_exchange(tmp_path, "ada", timeouts=WaitTimeouts(peer_timeout=60, round_timeout=3600))
    began = clock.now
    with pytest.raises(PeerLostError, match=r"lost its peer 'bob'.*round 4.*policies/bob/logs"):
        reader.wait(["bob"], 4)
    assert 60 < clock.now - began < 62


def test_live_but_late_peer_hits_the_round_timeout(tmp_path: Path, clock: Clock) -> None:
    clock.every(1, Heartbeat(tmp_path, "bob").beat)
    reader = open_exchange(tmp_path, "ada", timeouts=WaitTimeouts(peer_timeout=10, round_timeout=120))
    with pytest.raises(WaitTimeoutError, match=r"round 0 of bob.*round_timeout \(120 s\)"):
        reader.wait(["bob"], 0)


def test_a_source_that_is_alive_and_late_is_left_out_at_the_round_timeout(tmp_path: Path, clock: Clock) -> None:
    clock.every(1, Heartbeat(tmp_path, "teacher").beat)
    open_exchange(tmp_path).publish(0, RECORDS, 0)
    timeouts = WaitTimeouts(peer_timeout=10, round_timeout=120, dispensable=frozenset({"teacher"}))
    assert list(open_exchange(tmp_path, "ada", timeouts=timeouts).wait(["bob", "teacher"], 0)) == ["bob"]


def test_reader_waits_for_a_slow_peer_with_a_heartbeat(tmp_path: Path, clock: Clock) -> None:
    heartbeat = Heartbeat(tmp_path, "bob")
    clock.every(1, heartbeat.beat)
    clock.at(50, lambda: open_exchange(tmp_path).publish(0, RECORDS, 0))
    messages: list[str] = []
    reader = open_exchange(tmp_path, "ada", timeouts=WaitTimeouts(peer_timeout=10, round_timeout=120))
    assert list(reader.wait(["bob"], 0, WaitCallbacks(waiting=messages.append))) == ["bob"]
    assert messages[0] == "waiting for round 0 of bob"
    assert all("its heartbeat continues" in message for message in messages[1:])  # after peer_timeout


def test_peer_that_has_never_published_is_named_within_five_seconds(tmp_path: Path, clock: Clock) -> None:
    heartbeat = Heartbeat(tmp_path, "bob")
    clock.every(1, heartbeat.beat)
    clock.at(50, lambda: open_exchange(tmp_path).publish(0, RECORDS, 0))
    absent: list[tuple[float, list[str]]] = []
    reader = open_exchange(tmp_path, "ada", timeouts=WaitTimeouts(peer_timeout=10, round_timeout=120))
    callbacks = WaitCallbacks(absent=lambda peers: absent.append((clock.now, list(peers))))
    start = clock.now
    assert list(reader.wait(["bob"], 0, callbacks)) == ["bob"]
    ((when, peers),) = absent
    assert when - start < 5
    assert peers == ["bob"]


def test_heartbeat_repeats_until_stopped(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path, "bob", interval=0.01)
    heartbeat.start()
    path = tmp_path / "bob" / "heartbeat.json"
    while json.loads(path.read_text())["counter"] < 5:  # pytest's time-out ends an endless wait
        time.sleep(0.01)
    heartbeat.stop("finished")
    state = json.loads(path.read_text())
    assert (state["policy"], state["phase"]) == ("bob", "finished")
    time.sleep(0.05)
    assert json.loads(path.read_text()) == state


def test_ids_and_log_probs_are_slices_of_one_array(tmp_path: Path) -> None:
    rows = [
        Rollout("p", i, 1.0, True, trajectory=Trajectory.of_text("x"), token_ids=tuple(range(i)), logprobs=(-0.5,) * i)
        for i in range(3)
    ]
    Exchange(tmp_path, "ada", "run").publish(0, [*rows, Rollout("p", 3, 0.0, True)], 0)
    shard = Exchange(tmp_path, "bob", "run").read("ada", 0)
    assert shard is not None
    ids, traces = shard.token_ids, shard.logprobs
    assert [None if array is None else array.tolist() for array in ids] == [[], [0], [0, 1], None]
    assert [None if array is None else array.tolist() for array in traces] == [[], [-0.5], [-0.5, -0.5], None]
    assert ids[1] is not None and ids[2] is not None
    assert ids[1].base is not None and np.shares_memory(ids[2], shard._array("token_ids").chunks[0].values.to_numpy())
