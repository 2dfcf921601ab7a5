"""`mutualrl exchange`: list, verify, export and prune a run's exchange; make one of a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from mutualrl.cli.command import command, options_of
from mutualrl.cli.completion import run_directories
from mutualrl.cli.options import JsonFlag
from mutualrl.cli.output import emit, prose, reports_errors, screen, show_table, show_verification
from mutualrl.console.display import print_text
from mutualrl.console.options import JSON, Option
from mutualrl.recipes.request import Request

if TYPE_CHECKING:
    from mutualrl.see.inspection import PolicyInspection
    from mutualrl.storage.rundir import RunDirectory

REQUEST = options_of(Request)
exchange = typer.Typer(help="Inspect the exchange of a run: rounds, bytes, damage.", no_args_is_help=True)

RunArgument = Annotated[
    Path, typer.Argument(help="The run directory.", show_default=False, autocompletion=run_directories)
]


@exchange.command("ls")
@reports_errors
def ls(run: RunArgument, as_json: JsonFlag = False) -> None:
    """List rounds, records and bytes of every policy, and gaps between rounds. Reads only the commit markers."""
    inspections = _inspections(_open(run))
    if as_json:
        emit({"policies": [s.to_json() for s in inspections]})
        return
    _show(inspections)


@exchange.command("verify")
@reports_errors
def verify(run: RunArgument, as_json: JsonFlag = False) -> None:
    """Verify rounds and checkpoints against their markers, and decode them. Exits with 6 if one is damaged.

    `mutualrl runs verify` checks every file of a run.
    """
    from mutualrl.reporting.verify_run import Verification, verify_checkpoints, verify_exchange

    directory, result = _open(run), Verification()
    verify_exchange(directory, result)
    verify_checkpoints(directory, result)
    if not as_json:
        _show(result.exchange)
    show_verification(result, as_json=as_json)


@exchange.command("export")
@reports_errors
def export(
    run: RunArgument,
    out: Annotated[Path, typer.Option("--out", help="Output file: .parquet or .jsonl.", show_default=False)],
    policy: Annotated[list[str] | None, typer.Option(help="Only this policy. Repeatable.", show_default=False)] = None,
    as_json: JsonFlag = False,
) -> None:
    """Export all records to one Parquet or JSONL file, for `datasets`, pandas or DuckDB."""
    from mutualrl.errors import UsageError
    from mutualrl.recipes.published import missing_rounds
    from mutualrl.see.inspection import export as write
    from mutualrl.see.inspection import writers
    from mutualrl.see.location import record_store
    from mutualrl.storage.files import user_path

    directory, target = _open(run), user_path(out)
    if target.suffix not in (".parquet", ".jsonl"):
        raise UsageError(f"--out {out}: expected a file name ending in .parquet or .jsonl")
    if target.exists():
        raise UsageError(f"--out {out}: the file already exists; choose another name, or remove it")
    if not target.parent.is_dir():
        raise UsageError(f"--out {out}: no directory {target.parent}")
    store = record_store(directory)
    known = writers(store)
    inspections = _inspections(directory)
    notes = missing_rounds(directory, {s.policy: s.rounds for s in inspections})
    notes += [
        f"policy {s.policy}: rounds before {s.pruned} are missing (pruned, or lost)" for s in inspections if s.pruned
    ]
    for note in notes:
        print_text(prose(), f"Note: {note}")
    if unknown := sorted(set(policy or ()) - set(known)):
        raise UsageError(f"--policy {unknown[0]}: no such policy in the exchange; expected one of: {', '.join(known)}")
    rows = write(store, directory.info().run_id, policy or known, target)
    if not rows:
        raise UsageError(
            f"the exchange of {run} has no records (regimes that read no peers publish none; "
            "train with --exchange full to publish every field)"
        )
    if as_json:
        emit({"out": str(target), "records": rows, "notes": notes})
    else:
        print_text(screen(), f"{rows:,} records written to {target}")


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """Options of `exchange import`."""

    file: Annotated[str, Option("Recorded texts: a file, a directory, or hub:OWNER/NAME.", argument=True)]
    out: Annotated[Path, Option("Directory of the new exchange.")]
    name: Annotated[str, Option("Name of the member that has the texts.")] = "recorded"
    task: Annotated[str | None, REQUEST["task"]] = None
    data: Annotated[Path | None, REQUEST["data"]] = None
    model: Annotated[str | None, Option("The model to train, for a reward function of your own.")] = None
    assignments: Annotated[tuple[str, ...], REQUEST["assignments"]] = ()
    as_json: Annotated[bool, JSON] = False


@exchange.command("import")
@command(ImportOptions)
def import_file(options: ImportOptions) -> None:
    """Make an exchange of a file: its texts for the task's prompts, verified by the task's reward.

    Example: mutualrl exchange import openr1.parquet --out expert --task dataset --data math_train.jsonl
    """
    from mutualrl.launch.importing import ImportRequest, import_texts

    request = ImportRequest(
        source=f"{options.name}=recorded:{options.file}",
        task=options.task,
        data=options.data,
        model=options.model,
        assignments=options.assignments,
        out=options.out,
    )
    run, prepared = import_texts(request)
    if options.as_json:
        emit({"run_dir": str(run.root), "source": prepared.summary})
        return
    print_text(screen(), prepared.note)
    print_text(screen(), f"{len(prepared.source.table):,} records written to {run.root}")


@exchange.command("gc")
@reports_errors
def gc(
    run: RunArgument,
    keep_rounds: Annotated[int, typer.Option(min=1, help="Number of newest rounds to keep per policy.")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be deleted; delete nothing.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Delete rounds that are no longer needed: older than any round that a resume from a kept checkpoint
    may read."""
    from mutualrl.recipes import load_run
    from mutualrl.see.inspection import writers
    from mutualrl.see.location import record_store
    from mutualrl.see.retention import prune_rounds
    from mutualrl.storage.checkpoints import oldest_needed
    from mutualrl.storage.rundir import hold

    directory = _open(run)
    recipe = load_run(directory)
    needed = oldest_needed([directory.policy(p.name).root for p in recipe.policies], recipe.exchange.staleness)
    deleted: dict[str, Any] = {}
    with hold(directory.lock, str(directory.root)):
        store = record_store(directory)
        for name in writers(store):
            rounds, size = prune_rounds(store, name, needed, keep_rounds, dry_run=dry_run)
            deleted[name] = {"rounds": len(rounds), "last": rounds[-1] if rounds else None, "bytes": size}
    if as_json:
        emit({"needed_from": needed, "deleted": deleted, "dry_run": dry_run})
        return
    verb = "would be deleted" if dry_run else "deleted"
    for name, entry in deleted.items():
        screen().print(
            f"{name}: {entry['rounds']} rounds {verb}, {entry['bytes']:,} bytes", markup=False, highlight=False
        )
    screen().print(f"A resumed policy may still read rounds from {needed} on", highlight=False)


def _open(path: Path) -> RunDirectory:
    from mutualrl.errors import UsageError
    from mutualrl.storage.files import user_path
    from mutualrl.storage.rundir import RunDirectory

    run = RunDirectory(user_path(path))
    if not run.root.is_dir():
        raise UsageError(f"{path} is not a run directory: {'a file' if run.root.exists() else 'it does not exist'}")
    run.info()
    return run


def _inspections(run: RunDirectory) -> list[PolicyInspection]:
    from mutualrl.see.inspection import inspect_policy, writers
    from mutualrl.see.location import record_store

    run_id, store = run.info().run_id, record_store(run)
    return [inspect_policy(store, run_id, policy, verify=False) for policy in writers(store)]


def _show(inspections: list[PolicyInspection]) -> None:
    from mutualrl.console.display import cell

    table = Table("policy", "rounds", "records", "bytes", "gaps", "uncommitted parts")
    for s in inspections:
        span = f"{s.rounds[0]}-{s.rounds[-1]}" if s.rounds else "none"
        gaps = ", ".join(map(str, s.gaps[:8])) + ("..." if len(s.gaps) > 8 else "") or "-"
        table.add_row(cell(s.policy), span, f"{s.rows:,}", f"{s.bytes:,}", gaps, str(len(s.orphaned)))
    show_table(table)
