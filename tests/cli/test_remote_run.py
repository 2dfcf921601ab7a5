"""A run in a bucket as it is seen from anywhere: what its policies mirror there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from buckets import Server, reachable, serving
from conftest import Cli
from mutualrl.errors import ExchangeDamagedError, UsageError
from mutualrl.reporting.remote_run import fetch_run
from mutualrl.reporting.run_reader import read_run
from mutualrl.see import LocalStore, open_store
from mutualrl.see.manifest import Manifest, write_manifest
from mutualrl.see.mirror import Mirror, mirrored
from mutualrl.storage.files import checksummed_bytes
from mutualrl.storage.rundir import RunDirectory
from runs import FinishedRun

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving("moto", tmp_path_factory.mktemp("server")) as server, reachable(server):
        yield server


def mirror(url: str, run: RunDirectory, *policies: str) -> None:
    """Put a run's files where policies that join would."""
    store, info = open_store(url), run.info()
    write_manifest(store, Manifest(info.run_id, ("ada", "bob"), info.regime, dict(info.fingerprint), {}))
    for policy in policies:
        Mirror(store, run, policy).write()


def test_a_finished_run_is_reported_and_watched_from_anywhere(
    server: Server, unbroken: FinishedRun, tmp_path: Path, cli: Cli
) -> None:
    url = server.bucket()
    mirror(url, RunDirectory(unbroken.path), "ada", "bob")
    here, there = read_run(unbroken.path), read_run(fetch_run(url, tmp_path / "one").root)
    assert there.state == "finished"
    for name, policy in here.policies.items():
        assert there.policies[name].metrics == policy.metrics
        assert there.policies[name].rescues == policy.rescues
        assert there.policies[name].final == policy.final
    watched = cli("watch", url)
    assert watched.returncode == 0, watched.stderr
    assert f"the run is in {url}" in watched.stdout
    reported = cli("report", url)
    assert reported.returncode == 0, reported.stderr
    assert (tmp_path / "one-report" / "index.html").is_file()


def test_a_run_that_goes_on_is_shown_as_it_stands(server: Server, unbroken: FinishedRun, cli: Cli) -> None:
    url = server.bucket()
    mirror(url, RunDirectory(unbroken.path), "ada")  # bob has not joined yet
    shown = json.loads(cli("watch", url, "--json").stdout)
    assert (shown["run"], shown["state"]) == (url, "elsewhere")
    assert shown["policies"]["ada"]["step"] == 6
    assert any(f"its policies joined {url}" in note for note in shown["notes"])


def test_what_is_no_run_is_refused_by_name(server: Server, unbroken: FinishedRun, tmp_path: Path, cli: Cli) -> None:
    empty = server.bucket()
    refused = cli("watch", empty)
    assert refused.returncode == 2
    assert "contains no run" in refused.stderr
    mirror(empty, RunDirectory(unbroken.path))
    nobody = cli("report", empty)
    assert nobody.returncode == 2
    assert "no policy of run" in nobody.stderr
    with pytest.raises(UsageError, match="credentials"):
        fetch_run("s3://key:secret@bucket/run", tmp_path / "x")
    damaged = server.bucket()
    mirror(damaged, RunDirectory(unbroken.path), "ada")
    store = open_store(damaged)
    run_json = mirrored(store, "ada", "run.json")
    assert run_json is not None
    store.put("ada", "mirror.run.json", run_json.replace(b'"seed": 0', b'"seed": 7'))
    answer = cli("report", damaged)
    assert answer.returncode == 6
    assert "run.json" in answer.stderr


def test_only_what_has_changed_is_put_again(unbroken: FinishedRun, tmp_path: Path) -> None:
    puts: list[str] = []

    class Counted(LocalStore):
        def put(self, policy: str, name: str, data: bytes, *, durable: bool = True) -> None:
            puts.append(name)
            super().put(policy, name, data, durable=durable)

    import shutil

    shutil.copytree(unbroken.path, tmp_path / "r")
    run = RunDirectory(tmp_path / "r")
    (tmp_path / "store" / "ada").mkdir(parents=True)
    copies = Mirror(Counted(tmp_path / "store"), run, "ada")
    copies.write()
    assert sorted(puts) == [
        f"mirror.{name}" for name in ("before.json", "metrics.jsonl", "rescues.jsonl", "result.json", "run.json")
    ]
    copies.write()
    assert len(puts) == 5
    with run.policy("ada").metrics.open("a") as file:
        file.write('{"step": 7}\n')
    copies.write()
    assert puts[5:] == ["mirror.metrics.jsonl"]


def test_policies_of_a_manifest_are_names_and_no_paths(server: Server, unbroken: FinishedRun, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    url = server.bucket()
    store, info = open_store(url), RunDirectory(unbroken.path).info()
    write_manifest(store, Manifest(info.run_id, ("ada", "bob"), info.regime, dict(info.fingerprint), {}))
    for name in (str(victim), "../victim", ".."):
        forged = Manifest(info.run_id, (name,), info.regime, {}, {})
        store.put("", "run.json", checksummed_bytes(asdict(forged)))
        with pytest.raises(ExchangeDamagedError, match="invalid policy name"):
            fetch_run(url, tmp_path / "one")
    assert not list(victim.iterdir())


def test_what_has_only_grown_stays_the_same_file_for_who_follows_it(
    server: Server, unbroken: FinishedRun, tmp_path: Path
) -> None:
    run = RunDirectory(shutil.copytree(unbroken.path, tmp_path / "grows"))
    metrics, url = run.policy("ada").metrics, server.bucket()
    whole = metrics.read_bytes()
    lines = whole.splitlines(keepends=True)
    metrics.write_bytes(b"".join(lines[:2]))
    mirror(url, run, "ada")
    there = fetch_run(url, tmp_path / "one").policy("ada").metrics
    inode = there.stat().st_ino
    for text, same in ((whole, True), (whole, True), (lines[0], False)):
        metrics.write_bytes(text)
        mirror(url, run, "ada")
        fetch_run(url, tmp_path / "one")
        assert there.read_bytes() == text
        assert (there.stat().st_ino == inode) == same
