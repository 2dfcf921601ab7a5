"""`mutualrl recipes`: list, show and copy the shipped recipes."""

from __future__ import annotations

import json
from pathlib import Path

import typer
from rich.table import Table
from rich.text import Text

from mutualrl.cli.commands import RecipesCp, RecipesDiff, RecipesLs, RecipesShow
from mutualrl.cli.output import emit, screen, show_table
from mutualrl.console.display import PLAIN_BELOW, cell, print_text
from mutualrl.console.markdown import table as markdown_table
from mutualrl.console.user_path import user_path
from mutualrl.errors import UsageError
from mutualrl.recipes import Recipe, Request, load_run, resolve, shipped, templates
from mutualrl.recipes.differences import by_dotted_key
from mutualrl.recipes.yaml_file import read
from mutualrl.storage.files import JsonObject
from mutualrl.storage.rundir import RunDirectory

FRAME = 10  # columns that the borders of a three-column table take


def _headline(text: str) -> str:
    lines = [line.removeprefix("#").strip() for line in text.splitlines() if not line.startswith("#!")]
    return lines[0] if lines and text.startswith("#") else ""


def _find(name: str) -> list[tuple[str, str, Path]]:
    """Return the shipped files with a name (`sgt`, or `paper/2qwen-sgt` with its kind). Raises UsageError that lists
    all names."""
    known = [*shipped(), *templates()]
    matches = [entry for entry in known if name in (entry[1], f"{entry[0]}/{entry[1]}")]
    if not matches:
        names = ", ".join(sorted(f"{kind}/{shipped_name}" for kind, shipped_name, _ in known))
        raise UsageError(f"no recipe {name!r}; expected one of: {names}")
    return matches


def ls(options: RecipesLs) -> None:
    """List recipes with their first lines."""
    rows = [(k, n, path, _headline(path.read_text("utf-8"))) for k, n, path in (*shipped(), *templates())]
    if options.as_json:
        emit({"recipes": [{"kind": k, "name": n, "path": str(p), "about": a} for k, n, p, a in rows]})
        return
    shown = [(kind, f"paper/{name}" if kind == "paper" else name, about) for kind, name, _, about in rows]
    kinds, names, _ = zip(*shown, strict=True)
    width = screen().width - max(map(len, kinds)) - max(map(len, names)) - FRAME
    table = Table("kind", "name", "about")
    for kind, name, about in shown:
        description = Text(about)
        if not options.verbose and screen().width >= PLAIN_BELOW:
            description.truncate(max(width, 10), overflow="ellipsis")
        table.add_row(kind, name, description)
    show_table(table)


def show(options: RecipesShow) -> None:
    """Print a recipe."""
    matches = _find(options.name)
    if options.as_json:
        entries = []
        for kind, _, path in matches:
            content = read(path) if path.suffix == ".yaml" else path.read_text("utf-8")
            entries.append({"kind": kind, "path": str(path), "content": content})
        emit({"recipes": entries})
        return
    for _, _, path in matches:
        text = path.read_text("utf-8")
        if path.suffix == ".yaml" and (policies := read(path).get("policies")):
            typer.echo(_policy_table(policies))
        typer.echo(text, nl=False)


def _policy_table(policies: list[JsonObject]) -> str:
    """Return the policies of a pool as a table in YAML comments, so that the output is still the recipe."""
    rows = []
    for policy in policies:
        size = policy.get("parameters")
        other = [key for key in policy if key not in ("name", "model", "parameters")]
        rows.append([policy["name"], policy["model"], "" if size is None else f"{float(size):.3g}", ", ".join(other)])
    text = markdown_table("Policies", ["policy", "model", "parameters", "own settings"], rows)
    return "\n".join(f"# {line}".rstrip() for line in text.splitlines())


def cp(options: RecipesCp) -> None:
    """Copy a recipe. Never overwrites a file."""
    matches = _find(options.name)
    if len(matches) > 1:
        raise UsageError(f"{options.name!r} is ambiguous: {', '.join(f'{k}/{n}' for k, n, _ in matches)}; name one")
    source = matches[0][2]
    path = user_path(options.target)
    path = path / source.name if path.is_dir() else path
    if path.exists():
        raise UsageError(f"{path} already exists; choose another name, or remove it")
    if not path.parent.is_dir():
        raise UsageError(f"no directory {path.parent}")
    path.write_bytes(source.read_bytes())
    if options.as_json:
        emit({"copied": str(path)})
    else:
        print_text(screen(), f"copied to {path}")


def diff(options: RecipesDiff) -> None:
    """Print the keys that differ, with both values."""
    a, b = options.a, options.b
    left, right = (by_dotted_key(_resolved(name).model_dump(mode="json")) for name in (a, b))
    differing = [key for key in {**left, **right} if left.get(key) != right.get(key)]
    if options.as_json:
        entries = [{"key": key, "a": left.get(key), "b": right.get(key)} for key in differing]
        emit({"a": a, "b": b, "differences": entries})
        return
    if not differing:
        print_text(screen(), "no differences")
        return
    table = Table("key", cell(a), cell(b))
    for key in differing:
        table.add_row(*(cell(text) for text in (key, json.dumps(left.get(key)), json.dumps(right.get(key)))))
    show_table(table)


def _resolved(name: str) -> Recipe:
    """Return the recipe of a name on the command line. Raises UsageError, RecipeError."""
    path = user_path(name)
    if (path / "run.json").exists():
        return load_run(RunDirectory(path), without_models=True)
    pool, colon, regime = name.partition(":")
    if colon and not path.exists():
        return resolve(Request(pool=pool, regime=regime))
    return resolve(Request(recipe=Path(name)))
