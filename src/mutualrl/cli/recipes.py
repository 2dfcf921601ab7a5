"""`mutualrl recipes`: what ships, and what is in it."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from mutualrl.cli.output import emit, reports_errors

recipes = typer.Typer(help="The recipes that ship with mutualrl.", no_args_is_help=True)


def _headline(text: str) -> str:
    first = text.partition("\n")[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""


@recipes.command("ls")
@reports_errors
def ls(as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False) -> None:
    """List pools, regimes and tasks."""
    from mutualrl.recipes import shipped

    rows = [(kind, name, path, _headline(path.read_text("utf-8"))) for kind, name, path in shipped()]
    if as_json:
        emit({"recipes": [{"kind": k, "name": n, "path": str(p), "about": a} for k, n, p, a in rows]})
        return
    table = Table("kind", "name", "about")
    for kind, name, _, about in rows:
        table.add_row(kind, name, about)
    Console().print(table)


@recipes.command("show")
@reports_errors
def show(
    name: Annotated[str, typer.Argument(help="Name of a recipe, as `mutualrl recipes ls` lists it.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Print a recipe as it ships."""
    from mutualrl.errors import UsageError
    from mutualrl.recipes import shipped
    from mutualrl.recipes.yaml_file import read

    found = [(kind, path) for kind, known, path in shipped() if known == name]
    if not found:
        raise UsageError(f"no recipe {name!r}; there are: {', '.join(sorted({n for _, n, _ in shipped()}))}")
    if as_json:
        emit({"recipes": [{"kind": kind, "path": str(path), "content": read(path)} for kind, path in found]})
        return
    for _, path in found:
        typer.echo(path.read_text("utf-8"), nl=False)
