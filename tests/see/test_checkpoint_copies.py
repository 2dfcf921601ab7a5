"""A checkpoint in a bucket: what is restored is what was saved, and nothing else is taken for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from buckets import Server, reachable, serving
from mutualrl.errors import CheckpointDamagedError
from mutualrl.see.bucket import BucketStore
from mutualrl.see.checkpoint_copies import POINTER, CheckpointCopies, restore
from mutualrl.see.mirror import Mirror
from mutualrl.storage.artifacts import file_sum, relative_files
from mutualrl.storage.checkpoints import CheckpointMarker, Checkpoints
from mutualrl.storage.files import write_checksummed
from mutualrl.storage.rundir import RunDirectory


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving("moto", tmp_path_factory.mktemp("server")) as server, reachable(server):
        yield server


def saved(root: Path, step: int, **contents: bytes) -> RunDirectory:
    """Return a run directory with a checkpoint of `ada`."""
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


def copies(store: BucketStore, run: RunDirectory) -> CheckpointCopies:
    return CheckpointCopies(store, run, "ada", Mirror(store, run, "ada"))


def test_what_is_restored_is_what_was_saved_and_older_copies_are_gone(server: Server, tmp_path: Path) -> None:
    store = BucketStore(server.bucket())
    assert restore(store, "ada", "run-1", tmp_path / "none") is None
    writer = copies(store, saved(tmp_path / "here", 2, optimizer=b"x" * 20_000_000))  # put in parts
    writer.write()
    saved(tmp_path / "here", 4, optimizer=b"y" * 1000, further=b"")
    writer.write()
    assert sorted(name for name in store.names("ada") if name.startswith("checkpoint.000")) == [
        f"checkpoint.000004.{number}" for number in range(3)
    ]
    assert restore(store, "ada", "run-1", tmp_path / "there") == 4
    there = RunDirectory(tmp_path / "there")
    marker = Checkpoints(there.policy("ada").root).verify(4)
    assert marker == Checkpoints(tmp_path / "here" / "policies" / "ada").marker(4)
    assert there.policy("ada").metrics.read_text() == '{"step": 1}\n'
    assert there.recipe.read_text() == "a: 1\n"
    assert there.run_json.read_bytes() == (tmp_path / "here" / "run.json").read_bytes()
    assert restore(store, "ada", "run-2", tmp_path / "another run") is None
    assert not (tmp_path / "another run").exists()


def test_a_copy_that_is_damaged_or_incomplete_is_refused(server: Server, tmp_path: Path) -> None:
    store = BucketStore(server.bucket())
    copies(store, saved(tmp_path / "here", 2)).write()
    store.put("ada", "checkpoint.000002.0", b"weighty")
    with pytest.raises(CheckpointDamagedError, match="below/model"):
        restore(store, "ada", "run-1", tmp_path / "a")
    store.delete("ada", ["checkpoint.000002.0"])
    with pytest.raises(CheckpointDamagedError, match="'below/model' is not there"):
        restore(store, "ada", "run-1", tmp_path / "b")


def test_a_marker_that_names_files_elsewhere_is_refused(server: Server, tmp_path: Path) -> None:
    from dataclasses import asdict

    from mutualrl.storage.files import checksummed_bytes

    store = BucketStore(server.bucket())
    run = saved(tmp_path / "here", 2)
    copies(store, run).write()
    marker = Checkpoints(run.policy("ada").root).marker(2)
    files = {"../../../evil": asdict(marker)["files"]["below/model"]}
    store.put("ada", POINTER, checksummed_bytes({**asdict(marker), "files": files}))
    with pytest.raises(CheckpointDamagedError, match="outside of the checkpoint"):
        restore(store, "ada", "run-1", tmp_path / "a" / "b")
    assert not list(tmp_path.rglob("evil"))
