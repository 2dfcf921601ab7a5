"""Rescues: prompts that a policy failed, the peer's text that it trained on, and what it did when the prompt recurred.

A visit is a round in which a policy sampled a prompt. A rescue is followed by later visits; the card of a rescue shows
the next one, and the summary above the cards the fractions over all rescues by the number of visits since."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mutualrl.console.display import clean
from mutualrl.errors import MutualRLError
from mutualrl.regimes import baseline
from mutualrl.reporting.figure_specs import Figure, Panel
from mutualrl.reporting.report_tables import Table
from mutualrl.runs.curves import curve, series
from mutualrl.runs.logs import LoggedRun
from mutualrl.see.inspection import Reader
from mutualrl.storage.files import JsonObject, finite_number

MOST = 50_000  # rescues per page
LARGEST = 100_000_000  # characters of all rescues of a page
LONGEST = 4_000  # characters per text
UNKNOWN = "unknown"  # next visit, if rounds are missing before it
MOST_VISITS = 12  # later visits in the summary
MOST_FRACTIONS = 40  # later visits on a card
RESCUED, NOT_RESCUED = "rescued", "failed, not rescued"


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

    def add(self, visit: Visit) -> None:
        """Count a visit."""
        self.visits += 1
        self.solved += visit.correct > 0
        self.correct += visit.correct
        self.rollouts += visit.of


@dataclass(slots=True)
class RescueReport:
    """What a page shows about rescues: records of the cards, tables and figures of what followed, notes."""

    records: list[JsonObject] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def collect_rescues(runs: Sequence[LoggedRun]) -> RescueReport:
    """Return the rescues of all runs by run and step, and what followed them.

    A record: `run`, `policy`, `step`, `prompt`, `own` (text, reward), `peer`, `answer`, `hint` (the peer's, where the
    answer is the policy's own; else empty), `later`: the next visit (`round`, `correct`, `of`, `text`), None if the
    prompt did not recur, UNKNOWN if it may have in missing rounds; `visits`: [correct, of] of all later visits.
    """
    report = RescueReport()
    for run in runs:
        tallies: dict[str, dict[str, list[Tally]]] = {}
        control = _control(run, runs)
        for policy, rows in run.rescues.items():
            if not rows:
                continue
            rescued = rescue_events(rows)
            visits = _visits(run, policy, report.notes.append, {key for key, _ in rescued})
            if visits.missing:
                problem = f"rounds of {policy!r} are missing from the exchange"
                report.notes.append(f"{run.name}: {problem}; some later answers are unknown")
            report.records += [_record(run, policy, row, visits) for row in rows]
            tallies[policy] = _followed(policy, rescued, visits, control, report.notes.append)
        if any(any(lists.values()) for lists in tallies.values()):
            report.tables.append(_table(run, tallies, control))
            report.figures.append(_figure(run, tallies, control))
    report.records.sort(key=lambda rescue: (rescue["run"], rescue["step"], rescue["policy"]))
    _thin(report)
    return report


def _thin(report: RescueReport) -> None:
    """Keep at most MOST records, and LARGEST characters."""
    entries, size = report.records, 0
    for entry in entries:
        size += sum(len(entry[key]) for key in ("prompt", "answer", "hint"))
        size += sum(len(text) for text, _ in entry["own"])
    most = min(MOST, int(len(entries) * min(1.0, LARGEST / max(size, 1))))
    if len(entries) > most:
        note = f"this page has {most} of {len(entries)} rescues, evenly spaced; rescues.jsonl has all of them"
        report.notes.append(note)
        report.records = [entries[index * len(entries) // most] for index in range(most)]


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
            control.name: later_visits(of_control, failures(of_control, prompts)),
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


def _beside(run: LoggedRun, control: LoggedRun | None) -> str:
    """Return what the rescues are shown beside, for a caption."""
    if control is None:
        return (
            "after a failure that was not rescued, since no peer had solved the prompt: other prompts, at other times "
            "of training, which may be harder or easier. A grpo run of the same recipe with --exchange full, reported "
            "beside this one, shows the same prompts without rescue"
        )
    return f"after the prompts rescued in {run.name} failed in {control.name}, which shares nothing"


def _table(run: LoggedRun, tallies: Mapping[str, Mapping[str, Sequence[Tally]]], control: LoggedRun | None) -> Table:
    rows = []
    for policy, by_kind in tallies.items():
        longest = max(map(len, by_kind.values()))
        for number in range(longest):
            cells = [policy, str(number + 1)]
            for kind in by_kind.values():
                cells += _cells(kind[number]) if number < len(kind) else ["0", "", ""]
            rows.append(cells)
    other = NOT_RESCUED if control is None else f"failed in {control.name}"
    head = ["policy", "visits since"]
    for name in (RESCUED, other):
        head += [f"{name}: visits", f"{name}: with a correct rollout", f"{name}: correct rollouts"]
    return Table(f"What followed rescues and other failures, {run.name}", head, rows)


def _cells(tally: Tally) -> list[str]:
    return [str(tally.visits), f"{tally.solved / tally.visits:.3f}", f"{tally.correct / tally.rollouts:.3f}"]


def _figure(run: LoggedRun, tallies: Mapping[str, Mapping[str, Sequence[Tally]]], control: LoggedRun | None) -> Figure:
    panels = []
    for policy, by_kind in tallies.items():
        lines = {}
        for kind, counted in by_kind.items():
            solved = {number: tally.solved / tally.visits for number, tally in enumerate(counted, 1)}
            lines[kind] = curve(series(solved))
        panels.append(Panel(policy, "visits with a correct rollout", lines, x="visits since"))
    return Figure(
        f"after-a-rescue-{_slug(run.name)}",
        f"What followed a rescue, {run.name}",
        f"Fraction of the first, second, ... later visits that have a correct rollout: after a rescue, and "
        f"{_beside(run, control)}.",
        tuple(panels),
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


def _record(run: LoggedRun, policy: str, row: JsonObject, visits: Visits) -> dict[str, object]:
    own = row.get("own") if isinstance(row.get("own"), list) else []
    rescue_round = int(finite_number(row.get("round")) or 0)
    later = visits.after(str(row.get("prompt_id")), rescue_round)
    return {
        "run": run.name,
        "policy": policy,
        "step": row["step"],
        "prompt": _text(row.get("prompt")),
        "own": [[_text(r.get("text")), finite_number(r.get("reward"))] for r in own or () if isinstance(r, dict)],
        "peer": _text(row.get("peer")),
        "answer": _text(row.get("answer")),
        "hint": _text(row.get("hint", "")),
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


def _text(value: Any) -> str:
    """Return model output as sanitized, truncated text for a page."""
    return clean(str(value), LONGEST)
