"""Architecture rules: imports point down, no unsafe or unfinished code."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import mutualrl
from conftest import REPOSITORY

SOURCE = Path(mutualrl.__file__).parent

#: from top to bottom; a module may import from its own layer and the layers below it
LAYERS: list[set[str]] = [
    {"cli", "__main__"},
    {"paper"},
    {"study"},
    {"launch", "evaluation", "diagnostics", "reporting"},
    {"runs"},
    {"training"},
    {"mwra", "adapter"},
    {"tiny", "engines", "recipes", "machine"},
    {"sources"},
    {"regimes", "thl", "see", "tasks"},
    {
        "storage",
        "process",
        "console",
        "records",
        "rollouts",
        "errors",
        "seeds",
        "section",
        "imported",
        "references",
        "traits",
        "trajectory",
        "__init__",
    },
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


def test_pandas_and_the_logs_of_runs_are_read_below_runs_only() -> None:
    """`training` and `storage` write the logs."""
    for path in SOURCE.rglob("*.py"):
        text, room = path.read_text(), package_of(path)
        if room != "runs":
            assert not re.search(r"^\s*(import|from) pandas", text, re.MULTILINE), path
        if room not in ("runs", "training", "storage"):
            assert not re.search(r"\.(metrics|rescues)\.(read|open)", text), path


#: modules of `training` without TRL: diagnostics rehearse a regime with them
WITHOUT_TRL = {"mutualrl.training.transfer"}


WITHOUT_TRAINING = ("evaluation", "diagnostics", "paper/specs", "paper/thl")


def test_evaluation_and_diagnostics_never_import_training() -> None:
    for path in (path for room in WITHOUT_TRAINING for path in (SOURCE / room).rglob("*.py")):
        assert not [m for m in imports(path) if m.startswith("mutualrl.training") and m not in WITHOUT_TRL], path


def module_imports(*, types: bool = False) -> dict[str, set[str]]:
    """Return the modules that each module imports, also inside functions; under TYPE_CHECKING only with `types`."""
    paths = {}
    for path in SOURCE.rglob("*.py"):
        name = ".".join(("mutualrl", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
        paths[name] = path
    graph: dict[str, set[str]] = {}
    for name, path in paths.items():
        tree, type_only, targets = ast.parse(path.read_text()), set(), set()
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                for child in node.body:
                    type_only.update(ast.walk(child))
        for node in ast.walk(tree):
            if node in type_only and not types:
                continue
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("mutualrl."):
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    targets.add(full if full in paths else node.module)
            if isinstance(node, ast.Import):
                targets.update(alias.name for alias in node.names)
        graph[name] = {target for target in targets if target in paths and target != name}
    return graph


@pytest.mark.parametrize("types", [False, True])
def test_there_are_no_import_cycles(types: bool) -> None:
    graph = module_imports(types=types)
    visited: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"cycle: {' -> '.join((*path[path.index(name) :], name))}"
        if name not in visited:
            for target in sorted(graph[name]):
                visit(target, (*path, name))
            visited.add(name)

    for name in sorted(graph):
        visit(name, ())


def test_package_root_has_only_shared_modules() -> None:
    modules = {path.name for path in SOURCE.iterdir() if not (path / "__init__.py").exists() and path.suffix == ".py"}
    shared = {
        f"{name}.py"
        for name in (
            "errors",
            "imported",
            "records",
            "references",
            "rollouts",
            "section",
            "seeds",
            "traits",
            "trajectory",
        )
    }
    assert modules == {"__init__.py", "__main__.py", *shared}


#: diagnostics of a single regime, and modules that use TRL's loss type with the name of our baseline
ONE_REGIME = {"diagnostics/specs/sgt_check.py", "paper/specs/xgrpo_check.py"}
LOSS_TYPES = {"recipes/trainer_keys.py", "recipes/resolution.py", "regimes/losses.py"}


def strings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the string constants of a module, without docstrings."""
    tree = ast.parse(path.read_text())
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docstrings.add(node.value)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            yield node.lineno, node.value


def test_no_regime_name_or_metric_is_hard_coded_outside_regimes() -> None:
    from mutualrl.regimes import regimes

    names = set(regimes())
    keys = {metric.key for regime in regimes().values() for metric in regime.metrics}
    prefixes = tuple(sorted({key.partition("/")[0] + "/" for key in keys}))
    matches = []
    for path in SOURCE.rglob("*.py"):
        module = path.relative_to(SOURCE).as_posix()
        if module.startswith("regimes/") or module in ONE_REGIME:
            continue
        for line, text in strings(path):
            trl_loss = text == "grpo" and module in LOSS_TYPES
            if (text in names and not trl_loss) or text.startswith(prefixes):
                matches.append(f"{module}:{line}: {text!r}")
    assert not matches


def test_string_scan_finds_names_and_metrics_but_not_docstrings(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text('"""About sgt."""\nif name == "sgt":\n    key = "sgt/pairs"\n')
    assert [text for _, text in strings(path)] == ["sgt", "sgt/pairs"]


def test_metrics_of_the_framework_are_declared_once_and_documented() -> None:
    from mutualrl.storage.metrics import FRAMEWORK

    keys = [metric.key for metric in FRAMEWORK]
    assert len(keys) == len(set(keys))
    prefixes = tuple(sorted({key.partition("/")[0] + "/" for key in keys} | {"source/"}))
    bare = []
    for path in SOURCE.rglob("*.py"):
        module = path.relative_to(SOURCE).as_posix()
        if module != "storage/metrics.py":
            bare += [
                f"{module}:{line}: {text!r}"
                for line, text in strings(path)
                if re.match(rf"({'|'.join(prefixes)})(\w|$)", text)
            ]
    assert bare == []
    page = SOURCE.parents[1] / "docs" / "regimes.md"
    if page.exists():
        rows = [f"| `{metric.key}` | {metric.unit} | {metric.meaning} |" for metric in FRAMEWORK]
        assert [row for row in rows if row not in page.read_text()] == []


def test_every_package_is_in_a_layer() -> None:
    packages = {
        p.name.removesuffix(".py") for p in SOURCE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()
    }
    assert packages == set().union(*LAYERS)


@pytest.mark.parametrize("section", sorted(path.parent.name for path in SOURCE.glob("*/section.py")))
def test_section_of_a_room_imports_the_bottom_only(section: str) -> None:
    """A section is read where a recipe is: what its room needs to work is imported when it works."""
    code = f"import sys, mutualrl.{section}.section; print('\\n'.join(sys.modules))"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"numpy", "pyarrow", "torch", "transformers", "datasets", "yaml"} & set(modules)
    rooms = {name.split(".")[1] for name in modules if name.startswith("mutualrl.")}
    assert rooms - {section} <= {*LAYERS[-1]}


FORBIDDEN = {
    r"^\s*(import|from) pickle": "pickle",
    r"weights_only\s*=\s*False": "unsafe load",
    r"except( Exception)?:\s*(pass)?$": "a swallowed error",
    r"\beval\(|\bexec\(": "evaluated text",
    r"\bTODO\b|NotImplementedError": "unfinished work",
    r"trust_remote_code=True": "remote code without a flag",
}


def test_source_has_no_unsafe_or_unfinished_code() -> None:
    results = [
        f"{path.relative_to(SOURCE)}:{number}: {problem}"
        for path in SOURCE.rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for pattern, problem in FORBIDDEN.items()
        if re.search(pattern, line) and ".eval()" not in line
    ]
    assert not results


def test_wheel_configuration_includes_the_recipes() -> None:
    import tomllib

    root = SOURCE.parents[1]
    if not (root / "pyproject.toml").exists():
        import pytest

        pytest.skip("not in a source tree")
    project = tomllib.loads((root / "pyproject.toml").read_text())
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"] == {"recipes": "mutualrl/_recipes"}


def test_every_guarantee_names_an_existing_test() -> None:
    page = REPOSITORY / "SECURITY.md"
    if not page.is_file():
        pytest.skip("not in a source tree")
    rows = [
        line for line in page.read_text().splitlines() if line.startswith("| ") and not line.startswith("| guarantee")
    ]
    assert len(rows) > 20
    before: list[str] = []
    for row in rows:
        tests = re.findall(r"`(tests/[\w/]+\.py)`", row) or (before if "the same" in row else [])
        assert tests, row
        assert all((page.parent / name).is_file() for name in tests), row
        before = tests


def test_lock_file_has_the_pinned_versions_with_hashes() -> None:
    text = (REPOSITORY / "requirements.lock").read_text().replace("\\\n", "")
    locked = [line for line in text.splitlines() if line and not line.startswith("#")]
    constraints = (REPOSITORY / "constraints.txt").read_text().splitlines()
    pinned = {line for line in constraints if not line.startswith(("#", "torch=="))}
    assert {line.split()[0] for line in locked} == pinned  # the torch build depends on the machine
    for line in locked:
        assert re.fullmatch(r"\S+==\S+( +--hash=sha256:[0-9a-f]{64})+", line), line


def test_pinned_versions_satisfy_the_requirements_of_the_package() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    extras = project["optional-dependencies"]
    requirements = [
        Requirement(text) for text in (*project["dependencies"], *extras["test"], *extras["docs"], *extras["dev"])
    ]
    applicable = [r for r in requirements if r.name != "mutualrl" and (r.marker is None or r.marker.evaluate())]
    for requirement in applicable:
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), requirement


#: what was measured last: it may fall, and the numbers with it, but not grow
NAMES_TWICE, PAIRS, FLOORS = 0, 12, 12
CLASSES, NODES = 564, 438_200
#: conditions that ask after a capability, and the names by which code asks
ASKED = {
    r"(with_turns|has_turns|acting|acts|messages|trajector\w*|turns\w*|tool_schemas|tools|is_text)": 108,
    r"(strategy|ZERO|SHARDED|FSDP2|is_fsdp2|zero\d|sharding|stage|wraps_layers|_deepspeed)": 34,
}
EQUAL_FIELDS = 5


def own_fields(node: ast.ClassDef) -> set[str]:
    """Return the names of the fields that a class declares itself."""
    declared = [each for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)]
    return {each.target.id for each in declared if "ClassVar" not in ast.unparse(each.annotation)}  # type: ignore[union-attr]


def copies(source: Path) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the class names that are defined more than once, and the pairs of classes that declare five or more fields
    of equal names."""
    names: list[str] = []
    fields: list[tuple[str, set[str]]] = []
    for path in sorted(source.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                names.append(node.name)
                fields.append((f"{path.relative_to(source)}:{node.name}", own_fields(node)))
    twice = sorted({name for name in names if names.count(name) > 1})
    pairs = [(a, b) for (a, of_a), (b, of_b) in combinations(fields, 2) if len(of_a & of_b) >= EQUAL_FIELDS]
    return twice, pairs


def floors(source: Path) -> int:
    """Return the length of the longest chain of rooms, each of which imports the next."""
    below: dict[str, set[str]] = {}
    for path in source.rglob("*.py"):
        room = path.relative_to(source).parts[0].removesuffix(".py")
        targets = {module.split(".")[1] for module in imports(path) if "." in module}
        below.setdefault(room, set()).update(targets - {room})

    def depth(room: str, above: frozenset[str]) -> int:
        above |= {room}
        return 1 + max((depth(each, above) for each in below.get(room, set()) - above), default=0)

    return max(depth(room, frozenset()) for room in below)


def test_copies_and_floors_do_not_grow() -> None:
    twice, pairs = copies(SOURCE)
    assert len(twice) <= NAMES_TWICE, twice
    assert len(pairs) <= PAIRS, pairs
    assert floors(SOURCE) <= FLOORS


def conditions(tree: ast.AST) -> Iterator[set[str]]:
    """Yield the names in each condition: if, ?:, while, assert, the ifs of comprehensions and guards."""
    tests: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert):
            tests.append(node.test)
        elif isinstance(node, ast.comprehension):
            tests += node.ifs
        elif isinstance(node, ast.match_case) and node.guard is not None:
            tests.append(node.guard)
    for test in tests:
        yield {
            n.id if isinstance(n, ast.Name) else n.attr
            for n in ast.walk(test)
            if isinstance(n, ast.Name | ast.Attribute)
        }


def asked(trees: Sequence[ast.AST], pattern: str) -> int:
    """Return the number of conditions that have one of these names."""
    return sum(any(re.fullmatch(pattern, name) for name in names) for tree in trees for names in conditions(tree))


def test_syntax_and_questions_do_not_grow() -> None:
    trees = [ast.parse(path.read_text()) for path in SOURCE.rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    assert len(nodes) <= NODES, "more syntax: remove as much as you add, or raise NODES and say why in the commit"
    assert sum(isinstance(node, ast.ClassDef) for node in nodes) <= CLASSES
    found = {pattern: asked(trees, pattern) for pattern in ASKED}
    assert all(found[pattern] <= most for pattern, most in ASKED.items()), found


def test_questions_are_counted() -> None:
    tree = ast.parse(
        "if a.tools and b: x\ny = [c for c in d if c.tools]\nz = 1 if tools else 2\nassert tool\nw = a.tools"
    )
    assert asked([tree], "tools") == 3


def test_copies_and_floors_are_counted(tmp_path: Path) -> None:
    for room, imported, names in (("top", "middle", "abcde"), ("middle", "bottom", "abcdef"), ("bottom", "", "abcd")):
        (tmp_path / room).mkdir()
        fields = "".join(f"    {name}: int\n" for name in names)
        line = f"from mutualrl.{imported} import x\n" if imported else ""
        (tmp_path / room / "m.py").write_text(f"{line}class Same:\n    kind: ClassVar[str]\n{fields}")
    assert copies(tmp_path) == (["Same"], [("middle/m.py:Same", "top/m.py:Same")])
    assert floors(tmp_path) == 3
