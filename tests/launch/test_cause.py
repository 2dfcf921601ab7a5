from __future__ import annotations

import os
import platform
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from mutualrl.errors import RunDirectoryError, UsageError, exit_code_of
from mutualrl.launch.group import next_attempt
from mutualrl.see import Exchange
from mutualrl.storage.run_info import RunInfo
from mutualrl.storage.rundir import RunDirectory, check_free, create, default_path, hold, holder_of


def test_exit_code_follows_the_error_kind() -> None:
    kinds = {
        "usage": 2,
        "recipe": 2,
        "data": 2,
        "run-directory": 2,
        "environment": 4,
        "model": 4,
        "peer-lost": 5,
        "wait-timeout": 5,
        "exchange-damaged": 6,
        "interrupted": 130,
        "failed": 1,
    }
    assert {kind: exit_code_of(kind) for kind in kinds} == kinds
    assert exit_code_of("unheard of") is None


def test_run_directory_is_claimed_once(tmp_path: Path) -> None:
    with ExitStack() as stack:
        run = create(tmp_path / "r", RunInfo(run_id="1"), stack)
        assert run.info() == RunInfo(run_id="1")
        with pytest.raises(RunDirectoryError, match=r"already holds a run.*running now: process.*--run-dir"):
            create(tmp_path / "r", RunInfo(run_id="2"), stack)
    with pytest.raises(RunDirectoryError, match=r"already holds a run \(not finished\)"), ExitStack() as stack:
        create(tmp_path / "r", RunInfo(run_id="2"), stack)
    assert run.info() == RunInfo(run_id="1")


def test_checking_a_lock_does_not_keep_another_process_from_it(tmp_path: Path) -> None:
    lock, stop = tmp_path / ".node-0.lock", threading.Event()

    def poll() -> None:
        while not stop.is_set():
            holder_of(lock)

    pollers = [threading.Thread(target=poll) for _ in range(2)]
    for poller in pollers:
        poller.start()
    try:
        for _ in range(200):
            with hold(lock, "r"):
                assert holder_of(lock) == f"process {os.getpid()} on {platform.node()}"
    finally:
        stop.set()
    assert holder_of(lock) is None


def test_attempt_number_follows_every_log_and_claim(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert next_attempt(run, "ada") == 0
    Exchange(run.exchange, "ada", "x", attempt=4).claim()
    assert next_attempt(run, "ada") == 5
    run.policy("ada").logs.mkdir(parents=True)
    (run.policy("ada").logs / "attempt-7.node-1.log").touch()
    assert next_attempt(run, "ada") == 8


def test_empty_directory_is_accepted_and_a_dangling_link_is_not(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    check_free(tmp_path / "empty")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(RunDirectoryError):
        check_free(tmp_path / "link")


def test_default_path_is_never_an_existing_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = default_path("sgt", "tiny")
    first.mkdir(parents=True)
    assert default_path("sgt", "tiny") != first
    with pytest.raises(UsageError, match="not a run directory"):
        RunDirectory(first).info()
