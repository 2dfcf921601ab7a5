"""Any changed byte of a shard, a marker or a checkpoint is detected."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from mutualrl.errors import CheckpointDamagedError, ExchangeDamagedError
from mutualrl.records import Rollout
from mutualrl.see import Exchange
from mutualrl.see.inspection import decode
from mutualrl.storage.artifacts import MARKER, file_sum, relative_files
from mutualrl.storage.checkpoints import CheckpointMarker, Checkpoints, oldest_needed
from mutualrl.storage.files import read_checksummed, write_checksummed
from mutualrl.trajectory import Trajectory

DAMAGES = 1000


def exchange(root: Path) -> Exchange:
    rng = np.random.default_rng(0)
    rows = [
        Rollout(
            f"p{n // 4}",
            n % 4,
            float(n % 2),
            True,
            trajectory=Trajectory.of_text(f"the answer is {n}"),
            token_ids=(1, 2, n),
            logprobs=tuple(rng.normal(size=3).astype("float32").tolist()),
        )
        for n in range(16)
    ]
    writer = Exchange(root, "bob", "run")
    writer.publish(0, rows, 0)
    writer.publish(1, rows[:8], 1)
    return Exchange(root, "ada", "run")


def checkpoint(policy: Path, step: int, content: bytes = b"weights" * 50) -> Checkpoints:
    store = Checkpoints(policy)
    staging = store.staged(step)
    (staging / "global").mkdir(parents=True)
    (staging / "model.safetensors").write_bytes(content + bytes([step]))
    (staging / "global" / "optimizer.pt").write_bytes(bytes(range(256)))
    (staging / "empty").touch()
    files = {name: file_sum(staging / name) for name in relative_files(staging)}
    store.commit(CheckpointMarker("run", "bob", step, step // 2, 0, 1, files, {"initial_validation": {"n": 4}}))
    return store


def damages(data: bytes, others: list[bytes], rng: random.Random) -> Iterator[bytes]:
    """Yield damaged copies of the data: truncated at every length, then bit flips, zero fill, another file's bytes,
    appended bytes; never the data itself."""
    for length in range(len(data)):
        yield data[:length]
    while True:
        kind = rng.randrange(5)
        damaged = bytearray(data)
        if kind <= 1 and data:
            for _ in range(rng.choice([1, 1, 2, 8])):
                damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        elif kind == 2 and data:
            start = rng.randrange(len(damaged))
            damaged[start:] = bytes(len(damaged) - start)
        elif kind == 3:
            damaged = bytearray(rng.choice(others))
        else:
            damaged += rng.randbytes(rng.randrange(1, 9)) if rng.random() < 0.5 else b"\n"
        if bytes(damaged) != data:
            yield bytes(damaged)


def count_rejected(path: Path, others: list[bytes], count: int, read: Callable[[], object]) -> int:
    """Return how many of `count` damages of a file were rejected."""
    data, rng, rejected = path.read_bytes(), random.Random(path.name), 0
    source = damages(data, others, rng)
    candidates = list(dict.fromkeys(next(source) for _ in range(len(data) + 4 * count)))
    rng.shuffle(candidates)
    for damaged in candidates[:count]:
        path.write_bytes(damaged)
        with pytest.raises((ExchangeDamagedError, CheckpointDamagedError)):
            read()
        rejected += 1
    path.write_bytes(data)
    read()
    return rejected


def test_a_thousand_damages_are_rejected(tmp_path: Path) -> None:
    reader = exchange(tmp_path / "exchange")
    store = checkpoint(tmp_path / "bob", 4)
    checkpoint(tmp_path / "bob", 8)
    shards = tmp_path / "exchange" / "bob"
    step = store.path(8)

    def read_round() -> None:
        shard = reader.read("bob", 0)
        if shard is None:
            raise AssertionError("a damaged round was treated as missing")
        decode(shard)

    total = count_rejected(shards / "000000.parquet", [(shards / "000001.parquet").read_bytes()], 300, read_round)
    total += count_rejected(shards / "000000.json", [(shards / "000001.json").read_bytes(), b"{}"], 300, read_round)
    swaps = [(store.path(4) / "model.safetensors").read_bytes(), (step / "global" / "optimizer.pt").read_bytes()]
    total += count_rejected(step / "model.safetensors", swaps, 100, lambda: store.verify(8))
    total += count_rejected(step / "global" / "optimizer.pt", swaps[:1], 50, lambda: store.verify(8))
    total += count_rejected(
        step / MARKER, [(store.path(4) / MARKER).read_bytes(), b"[]", b"7"], 300, lambda: store.verify(8)
    )
    (step / "empty").write_bytes(b"x")
    with pytest.raises(CheckpointDamagedError, match="empty: 1 bytes, expected 0"):
        store.verify(8)
    assert total + 1 >= DAMAGES


def test_extra_missing_and_misplaced_files_are_rejected(tmp_path: Path) -> None:
    store = checkpoint(tmp_path / "bob", 8)
    (store.path(8) / "extra.bin").write_bytes(b"")
    with pytest.raises(CheckpointDamagedError, match=r"extra\.bin: unexpected file"):
        store.verify(8)
    (store.path(8) / "extra.bin").unlink()
    (store.path(8) / "model.safetensors").unlink()
    with pytest.raises(CheckpointDamagedError, match=r"model\.safetensors: is missing"):
        store.verify(8)
    checkpoint(tmp_path / "other", 4)
    shutil.copytree(tmp_path / "other" / "checkpoints" / "step-000004", store.path(12))
    with pytest.raises(CheckpointDamagedError, match="written for step 4"):
        store.verify(12)


def test_newest_intact_checkpoint_is_used_and_the_damaged_one_named(tmp_path: Path) -> None:
    store = checkpoint(tmp_path / "bob", 4)
    checkpoint(tmp_path / "bob", 8)
    (store.path(8) / "model.safetensors").write_bytes(b"")
    messages: list[str] = []
    result = store.newest("run", "bob", messages.append)
    assert result is not None
    assert result.step == 4
    assert "step-000008/model.safetensors: 0 bytes" in messages[0]
    assert sorted(p.name for p in store.root.iterdir()) == [".step-000008.damaged", "latest.json", "step-000004"]
    with pytest.raises(CheckpointDamagedError, match="of run 'run', policy 'bob', not of this one"):
        store.newest("another", "bob", messages.append)
    checkpoint(tmp_path / "bob", 8)
    store.prune(2)
    assert sorted(p.name for p in store.root.iterdir()) == ["latest.json", "step-000004", "step-000008"]
    assert store.verify(8).step == 8


def test_policy_does_not_start_from_scratch_when_its_checkpoints_are_damaged(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "new").newest("run", "bob", print) is None
    store = checkpoint(tmp_path / "bob", 4)
    checkpoint(tmp_path / "bob", 8)
    for step in (4, 8):
        (store.path(step) / "empty").write_bytes(b"x")
    for _ in range(2):  # the second call fails like the first
        with pytest.raises(
            CheckpointDamagedError, match=r"has no intact checkpoint.*step-000008.*step-000004.*--clean"
        ):
            store.newest("run", "bob", print)
    (store.path(8) / "empty").write_bytes(b"")
    marker = read_checksummed(store.path(8) / MARKER)
    write_checksummed(store.path(8) / MARKER, {**(marker or {}), "format": 9})
    with pytest.raises(CheckpointDamagedError, match="format 9, this version reads 1; use the mutualrl that wrote it"):
        store.newest("run", "bob", print)


def test_pruning_keeps_the_newest_and_leaves_no_partial_checkpoint(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        store = checkpoint(tmp_path / "bob", step)
    (store.path(2) / MARKER).unlink()  # a writer was killed while removing this one
    store.staged(10).mkdir(parents=True)
    assert store.steps() == [4, 6, 8]
    store.clear_partial()
    assert not store.path(2).exists()
    assert not store.staged(10).exists()
    store.prune(2)
    assert store.steps() == [6, 8]
    assert store.newest_cursor() == 4


def test_oldest_needed_round_is_the_smallest_of_all_kept_checkpoints(tmp_path: Path) -> None:
    for step in (4, 8):
        checkpoint(tmp_path / "ada", step)
    store = checkpoint(tmp_path / "bob", 12)
    assert oldest_needed([tmp_path / "ada", tmp_path / "bob"]) == 2
    assert oldest_needed([tmp_path / "ada", tmp_path / "bob"], staleness=1) == 1
    assert oldest_needed([tmp_path / "ada", tmp_path / "bob"], staleness=4) == 0
    assert oldest_needed([tmp_path / "ada", tmp_path / "bob", tmp_path / "new"]) == 0
    (store.path(12) / MARKER).write_bytes(b"{}")
    assert oldest_needed([tmp_path / "ada", tmp_path / "bob"]) == 0
