"""Garbage collection during imports of large libraries."""

from __future__ import annotations

import gc
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from mutualrl.process.loading import fast_imports


def test_collection_is_disabled_in_the_block_and_enabled_after_it() -> None:
    with fast_imports():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), fast_imports():
        import no_such_module  # noqa: F401
    assert gc.isenabled()


def test_records_of_installed_packages_are_read_once() -> None:
    before = metadata.packages_distributions
    with fast_imports():
        assert metadata.packages_distributions() is metadata.packages_distributions()
    assert metadata.packages_distributions is before
    assert metadata.packages_distributions() is not metadata.packages_distributions()


def test_first_imports_are_frozen_and_garbage_of_models_is_collected() -> None:
    lines = [
        "import gc, weakref",
        "from mutualrl.process.loading import fast_imports",
        "with fast_imports():",
        "    import torch",
        "frozen = gc.get_freeze_count()",
        "assert frozen > 50_000, frozen",
        "class Model: pass",
        "model = Model(); model.itself = model",
        "seen = weakref.ref(model)",
        "with fast_imports():",
        "    del model",
        "gc.collect()",
        "assert seen() is None",
        "assert gc.get_freeze_count() <= frozen",
    ]
    result = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


#: prints whether garbage is collected while transformers is imported, then runs a command
WATCHED = """
import gc, sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "transformers.generation.utils":
            print("collects" if gc.isenabled() else "does not collect", file=sys.stderr)

sys.meta_path.insert(0, Watch())
from mutualrl.cli.app import app
app(sys.argv[1:])
"""


@pytest.mark.parametrize(
    "command",
    [
        ("train", "--pool", "tiny", "--dry-run"),
        ("train", "--model", "tiny:ada", "--source", "book=recorded:tiny:book", "--regime", "sgt", "--dry-run"),
        ("regimes", "check", "sgt"),
    ],
    ids=" ".join,
)
def test_commands_import_transformers_without_collection(command: tuple[str, ...], tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", WATCHED, *command], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    assert "does not collect\n" in result.stderr
    assert "\ncollects\n" not in f"\n{result.stderr}"
