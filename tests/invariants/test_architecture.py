"""The rules of the house: imports point down, nothing unsafe, nothing unfinished."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import mutualrl

SOURCE = Path(mutualrl.__file__).parent

#: from the top down; a module may import from its own layer and those below it
LAYERS: list[set[str]] = [
    {"cli", "__main__"},
    {"distillation"},
    {"mwra", "evaluation", "diagnostics", "reporting"},
    {"training"},
    {"tiny", "engines", "recipes", "machine"},
    {"regimes", "thl", "see", "tasks"},
    {"storage", "process", "console", "records", "errors", "seeds", "plugins", "__init__"},
]


def package_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def level(package: str) -> int:
    return next(i for i, layer in enumerate(LAYERS) if package in layer)


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("mutualrl"):
            yield node.module
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("mutualrl"))


def test_imports_point_down() -> None:
    upward = []
    for path in SOURCE.rglob("*.py"):
        for module in imports(path):
            target = module.split(".")[1] if "." in module else "__init__"
            if level(target) < level(package_of(path)):
                upward.append(f"{path.relative_to(SOURCE)} imports {module}")
    assert not upward


def test_evaluation_and_diagnostics_never_import_training() -> None:
    for path in (*(SOURCE / "evaluation").rglob("*.py"), *(SOURCE / "diagnostics").rglob("*.py")):
        assert not [m for m in imports(path) if m.startswith("mutualrl.training")], path


def test_no_upward_edge_would_go_unnoticed() -> None:
    packages = {
        p.name.removesuffix(".py") for p in SOURCE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()
    }
    assert packages == set().union(*LAYERS)


FORBIDDEN = {
    r"^\s*(import|from) pickle": "pickle",
    r"weights_only\s*=\s*False": "unsafe load",
    r"except( Exception)?:\s*(pass)?$": "a swallowed error",
    r"\beval\(|\bexec\(": "evaluated text",
    r"\bTODO\b|NotImplementedError": "unfinished work",
    r"trust_remote_code=True": "remote code without a flag",
}


def test_nothing_unsafe_and_nothing_unfinished_in_the_source() -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{number}: {what}"
        for path in SOURCE.rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for pattern, what in FORBIDDEN.items()
        if re.search(pattern, line) and ".eval()" not in line
    ]
    assert not found


def test_recipes_are_in_the_source_tree_and_the_wheel_s_configuration() -> None:
    import tomllib

    root = SOURCE.parents[1]
    if not (root / "pyproject.toml").exists():
        import pytest

        pytest.skip("not in a source tree")
    project = tomllib.loads((root / "pyproject.toml").read_text())
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"] == {"recipes": "mutualrl/_recipes"}
