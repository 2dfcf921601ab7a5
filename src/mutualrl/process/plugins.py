"""User code by import path: `package.module:NAME` or `path/to/file.py:NAME`.

Loading a module executes it, as any import does: such a path only ever comes from the user's input, or from the recipe
of a run that the user trains, resumes or evaluates.
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
from mutualrl.process import user_code
from mutualrl.process.user_code import LEAVING, contained, describe

IMPORT_PATH = re.compile(r"(?P<module>[A-Za-z_][\w.]*|.*\.py):(?P<name>[A-Za-z_]\w*)")
FORM = "'package.module:NAME' or 'path/to/file.py:NAME'"


def is_import_path(text: str) -> bool:
    """Return whether a text is an import path of user code."""
    return IMPORT_PATH.fullmatch(text) is not None


def absolute_path(text: str) -> str:
    """Return an import path with its file, if any, made absolute: independent of the working directory."""
    match = IMPORT_PATH.fullmatch(text)
    if match is None or not match["module"].endswith(".py"):
        return text
    return f"{Path(match['module']).expanduser().resolve()}:{match['name']}"


def portable_path(text: str) -> str:
    """Return an import path with its file, if any, reduced to its name: the same on every machine."""
    match = IMPORT_PATH.fullmatch(text)
    if match is None or not match["module"].endswith(".py"):
        return text
    return f"{Path(match['module']).name}:{match['name']}"


def load_object(path: str, what: str, error: type[UsageError] = UsageError, noun: str = "object") -> Any:
    """Return the object at an import path; the working directory is searched last.

    `what`: the flag or key that has the path; `noun`: the kind of object expected. Raises `error` with the file and
    line of the failure.
    """
    match = IMPORT_PATH.fullmatch(path)
    if match is None:
        raise error(f"{what}: found {path!r}, expected {FORM}")
    module = _import(match["module"], path, what, error)
    if not hasattr(module, match["name"]):
        source = getattr(module, "__file__", None) or match["module"]
        raise error(f"{what}: {source} has no {noun} {match['name']!r}")
    return getattr(module, match["name"])


def check_import_path(path: str, what: str, noun: str = "object") -> None:
    """Raise UsageError if the file, the package or the name of an import path does not exist. No code is executed;
    `load_object` raises the errors that only execution reveals."""
    match = IMPORT_PATH.fullmatch(path)
    if match is None:
        return
    if not match["module"].endswith(".py"):
        package = match["module"].partition(".")[0]
        local = Path.cwd() / package
        if importlib.util.find_spec(package) is None and not (local.is_dir() or local.with_suffix(".py").is_file()):
            raise UsageError(f"{what}: {path!r} cannot be imported: No module named {package!r}")
        return
    file = _file_of(match["module"], path, what, UsageError)
    names = _top_level_names(file)
    if names is not None and match["name"] not in names:
        raise UsageError(f"{what}: {file} has no {noun} {match['name']!r}")


def _top_level_names(file: Path) -> set[str] | None:
    """Return the names that a file defines at top level; None if only executing the file reveals them."""
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
            for target in targets:
                names |= {child.id for child in ast.walk(target) if isinstance(child, ast.Name)}
        elif not isinstance(node, ast.Expr):
            return None  # `if`, `try` or a loop: the names that it defines are unknown
    return None if "*" in names or "__getattr__" in names else names


def source_digest(path: str) -> str:
    """Return the sha256 of an import path's file, in hex."""
    match = IMPORT_PATH.fullmatch(path)
    assert match is not None, path
    if match["module"].endswith(".py"):
        return hashlib.sha256(Path(match["module"]).read_bytes()).hexdigest()
    _append_working_directory()
    module = importlib.util.find_spec(match["module"])
    origin = None if module is None else module.origin
    return "" if origin is None else hashlib.sha256(Path(origin).read_bytes()).hexdigest()


def entry_points(group: str) -> dict[str, metadata.EntryPoint]:
    """Return the entry points of a group in the installed packages, by name."""
    return {point.name: point for point in metadata.entry_points(group=group)}


def _import(name: str, path: str, what: str, error: type[UsageError]) -> ModuleType:
    try:
        with contained():
            if name.endswith(".py"):
                return _run_file(_file_of(name, path, what, error))
            _append_working_directory()
            return importlib.import_module(name)
    except UsageError:
        raise
    except (Exception, *LEAVING) as cause:
        raise error(f"{what}: {path!r} cannot be imported: {_line_of(cause)}{describe(cause)}") from cause


def _append_working_directory() -> None:
    """Append the working directory to sys.path, so that its modules do not shadow installed packages."""
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))


def _line_of(cause: BaseException) -> str:
    """Return the file and line where an import failed, if known."""
    if isinstance(cause, SyntaxError):  # its message has file and line
        return ""
    frames = [frame for frame in traceback.extract_tb(cause.__traceback__) if not frame.filename.startswith("<frozen")]
    user_frames = [
        frame
        for frame in frames
        if frame.filename not in (__file__, user_code.__file__) and "importlib" not in frame.filename
    ]
    return f"{user_frames[-1].filename}, line {user_frames[-1].lineno}: " if user_frames else ""


def _file_of(module: str, path: str, what: str, error: type[UsageError]) -> Path:
    """Return the file of an import path. Raises `error` if it does not exist."""
    file = Path(module).expanduser().resolve()
    if not file.is_file():
        raise error(f"{what}: {path!r}: no such file: {file}")
    return file


def _run_file(file: Path) -> ModuleType:
    """Return the module of a file; it is executed once, however many objects are loaded from it. Its directory is
    searched last for what it imports."""
    name = f"mutualrl_own_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, file  # its suffix is .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses, among others, look up their module
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
