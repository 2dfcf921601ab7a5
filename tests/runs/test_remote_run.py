"""A run in a bucket, read on any machine from the files that its policies mirror there."""

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
from mutualrl.runs.logs import read_logged
from mutualrl.runs.remote import fetch_run, run_place
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
    """Mirror a run's files as joined policies do."""
    store, info = open_store(url), run.info()
    write_manifest(store, Manifest(info.run_id, ("ada", "bob"), info.regime, dict(info.fingerprint), {}))
    for policy in policies:
        Mirror(store, run, policy).write()


def test_finished_run_is_reported_and_watched_on_any_machine(
    server: Server, unbroken: FinishedRun, tmp_path: Path, cli: Cli
) -> None:
    url = server.bucket()
    mirror(url, RunDirectory(unbroken.path), "ada", "bob")
    local, remote = read_logged(unbroken.path), read_logged(fetch_run(url, tmp_path / "one").root)
    assert remote.state == "finished"
    assert remote.metrics.equals(local.metrics)
    assert remote.rescues == local.rescues
    assert remote.policies == local.policies
    watched = cli("watch", url)
    assert watched.returncode == 0, watched.stderr
    assert f"the run is in {url}" in watched.stdout
    reported = cli("report", url)
    assert reported.returncode == 0, reported.stderr
    assert (tmp_path / "one-report" / "index.html").is_file()


def test_unfinished_run_is_shown_at_its_current_step(server: Server, unbroken: FinishedRun, cli: Cli) -> None:
    url = server.bucket()
    mirror(url, RunDirectory(unbroken.path), "ada")  # bob has not joined yet
    shown = json.loads(cli("watch", url, "--json").stdout)
    assert (shown["run"], shown["state"]) == (url, "elsewhere")
    assert shown["policies"]["ada"]["step"] == 6
    assert any(f"its policies joined {url}" in note for note in shown["notes"])


def test_buckets_without_an_intact_run_are_rejected_by_name(
    server: Server, unbroken: FinishedRun, tmp_path: Path, cli: Cli
) -> None:
    empty = server.bucket()
    rejected = cli("watch", empty)
    assert rejected.returncode == 2
    assert "contains no run" in rejected.stderr
    mirror(empty, RunDirectory(unbroken.path))
    without_policies = cli("report", empty)
    assert without_policies.returncode == 2
    assert "no policy of run" in without_policies.stderr
    with pytest.raises(UsageError, match="credentials"):
        fetch_run("s3://key:secret@bucket/run", tmp_path / "x")
    damaged = server.bucket()
    mirror(damaged, RunDirectory(unbroken.path), "ada")
    store = open_store(damaged)
    run_json = mirrored(store, "ada", "run.json")
    assert run_json is not None
    store.put("ada", "mirror.run.json", run_json.replace(b'"seed": 0', b'"seed": 7'))
    result = cli("report", damaged)
    assert result.returncode == 6
    assert "run.json" in result.stderr


def test_only_changed_files_are_put_again(unbroken: FinishedRun, tmp_path: Path) -> None:
    puts: list[str] = []

    class CountingStore(LocalStore):
        def put(self, policy: str, name: str, data: bytes, *, durable: bool = True) -> None:
            puts.append(name)
            super().put(policy, name, data, durable=durable)

    import shutil

    shutil.copytree(unbroken.path, tmp_path / "r")
    run = RunDirectory(tmp_path / "r")
    (tmp_path / "store" / "ada").mkdir(parents=True)
    run_mirror = Mirror(CountingStore(tmp_path / "store"), run, "ada")
    run_mirror.write()
    assert sorted(puts) == [
        f"mirror.{name}"
        for name in ("before.json", "metrics.jsonl", "rescues.jsonl", "result.json", "run.json", "samples.jsonl")
    ]
    run_mirror.write()
    assert len(puts) == 6
    with run.policy("ada").metrics.open("a") as file:
        file.write('{"step": 7}\n')
    run_mirror.write()
    assert puts[6:] == ["mirror.metrics.jsonl"]


def test_manifest_with_paths_as_policies_is_rejected(server: Server, unbroken: FinishedRun, tmp_path: Path) -> None:
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


def test_file_that_only_grew_keeps_its_inode(server: Server, unbroken: FinishedRun, tmp_path: Path) -> None:
    run = RunDirectory(shutil.copytree(unbroken.path, tmp_path / "grows"))
    metrics, url = run.policy("ada").metrics, server.bucket()
    content = metrics.read_bytes()
    lines = content.splitlines(keepends=True)
    metrics.write_bytes(b"".join(lines[:2]))
    mirror(url, run, "ada")
    fetched = fetch_run(url, tmp_path / "one").policy("ada").metrics
    inode = fetched.stat().st_ino
    for text, same_file in ((content, True), (content, True), (lines[0], False)):
        metrics.write_bytes(text)
        mirror(url, run, "ada")
        fetch_run(url, tmp_path / "one")
        assert fetched.read_bytes() == text
        assert (fetched.stat().st_ino == inode) == same_file


def test_a_run_that_goes_on_costs_no_read_of_its_sources_accounts(
    server: Server, unbroken: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`watch` looks every ten seconds: a run of many rounds has an account for each."""
    url = server.bucket()
    mirror(url, RunDirectory(unbroken.path), "ada")
    monkeypatch.setattr("mutualrl.runs.remote.accounts_of", lambda *asked: pytest.fail("the accounts were read"))
    assert not fetch_run(url, tmp_path / "one").summary.exists()


def test_what_else_stands_beside_the_policies_is_no_policy(unbroken: FinishedRun, tmp_path: Path) -> None:
    copy = shutil.copytree(unbroken.path, tmp_path / "run")
    (copy / "policies" / ".DS_Store").write_bytes(b"")
    with run_place(str(copy)) as place:
        assert not place.look()
        assert (place.root, place.page, place.is_here) == (copy, copy / "report", True)
