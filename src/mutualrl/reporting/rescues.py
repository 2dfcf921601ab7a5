"""Rescues: prompts that a policy failed, the peer's text that it trained on, and what it did when the prompt recurred.

A visit is a round in which a policy sampled a prompt. A rescue is followed by later visits; the card of a rescue shows
the next one, and the summary above the cards the fractions over all rescues by the number of visits since."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mutualrl.console.display import clean
from mutualrl.errors import MutualRLError
from mutualrl.regimes import baseline
from mutualrl.reporting.comparability import Comparison
from mutualrl.reporting.figure_specs import Figure, Panel, filled
from mutualrl.reporting.report_tables import Table
from mutualrl.runs.curves import curve, series
from mutualrl.runs.logs import LoggedRun
from mutualrl.see.inspection import Reader
from mutualrl.storage.files import JsonObject, finite_number

MOST = 50_000  # rescues per page
LARGEST = 100_000_000  # bytes of all rescues of a page
MANY = 12  # runs on a page, above which it shows arms, few rescues, and no samples
LARGEST_OF_MANY = 800_000  # bytes of all rescues of a page of more runs
LONGEST = 4_000  # characters per text
UNKNOWN = "unknown"  # next visit, if rounds are missing before it
MOST_VISITS = 12  # later visits in the summary
MOST_FRACTIONS = 40  # later visits on a card
RESCUED, NOT_RESCUED, FAILED_IN_BASELINE = "rescued", "failed, not rescued", f"failed in {baseline().name}"


@dataclass(frozen=True, slots=True)
class Visit:
    """Round in which a policy sampled a prompt: number of correct rollouts `of` all, and the text of its first rollout
    whose text was published (under SGT, of its first correct one), if there is any."""

    round: int
    correct: int
    of: int
    text: str | None


@dataclass(frozen=True, slots=True)
class Visits:
    """Visits of a policy by prompt. `missing`: rounds up to the last that could not be read."""

    by_prompt: Mapping[str, Sequence[Visit]]
    missing: frozenset[int]

    def after(self, prompt_id: str, round_index: int) -> list[Visit]:
        """Return the visits of a prompt in later rounds."""
        return [visit for visit in self.by_prompt.get(prompt_id, ()) if visit.round > round_index]

    def is_known_from(self, round_index: int, to: int | None) -> bool:
        """Return whether no round is missing after a round, up to another (None: up to the last)."""
        return not any(round_index < number and (to is None or number < to) for number in self.missing)


@dataclass(slots=True)
class Tally:
    """Later visits of one ordinal number: how many, those with a correct rollout, correct rollouts, all rollouts."""

    visits: int = 0
    solved: int = 0
    correct: int = 0
    rollouts: int = 0

    def join(self, other: Tally) -> None:
        """Add the counts of another."""
        self.visits += other.visits
        self.solved += other.solved
        self.correct += other.correct
        self.rollouts += other.rollouts

    def add(self, visit: Visit) -> None:
        """Count a visit."""
        self.visits += 1
        self.solved += visit.correct > 0
        self.correct += visit.correct
        self.rollouts += visit.of


@dataclass(slots=True)
class RescueReport:
    """What a page shows about rescues: records of the cards, tables and figures of what followed, notes. `gated`:
    every text was taught on a prompt that the policy had failed; else the page does not call them rescues."""

    records: list[JsonObject] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    gated: bool = True


def collect_rescues(groups: Sequence[Comparison]) -> RescueReport:
    """Return the rescues of all runs by run and step, and what followed them under each arm of each comparison.

    A record: `run`, `policy`, `step`, `id` of the prompt, `prompt`, `own` (text, reward), `peer`, `answer`, `hint` (the
    peer's, where the answer is the policy's own; else empty), each text as `messages` returns it; `gated`: of its run;
    `later`: the next
    visit (`round`, `correct`, `of`, `text`), None if the prompt did not recur, UNKNOWN if it may have in missing
    rounds; `visits`: [correct, of] of all later visits.
    """
    report = RescueReport()
    for number, comparison in enumerate(groups, 1):
        prefix, pool = (f"{number}-", f" ({comparison.name})") if len(groups) > 1 else ("", "")
        for arm, members in comparison.arms.items():
            of = f" under {arm}{pool}" if len(comparison.arms) > 1 else pool
            _collect_arm(report, members, comparison.runs, prefix, of)
    report.records.sort(key=lambda rescue: (rescue["run"], rescue["step"], rescue["policy"]))
    many = sum(len(comparison.runs) for comparison in groups) > MANY
    records = thinned(numbered(report.records), LARGEST_OF_MANY if many else LARGEST)
    if len(records) < len(report.records):
        shares = f"{len(records)} of {len(report.records)}"
        report.notes.append(f"this page has {shares} taught texts, evenly spaced; rescues.jsonl has all of them")
    report.records = records
    return report


def _collect_arm(
    report: RescueReport, members: Sequence[LoggedRun], runs: Sequence[LoggedRun], prefix: str, of: str
) -> None:
    """Add the rescues of an arm's runs, and what followed them over all of these. `runs`: of the comparison."""
    controls = {run.name: _control(run, runs) for run in members if any(run.rescues.values())}
    beside = all(controls.values())  # else every run beside its own failures
    tallies: dict[str, dict[str, list[Tally]]] = {}
    for run in members:
        for policy, rows in run.rescues.items():
            if not rows:
                continue
            rescued = rescue_events(rows)
            visits = _visits(run, policy, report.notes.append, {key for key, _ in rescued})
            if visits.missing:
                problem = f"rounds of {policy!r} are missing from the exchange"
                report.notes.append(f"{run.name}: {problem}; some later answers are unknown")
            report.records += [_record(run, policy, row, visits) for row in rows]
            report.gated &= run.gated
            if not run.gated:
                continue  # it was taught on prompts that it had solved, too: other failures are no control
            control = controls[run.name] if beside else None
            followed = _followed(policy, rescued, visits, control, report.notes.append)
            _add(tallies.setdefault(policy, {}), followed)
    if any(any(lists.values()) for lists in tallies.values()):
        report.tables.append(_table(of, tallies))
        report.figures.append(_figure(prefix, of, tallies, members, with_control=beside))


def _add(to: dict[str, list[Tally]], tallies: Mapping[str, Sequence[Tally]]) -> None:
    """Add tallies to those of other runs."""
    for kind, counted in tallies.items():
        sums = to.setdefault(kind, [])
        for number, tally in enumerate(counted):
            if number == len(sums):
                sums.append(Tally())
            sums[number].join(tally)


def numbered(records: list[JsonObject]) -> list[JsonObject]:
    """Number (`n`) the second and further records of one run, policy, step and prompt, so that each has a link."""
    seen: Counter[tuple[object, ...]] = Counter()
    for record in records:
        key = tuple(str(record[name]) for name in ("run", "policy", "step", "id"))
        if seen[key]:
            record["n"] = seen[key]
        seen[key] += 1
    return records


def thinned(records: list[JsonObject], most_bytes: int) -> list[JsonObject]:
    """Return at most MOST evenly spaced records, of about `most_bytes` as JSON."""
    size = sum(map(_size, records))
    most = min(MOST, int(len(records) * min(1.0, most_bytes / max(size, 1))))
    return records if len(records) <= most else [records[index * len(records) // most] for index in range(most)]


def _size(value: object) -> int:
    """Return about as many bytes as a value of JSON takes."""
    if isinstance(value, str):
        return len(value) + 3
    if isinstance(value, Mapping):
        return sum(_size(key) + _size(each) for key, each in value.items())
    return sum(map(_size, value)) + 2 if isinstance(value, list | tuple) else 6


# ---- what followed


def later_visits(visits: Visits, events: Iterable[tuple[str, int]]) -> list[Tally]:
    """Return the tallies of the first, second, ... visit after each event, a prompt and a round."""
    tallies: list[Tally] = []
    for prompt_id, round_index in events:
        for number, visit in enumerate(visits.after(prompt_id, round_index)[:MOST_VISITS]):
            if not visits.is_known_from(round_index, visit.round):
                break  # it may not be the visit of this number
            if number == len(tallies):
                tallies.append(Tally())
            tallies[number].add(visit)
    return tallies


def rescue_events(rows: Iterable[JsonObject]) -> list[tuple[str, int]]:
    """Return the prompts and rounds of rescues, each once."""
    events = ((str(row.get("prompt_id")), int(finite_number(row.get("round")) or 0)) for row in rows)
    return list(dict.fromkeys(events))


def failures(visits: Visits, prompts: Iterable[str]) -> list[tuple[str, int]]:
    """Return the visits of prompts without a correct rollout."""
    return [(key, visit.round) for key in prompts for visit in visits.by_prompt.get(key, ()) if not visit.correct]


def _followed(
    policy: str,
    rescued: Sequence[tuple[str, int]],
    visits: Visits,
    control: LoggedRun | None,
    notify: Callable[[str], None],
) -> dict[str, list[Tally]]:
    """Return what followed the policy's rescues, and what followed failures without a rescue: in the control run, of
    the prompts rescued here; without one, in this run."""
    if control is not None:
        of_control = _visits(control, policy, notify)
        prompts = dict.fromkeys(key for key, _ in rescued)
        return {
            RESCUED: later_visits(visits, rescued),
            FAILED_IN_BASELINE: later_visits(of_control, failures(of_control, prompts)),
        }
    known = set(rescued)
    others = [event for event in failures(visits, visits.by_prompt) if event not in known]
    return {RESCUED: later_visits(visits, rescued), NOT_RESCUED: later_visits(visits, others)}


def _control(run: LoggedRun, runs: Sequence[LoggedRun]) -> LoggedRun | None:
    """Return the run of plain GRPO beside a run, with the same policies, task and seed, whose exchange has its rounds;
    the first of another seed if there is none of this one."""
    candidates = []
    for other in runs:
        same = (other.pool, other.task, set(other.policies)) == (run.pool, run.task, set(run.policies))
        if same and other.info.regime == baseline().name and other is not run and _has_rounds(other):
            candidates.append(other)
    of_seed = [other for other in candidates if other.seed == run.seed]
    return next(iter([*of_seed, *candidates]), None)


def _has_rounds(run: LoggedRun) -> bool:
    try:
        reader = _reader(run)
        return all(reader.rounds(name) for name in run.policies)
    except MutualRLError:
        return False


def _beside(members: Sequence[LoggedRun], *, with_control: bool) -> str:
    """Return what the rescues are shown beside, for a caption."""
    if not with_control:
        return (
            "after a failure on which nothing was taught: other prompts, at other times "
            f"of training, which may be harder or easier. A {baseline().name} run of the same recipe with --exchange "
            "full, reported beside this one, shows the same prompts without rescue"
        )
    rescued = members[0].name if len(members) == 1 else "these runs"
    return f"after the prompts rescued in {rescued} failed under {baseline().name}, which shares nothing"


def _table(of: str, tallies: Mapping[str, Mapping[str, Sequence[Tally]]]) -> Table:
    rows = []
    kinds = list(dict.fromkeys(kind for by_kind in tallies.values() for kind in by_kind))
    for policy, by_kind in tallies.items():
        longest = max(map(len, by_kind.values()))
        for number in range(longest):
            cells = [policy, str(number + 1)]
            for kind in kinds:
                counted = by_kind.get(kind, ())
                cells += _cells(counted[number]) if number < len(counted) else ["0", "", ""]
            rows.append(cells)
    head = ["policy", "visits since"]
    for name in kinds:
        head += [f"{name}: visits", f"{name}: with a correct rollout", f"{name}: correct rollouts"]
    return Table(f"What followed rescues and other failures{of}", head, rows)


def _cells(tally: Tally) -> list[str]:
    return [str(tally.visits), f"{tally.solved / tally.visits:.3f}", f"{tally.correct / tally.rollouts:.3f}"]


def _figure(
    prefix: str,
    of: str,
    tallies: Mapping[str, Mapping[str, Sequence[Tally]]],
    members: Sequence[LoggedRun],
    *,
    with_control: bool,
) -> Figure:
    panels = []
    for policy, by_kind in tallies.items():
        lines = {}
        for kind, counted in by_kind.items():
            solved = {number: tally.solved / tally.visits for number, tally in enumerate(counted, 1)}
            lines[kind] = curve(series(solved))
        panels.append(Panel(policy, "fraction of visits with a correct rollout", lines, x="visits since"))
    over = f", over {len(members)} runs" if len(members) > 1 else ""
    return Figure(
        f"{prefix}after-a-rescue{_slug(of)}",
        f"What followed a rescue{of}?",
        f"Fraction of the first, second, ... later visits that have a correct rollout{over}: after a rescue, and "
        f"{_beside(members, with_control=with_control)}.",
        filled(*panels),
    )


def _slug(text: str) -> str:
    return "".join(c if c.isalnum() or c in ".-" else "-" for c in text)[:60]


# ---- visits and records


def _reader(run: LoggedRun) -> Reader:
    return Reader(run.info.exchange or run.root / "exchange", run.info.run_id)


def _visits(run: LoggedRun, policy: str, notify: Callable[[str], None], with_text: Collection[str] = ()) -> Visits:
    """Return the rounds in which the policy sampled each prompt, with the texts of some prompts. Damaged rounds are
    reported and left out."""
    visits: dict[str, list[Visit]] = {}
    above = run.success_above(policy)
    try:
        reader = _reader(run)
        rounds = reader.rounds(policy)
    except MutualRLError as error:
        notify(f"later answers of {policy!r} are not shown: {error}")
        return Visits({}, frozenset({0}))
    missing = set(range(rounds[-1] + 1 if rounds else 1)) - set(rounds)
    for round_index in rounds:
        try:
            shard = reader.read(policy, round_index)
            if shard is None:
                continue
            rows: dict[str, list[int]] = {}
            for row, key in enumerate(shard.prompt_ids):
                rows.setdefault(key, []).append(row)
            rewards = shard.rewards
            shown = [row for key in rows.keys() & set(with_text) for row in rows[key]]
            texts = dict(zip(shown, shard.texts(shown), strict=True))
        except MutualRLError as error:
            notify(f"round {round_index} of {policy!r} is left out: {error}")
            missing.add(round_index)
            continue
        for key, rollouts in rows.items():
            correct = sum(rewards[row] > above for row in rollouts)
            text = next((texts[row] for row in rollouts if texts.get(row) is not None), None)
            visits.setdefault(key, []).append(Visit(round_index, correct, len(rollouts), text))
    return Visits(visits, frozenset(missing))


def _record(run: LoggedRun, policy: str, row: JsonObject, visits: Visits) -> JsonObject:
    own = row.get("own") if isinstance(row.get("own"), list) else []
    rescue_round = int(finite_number(row.get("round")) or 0)
    later = visits.after(str(row.get("prompt_id")), rescue_round)
    return {
        "run": run.name,
        "policy": policy,
        "step": row["step"],
        "id": clean(str(row.get("prompt_id")), 200),
        "prompt": messages(row.get("prompt")),
        "own": [[messages(r.get("text")), finite_number(r.get("reward"))] for r in own or () if isinstance(r, dict)],
        "peer": _text(row.get("peer")),
        "answer": messages(row.get("answer")),
        "hint": messages(row.get("hint", "")),
        "gated": run.gated,
        "later": _next(later, rescue_round, visits),
        "visits": [[visit.correct, visit.of] for visit in later[:MOST_FRACTIONS]],
    }


def _next(later: Sequence[Visit], rescue_round: int, visits: Visits) -> Any:
    following = later[0] if later else None
    if not visits.is_known_from(rescue_round, None if following is None else following.round):
        return UNKNOWN
    if following is None:
        return None
    text = None if following.text is None else _text(following.text)
    return {"round": following.round, "correct": following.correct, "of": following.of, "text": text}


def messages(value: Any) -> str | list[list[str]]:
    """Return a text, or messages (`role`, `content`) as [role, content], sanitized and truncated for a page."""
    if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        return [[_text(each.get("role", "")), _text(each.get("content", ""))] for each in value]
    return _text(value)


def _text(value: Any) -> str:
    """Return model output as sanitized, truncated text for a page."""
    return clean(str(value), LONGEST)
