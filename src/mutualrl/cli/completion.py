"""Shell completion: names of recipes, pools, tasks, regimes and runs, and keys of a recipe.

`mutualrl --install-completion` installs it. Each function gets the command so far and the incomplete word; no user code
is executed.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from typer import Context

from mutualrl.errors import MutualRLError
from mutualrl.recipes import Recipe, shipped, templates
from mutualrl.recipes.layers import find, recipe_file
from mutualrl.recipes.trainer_table import fields
from mutualrl.recipes.yaml_file import read
from mutualrl.regimes import regimes
from mutualrl.tasks import TASKS


def recipe_names(context: Context, incomplete: str) -> list[str]:
    """Return shipped recipes, as arguments of `train`, and YAML files."""
    names = [f"{kind}/{name}" for kind, name, _ in shipped() if kind == "paper"]
    return _matching(names, incomplete) + _paths(incomplete, ".yaml")


def copied_names(context: Context, incomplete: str) -> list[str]:
    """Return recipes and templates, as arguments of `recipes show` and `recipes cp`."""
    return _matching([f"{kind}/{name}" for kind, name, _ in (*shipped(), *templates())], incomplete)


def pool_names(context: Context, incomplete: str) -> list[str]:
    """Return shipped pools, and YAML files."""
    return _matching([name for kind, name, _ in shipped() if kind == "pools"], incomplete) + _paths(incomplete, ".yaml")


def task_names(context: Context, incomplete: str) -> list[str]:
    """Return the names of tasks."""
    return _matching(TASKS, incomplete)


def regime_names(context: Context, incomplete: str) -> list[tuple[str, str]]:
    """Return regimes with their summaries."""
    return [(name, regime.summary) for name, regime in regimes().items() if name.startswith(incomplete)]


def run_directories(context: Context, incomplete: str) -> list[str]:
    """Return run directories: those under runs/, and those under the incomplete path."""
    candidates = _entries(Path("runs"))
    if incomplete:
        candidates += _entries(_directory_of(incomplete))
    return _matching(dict.fromkeys(str(path) for path in candidates if _is_run(path)), incomplete)


def _directory_of(incomplete: str) -> Path:
    """Return the directory whose entries the word may name."""
    return Path(incomplete) if incomplete.endswith("/") else Path(incomplete).parent


def _entries(directory: Path) -> list[Path]:
    """Return the entries of a directory; none if it cannot be read, since completion prints no errors."""
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []


def _is_run(path: Path) -> bool:
    try:
        return (path / "run.json").is_file()
    except OSError:
        return False


def policy_names(context: Context, incomplete: str) -> list[str]:
    """Return the policies of the pool or recipe given earlier on the command line, as named in its file."""
    pool, recipe = context.params.get("pool"), context.params.get("recipe")
    try:
        content = read(recipe_file(Path(recipe))) if recipe is not None else {}
        pool = pool or content.get("pool") or "tiny"
        if "policies" not in content:
            content = read(find("pools", pool))
    except (MutualRLError, OSError, TypeError, ValueError):
        return []  # the command itself reports the error
    entries = content.get("policies")
    if not isinstance(entries, list):
        return []
    names = [entry.get("name") for entry in entries if isinstance(entry, dict)]
    return _matching([name for name in names if isinstance(name, str)], incomplete)


def recipe_keys(context: Context, incomplete: str) -> list[str]:
    """Return keys of `--set`: those of every section, all of TRL's GRPOConfig, and every regime's settings."""
    keys = [f"trainer.{name}" for name in fields()]
    for regime in regimes().values():
        keys += [f"regime.{name}" for name in regime.model_fields]
    for name, field in Recipe.model_fields.items():
        inner = getattr(field.annotation, "model_fields", None)
        if inner is not None and name not in ("trainer", "regime"):
            keys += [f"{name}.{key}" for key in inner]
    return _matching([f"{key}=" for key in dict.fromkeys(keys)], incomplete)


def _matching(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _paths(incomplete: str, suffix: str) -> list[str]:
    """Return files with a suffix, and directories with a trailing slash."""
    prefix = incomplete[: incomplete.rfind("/") + 1]
    names = []
    for path in _entries(_directory_of(incomplete)):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            names.append(f"{prefix}{path.name}/")
        elif path.suffix == suffix:
            names.append(f"{prefix}{path.name}")
    return _matching(names, incomplete)
