"""What each sweep declared before its runs, and what was changed after it, by git.

    python benchmarks/registrations.py           # benchmarks/results/registrations.json, docs/registrations.md
    python benchmarks/registrations.py paper     # the changes of one sweep, in the terminal

A registration is the claims, pools with their files, arms, settings, steps and seeds as they stood in the first commit
of the claims: the sweep file, the claim file, and the files of pools, regimes and tasks that they name. A comment is no
part of it. Every later commit up to the last results is compared with the one before it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import yaml

import harness
import sweep_results as sweeps
from mutualrl.console.markdown import name as shown
from mutualrl.study.registration import changes, digest

ROOT = harness.HERE.parent
BOARD = yaml.safe_load((harness.HERE / "board.yaml").read_text(encoding="utf-8"))
SWEEPS, RESULTS = "benchmarks/sweeps", "benchmarks/results"
DECLARED = (f"{SWEEPS}/", "recipes/pools/", "recipes/regimes/", "recipes/tasks/")


@dataclass(frozen=True)
class Change:
    """Commit that changed what a sweep declared. `after`: results of the sweep were stored before it."""

    commit: str
    time: str
    after: bool
    lines: Sequence[str]


@dataclass(frozen=True)
class History:
    """One sweep. `committed`: time of its claims' first commit; `sha256`: of what stood there; `began`: its first
    run, empty if that was not recorded; `stored`: first commit of its results; `beside`: results in the claims' own
    commit; `not_run`: what of the declared grid has no run; `repeated`: runs that were made again, by later code;
    `known`: what else was known by then."""

    name: str
    commit: str
    committed: str
    sha256: str
    began: str
    stored: str
    beside: Sequence[str]
    changed: Sequence[Change]
    not_run: Sequence[str]
    repeated: int = 0
    known: str = ""

    @property
    def remarkable(self) -> bool:
        """Return whether there is anything to tell of it."""
        return bool(self.known or self.beside or self.changed or self.not_run or self.repeated)


def git(*arguments: str) -> str:
    """Return the output of a git command. Raises CalledProcessError."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


@cache
def file_at(commit: str, path: str) -> Any:
    """Return a YAML or JSON file of a commit; None if it was not there."""
    try:
        text = git("show", f"{commit}:{path}")
    except subprocess.CalledProcessError:
        return None
    return json.loads(text) if path.endswith(".json") else yaml.safe_load(text)


def time_of(commit: str) -> str:
    """Return the time of a commit, in UTC."""
    return datetime.fromtimestamp(int(git("show", "-s", "--format=%ct", commit)), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def declared_at(commit: str, claims: str) -> dict[str, Any]:
    """Return what a sweep declared at a commit: its claims by text, its sweep files without comments, and each file of
    a pool, regime or task that these name. Claims of several sweep files, as of a pool that is run by itself, have all
    of them."""
    content: dict[str, Any] = {"claims": _keyed(file_at(commit, f"{SWEEPS}/{claims}"))}
    for path in git("ls-tree", "--name-only", commit, f"{SWEEPS}/").split():
        sweep = file_at(commit, path) if not path.endswith("-claims.yaml") else None
        if not isinstance(sweep, dict) or sweep.get("claims") != claims:
            continue
        name = Path(path).stem
        content[name] = {**sweep, "seeds": sweep.get("seeds", 3)}
        for pool in sweep.get("pools", ["tiny"]):
            here = f"{SWEEPS}/{pool}" if pool.endswith(".yaml") else f"recipes/pools/{pool}.yaml"
            content[f"pool {Path(pool).stem}"] = declared = file_at(commit, here) or {}
            task = declared.get("task")
            task = task.get("name") if isinstance(task, dict) else task
            content[f"task {task}"] = file_at(commit, f"recipes/tasks/{task}.yaml")
        for arm in sweep["arms"].values():
            regime = arm.get("regime")
            content[f"regime {regime}"] = file_at(commit, f"recipes/regimes/{regime}.yaml")
    known = {key: value for key, value in content.items() if value is not None}
    return dict(json.loads(json.dumps(known)))


def _keyed(claims: Any) -> Any:
    """Return a claim file with its claims by text, in which one more is not a change of all that follow."""
    if not isinstance(claims, dict):
        return claims
    return {**claims, "claims": {claim["text"]: claim for claim in claims["claims"]}}


def runs_at(commit: str, result: str) -> set[tuple[str, str, int]]:
    """Return the runs in a results file of a commit: pool, arm and seed of each."""
    content = file_at(commit, f"{RESULTS}/{result}.json")
    return _runs(content) if isinstance(content, dict) else set()


def _runs(content: Mapping[str, Any]) -> set[tuple[str, str, int]]:
    return {(piece["pool"], piece["arm"], piece["seed"]) for piece in content.get("pieces", [])}


def _starts(content: Mapping[str, Any]) -> dict[tuple[str, str, int], str]:
    """Return when each run of a results file began; empty where that was not recorded."""
    return {(piece["pool"], piece["arm"], piece["seed"]): piece.get("began") or "" for piece in content["pieces"]}


def history(result: str) -> History:
    """Return the registration of a results file, and what was changed after it, up to its last new run."""
    content = sweeps.stored(result)
    claims = content["comparison"]["registered"]["file"]
    first = git("log", "--diff-filter=A", "--format=%H", "--", f"{SWEEPS}/{claims}").split()[-1]
    log = git("log", "--reverse", "--format=%H", "--", f"{RESULTS}/{result}.json").split()
    stored = [commit for commit in log if runs_at(commit, result)]
    judged = next(commit for commit in stored if file_at(commit, f"{RESULTS}/{result}.json").get("comparison"))
    last, runs = stored[0], runs_at(stored[0], result)
    for commit in stored:  # to the last that has a new run, or the first with verdicts on runs that were there before
        if runs_at(commit, result) - runs or commit == judged:
            last, runs = commit, runs_at(commit, result)
    before = now = declared_at(first, claims)
    old = set(git("rev-list", stored[0]).split())  # what was committed before the first results, and they
    changed = []
    for commit in git("log", "--reverse", "--format=%H", f"{first}..{last}", "--", *DECLARED).split():
        at = declared_at(commit, claims)
        if lines := changes(now, at):
            changed.append(Change(commit[:8], time_of(commit), commit not in old, lines))
        now = at
    first_starts: dict[tuple[str, str, int], str] = {}
    repeated = 0
    for commit in stored:
        for run, began in _starts(file_at(commit, f"{RESULTS}/{result}.json")).items():
            repeated += bool(began and first_starts.get(run, began) != began and first_starts[run])
            first_starts.setdefault(run, began)
    in_first = git("show", "--name-only", "--format=", first, "--", f"{RESULTS}/*.json").split()
    return History(
        name=result,
        commit=first[:8],
        committed=time_of(first),
        sha256=digest(before),
        began=min((began for began in first_starts.values() if began), default=""),
        stored=time_of(stored[0]),
        beside=[Path(path).stem for path in in_first],
        changed=changed,
        not_run=_without(before, _runs(content)),
        repeated=repeated,
        known=BOARD["known"].get(result, ""),
    )


def _without(declared: Mapping[str, Any], runs: set[tuple[str, str, int]]) -> list[str]:
    """Return what of the declared pools, arms and seeds has no run, a line per pool."""
    lines = []
    for sweep in declared.values():
        for pool in sweep.get("pools", ["tiny"]) if "arms" in sweep else ():
            seeds = sweep["seeds"]
            seeds = range(seeds) if isinstance(seeds, int) else seeds
            by_seeds: dict[tuple[int, ...], list[str]] = {}
            arms = [name for name, arm in sweep["arms"].items() if pool in arm.get("pools", [pool])]
            for arm in arms:
                missing = tuple(seed for seed in seeds if (pool, arm, seed) not in runs)
                by_seeds.setdefault(missing, []).append(arm)
            for missing, of in by_seeds.items():
                if missing:
                    which = "every arm" if of == arms else ", ".join(of)
                    lines.append(f"{pool}: {which}, seed{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}")
    return list(dict.fromkeys(lines))


INTRODUCTION = """\
# What was declared before the runs, and what was changed after

For whoever asks whether a claim was chosen after its result. `python benchmarks/registrations.py` makes this page from
git. A registration is the claims, the pools with their files, arms, settings, steps and seeds in the first commit of
the claims, as one sha256; each later commit up to the last new run is compared with the one before it. Comments are no
part of it, and defaults in the code are not compared. Newer sweeps also store their registration with all resolved
recipes when they begin, and `mutualrl compare` notes what was changed after that.
"""
HEAD = ("results", "claims committed", "sha256", "first run began", "results first stored", "changed before", "after")


def page(histories: Sequence[History]) -> str:
    """Return docs/registrations.md."""
    untouched = sum(not each.changed and not each.not_run for each in histories)
    lines = [
        INTRODUCTION,
        f"{untouched} of {len(histories)} were run as they were registered, with nothing changed or left out.",
        "",
        f"| {' | '.join(HEAD)} |",
        "|" + "---|" * len(HEAD),
    ]
    for each in histories:
        before, after = (sum(change.after is late for change in each.changed) for late in (False, True))
        label = f"[{shown(each.name)}](#{each.name})" if each.remarkable else shown(each.name)
        began = each.began or "not recorded"
        cells = (label, each.committed, each.sha256[:12], began, each.stored, str(before), str(after))
        lines.append(f"| {' | '.join(cells)} |")
    for each in histories:
        if each.remarkable:
            lines += ["", f"## {shown(each.name)}", "", *_told(each)]
    return "\n".join([*lines, ""])


def _told(history: History) -> Iterator[str]:
    if history.known:
        yield f"- Known besides: {history.known}"
    if history.beside:
        names = ", ".join(f"`{name}`" for name in history.beside)
        yield f"- The commit of the claims, {history.commit}, stores results of {names} too."
    for change in history.changed:
        when = "after results were stored" if change.after else "before any result was stored"
        yield f"- {change.time} ({change.commit}), {when}:"
        yield from (f"    - `{line}`" for line in change.lines)
    yield from (f"- Declared and not run: {line}" for line in history.not_run)
    if history.repeated:
        yield f"- Runs that were made again and replaced the first ones: {history.repeated}."


def main() -> None:
    """Write the page and its values, or print the changes of the sweeps that are named."""
    parser = harness.options(__doc__)
    parser.add_argument("names", nargs="*", help="results files whose changes are printed; nothing is written")
    args = harness.parse(parser)
    if unknown := sorted(set(args.names) - set(BOARD["committed"])):
        raise SystemExit(f"found {', '.join(unknown)}, expected some of {', '.join(BOARD['committed'])}")
    histories = [history(name) for name in args.names or BOARD["committed"]]
    if args.names:
        print("\n".join(line for each in histories for line in (f"{each.name}, {each.committed}", *_told(each))))
        return
    docs = args.out if args.smoke else ROOT / "docs"
    values = {"command": "python benchmarks/registrations.py", "registrations": [asdict(each) for each in histories]}
    harness.write(args.out, "registrations", values)
    (docs / "registrations.md").write_text(page(histories), encoding="utf-8")
    print(f"{sum(not each.changed for each in histories)} of {len(histories)} were not changed", file=sys.stderr)


if __name__ == "__main__":
    main()
