from __future__ import annotations

from pathlib import Path

import pytest

from mutualrl.errors import RunDirectoryError, UsageError, exit_code_of
from mutualrl.rundir import RunDirectory, check_free, create, default_path


def test_exit_codes_follow_the_kind() -> None:
    kinds = {"usage": 2, "recipe": 2, "data": 2, "run-directory": 2, "environment": 4, "model": 4, "peer-lost": 5,
             "wait-timeout": 5, "exchange-damaged": 6, "interrupted": 130, "failed": 1}  # fmt: skip
    assert {kind: exit_code_of(kind) for kind in kinds} == kinds
    assert exit_code_of("unheard of") is None


def test_a_run_directory_is_claimed_once(tmp_path: Path) -> None:
    run = create(tmp_path / "r", {"run_id": "1"})
    assert run.info() == {"run_id": "1"}
    with pytest.raises(RunDirectoryError, match=r"already holds a run.*--run-dir"):
        create(tmp_path / "r", {"run_id": "2"})
    assert run.info() == {"run_id": "1"}


def test_an_empty_directory_may_be_used_and_a_link_to_nowhere_not(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    check_free(tmp_path / "empty")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(RunDirectoryError):
        check_free(tmp_path / "link")


def test_a_default_path_is_never_one_that_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = default_path("sgt", "tiny")
    first.mkdir(parents=True)
    assert default_path("sgt", "tiny") != first
    with pytest.raises(UsageError, match="not a run directory"):
        RunDirectory(first).info()
