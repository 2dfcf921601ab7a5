"""The board: what each way of teaching gained over plain GRPO, from the raw values in result files.

    python benchmarks/board.py                     # docs/board.md and docs/images/board.svg
    python benchmarks/board.py --pool "file of"    # the pools with these words in their title, in the terminal
    python benchmarks/board.py --check ENTRY.json  # what an entry would add, or why it cannot enter

Reads the files named in board.yaml, and entries from benchmarks/entries/*.json: each is the output of `mutualrl compare
RUNS --json` with an arm `grpo`. An entry must have three seeds or more that its arms share, and the same prompts for
all arms of a seed.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

import harness
import regimes
import sweep_results as sweeps
from mutualrl.console.display import clean
from mutualrl.console.markdown import name as shown
from mutualrl.console.plots import draw_on
from mutualrl.reporting.drawing import STYLE
from mutualrl.study.claims import difference, read_claims
from mutualrl.study.comparison import Compared, compare
from mutualrl.study.outcomes import Outcome, Outcomes
from mutualrl.study.statistics import MIN_VALUES, Estimate, smallest_found

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
ENTRIES = HERE / "entries"
BOARD = yaml.safe_load((HERE / "board.yaml").read_text(encoding="utf-8"))
HEAD = (
    *("arm", "what it teaches", "minus GRPO", "reading", "GRPO alone", "tokens: sampled + trained + asked", "seeds"),
    *("ten seeds find", "newer than the claim", "code of its runs"),
)
#: what teaching may cost the model: columns and measures
COSTS = {
    "length": "length",
    "entropy": "entropy",
    "KL to the start": "kl",
    "retained": "retained",
    "pass@1": "pass_at/1",
    "pass@8": "pass_at/8",
    "pass@16": "pass_at/16",
    "pass@64": "pass_at/64",
}
SEEDS = 10  # of the power statement
VERDICTS = ("held", "refuted", "undecided", "implied")
REFERENCE = "grpo"
COLOURS = {"above": "#2a9d6f", "below": "#c8454f", "not decided": "#8c8c8c"}


@dataclass(frozen=True)
class Row:
    """One arm of a pool. `gain`: final greedy accuracy minus GRPO's of the same seed; `alone`: GRPO's own after
    training minus before on these seeds, None where the runs do not record what was before; `tokens`: sampled, trained
    on besides, and asked of sources, as multiples of the tokens that GRPO sampled; `newer`: which runs began after the
    claims about them were written; `code`: what began them; `costs`: measures of COSTS minus GRPO's, those that the
    runs record."""

    arm: str
    lesson: str
    gain: Estimate
    alone: Estimate | None
    tokens: tuple[float | None, float | None, float | None]
    newer: str
    code: str
    costs: Mapping[str, Estimate]

    @property
    def reading(self) -> str:
        """Return what the 95 % interval says."""
        return self.gain.reading


@dataclass(frozen=True)
class Section:
    """Rows of one pool, the largest gain first. `page`: below docs, with the account of it; empty for an entry.
    `minutes`: of each run, for each arm, GRPO too; NaN where they are not recorded. `steps`: of the runs. `about`: what
    the pool was made for, and how its policies differ."""

    title: str
    page: str
    rows: Sequence[Row]
    minutes: Mapping[str, Sequence[float]]
    steps: tuple[int, ...] = ()
    about: Sequence[str] = ()


def sections() -> list[Section]:
    """Return the sections of board.yaml, then those of the entries."""
    made = [_of_results(pool, BOARD["lessons"]) for pool in BOARD["pools"]]
    for path in sorted(ENTRIES.glob("*.json")):
        made += of_entry(read(path), path.stem)
    return made


def read(path: Path) -> object:
    """Return the content of an entry. Raises SystemExit if it is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SystemExit(f"{path}: not JSON ({error})") from None


def _of_results(pool: Mapping[str, Any], lessons: Mapping[str, str]) -> Section:
    outcomes: dict[tuple[str, int], Outcome] = {}
    written: dict[str, str] = {}  # when the last claim about an arm of this pool was
    for name in pool["results"]:
        content = sweeps.stored(name)
        for arm in _claimed(content, pool["pool"]):
            written[arm] = max(written.get(arm, ""), content["comparison"]["registered"]["changed"])
        stored = sweeps.outcomes_of(content) if "pieces" in content else regimes.outcomes(content["runs"])
        own = [outcome for outcome in stored.by.values() if outcome.pool == pool["pool"]]
        for outcome in own:
            outcomes[outcome.arm, outcome.seed] = outcome
    both = Outcomes(list(outcomes.values()))
    newer, code = {}, {}
    for arm in both.arms(pool["pool"]):
        of_arm = [each for each in outcomes.values() if each.arm == arm]
        newer[arm], code[arm] = _newer(of_arm, written.get(arm)), Outcomes(of_arm).code
    rows = _rows(both, compare(both, REFERENCE), pool["pool"], lessons, newer, code)
    about = ["", f"{pool['about']} {_before(both, pool['pool'])}".rstrip()]
    return Section(pool["title"], pool["page"], rows, _minutes(both), _steps(outcomes.values()), about)


def _before(outcomes: Outcomes, pool: str) -> str:
    """Return how able each policy of a pool is before training, by group where there are several: means over seeds."""
    runs = [outcomes.by[pool, REFERENCE, seed].policies for seed in outcomes.seeds(pool, REFERENCE)]
    able = []
    for policy in outcomes.policies(pool):
        before = [run[policy].before for run in runs]
        groups = [group for group in outcomes.groups(pool, policy) if all(group in each for each in before)]
        means = {group: statistics.fmean(each[group] for each in before) for group in groups}
        whole, parts = means.pop("all", None), ", ".join(f"{group} {mean:.0%}" for group, mean in means.items())
        if whole is not None:
            able.append(f"{policy} {whole:.0%}" + (f" ({parts})" if len(means) > 1 else ""))
    return f"Greedy accuracy before training: {', '.join(able)}." if able else ""


def _minutes(outcomes: Outcomes) -> dict[str, list[float]]:
    """Return the minutes of each run of each arm."""
    minutes: dict[str, list[float]] = {}
    for outcome in outcomes.by.values():
        seconds = [policy.seconds for policy in outcome.policies.values() if policy.seconds is not None]
        minutes.setdefault(outcome.arm, []).append(max(seconds, default=math.nan) / 60)
    return minutes


def _claimed(content: Mapping[str, Any], pool: str) -> set[str]:
    """Return the arms that the claims of a results file compare on a pool."""
    compared = content.get("comparison", {})
    if not compared.get("registered"):
        return set()
    registered = read_claims(sweeps.SWEEPS / compared["registered"]["file"])
    claims = [claim for claim in registered.file.claims if not claim.pools or pool in claim.pools]
    return {arm for claim in claims for arm in (claim.one, claim.other) if arm is not None}


def _newer(runs: Sequence[Outcome], written: str | None) -> str:
    """Return how many runs of an arm began after the last claim about it was written, and of how many that is not
    recorded."""
    if written is None:
        return "no claim"
    ages = Counter(outcome.age(written) for outcome in runs)
    if not ages["not recorded"]:
        return f"{ages['newer']} of {ages.total()}"
    parts = [f"{ages[age]} {age}" for age in ("newer", "older") if ages[age]]
    return "; ".join(["not recorded" if not parts else f"{ages['not recorded']} not recorded", *parts])


def of_entry(content: object, name: str) -> list[Section]:
    """Return the sections of an entry. Raises SystemExit that says why it cannot enter."""
    if not isinstance(content, dict) or not isinstance(content.get("pieces"), list) or not content["pieces"]:
        raise SystemExit(f"{name}: found no pieces, expected the output of: mutualrl compare RUNS --json")
    try:
        outcomes = list(sweeps.pieces_of(content))
        compared = compare(Outcomes(outcomes), REFERENCE)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise SystemExit(f"{name}: not what `mutualrl compare` prints ({type(error).__name__}: {error})") from None
    version = ", ".join(sorted({f"mutualrl {outcome.version}" for outcome in outcomes}))
    entry, problems = _described(content)
    by_pool = {pool: [each for each in outcomes if each.pool == pool] for pool in compared.differences}
    problems += [f"{pool}: {problem}" for pool, own in by_pool.items() for problem in _problems(own)]
    unmatched = [note for note in content.get("notes", []) if "not matched" in note]
    problems += [f"the arms differ in more than the rule: {note}" for note in unmatched]
    if problems:
        raise SystemExit("\n".join(f"{name}: {problem}" for problem in problems))
    made = []
    for pool, own in by_pool.items():
        written = (content.get("registered") or {}).get("changed")
        newer = {arm: _newer([each for each in own if each.arm == arm], written) for arm in {each.arm for each in own}}
        code = {outcome.arm: f"{entry['code']} ({version})" for outcome in own}
        lessons = {outcome.arm: BOARD["lessons"].get(outcome.arm, entry["rule"]) for outcome in own}
        title = f"{name}: {pool}, by {entry['author']}"
        rows = _rows(Outcomes(own), compared, pool, lessons, newer, code)
        made.append(Section(title, "", rows, _minutes(Outcomes(own)), _steps(own)))
    return made


ENTRY = {
    "rule": "what the rule teaches, in a few words",
    "author": "who hands it in",
    "code": "where the rule's code is: an address, or a commit",
}


def _described(content: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Return who hands an entry in, and what of; and which keys to add."""
    given = content.get("entry")
    values = {key: given.get(key) if isinstance(given, dict) else None for key in ENTRY}
    missing = {key: ENTRY[key] for key, value in values.items() if not isinstance(value, str) or not value.strip()}
    problems = [f'add to the file: "entry": {json.dumps(missing)}'] if missing else []
    return {key: clean(str(value), 100) for key, value in values.items()}, problems


def _steps(outcomes: Iterable[Outcome]) -> tuple[int, ...]:
    """Return the numbers of steps at which the runs of a pool were evaluated last."""
    curves = [policy.curve for outcome in outcomes for policy in outcome.policies.values()]
    return tuple(sorted({curve[-1][0] for curve in curves if curve}))


def _problems(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield why the runs of a pool cannot enter."""
    seeds: dict[str, list[int]] = {}
    by_seed: dict[int, list[Outcome]] = {}
    for outcome in outcomes:
        seeds.setdefault(outcome.arm, []).append(outcome.seed)
        by_seed.setdefault(outcome.seed, []).append(outcome)
    if REFERENCE not in seeds or len(seeds) < 2:
        yield f"found the arms {', '.join(seeds)}, expected {REFERENCE} and another"
        return
    for arm, own in seeds.items():
        if len(set(own)) < len(own):
            yield f"{arm} has two runs of one seed ({', '.join(map(str, sorted(own)))})"
        elif len(own) < MIN_VALUES or set(own) != set(seeds[REFERENCE]):
            expected = ", ".join(map(str, sorted(seeds[REFERENCE])))
            yield (
                f"{arm} has the seeds {', '.join(map(str, sorted(own)))}, expected the same {MIN_VALUES} or more as "
                f"{REFERENCE} ({expected}); train those that are missing"
            )
    for seed, runs in by_seed.items():
        data, steps = {outcome.data for outcome in runs}, _steps(runs)
        if len({tuple(sorted(outcome.policies)) for outcome in runs}) > 1:
            yield f"the arms of seed {seed} have other policies"
        elif len(data) > 1 or not all(data):
            yield f"the arms of seed {seed} have other prompts, or do not record them"
        if len(steps) > 1:
            yield f"the runs of seed {seed} have other numbers of steps ({', '.join(map(str, steps))})"


def _rows(
    outcomes: Outcomes,
    compared: Compared,
    pool: str,
    lessons: Mapping[str, str],
    newer: Mapping[str, str],
    code: Mapping[str, str],
) -> list[Row]:
    rows = []
    for arm, differences in compared.differences[pool].items():
        budget = compared.budget[pool].get(arm, {})
        tokens = (budget.get("generated_tokens"), budget.get("extra_tokens"), budget.get("asked_tokens"))
        changes = {name: difference(outcomes, pool, arm, REFERENCE, measure) for name, measure in COSTS.items()}
        costs = {name: each for name, each in changes.items() if each is not None}
        lesson = lessons.get(arm, "")
        alone = sweeps.gained(outcomes, pool, REFERENCE, outcomes.seeds(pool, arm, REFERENCE))
        rows.append(Row(arm, lesson, differences["accuracy"], alone, tokens, newer[arm], code[arm], costs))
    return sorted(rows, key=lambda row: -row.gain.mean)


# ---- the page


def page(made: Sequence[Section]) -> str:
    """Return docs/board.md."""
    links = [f"[{shown(section.title)}](#{_anchor(section.title)})" for section in made]
    lines = [BOARD["introduction"], f"**Pools**: {' · '.join(links)}", ""]
    for section in made:
        link = f" ([account]({section.page}))" if section.page else ""
        steps = " and ".join(map(str, section.steps)) or "an unknown number of"
        after = f"Final greedy accuracy minus `grpo`'s of the same seed, after {steps} steps{link}."
        lines += [f"## {shown(section.title)}", "", after, *section.about, ""]
        lines += [f"| {' | '.join(HEAD)} |", "|" + "---|" * len(HEAD)]
        lines += [_line(row) for row in section.rows]
        lines += ["", *_costs(section)]
    return "\n".join([*lines, *_ahead(made), *_claims(), ""])


def _ahead(made: Sequence[Section]) -> list[str]:
    """Return the table of what more seeds would take, the fewest minutes first."""
    whole = sum(row.gain.n >= SEEDS for section in made for row in section.rows)
    total = sum(len(section.rows) for section in made)
    lines = [
        "## What more seeds would take",
        "",
        f"{whole} of {total} rows have {SEEDS} seeds or more. Minutes of two cores, from the median run of each arm "
        "that has fewer; GRPO's runs are among them where it has fewer too.",
        "",
        f"| pool | arms with fewer than {SEEDS} seeds | minutes per run | minutes to {SEEDS} seeds |",
        "|---|---|---|---|",
    ]
    rows = []
    for section in made:
        fewer = {arm: minutes for arm, minutes in section.minutes.items() if len(minutes) < SEEDS}
        if not fewer:
            continue
        typical = {arm: statistics.median(minutes) for arm, minutes in fewer.items()}
        left = sum((SEEDS - len(minutes)) * typical[arm] for arm, minutes in fewer.items())
        arms = ", ".join(f"`{shown(BOARD['shown'].get(arm, arm))}` ({len(fewer[arm])})" for arm in sorted(fewer))
        span = "not recorded" if math.isnan(left) else f"{min(typical.values()):.1f} to {max(typical.values()):.1f}"
        rows.append(
            (left, f"| {shown(section.title)} | {arms} | {span} | {left:.0f} |".replace("| nan |", "| not recorded |"))
        )
    rows.sort(key=lambda row: (math.isnan(row[0]), row[0]))
    return [*lines, *(line for _, line in rows), ""]


def _costs(section: Section) -> list[str]:
    """Return the table of what the main lessons cost the model, with the measures that any of them records."""
    rows = [row for row in section.rows if row.costs and (row.lesson or not section.page)]
    columns = [name for name in COSTS if any(name in row.costs for row in rows)]
    if not columns:
        return []
    lines = ["What it costs the model, minus GRPO's:", "", f"| arm | {' | '.join(columns)} |"]
    lines.append("|" + "---|" * (len(columns) + 1))
    for row in rows:
        cells = [_interval(row.costs[name]) if name in row.costs else "not recorded" for name in columns]
        lines.append(f"| `{shown(BOARD['shown'].get(row.arm, row.arm))}` | {' | '.join(cells)} |")
    return [*lines, ""]


def _interval(estimate: Estimate) -> str:
    return sweeps.interval(estimate.mean, estimate.low, estimate.high)


def _claims() -> list[str]:
    """Return the table of all registered claims, the oldest first, and their sums."""
    lines = [
        "## Registered claims",
        "",
        "All but the four of `smol-pair`, whose runs were cut short and none of which was tested; with the time of the "
        "first commit of their present text. Verdicts are Holm-corrected within a sweep, but for those of `study`, "
        "which are not corrected and were written after its results: they describe these and predict nothing. One that "
        "is *implied* by another of them is counted only there. [What was changed after each "
        "registration](registrations.md). The last column is the commit of the code that wrote the table, *with "
        "changes* where its tracked files differed from it; what began the runs stands above.",
    ]
    lines += [
        "",
        f"| sweep | committed | first run began | {' | '.join(VERDICTS)} | table written by |",
        "|---" * 8 + "|",
    ]
    before, after, real = Counter[str](), Counter[str](), Counter[str]()
    for name, committed in sweeps.COMMITTED.items():
        content = sweeps.stored(name)
        verdicts = Counter(content["comparison"]["verdicts"])
        (after if name in BOARD["after"] else before).update(verdicts)
        real.update(verdicts if name in BOARD["real"] else {})
        began = min((piece.get("began") or "" for piece in content["pieces"]), default="") or "not recorded"
        counts = " | ".join(str(verdicts[each]) for each in VERDICTS)
        code = content["code"]
        table = str(code["commit"] or code["stored_in"])[:8] + (" with changes" if code.get("changed") else "")
        lines.append(f"| {shown(name)} | {committed} | {began} | {counts} | {table} |")
    sums_of = {"**written before their results**": before, "of these on real models": real, "written after": after}
    for label, sums in sums_of.items():
        lines.append(f"| {label} | | | {' | '.join(str(sums[each]) for each in VERDICTS)} | |")
    return lines


def _anchor(title: str) -> str:
    """Return the anchor that GitHub and MkDocs give a heading."""
    return re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")


def _line(row: Row) -> str:
    gain = _interval(row.gain)
    reading = row.reading if row.reading == "not decided" else f"**{row.reading}**"
    sampled, trained, asked = row.tokens
    tokens = "not recorded"
    if sampled is not None and trained is not None:
        tokens = f"{sampled:.2f} + {trained:.2f} + {asked or 0.0:.2f}"
    findable = max(smallest_found(row.gain.standard_deviation, SEEDS), row.gain.resolution)
    arm = BOARD["shown"].get(row.arm, row.arm)
    alone = "not recorded" if row.alone is None else _interval(row.alone)
    measured = (gain, reading, alone, tokens, str(row.gain.n), f"{findable:.3f}")
    cells = (f"`{shown(arm)}`", row.lesson, *measured, row.newer, shown(row.code))
    return f"| {' | '.join(cells)} |"


# ---- the picture


def draw(made: Sequence[Section], path: Path) -> None:
    """Write the picture of the main lessons as an SVG."""
    shown_rows: list[tuple[str, list[Row]]] = []
    for section in made:
        drawn = [row for row in section.rows if row.gain.n >= MIN_VALUES]
        rows = [row for row in drawn if row.lesson or not section.page]
        if rows:
            shown_rows.append((section.title, rows))
    count = sum(len(rows) + 1.4 for _, rows in shown_rows)
    with draw_on((9.6, 0.24 * count + 0.6), STYLE | {"svg.hashsalt": "board"}) as canvas:
        axis = canvas.subplots()
        height, ticks, labels = 0.0, [], []
        for title, rows in shown_rows:
            height += 1.4
            axis.text(
                -0.44, height - 0.75, clean(title, 80), weight="bold", va="center", transform=axis.get_yaxis_transform()
            )
            for row in rows:
                colour = COLOURS[row.reading]
                low, high = max(row.gain.low, LEAST), min(row.gain.high, MOST)
                axis.plot((low, high), (height, height), color=colour, linewidth=2)
                axis.plot(row.gain.mean, height, "o", color=colour, markersize=5)
                ticks.append(height)
                labels.append(clean(row.lesson or row.arm, 60))
                height += 1
        axis.axvline(0, color="#222222", linewidth=0.8)
        axis.set(ylim=(height, 0), xlim=(LEAST, MOST), xlabel="final accuracy minus plain GRPO's, 95 % interval")
        axis.set_yticks(ticks, labels)
        axis.tick_params(axis="y", length=0)
        axis.spines["left"].set_visible(False)
        axis.grid(axis="x", alpha=0.25, linewidth=0.5)
        for number, (reading, colour) in enumerate(COLOURS.items()):
            axis.text(0.72 + 0.09 * number, 1.0, reading, color=colour, weight="bold", transform=axis.transAxes)
        canvas.savefig(path, metadata={"Date": None})
    path.write_text(re.sub(r"[ \t]+$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE), encoding="utf-8")


LEAST, MOST = -0.46, 0.6


def draw_tokens(made: Sequence[Section], path: Path) -> None:
    """Write the picture of gain against tokens as an SVG: every main lesson whose tokens are recorded."""
    rows = [row for section in made for row in section.rows if row.lesson and None not in row.tokens[:2]]
    rows = [row for row in rows if row.gain.n >= MIN_VALUES]  # of fewer seeds the interval is as long as the axis
    named: list[tuple[str, float, float]] = []
    with draw_on((9.6, 4.2), STYLE | {"svg.hashsalt": "tokens"}) as canvas:
        axis = canvas.subplots()
        for row in rows:
            total = sum(each or 0.0 for each in row.tokens)
            low, high = max(row.gain.low, LEAST), min(row.gain.high, MOST)
            colour = COLOURS[row.reading]
            axis.plot((total, total), (low, high), color=colour, linewidth=1.2, alpha=0.7)
            axis.plot(total, row.gain.mean, "o", color=colour, markersize=4)
            near = [(arm, at) for arm, at, gain in named if arm == row.arm and abs(gain - row.gain.mean) < NEAR]
            if row.reading != "not decided" and abs(row.gain.mean) > LABELLED and not near:
                named.append((row.arm, total, row.gain.mean))
                axis.annotate(row.arm, (total, row.gain.mean), xytext=(6, 4), textcoords="offset points", fontsize=8)
        axis.axhline(0, color="#222222", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set_xticks((1, 1.5, 2, 3, 4), ("1", "1.5", "2", "3", "4"))
        axis.minorticks_off()
        axis.set(
            ylim=(LEAST, MOST),
            xlabel="tokens sampled, trained on besides and asked of sources, GRPO's sampled ones = 1",
        )
        axis.set_ylabel("final accuracy minus GRPO's")
        axis.grid(alpha=0.25, linewidth=0.5)
        for number, (reading, colour) in enumerate(COLOURS.items()):
            axis.text(0.72 + 0.09 * number, 1.02, reading, color=colour, weight="bold", transform=axis.transAxes)
        canvas.savefig(path, metadata={"Date": None})
    path.write_text(re.sub(r"[ \t]+$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE), encoding="utf-8")


LABELLED = 0.1  # gains or losses above this are named in the picture
NEAR = 0.05  # an arm is named once among gains as close as this


def described(made: Sequence[Section]) -> Iterator[str]:
    """Yield a line per row, for a terminal."""
    for section in made:
        steps = " and ".join(map(str, section.steps)) or "an unknown number of"
        yield f"{section.title}, {steps} steps"
        for row in section.rows:
            yield f"  {row.arm}: {_interval(row.gain)}, {row.reading}"


def main() -> None:
    """Write the board, or check an entry."""
    parser = harness.options(__doc__)
    parser.add_argument(
        "--pool", metavar="WORDS", help="print the pools whose title has these words; nothing is written"
    )
    parser.add_argument("--check", type=Path, metavar="ENTRY", help="an entry to check; nothing is written")
    args = harness.parse(parser)
    if args.check is not None:
        entry = read(args.check)
        print("\n".join(clean(line, 300) for line in described(of_entry(entry, args.check.stem))))
        return
    if args.pool is not None:
        chosen = [section for section in sections() if args.pool.lower() in section.title.lower()]
        if not chosen:
            titles = "; ".join(section.title for section in sections())
            raise SystemExit(f"--pool: no title has {args.pool!r}; expected words of: {titles}")
        print("\n".join(clean(line, 300) for line in described(chosen)))
        return
    docs = args.out if args.smoke else DOCS
    (docs / "images").mkdir(parents=True, exist_ok=True)
    made = sections()
    (docs / "board.md").write_text(page(made), encoding="utf-8")
    draw(made, docs / "images" / "board.svg")
    draw_tokens(made, docs / "images" / "tokens.svg")
    print("\n".join(clean(line, 300) for line in described(made)))


if __name__ == "__main__":
    main()
