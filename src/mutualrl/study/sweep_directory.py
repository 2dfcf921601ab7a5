"""Files of a sweep directory: its start, the result of each piece, and their comparison.

`sweep.json` (its start), `pieces/POOL/ARM-SEED/` (a run directory of `mutualrl train`), `pieces/POOL/ARM-SEED.json`
(its outcome), `.began.json` (its command) and `.log` (its output), `results.json` and `results.md`.
"""

from __future__ import annotations

from pathlib import Path

from mutualrl.errors import FileDamagedError, UsageError
from mutualrl.storage.files import JsonObject, read_checksummed, write_atomic, write_json
from mutualrl.study.claims import RegisteredClaims, parse_claims
from mutualrl.study.comparison import Compared, compare, markdown
from mutualrl.study.outcomes import Outcome, Outcomes
from mutualrl.study.registration import digest
from mutualrl.study.sweep_file import Grid, Piece, Sweep

SWEEP, RESULTS = "sweep.json", "results.json"
_SHOWN = 8  # changes in a note


def in_sweep(run: Path) -> bool:
    """Return whether a run is a piece of a sweep: `SWEEP/pieces/POOL/ARM-SEED`."""
    parents = run.resolve().parents
    return len(parents) > 2 and parents[1].name == "pieces" and (parents[2] / SWEEP).is_file()


def outcome_file(root: Path, piece: Piece) -> Path:
    """Return the path of a piece's outcome."""
    return beside(root, piece, ".json")


def beside(root: Path, piece: Piece, suffix: str) -> Path:
    """Return the path of a file next to a piece's directory."""
    place = root / piece.place
    return place.with_name(f"{place.name}{suffix}")


def stored_outcome(root: Path, piece: Piece) -> Outcome | None:
    """Return the stored outcome of a piece; None if it is not done. Raises FileDamagedError."""
    path = outcome_file(root, piece)
    value = read_checksummed(path, root=root)
    if value is None:
        return None
    try:
        return Outcome.from_json(value["outcome"])
    except (KeyError, TypeError, AttributeError) as error:
        raise FileDamagedError(f"{path}: not written by a sweep ({error!r})") from None


def stored_grid(root: Path) -> Grid:
    """Return the grid of the sweep in a directory. Raises FileDamagedError."""
    stored = read_checksummed(root / SWEEP, root=root) or {}
    try:
        grid = stored["grid"]
        pools, arms, seeds = (tuple(grid[key]) for key in ("pools", "arms", "seeds"))
        only = {str(arm): tuple(map(str, on)) for arm, on in (grid.get("only") or {}).items()}
        reference = str(grid["reference"])
        return Grid(tuple(map(str, pools)), tuple(map(str, arms)), tuple(map(int, seeds)), reference, only)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FileDamagedError(f"{root / SWEEP}: not written by a sweep ({error!r})") from None


def registered_claims(root: Path) -> RegisteredClaims | None:
    """Return the claims that the sweep in a directory began with; None if there were none."""
    stored = (read_checksummed(root / SWEEP, root=root) or {}).get("claims")
    return None if stored is None else parse_claims(stored["text"], stored["name"], stored["changed"])


def compared(root: Path, claims: RegisteredClaims | None = None, reference: str | None = None) -> Compared:
    """Compare the finished pieces; see `results`."""
    return results(root, claims, reference)[1]


def results(
    root: Path, claims: RegisteredClaims | None = None, reference: str | None = None
) -> tuple[JsonObject, Compared]:
    """Return the content of `results.json` (raw values of the finished pieces and their comparison), and the
    comparison. `claims` default to those that the sweep began with. What is missing is noted, and what was changed in
    the claims, pools, arms, settings or seeds after the sweep began. `registration`: the sha256 of these at its start.

    Reads only files that the sweep wrote, and runs no code named in them. Raises UsageError if no piece is done.
    """
    grid, registered = stored_grid(root), registered_claims(root)
    start = read_checksummed(root / SWEEP, root=root) or {}
    stored = {piece: stored_outcome(root, piece) for piece in grid.pieces}
    outcomes = [outcome for outcome in stored.values() if outcome is not None]
    if not outcomes:
        raise UsageError(f"{root}: no piece of the sweep is done; resume with: mutualrl sweep FILE --out {root}")
    if reference is not None and reference not in grid.arms:
        raise UsageError(f"--reference: found {reference!r}, expected one of {', '.join(grid.arms)}")
    notes = []
    if missing := [str(piece) for piece, outcome in stored.items() if outcome is None]:
        shown = "; ".join(missing[:5]) + ("; ..." if len(missing) > 5 else "")
        notes.append(f"{len(missing)} of {len(stored)} pieces are missing: {shown}")
    if claims is not None and registered is not None and claims.sha256 == registered.sha256:
        claims = None  # the same bytes, with the date at which the sweep began
    if claims is not None:
        before = "none" if registered is None else f"sha256 {registered.sha256[:12]}"
        notes.append(
            f"the claims differ from those that the sweep began with ({before}, now {claims.sha256[:12]}): "
            f"they were written or changed after {start.get('began')}"
        )
    declared = start.get("registration")
    for each in start.get("changes", ()):
        changed = each["changes"]
        shown = "; ".join(changed[:_SHOWN]) + ("; ..." if len(changed) > _SHOWN else "")
        notes.append(f"changed at {each['at']}, after the sweep began at {start.get('began')}: {shown}")
        if any(line.startswith("claims:") for line in changed):
            notes.append(f"tested are the claims that it began with; the others: mutualrl compare {root} --claims FILE")
    result = compare(Outcomes(outcomes), reference or grid.reference, claims or registered, notes)
    value: JsonObject = {"pieces": [each.to_json() for each in outcomes], "comparison": result.to_json()}
    if declared is not None:
        value["registration"] = {
            "sha256": digest(declared),
            "began": start.get("began"),
            "changes": start.get("changes", []),
        }
    return value, result


def write_results(sweep: Sweep, root: Path) -> Compared | None:
    """Write `results.json` (raw values, comparison, the claims that the sweep began with) and `results.md`; None if no
    piece is done."""
    if not any(outcome_file(root, piece).exists() for piece in sweep.grid.pieces):
        return None
    value, result = results(root)
    write_json(root / RESULTS, value)
    write_atomic(root / "results.md", (markdown(result) + "\n").encode())
    return result
