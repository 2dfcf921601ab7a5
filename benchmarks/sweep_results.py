"""Results of a sweep as a committed page: raw values, tables, claims and figures. Used by other benchmarks."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

import harness
from mutualrl.reporting.drawing import draw_figure
from mutualrl.reporting.figure_specs import Figure, Panel
from mutualrl.runs.curves import Bars, Curve, mean, mean_bars, mean_curve, series
from mutualrl.storage.files import JsonObject
from mutualrl.storage.rundir import versions
from mutualrl.study.claims import RegisteredClaims, parse_claims, read_claims
from mutualrl.study.comparison import Compared, compare, markdown
from mutualrl.study.outcomes import Outcome, Outcomes, PolicyOutcome
from mutualrl.study.statistics import Estimate
from mutualrl.study.sweep_directory import registered_claims, results, stored_grid

HERE = Path(__file__).parent
SWEEPS = HERE / "sweeps"
RESULTS = HERE / "results"
#: when the claims of each results file were committed first (a test compares with git)
COMMITTED = yaml.safe_load((HERE / "board.yaml").read_text(encoding="utf-8"))["committed"]


def outcomes_of(content: Mapping[str, Any]) -> Outcomes:
    """Return the outcomes in a results file."""
    return Outcomes(list(pieces_of(content)))


def pieces_of(content: Mapping[str, Any]) -> Iterator[Outcome]:
    """Yield the pieces in a results file, without fields of other versions."""
    known = {field.name for field in fields(PolicyOutcome)}
    for piece in content["pieces"]:
        policies = {}
        for name, policy in piece["policies"].items():
            policies[name] = {key: value for key, value in policy.items() if key in known}
        yield Outcome.from_json({**piece, "policies": policies})


def has_results(name: str) -> bool:
    """Return whether a sweep has results."""
    return (RESULTS / f"{name}.json").is_file()


def stored(name: str) -> JsonObject:
    """Return a results file."""
    content: JsonObject = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return content


def of_sweep(runs: Path) -> tuple[JsonObject, Compared]:
    """Return the content of the results file and the comparison, from a sweep's directory."""
    values, comparison = results(runs)
    return {"versions": versions(), **values}, comparison


def added_to(name: str, runs: Path) -> tuple[JsonObject, Compared]:
    """Return the results file's content with the pieces of a sweep's directory added, or replacing those of the same
    pool, arm and seed, and compared again. For grids that are run in several parts, on several days. Raises ValueError
    if the sweep began with different claims than the results."""
    content, _ = of_sweep(runs)
    before, registered = stored(name), registered_claims(runs)
    earlier_sha256 = before["comparison"]["registered"]["sha256"]
    if registered is None or registered.sha256 != earlier_sha256:
        new_sha256 = "none" if registered is None else registered.sha256[:12]
        raise ValueError(
            f"{runs}: its claims ({new_sha256}) are not those of {name}.json ({earlier_sha256[:12]}); sweep with those"
        )
    registered = _dated(registered, before["comparison"]["registered"]["changed"])  # when the first part began
    new = {_key(piece) for piece in content["pieces"]}
    earlier = [piece for piece in before["pieces"] if _key(piece) not in new]
    grid = stored_grid(runs)
    places = {(piece.pool, piece.arm): place for place, piece in enumerate(grid.pieces)}
    of_both = sorted([*earlier, *content["pieces"]], key=_key)
    content["pieces"] = sorted(of_both, key=lambda piece: places.get(_key(piece)[:2], -1))  # other pools stay first
    declared = len({*places, *(_key(piece)[:2] for piece in of_both)}) * registered.file.seeds
    notes = [f"{len(earlier)} of {len(content['pieces'])} pieces were made by an earlier part of the sweep"]
    if (missing := declared - len(content["pieces"])) > 0:
        notes.insert(0, f"{missing} of {declared} pieces are missing")
    comparison = compare(outcomes_of(content), grid.reference, registered, notes)
    return {**content, "comparison": comparison.to_json()}, comparison


def _key(piece: Mapping[str, Any]) -> tuple[str, str, int]:
    return piece["pool"], piece["arm"], piece["seed"]


def smoke_sweep(
    name: str, arms: Sequence[str], out: Path, keys: Mapping[str, Any] = MappingProxyType({}), **settings: Any
) -> Path:
    """Copy a sweep with its pool and rewards below `out`, with these arms, one seed, two steps and no claims; return
    the copy. `keys`: settings of the runs; `settings`: further keys of the sweep file."""
    directory = out / "sweeps"
    directory.mkdir(parents=True, exist_ok=True)
    for path in SWEEPS.glob("*.yaml"):
        shutil.copy(path, directory)
    for path in (HERE / "paced_rewards.py", HERE / "word_problems.py"):
        shutil.copy(path, out)
    sweep = yaml.safe_load((SWEEPS / f"{name}.yaml").read_text(encoding="utf-8"))
    few = {"run.steps": 2, "run.validate_every": 0, "run.validation_limit": 2, "run.save_every": 0}
    few |= {"trainer.bf16": False, **keys}
    sweep |= {"seeds": 1, "arms": {arm: sweep["arms"][arm] for arm in arms}, "set": {**sweep["set"], **few}, **settings}
    sweep |= {"claims": None, "reference": arms[0]}
    copy = directory / f"{name}.yaml"
    copy.write_text(yaml.safe_dump(sweep, sort_keys=False), encoding="utf-8")
    return copy


def options(description: str | None) -> argparse.ArgumentParser:
    """Return the parser of a benchmark that runs a sweep: where its runs are, and whether only its table is written."""
    parser = harness.options(description)
    parser.add_argument("--runs", type=Path, help="directory of the sweep; default: its name in runs/")
    parser.add_argument("--table", action="store_true", help="run nothing, only write the table of the existing pieces")
    parser.add_argument("--add", action="store_true", help="the same, added to the pieces in the results file")
    return parser


def make(
    name: str,
    command: str,
    args: argparse.Namespace,
    smoke: Sequence[str],
    *,
    result: str | None = None,
    prepare: Callable[[Path], None] = lambda file: None,
    jobs: int | None = None,
    **smoke_settings: Any,
) -> None:
    """Make the missing runs of a sweep and write its results, as the options of `options` say.

    `name`: of the sweep file; `command`: as it stands in the results; `smoke`: arms of a smoke test, with
    `smoke_settings` for `smoke_sweep`; `result`: of the results file, by default `name`; `prepare`: makes what the
    sweep file needs; `jobs`: parallel pieces, by default what `mutualrl sweep` takes.
    """
    file, runs = SWEEPS / f"{name}.yaml", args.runs or Path("runs") / name
    if args.smoke:
        file, runs = smoke_sweep(name, smoke, args.out, **smoke_settings), args.out / "runs"
    if not (args.table or args.add):
        prepare(file)
        run_sweep(file, runs, *(("--jobs", str(jobs)) if jobs else ()))
    result = result or name
    content, comparison = added_to(result, runs) if args.add else of_sweep(runs)
    write(result, command, content, comparison, args.out)


def run_sweep(file: Path, runs: Path, *options: str) -> None:
    """Run a sweep, or what is missing of it. Raises CalledProcessError."""
    command = ["sweep", str(file), "--out", str(runs), *options]
    subprocess.run([sys.executable, "-m", "mutualrl", *command], check=True)


def of_results(name: str, claims: Path) -> tuple[JsonObject, Compared]:
    """Return the same from the raw values in the results file, compared again, for when the runs no longer exist."""
    content = stored(name)
    registered = _dated(read_claims(claims), COMMITTED.get(name, content["comparison"]["registered"]["changed"]))
    references = set(content["comparison"]["reference"].values())
    reference = references.pop() if len(references) == 1 else None
    comparison = compare(outcomes_of(content), reference, registered, _of_directory(content))
    return {**content, "comparison": comparison.to_json()}, comparison


def _dated(claims: RegisteredClaims, changed: str) -> RegisteredClaims:
    """Return claims with the time of their first commit, or at the start of the sweep, since a checkout changes the
    file's date."""
    return parse_claims(claims.text, claims.name, changed)


def _of_directory(content: Mapping[str, Any]) -> list[str]:
    """Return the notes on missing pieces, which the raw values do not record."""
    phrases = ("pieces are missing", "by an earlier part of the sweep")
    return [note for note in content["comparison"]["notes"] if any(phrase in note for phrase in phrases)]


def write(name: str, command: str, value: JsonObject, comparison: Compared, out: Path) -> None:
    """Write `NAME.json` and `NAME.md`, and print the tables. The code of raw values that were stored before stays.
    `gained` in the file: by pool and arm, accuracy after training minus before, where the runs record both."""
    content = {"command": command, **{key: each for key, each in value.items() if key != "command"}}
    outcomes = outcomes_of(content)
    content["gained"] = {pool: {} for pool in outcomes.pools}
    for pool in outcomes.pools:
        for arm in outcomes.arms(pool):
            if (estimate := gained(outcomes, pool, arm, outcomes.seeds(pool, arm))) is not None:
                content["gained"][pool][arm] = estimate.to_json(effect=False)
    harness.write(out, name, content, markdown(comparison), indent=None)


def mark_known(content: JsonObject, earlier: str) -> None:
    """Mark the pieces whose runs are those of an earlier study, whose result was known when the claims were written:
    same pool, seed and final accuracies of every policy, in every group."""
    known = {_identity(piece) for piece in stored(earlier)["pieces"]}
    for piece in content["pieces"]:
        piece["known"] = _identity(piece) in known


def _identity(piece: Mapping[str, Any]) -> str:
    after = {name: policy["after"] for name, policy in piece["policies"].items()}
    return json.dumps([piece["pool"], piece["seed"], after], sort_keys=True)


def page(
    name: str, description: str | None, references: Sequence[str], probes: Sequence[str], earlier: str = ""
) -> None:
    """Run the command `python benchmarks/NAME.py [--runs DIR]`: tables, figures, every arm minus each of the
    `references`, the curves of the `probes`. `earlier`: a study whose runs are among these and were known before."""
    parser = harness.options(description)
    parser.add_argument("--runs", type=Path, help="directory of the sweep")
    parser.add_argument("--add", action="store_true", help="add them to the pieces in the results file")
    args = harness.parse(parser)
    if args.runs is None:
        content, comparison = of_results(name, SWEEPS / f"{name}-claims.yaml")
    else:
        content, comparison = added_to(name, args.runs) if args.add else of_sweep(args.runs)
    if earlier:
        mark_known(content, earlier)
        registered, notes = comparison.registered, _of_directory(content)
        comparison = compare(outcomes_of(content), registered=registered, notes=notes)
        content["comparison"] = comparison.to_json()
    outcomes = outcomes_of(content)
    content |= {"against": differences(outcomes, references), "gates": gates(outcomes, "sgt")}
    if earlier:  # on the pieces that were not known when the claims were written
        rest = Outcomes([outcome for outcome in outcomes.by.values() if not outcome.known])
        content |= {"unseen": differences(rest, references[:1])}
    write(name, f"python benchmarks/{name}.py", content, comparison, args.out)
    draw([curves(outcomes, f"{name}_curves", probes), gains(comparison, f"{name}_gains")], args.out)


# ---- further values quoted in a page


def gained(outcomes: Outcomes, pool: str, arm: str, seeds: Sequence[int]) -> Estimate | None:
    """Return what an arm itself gained: mean greedy accuracy of the pool after training minus before, over seeds; None
    where a run does not record what was before."""
    gains = []
    for seed in seeds:
        policies = outcomes.by[pool, arm, seed].policies.values()
        if not all("all" in policy.before for policy in policies):
            return None
        gains.append(statistics.fmean(policy.after["all"] - policy.before["all"] for policy in policies))
    return Estimate.of(gains, resolution=outcomes.resolution(pool, "accuracy")) if gains else None


def differences(outcomes: Outcomes, references: Sequence[str]) -> JsonObject:
    """Return `{reference: {pool: {arm: {measure: estimate}}}}`: every arm minus each of the references."""
    against: JsonObject = {}
    for reference in references:
        compared = compare(outcomes, reference).to_json()["differences"]
        against[reference] = {pool: arms for pool, arms in compared.items() if reference in outcomes.arms(pool)}
    return against


def gates(outcomes: Outcomes, arm: str) -> JsonObject:
    """Return an arm's gate rate over ten parts of the run, `{pool: {policy: [10]}}`, as means over seeds."""
    result: JsonObject = {}
    for pool in outcomes.pools:
        runs = [outcomes.by[pool, arm, seed].policies for seed in outcomes.seeds(pool, arm)]
        result[pool] = {}
        for policy in outcomes.policies(pool) if runs else ():
            by_part = zip(*(run[policy].gate for run in runs), strict=True)
            result[pool][policy] = [sum(values) / len(values) for values in by_part]
    return result


def interval(mean: float, low: float, high: float) -> str:
    """Return a difference with its 95 % interval; without one where it is not finite, as for a single seed."""
    return f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]" if math.isfinite(low) and math.isfinite(high) else f"{mean:+.3f}"


# ---- figures


def curves(outcomes: Outcomes, name: str, arms: Sequence[str]) -> Figure:
    """Return the pool's mean greedy accuracy over training, a panel for each pool."""
    panels = []
    for pool in outcomes.pools:
        lines = {arm: _curve(outcomes, pool, arm) for arm in arms if outcomes.seeds(pool, arm)}
        panels.append(Panel(f"pool {pool}", "greedy accuracy, mean of the pool", lines))
    return Figure(name, "Greedy accuracy over training", "", tuple(panels), columns=len(panels))


def _curve(outcomes: Outcomes, pool: str, arm: str) -> Curve:
    pools = []
    for seed in outcomes.seeds(pool, arm):
        policies = outcomes.by[pool, arm, seed].policies.values()
        pools.append(mean([series(dict(policy.curve)) for policy in policies]))
    return mean_curve(pools)


def gains(comparison: Compared, name: str) -> Figure:
    """Return every arm's final accuracy minus the reference's, with its interval, a bar for each pool."""
    panel = Panel("final accuracy minus the same seed's, 95 % interval", "difference", bars=_bars(comparison))
    return Figure(name, "Final accuracy minus the reference's", "", (panel,), columns=1)


def _bars(comparison: Compared) -> dict[str, Bars]:
    by_pool = {}
    for pool, arms in comparison.differences.items():
        known = {arm: row["accuracy"] for arm, row in arms.items() if "accuracy" in row}
        bars = mean_bars({arm: [estimate.mean] for arm, estimate in known.items()})
        bars["error"] = [estimate.high - estimate.mean for estimate in known.values()]
        by_pool[pool] = bars.replace(math.inf, math.nan)
    return by_pool


def draw(figures: Sequence[Figure], out: Path) -> None:
    """Draw figures into a directory."""
    for figure in figures:
        draw_figure(figure, out)
