"""`mutualrl doctor`: is this machine ready for a run?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from mutualrl.cli.options import JsonFlag
from mutualrl.cli.output import emit, reports_errors, show_table


@reports_errors
def doctor(
    run_dir: Annotated[
        Path | None,
        typer.Option(
            help="Directory of a future run, whose file system is probed (the current one).", show_default=False
        ),
    ] = None,
    exchange: Annotated[
        str | None, typer.Option(help="Also probe a bucket for an exchange (s3://, gs://, az://).", show_default=False)
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Check versions, devices, NCCL, vLLM, the hub, shared memory, ports, the file system, and a bucket. Exits with 4
    if a check fails."""
    from dataclasses import asdict

    from mutualrl.console.display import cell
    from mutualrl.errors import MachineError, UsageError
    from mutualrl.machine.doctor import run_checks
    from mutualrl.storage.files import user_path

    target = user_path(run_dir or Path())
    directory = next((p for p in (target, *target.parents) if p.exists()), Path("/"))
    if not directory.is_dir():
        raise UsageError(f"--run-dir {run_dir}: {directory} is a file")
    rows = list(run_checks(directory, exchange))
    failed = [row.check for row in rows if row.status == "fail"]
    if as_json:
        emit({"ok": not failed, "checks": [asdict(row) for row in rows]})
        if failed:
            raise typer.Exit(MachineError.exit_code)
        return
    table = Table("", "check", "found", "what to do")
    colors = {"ok": "[green]ok[/green]", "warn": "[yellow]warn[/yellow]", "fail": "[red]fail[/red]"}
    for row in rows:
        table.add_row(colors[row.status], cell(row.check), cell(row.found), cell(row.advice))
    show_table(table)
    if failed:
        raise MachineError(f"this machine is not ready: {', '.join(failed)}")
