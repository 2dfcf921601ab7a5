"""`mutualrl doctor` where mutualrl is imported from a source tree and was not installed."""

from __future__ import annotations

import json
from importlib import metadata

import pytest

from conftest import Cli


def test_package_that_is_only_imported_is_reported(cli_here: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", requires)
    result = cli_here("doctor", "--json")
    checks = {row["check"]: row for row in json.loads(result.stdout)["checks"]}
    assert checks["mutualrl"]["status"] == "warn"
    assert "pip install ." in checks["mutualrl"]["advice"]
    assert checks["file locks"]["status"] == "ok"
