"""User's own code by import path: `package.module:NAME` or `path/to/file.py:NAME`.

Loading a module runs it, as any import does: such a path is only ever taken from what the user typed, or from the
recipe of a run that the user trains, resumes or evaluates.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import re
import sys
import traceback
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from mutualrl.errors import UsageError

IMPORT_PATH = re.compile(r"(?P<module>[A-Za-z_][\w.]*|.*\.py):(?P<name>[A-Za-z_]\w*)")
FORM = "'package.module:NAME' or 'path/to/file.py:NAME'"


def is_import_path(text: str) -> bool:
    """Return whether a text names an object of the user's code."""
    return IMPORT_PATH.fullmatch(text) is not None


def absolute_path(text: str) -> str:
    """Return an import path whose file, if it names one, is absolute: a recipe means the same from every directory."""
    match = IMPORT_PATH.fullmatch(text)
    if match is None or not match["module"].endswith(".py"):
        return text
    return f"{Path(match['module']).expanduser().resolve()}:{match['name']}"


def without_directory(text: str) -> str:
    """Return an import path whose file, if it names one, is named without its directory: the same on every machine."""
    match = IMPORT_PATH.fullmatch(text)
    if match is None or not match["module"].endswith(".py"):
        return text
    return f"{Path(match['module']).name}:{match['name']}"


def load_object(path: str, what: str, error: type[UsageError] = UsageError, noun: str = "object") -> Any:
    """Return the object that an import path names; the working directory is searched last.

    `what`: the flag or key that the path was given for; `noun`: what it should name. Raises `error` naming file and
    line of what failed.
    """
    match = IMPORT_PATH.fullmatch(path)
    if match is None:
        raise error(f"{what}: found {path!r}, expected {FORM}")
    module = _import(match["module"], path, what, error)
    if not hasattr(module, match["name"]):
        where = getattr(module, "__file__", None) or match["module"]
        raise error(f"{what}: {where} has no {noun} {match['name']!r}")
    return getattr(module, match["name"])


def require_there(path: str, what: str, noun: str = "object") -> None:
    """Raise UsageError where an import path names no file, no installed package, or no name in its file; nothing is
    run. What only running it would tell is left to `load_object`."""
    match = IMPORT_PATH.fullmatch(path)
    if match is None:
        return
    if not match["module"].endswith(".py"):
        package = match["module"].partition(".")[0]
        beside = Path.cwd() / package
        if importlib.util.find_spec(package) is None and not (beside.is_dir() or beside.with_suffix(".py").is_file()):
            raise UsageError(f"{what}: {path!r} cannot be imported: No module named {package!r}")
        return
    file = _file_of(match["module"], path, what, UsageError)
    names = _top_level_names(file)
    if names is not None and match["name"] not in names:
        raise UsageError(f"{what}: {file} has no {noun} {match['name']!r}")


def _top_level_names(file: Path) -> set[str] | None:
    """Return the names that a file defines at its top; None where only running it would tell."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return None
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}
        elif not isinstance(node, ast.Expr):
            return None  # an `if`, a `try`, a loop: what they define is not known here
    return None if "*" in names or "__getattr__" in names else names


def source_digest(path: str) -> str:
    """Return the sha256 of the file that an import path names, in hex."""
    match = IMPORT_PATH.fullmatch(path)
    assert match is not None, path
    if match["module"].endswith(".py"):
        return hashlib.sha256(Path(match["module"]).read_bytes()).hexdigest()
    _search_here()
    module = importlib.util.find_spec(match["module"])
    origin = None if module is None else module.origin
    return "" if origin is None else hashlib.sha256(Path(origin).read_bytes()).hexdigest()


def entry_points(group: str) -> dict[str, metadata.EntryPoint]:
    """Return what installed packages offer under an entry-point group, by name."""
    return {point.name: point for point in metadata.entry_points(group=group)}


def _import(name: str, path: str, what: str, error: type[UsageError]) -> ModuleType:
    try:
        if name.endswith(".py"):
            return _run_file(_file_of(name, path, what, error))
        _search_here()
        return importlib.import_module(name)
    except UsageError:
        raise
    except Exception as cause:
        raise error(f"{what}: {path!r} cannot be imported: {_where(cause)}{type(cause).__name__}: {cause}") from cause


def _search_here() -> None:
    """Make modules of the working directory importable, last: nothing there hides an installed package."""
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))


def _where(cause: Exception) -> str:
    """Return the file and line in which an import failed, where that is known."""
    if isinstance(cause, SyntaxError):  # its own text names file and line
        return ""
    frames = [frame for frame in traceback.extract_tb(cause.__traceback__) if not frame.filename.startswith("<frozen")]
    inside = [frame for frame in frames if frame.filename != __file__ and "importlib" not in frame.filename]
    return f"{inside[-1].filename}, line {inside[-1].lineno}: " if inside else ""


def _file_of(module: str, path: str, what: str, error: type[UsageError]) -> Path:
    """Return the file that an import path names. Raises `error` where there is none."""
    file = Path(module).expanduser().resolve()
    if not file.is_file():
        raise error(f"{what}: {path!r}: no such file: {file}")
    return file


def _run_file(file: Path) -> ModuleType:
    """Return the module that a file makes; run once, however many objects are taken from it."""
    known = f"mutualrl_own_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    if known in sys.modules:
        return sys.modules[known]
    spec = importlib.util.spec_from_file_location(known, file)
    assert spec is not None and spec.loader is not None, file  # it ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[known] = module  # dataclasses, among others, look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[known]
        raise
    return module
