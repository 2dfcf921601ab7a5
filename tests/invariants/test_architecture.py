"""Rules of the house: imports point down, nothing unsafe, nothing unfinished."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import mutualrl
from conftest import REPOSITORY

SOURCE = Path(mutualrl.__file__).parent

#: from the top down; a module may import from its own layer and those below it
LAYERS: list[set[str]] = [
    {"cli", "__main__"},
    {"study"},
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


#: of `training`, what holds no TRL: diagnostics rehearse a regime with it
WITHOUT_TRL = {"mutualrl.training.transfer"}


def test_evaluation_and_diagnostics_never_import_training() -> None:
    for path in (*(SOURCE / "evaluation").rglob("*.py"), *(SOURCE / "diagnostics").rglob("*.py")):
        assert not [m for m in imports(path) if m.startswith("mutualrl.training") and m not in WITHOUT_TRL], path


def module_imports() -> dict[str, set[str]]:
    """Return the modules that each module imports, inside functions too; what only a type checker sees is left out."""
    paths = {}
    for path in SOURCE.rglob("*.py"):
        name = ".".join(("mutualrl", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
        paths[name] = path
    graph: dict[str, set[str]] = {}
    for name, path in paths.items():
        tree, unseen, targets = ast.parse(path.read_text()), set(), set()
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                for child in node.body:
                    unseen.update(ast.walk(child))
        for node in ast.walk(tree):
            if node in unseen:
                continue
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("mutualrl."):
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    targets.add(full if full in paths else node.module)
            if isinstance(node, ast.Import):
                targets.update(alias.name for alias in node.names)
        graph[name] = {target for target in targets if target in paths and target != name}
    return graph


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = module_imports()
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, f"circle: {' -> '.join((*way[way.index(name) :], name))}"
        if name not in done:
            for target in sorted(graph[name]):
                visit(target, (*way, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())


def test_the_root_of_the_package_holds_nouns_and_errors() -> None:
    modules = {path.name for path in SOURCE.iterdir() if not (path / "__init__.py").exists() and path.suffix == ".py"}
    assert modules == {"__init__.py", "__main__.py", "errors.py", "plugins.py", "records.py", "seeds.py"}


#: the diagnostics that are about one regime, and TRL's own loss called like our baseline
ABOUT_ONE = {"diagnostics/sgt_check.py", "diagnostics/xgrpo_check.py"}
LOSS_TYPES = {"recipes/trainer_keys.py", "recipes/resolve.py", "regimes/losses.py"}


def strings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield string constants of a module, docstrings left out."""
    tree = ast.parse(path.read_text())
    prose = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            prose.add(node.value)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in prose:
            yield node.lineno, node.value


def test_nothing_outside_the_regimes_spells_a_regime_s_name_or_metric() -> None:
    from mutualrl.regimes import regimes

    names = set(regimes())
    keys = {metric.key for spec in regimes().values() for metric in spec.metrics}
    prefixes = tuple(sorted({key.partition("/")[0] + "/" for key in keys}))
    spelt = []
    for path in SOURCE.rglob("*.py"):
        where = path.relative_to(SOURCE).as_posix()
        if where.startswith("regimes/") or where in ABOUT_ONE:
            continue
        for line, text in strings(path):
            trl_loss = text == "grpo" and where in LOSS_TYPES
            if (text in names and not trl_loss) or text.startswith(prefixes):
                spelt.append(f"{where}:{line}: {text!r}")
    assert not spelt


def test_the_blind_check_would_see_a_name(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text('"""About sgt."""\nif name == "sgt":\n    key = "sgt/pairs"\n')
    assert [text for _, text in strings(path)] == ["sgt", "sgt/pairs"]


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
    results = [
        f"{path.relative_to(SOURCE)}:{number}: {what}"
        for path in SOURCE.rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for pattern, what in FORBIDDEN.items()
        if re.search(pattern, line) and ".eval()" not in line
    ]
    assert not results


def test_recipes_are_in_the_source_tree_and_the_wheel_s_configuration() -> None:
    import tomllib

    root = SOURCE.parents[1]
    if not (root / "pyproject.toml").exists():
        import pytest

        pytest.skip("not in a source tree")
    project = tomllib.loads((root / "pyproject.toml").read_text())
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"] == {"recipes": "mutualrl/_recipes"}


def test_every_guarantee_names_a_test_that_is_there() -> None:
    page = REPOSITORY / "SECURITY.md"
    if not page.is_file():
        pytest.skip("not in a source tree")
    rows = [
        line for line in page.read_text().splitlines() if line.startswith("| ") and not line.startswith("| guarantee")
    ]
    assert len(rows) > 20
    before: list[str] = []
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)`", row) or (before if "the same" in row else [])
        assert named, row
        assert all((page.parent / name).is_file() for name in named), row
        before = named


def test_the_lock_has_the_pinned_versions_with_hashes() -> None:
    text = (REPOSITORY / "requirements.lock").read_text().replace("\\\n", "")
    locked = [line for line in text.splitlines() if line and not line.startswith("#")]
    constraints = (REPOSITORY / "constraints.txt").read_text().splitlines()
    pinned = {line for line in constraints if not line.startswith(("#", "torch=="))}
    assert {line.split()[0] for line in locked} == pinned  # torch's build is the machine's
    for line in locked:
        assert re.fullmatch(r"\S+==\S+( +--hash=sha256:[0-9a-f]{64})+", line), line


def test_the_pinned_versions_are_within_the_bounds_of_the_package() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    extras = project["optional-dependencies"]
    wanted = [
        Requirement(text) for text in (*project["dependencies"], *extras["test"], *extras["docs"], *extras["dev"])
    ]
    names = [each for each in wanted if each.name != "mutualrl" and (each.marker is None or each.marker.evaluate())]
    for each in names:
        assert each.specifier.contains(pinned[canonicalize_name(each.name)]), each
