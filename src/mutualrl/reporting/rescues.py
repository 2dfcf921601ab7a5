"""Rescues: what a policy failed at, the peer's text that it learnt, and its later answer to the same prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mutualrl.console.display import clean
from mutualrl.errors import MutualRLError
from mutualrl.reporting.run_reader import PolicyRun, Run
from mutualrl.see.inspection import Reader
from mutualrl.storage.files import JsonObject, finite_number

MOST = 50_000  # rescues in a page
LARGEST = 100_000_000  # characters of all of them together
LONGEST = 4_000  # characters of a text in a page
UNKNOWN = "unknown"  # what came later, where rounds are missing


@dataclass(frozen=True, slots=True)
class Visit:
    """Later round in which the policy was asked the same prompt: how many of its rollouts were correct, and the text
    of one of those, where it was published."""

    round: int
    correct: int
    of: int
    text: str | None


@dataclass(frozen=True, slots=True)
class Visits:
    """Policy's visits by prompt. `complete`: whether every round up to the last could be read."""

    by_prompt: Mapping[str, Sequence[Visit]]
    complete: bool


def collect_rescues(runs: Sequence[Run]) -> tuple[list[JsonObject], list[str]]:
    """Return the rescues of all runs, in the order in which they happened, as the page shows them, and what is
    missing.

    A rescue: `run`, `policy`, `step`, `prompt`, `own` (text, reward), `peer`, `answer`, and `later`: the first later
    visit with a correct rollout, else the last one without; None where the prompt did not come again, UNKNOWN where it
    may have, in rounds that are missing.
    """
    entries: list[JsonObject] = []
    notes: list[str] = []
    for run in runs:
        for policy in run.policies.values():
            if not policy.rescues:
                continue
            visits = _visits(run, policy, {str(row.get("prompt_id")) for row in policy.rescues}, notes.append)
            if not visits.complete:
                what = f"rounds of {policy.name!r} are missing from the exchange"
                notes.append(f"{run.name}: {what}; what it answered later is not always known")
            entries += [_shown(run, policy, row, visits) for row in policy.rescues]
    entries.sort(key=lambda rescue: (rescue["run"], rescue["step"], rescue["policy"]))
    size = sum(
        len(each["prompt"]) + len(each["answer"]) + sum(len(text) for text, _ in each["own"]) for each in entries
    )
    most = min(MOST, int(len(entries) * min(1.0, LARGEST / max(size, 1))))
    if len(entries) > most:
        notes.append(f"of {len(entries)} rescues the page has {most}, evenly spaced; rescues.jsonl has all of them")
        entries = [entries[place * len(entries) // most] for place in range(most)]
    return entries, notes


def _visits(run: Run, policy: PolicyRun, wanted: set[str], notify: Callable[[str], None]) -> Visits:
    """Return for each prompt the rounds in which the policy sampled it. A damaged round is reported and left out."""
    visits: dict[str, list[Visit]] = {}
    above = run.success_above(policy.name)
    try:
        place = str(run.info.get("exchange") or "") or run.root / "exchange"
        reader = Reader(place, str(run.info.get("run_id")))
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
            shown = {key: good[0] for key, good in correct.items() if good}
            texts = dict(zip(shown, shard.texts(list(shown.values())), strict=True))
        except MutualRLError as error:
            notify(f"round {round_index} of {policy.name!r} is left out: {error}")
            complete = False
            continue
        for key, rollouts in rows.items():
            visits.setdefault(key, []).append(Visit(round_index, len(correct[key]), len(rollouts), texts.get(key)))
    return Visits(visits, complete)


def _shown(run: Run, policy: PolicyRun, row: JsonObject, visits: Visits) -> dict[str, object]:
    own = row.get("own") if isinstance(row.get("own"), list) else []
    began = finite_number(row.get("round")) or 0
    later = [visit for visit in visits.by_prompt.get(str(row.get("prompt_id")), ()) if visit.round > began]
    answered = next((visit for visit in later if visit.correct), later[-1] if later else None)
    return {
        "run": run.name,
        "policy": policy.name,
        "step": row["step"],
        "prompt": _text(row.get("prompt")),
        "own": [
            [_text(each.get("text")), finite_number(each.get("reward"))] for each in own or () if isinstance(each, dict)
        ],
        "peer": _text(row.get("peer")),
        "answer": _text(row.get("answer")),
        "later": _later(answered, visits.complete),
    }


def _later(visit: Visit | None, complete: bool) -> Any:
    if visit is None or not (visit.correct or complete):
        return None if complete else UNKNOWN
    return [visit.round, visit.correct, visit.of, None if visit.text is None else _text(visit.text)]


def _text(value: Any) -> str:
    """Return a model's text for a page: whatever it was, it is only that."""
    return clean(str(value), LONGEST)
