"""Checkpoint copies in a bucket: only what was saved is restored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from buckets import Server, reachable, serving
from mutualrl.errors import CheckpointDamagedError, ExchangeDamagedError
from mutualrl.see.checkpoint_copies import POINTER, CheckpointCopies, forget, has_copy, stage
from mutualrl.see.mirror import Mirror
from mutualrl.see.store import RemoteStore, remote_store
from mutualrl.storage.artifacts import file_sum, relative_files
from mutualrl.storage.checkpoints import CheckpointMarker, Checkpoints
from mutualrl.storage.files import checksummed_bytes, write_checksummed
from mutualrl.storage.rundir import RunDirectory


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving("moto", tmp_path_factory.mktemp("server")) as server, reachable(server):
        yield server


def saved(root: Path, step: int, **contents: bytes) -> RunDirectory:
    """Write a run directory with a checkpoint of `ada`."""
    run = RunDirectory(root)
    checkpoints = Checkpoints(run.policy("ada").root)
    staging = checkpoints.staged(step)
    (staging / "below").mkdir(parents=True)
    for name, content in {"model": b"weights", **contents}.items():
        (staging / "below" / name).write_bytes(content)
    files = {name: file_sum(staging / name) for name in relative_files(staging)}
    checkpoints.commit(CheckpointMarker("run-1", "ada", step, step, 0, 1, files))
    run.policy("ada").metrics.write_text('{"step": 1}\n')
    write_checksummed(run.run_json, {"run_id": "run-1", "recipe": "a: 1\n"}, root=run.root)
    return run


def copies(store: RemoteStore, run: RunDirectory, attempt: int = 0, newest: int = 0) -> CheckpointCopies:
    def is_newest() -> bool:
        return attempt >= newest

    mirror = Mirror(store, run, "ada", is_newest)
    return CheckpointCopies(store, run, "ada", mirror, attempt=attempt, model="base")


def test_fetched_checkpoint_equals_the_saved_one_and_older_copies_are_deleted(server: Server, tmp_path: Path) -> None:
    store = remote_store(server.bucket())
    assert stage(store, "ada", "run-1", tmp_path / "none") is None
    assert not has_copy(store, "ada")
    writer = copies(store, saved(tmp_path / "here", 2, optimizer=b"x" * 80_000_000))  # in several parts
    writer.write()
    first = stage(store, "ada", "run-1", tmp_path / "first")
    assert first is not None
    assert (tmp_path / "first" / "files" / "below" / "optimizer").stat().st_size == 80_000_000
    saved(tmp_path / "here", 4, optimizer=b"y" * 1000, further=b"")
    writer.write()
    remaining = sorted(name for name in store.names("ada") if name.startswith("checkpoint.0"))
    assert remaining == [f"checkpoint.000004.a0.{number}" for number in range(3)]
    fetched = stage(store, "ada", "run-1", tmp_path / "fetched")
    assert fetched is not None
    assert (fetched.marker.step, fetched.model) == (4, "base")
    restored = RunDirectory(tmp_path / "there")
    fetched.install(restored)
    marker = Checkpoints(restored.policy("ada").root).verify(4)
    assert marker == Checkpoints(tmp_path / "here" / "policies" / "ada").marker(4)
    assert restored.policy("ada").metrics.read_text() == '{"step": 1}\n'
    assert not restored.run_json.exists()  # recipe and code are the user's
    assert not (tmp_path / "fetched").exists()
    assert stage(store, "ada", "run-2", tmp_path / "another run") is None
    forget(store, "ada")
    assert store.names("ada") == []


def test_fenced_attempt_writes_and_deletes_nothing(server: Server, tmp_path: Path) -> None:
    store = remote_store(server.bucket())
    copies(store, saved(tmp_path / "new", 6), attempt=1, newest=1).write()
    before = sorted(store.names("ada"))
    copies(store, saved(tmp_path / "old", 4), attempt=0, newest=1).write()
    assert sorted(store.names("ada")) == before
    fetched = stage(store, "ada", "run-1", tmp_path / "fetched")
    assert fetched is not None
    assert fetched.marker.step == 6


def test_damaged_or_incomplete_copy_is_rejected(server: Server, tmp_path: Path) -> None:
    store = remote_store(server.bucket())
    copies(store, saved(tmp_path / "here", 2)).write()
    store.put("ada", "checkpoint.000002.a0.0", b"WEIGHTS")
    with pytest.raises(CheckpointDamagedError, match="below/model"):
        stage(store, "ada", "run-1", tmp_path / "a")
    store.put("ada", "checkpoint.000002.a0.0", b"weights and much more")  # larger than in its marker
    with pytest.raises(CheckpointDamagedError, match="has another size"):
        stage(store, "ada", "run-1", tmp_path / "a")
    store.delete("ada", ["checkpoint.000002.a0.0"])
    with pytest.raises(CheckpointDamagedError, match="'below/model' is missing"):
        stage(store, "ada", "run-1", tmp_path / "b")


@pytest.mark.parametrize(
    "change",
    [
        {"files": {"../../../evil": {"bytes": 7, "sha256": "0" * 64}}},
        {"files": {"/tmp/evil": {"bytes": 7, "sha256": "0" * 64}}},
        {"files": {"evil.py": {"bytes": 7, "sha256": "0" * 64}}},
        {"step": "../2"},
        {"ranks": -1},
    ],
    ids=str,
)
def test_malformed_marker_or_one_with_outside_paths_is_rejected(
    server: Server, tmp_path: Path, change: dict[str, object]
) -> None:
    store = remote_store(server.bucket())
    run = saved(tmp_path / "here", 2)
    copies(store, run).write()
    marker = {**asdict(Checkpoints(run.policy("ada").root).marker(2)), **change}
    pointer = {"prefix": "checkpoint.000002.a0.", "model": "base", "marker": marker}
    store.put("ada", POINTER, checksummed_bytes(pointer))
    with pytest.raises(ExchangeDamagedError, match="not a checkpoint's marker"):
        stage(store, "ada", "run-1", tmp_path / "a" / "b")
    assert not list(tmp_path.rglob("evil*"))
