"""Rescues: prompts that a policy failed, the peer's text that it trained on, and its later answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mutualrl.console.display import clean
from mutualrl.errors import MutualRLError
from mutualrl.reporting.run_reader import PolicyRun, Run
from mutualrl.see.inspection import Reader
from mutualrl.storage.files import JsonObject, finite_number

MOST = 50_000  # rescues per page
LARGEST = 100_000_000  # characters of all rescues of a page
LONGEST = 4_000  # characters per text
UNKNOWN = "unknown"  # later answer, if rounds are missing


@dataclass(frozen=True, slots=True)
class Visit:
    """Later round with the same prompt: number of correct rollouts `of` all, and the text of a correct one, if it was
    published."""

    round: int
    correct: int
    of: int
    text: str | None


@dataclass(frozen=True, slots=True)
class Visits:
    """Visits of a policy by prompt. `complete`: whether every round up to the last could be read."""

    by_prompt: Mapping[str, Sequence[Visit]]
    complete: bool


def collect_rescues(runs: Sequence[Run]) -> tuple[list[JsonObject], list[str]]:
    """Return the rescues of all runs by run and step, as records for the page, and notes on missing data.

    A rescue: `run`, `policy`, `step`, `prompt`, `own` (text, reward), `peer`, `answer`, and `later`: the first later
    visit with a correct rollout, else the last visit; None if the prompt did not recur, UNKNOWN if it may have in
    missing rounds.
    """
    entries: list[JsonObject] = []
    notes: list[str] = []
    for run in runs:
        for policy in run.policies.values():
            if not policy.rescues:
                continue
            visits = _visits(run, policy, {str(row.get("prompt_id")) for row in policy.rescues}, notes.append)
            if not visits.complete:
                problem = f"rounds of {policy.name!r} are missing from the exchange"
                notes.append(f"{run.name}: {problem}; some later answers are unknown")
            entries += [_record(run, policy, row, visits) for row in policy.rescues]
    entries.sort(key=lambda rescue: (rescue["run"], rescue["step"], rescue["policy"]))
    size = 0
    for entry in entries:
        size += len(entry["prompt"]) + len(entry["answer"]) + sum(len(text) for text, _ in entry["own"])
    most = min(MOST, int(len(entries) * min(1.0, LARGEST / max(size, 1))))
    if len(entries) > most:
        notes.append(f"this page has {most} of {len(entries)} rescues, evenly spaced; rescues.jsonl has all of them")
        entries = [entries[index * len(entries) // most] for index in range(most)]
    return entries, notes


def _visits(run: Run, policy: PolicyRun, wanted: set[str], notify: Callable[[str], None]) -> Visits:
    """Return the rounds in which the policy sampled each prompt. Damaged rounds are reported and left out."""
    visits: dict[str, list[Visit]] = {}
    above = run.success_above(policy.name)
    try:
        location = str(run.info.get("exchange") or "") or run.root / "exchange"
        reader = Reader(location, str(run.info.get("run_id")))
        rounds = reader.rounds(policy.name)
    except MutualRLError as error:
        notify(f"later answers of {policy.name!r} are not shown: {error}")
        return Visits({}, complete=False)
    complete = bool(rounds) and rounds == list(range(rounds[-1] + 1))
    for round_index in rounds:
        try:
            shard = reader.read(policy.name, round_index)
            if shard is None:
                continue
            rows: dict[str, list[int]] = {}
            for row, key in enumerate(shard.column("prompt_id")):
                if key in wanted:
                    rows.setdefault(key, []).append(row)
            rewards = shard.column("reward")
            correct = {key: [r for r in rollouts if rewards[r] > above] for key, rollouts in rows.items()}
            first_correct = {key: rollouts[0] for key, rollouts in correct.items() if rollouts}
            texts = dict(zip(first_correct, shard.texts(list(first_correct.values())), strict=True))
        except MutualRLError as error:
            notify(f"round {round_index} of {policy.name!r} is left out: {error}")
            complete = False
            continue
        for key, rollouts in rows.items():
            visits.setdefault(key, []).append(Visit(round_index, len(correct[key]), len(rollouts), texts.get(key)))
    return Visits(visits, complete)


def _record(run: Run, policy: PolicyRun, row: JsonObject, visits: Visits) -> dict[str, object]:
    own = row.get("own") if isinstance(row.get("own"), list) else []
    rescue_round = finite_number(row.get("round")) or 0
    later = [visit for visit in visits.by_prompt.get(str(row.get("prompt_id")), ()) if visit.round > rescue_round]
    answered = next((visit for visit in later if visit.correct), later[-1] if later else None)
    return {
        "run": run.name,
        "policy": policy.name,
        "step": row["step"],
        "prompt": _text(row.get("prompt")),
        "own": [[_text(r.get("text")), finite_number(r.get("reward"))] for r in own or () if isinstance(r, dict)],
        "peer": _text(row.get("peer")),
        "answer": _text(row.get("answer")),
        "later": _later(answered, visits.complete),
    }


def _later(visit: Visit | None, complete: bool) -> Any:
    if visit is None or not (visit.correct or complete):
        return None if complete else UNKNOWN
    return [visit.round, visit.correct, visit.of, None if visit.text is None else _text(visit.text)]


def _text(value: Any) -> str:
    """Return model output as sanitized, truncated text for a page."""
    return clean(str(value), LONGEST)
