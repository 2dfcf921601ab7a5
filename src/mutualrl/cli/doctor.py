"""`mutualrl doctor`: is this machine ready for a run?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer
from rich.table import Table

from mutualrl.cli.commands import Doctor
from mutualrl.cli.output import emit, show_table
from mutualrl.console.display import cell
from mutualrl.console.user_path import user_path
from mutualrl.errors import MachineError, UsageError
from mutualrl.machine.doctor import run_checks

COLORS = {"ok": "[green]ok[/green]", "warn": "[yellow]warn[/yellow]", "fail": "[red]fail[/red]"}


def doctor(options: Doctor) -> None:
    """Run every check, and list what was found and what to do."""
    target = user_path(options.run_dir or Path())
    directory = next((p for p in (target, *target.parents) if p.exists()), Path("/"))
    if not directory.is_dir():
        raise UsageError(f"--run-dir {options.run_dir}: {directory} is a file")
    rows = list(run_checks(directory, options.exchange))
    failed = [row.check for row in rows if row.status == "fail"]
    if options.as_json:
        emit({"ok": not failed, "checks": [asdict(row) for row in rows]})
        if failed:
            raise typer.Exit(MachineError.exit_code)
        return
    table = Table("", "check", "found", "what to do")
    for row in rows:
        table.add_row(COLORS[row.status], cell(row.check), cell(row.found), cell(row.advice))
    show_table(table)
    if failed:
        raise MachineError(f"this machine is not ready: {', '.join(failed)}")
