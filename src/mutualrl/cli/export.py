"""`mutualrl export`: the trained models of a run, as self-contained directories."""

from __future__ import annotations

from rich.table import Table

from mutualrl.cli.commands import Export
from mutualrl.cli.output import emit, prose, show_table
from mutualrl.console.display import cell
from mutualrl.console.user_path import user_path
from mutualrl.reporting.export import SUMS
from mutualrl.reporting.export import export as copy


def export(options: Export) -> None:
    """Copy the models, and list what was written."""
    exported = copy(user_path(options.run), user_path(options.to), options.policy)
    if options.as_json:
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
