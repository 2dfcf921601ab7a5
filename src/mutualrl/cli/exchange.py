"""`mutualrl exchange`: list, export and prune a run's exchange; make one of a file."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from pathlib import Path

from rich.table import Table

from mutualrl.cli.commands import ExchangeExport, ExchangeGc, ExchangeShow, OfRun
from mutualrl.cli.output import emit, note_all, screen, show_table
from mutualrl.console.display import cell, print_text
from mutualrl.console.user_path import user_path
from mutualrl.errors import UsageError
from mutualrl.launch.import_request import ImportRequest
from mutualrl.launch.importing import import_texts
from mutualrl.recipes import load_run
from mutualrl.recipes.published import missing_rounds
from mutualrl.records import Rollout
from mutualrl.see import inspection
from mutualrl.see.inspection import PolicyInspection, inspect_policy, writers
from mutualrl.see.location import record_store
from mutualrl.see.retention import first_needed, prune_rounds
from mutualrl.storage.files import JsonObject
from mutualrl.storage.rundir import RunDirectory, hold
from mutualrl.tasks.trajectories import cut, shown


def ls(options: OfRun) -> None:
    """List what each policy published."""
    inspections = _inspections(_open(options.run))
    if options.as_json:
        emit({"policies": [s.to_json() for s in inspections]})
        return
    _show(inspections)


def show(options: ExchangeShow) -> None:
    """Show rollouts of a round, of each policy and source."""
    directory = _open(options.run)
    reader = inspection.Reader(record_store(directory), directory.info().run_id)
    found: list[JsonObject] = []
    for name in _named(writers(reader.store), options.policy):
        rounds = reader.rounds(name)
        number = options.round if options.round is not None else max(rounds, default=None)
        shard = None if number is None or number not in rounds else reader.read(name, number)
        if shard is None:
            note_all([f"{name} has no round {number}" if rounds else f"{name} has published no round"])
            continue
        rows = [row for row in shard.rows("prompt", "text", "length") if options.prompt in (None, row.prompt_id)]
        rows.sort(key=lambda row: row.text is None)
        most = ALL_BYTES if options.as_json else SHOWN_BYTES
        found += [_shown(name, shard.marker.round, row, most) for row in rows[: options.limit]]
    if options.as_json:
        emit({"rollouts": found})
        return
    for row in found:
        print_text(screen(), _as_text(row), SHOWN_BYTES * 2)


#: of a rollout's text or turns
SHOWN_BYTES, ALL_BYTES = 4_000, 2**62


def _shown(member: str, round_index: int, row: Rollout, most: int) -> JsonObject:
    """Return a rollout, of its text or turns at most this many bytes."""
    value: JsonObject = {"policy": member, "round": round_index, "prompt_id": row.prompt_id, "rollout": row.index}
    value |= {"reward": row.reward if isfinite(row.reward) else None, "length": row.length, "prompt": row.prompt}
    if row.trajectory is None:
        return {**value, "text": None}
    return {**value, "text" if row.trajectory.is_text else "turns": shown(row.trajectory, most, cut)}


def _as_text(row: JsonObject) -> str:
    reward = "no reward" if row["reward"] is None else f"reward {row['reward']:g}"
    head = f"{row['policy']}, round {row['round']}, {row['prompt_id']}, rollout {row['rollout']}: {reward}"
    if "turns" in row:
        return "\n".join([head, *(f"  [{turn['role']}] {turn['content']}" for turn in row["turns"])])
    return f"{head}\n  {'(no text published)' if row['text'] is None else row['text']}"


def _named(known: list[str], chosen: Sequence[str]) -> list[str]:
    """Return the chosen members, or all. Raises UsageError for one that the exchange does not have."""
    if unknown := sorted(set(chosen) - set(known)):
        raise UsageError(f"--policy {unknown[0]}: no such policy in the exchange; expected one of: {', '.join(known)}")
    return list(chosen) or known


def export(options: ExchangeExport) -> None:
    """Write the records to a new file."""
    run, out = options.run, options.out
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
    note_all(notes)
    rows = inspection.export(store, directory.info().run_id, _named(known, options.policy), target)
    if not rows:
        raise UsageError(
            f"the exchange of {run} has no records (regimes that read no peers publish none; "
            "train with --exchange full to publish every field)"
        )
    if options.as_json:
        emit({"out": str(target), "records": rows, "notes": notes})
    else:
        print_text(screen(), f"{rows:,} records written to {target}")


def import_file(request: ImportRequest) -> None:
    """Read the file, verify its texts, and write the exchange."""
    run, prepared = import_texts(request)
    if request.as_json:
        emit({"run_dir": str(run.root), "source": prepared.summary})
        return
    print_text(screen(), prepared.note)
    print_text(screen(), f"{len(prepared.source.table):,} records written to {run.root}")


def gc(options: ExchangeGc) -> None:
    """Delete rounds, or list those that would be deleted."""
    directory = _open(options.run)
    recipe = load_run(directory)
    roots, info = {policy.name: directory.policy(policy.name).root for policy in recipe.policies}, directory.info()
    store, staleness = record_store(directory), recipe.exchange.staleness
    needed = first_needed(store, info.run_id, roots, staleness, elsewhere=bool(info.joined))
    deleted: JsonObject = {}
    with hold(directory.lock, str(directory.root)):
        for name in writers(store):
            rounds, size = prune_rounds(store, name, needed, options.keep_rounds, dry_run=options.dry_run)
            deleted[name] = {"rounds": len(rounds), "last": rounds[-1] if rounds else None, "bytes": size}
    if options.as_json:
        emit({"needed_from": needed, "deleted": deleted, "dry_run": options.dry_run})
        return
    verb = "would be deleted" if options.dry_run else "deleted"
    for name, entry in deleted.items():
        screen().print(
            f"{name}: {entry['rounds']} rounds {verb}, {entry['bytes']:,} bytes", markup=False, highlight=False
        )
    screen().print(f"A resumed policy may still read rounds from {needed} on", highlight=False)


def _open(path: Path) -> RunDirectory:
    run = RunDirectory(user_path(path))
    if not run.root.is_dir():
        raise UsageError(f"{path} is not a run directory: {'a file' if run.root.exists() else 'it does not exist'}")
    run.info()
    return run


def _inspections(run: RunDirectory) -> list[PolicyInspection]:
    run_id, store = run.info().run_id, record_store(run)
    return [inspect_policy(store, run_id, policy, verify=False) for policy in writers(store)]


def _show(inspections: list[PolicyInspection]) -> None:
    table = Table("policy", "rounds", "records", "bytes", "gaps", "uncommitted parts")
    for s in inspections:
        span = f"{s.rounds[0]}-{s.rounds[-1]}" if s.rounds else "none"
        gaps = ", ".join(map(str, s.gaps[:8])) + ("..." if len(s.gaps) > 8 else "") or "-"
        table.add_row(cell(s.policy), span, f"{s.rows:,}", f"{s.bytes:,}", gaps, str(len(s.orphaned)))
    show_table(table)
