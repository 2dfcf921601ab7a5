"""`mutualrl recipes`: what ships, and what is in it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from mutualrl.cli.completion import copied_names
from mutualrl.cli.options import JsonFlag
from mutualrl.cli.output import emit, reports_errors, screen, show_table

FRAME = 10  # columns that the lines of a table of three columns take

recipes = typer.Typer(help="The recipes that ship with mutualrl.", no_args_is_help=True)


def _headline(text: str) -> str:
    lines = [line.removeprefix("#").strip() for line in text.splitlines() if not line.startswith("#!")]
    return lines[0] if lines and text.startswith("#") else ""


def _known(name: str) -> list[tuple[str, str, Path]]:
    """Return what ships under a name (`sgt`, or `paper/2qwen-sgt` with its kind). Raises UsageError naming all there
    is."""
    from mutualrl.errors import UsageError
    from mutualrl.recipes import shipped, templates

    known = [*shipped(), *templates()]
    matches = [entry for entry in known if name in (entry[1], f"{entry[0]}/{entry[1]}")]
    if not matches:
        raise UsageError(f"no recipe {name!r}; there are: {', '.join(sorted(f'{kind}/{n}' for kind, n, _ in known))}")
    return matches


@recipes.command("ls")
@reports_errors
def ls(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Whole descriptions, over several lines.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """List pools, regimes, tasks, the paper's runs and batch scripts, by the names that commands take."""
    from mutualrl.recipes import shipped, templates

    rows = [(k, n, path, _headline(path.read_text("utf-8"))) for k, n, path in (*shipped(), *templates())]
    if as_json:
        emit({"recipes": [{"kind": k, "name": n, "path": str(p), "about": a} for k, n, p, a in rows]})
        return
    typed = [(kind, f"paper/{name}" if kind == "paper" else name, about) for kind, name, _, about in rows]
    room = screen().width - sum(max(len(row[column]) for row in typed) for column in (0, 1)) - FRAME
    table = Table("kind", "name", "about")
    for kind, name, about in typed:
        description = Text(about)
        if not verbose:
            description.truncate(max(room, 10), overflow="ellipsis")
        table.add_row(kind, name, description)
    show_table(table)


@recipes.command("show")
@reports_errors
def show(
    name: Annotated[
        str, typer.Argument(help="Name of a recipe, as `mutualrl recipes ls` lists it.", autocompletion=copied_names)
    ],
    as_json: JsonFlag = False,
) -> None:
    """Print a recipe as it ships."""
    from mutualrl.recipes.yaml_file import read

    matches = _known(name)
    if as_json:
        contents = [read(path) if path.suffix == ".yaml" else path.read_text("utf-8") for _, _, path in matches]
        emit(
            {
                "recipes": [
                    {"kind": k, "path": str(p), "content": c} for (k, _, p), c in zip(matches, contents, strict=True)
                ]
            }
        )
        return
    for _, _, path in matches:
        typer.echo(path.read_text("utf-8"), nl=False)


@recipes.command("cp")
@reports_errors
def cp(
    name: Annotated[
        str,
        typer.Argument(help="Name of a recipe or batch script, such as paper/2qwen-sgt.", autocompletion=copied_names),
    ],
    target: Annotated[Path, typer.Argument(help="A directory, or the new file's name.")] = Path(),
    as_json: JsonFlag = False,
) -> None:
    """Copy a recipe or a batch script, to be changed."""
    from mutualrl.errors import UsageError
    from mutualrl.storage.files import user_path

    matches = _known(name)
    if len(matches) > 1:
        raise UsageError(f"{name!r} is the name of several: {', '.join(f'{k}/{n}' for k, n, _ in matches)}; name one")
    source = matches[0][2]
    path = user_path(target)
    path = path / source.name if path.is_dir() else path
    if path.exists():
        raise UsageError(f"{path} already exists; name another file, or remove it")
    if not path.parent.is_dir():
        raise UsageError(f"there is no directory {path.parent}")
    path.write_bytes(source.read_bytes())
    if as_json:
        emit({"copied": str(path)})
    else:
        screen().print(f"copied to {path}", markup=False, highlight=False, soft_wrap=True)
