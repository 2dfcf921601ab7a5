"""`mutualrl doctor` where mutualrl is imported from a source tree and was not installed."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest

from conftest import Cli
from mutualrl.launch.plan import plan
from mutualrl.launch.session import Launch
from mutualrl.machine.devices import Machine
from mutualrl.machine.extensions import build_locks
from mutualrl.recipes import Request, resolve


def test_package_that_is_only_imported_is_reported(cli_here: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", requires)
    result = cli_here("doctor", "--json")
    checks = {row["check"]: row for row in json.loads(result.stdout)["checks"]}
    assert checks["mutualrl"]["status"] == "warn"
    assert "pip install ." in checks["mutualrl"]["advice"]
    assert checks["file locks"]["status"] == "ok"


def test_lock_of_a_build_that_was_killed_is_named_by_doctor_and_by_a_start(
    cli_here: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / "extensions" / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    rows = json.loads(cli_here("doctor", "--json").stdout)["checks"]
    assert [row["advice"].rpartition("rm ")[2] for row in rows if row["check"] == "C++ operator"] == [str(lock)]
    machine = Machine((), 2)
    for strategy, named in (("zero2", True), ("ddp", False)):
        recipe = resolve(Request(pool="tiny", assignments=(f"launch.strategy={strategy}",)))
        assert any(str(lock) in note for note in plan(recipe, machine, Launch()).notes) is named


def test_locks_of_builds_are_looked_for_where_torch_puts_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    from torch.utils.cpp_extension import _get_build_directory, get_default_build_root

    lock = Path(_get_build_directory("an_operator", verbose=False)) / "lock"
    assert lock.is_relative_to(get_default_build_root())
    lock.touch()
    assert build_locks() == [lock]
