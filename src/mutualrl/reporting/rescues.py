"""What a policy failed at, what it was shown of a peer, and what it answered when it was asked again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mutualrl.console.display import clean
from mutualrl.errors import ExchangeDamagedError
from mutualrl.reporting.reading import Policy, Run, number
from mutualrl.see.survey import Reader
from mutualrl.storage.files import JsonObject

MOST = 50_000  # rescues in a page
LARGEST = 100_000_000  # characters of all of them together
LONGEST = 4_000  # characters of a text in a page
UNKNOWN = "unknown"  # what came later, where rounds are missing


@dataclass(frozen=True, slots=True)
class Visit:
    """A later round in which the policy was asked the same prompt: how many of its rollouts were right, and the text of
    one of those, where it was published."""

    round: int
    right: int
    of: int
    text: str | None


@dataclass(frozen=True, slots=True)
class Visits:
    """A policy's visits by prompt. `whole`: whether every round up to the last could be read."""

    by_prompt: Mapping[str, Sequence[Visit]]
    whole: bool


def gathered(runs: Sequence[Run]) -> tuple[list[JsonObject], list[str]]:
    """The rescues of all runs, in the order in which they happened, as the page shows them, and what is missing.

    A rescue: `run`, `policy`, `step`, `prompt`, `own` (text, reward), `peer`, `answer`, and `later`: the first later
    visit with a right rollout, else the last one without; None where the prompt did not come again, UNKNOWN where it
    may have, in rounds that are missing.
    """
    found: list[JsonObject] = []
    notes: list[str] = []
    for run in runs:
        for policy in run.policies.values():
            if not policy.rescues:
                continue
            visits = _visits(run, policy, {str(row.get("prompt_id")) for row in policy.rescues}, notes.append)
            if not visits.whole:
                what = f"rounds of {policy.name!r} are missing from the exchange"
                notes.append(f"{run.name}: {what}; what it answered later is not always known")
            found += [_shown(run, policy, row, visits) for row in policy.rescues]
    found.sort(key=lambda rescue: (rescue["run"], rescue["step"], rescue["policy"]))
    size = sum(len(each["prompt"]) + len(each["answer"]) + sum(len(text) for text, _ in each["own"]) for each in found)
    most = min(MOST, int(len(found) * min(1.0, LARGEST / max(size, 1))))
    if len(found) > most:
        notes.append(f"of {len(found)} rescues the page has {most}, evenly spaced; rescues.jsonl has all of them")
        found = [found[place * len(found) // most] for place in range(most)]
    return found, notes


def _visits(run: Run, policy: Policy, wanted: set[str], say: Callable[[str], None]) -> Visits:
    """Of each prompt the rounds in which the policy was asked it. A damaged round is said, and left out."""
    directory = run.root / "exchange"
    reader = Reader(directory, str(run.info.get("run_id")))
    found: dict[str, list[Visit]] = {}
    above = run.success_above(policy.name)
    rounds = reader.rounds(policy.name)
    whole = bool(rounds) and rounds == list(range(rounds[-1] + 1))
    for round_ in rounds:
        try:
            shard = reader.read(policy.name, round_)
            if shard is None:
                continue
            rows: dict[str, list[int]] = {}
            for row, key in enumerate(shard.column("prompt_id")):
                if key in wanted:
                    rows.setdefault(key, []).append(row)
            rewards = shard.column("reward")
            right = {key: [r for r in mine if rewards[r] > above] for key, mine in rows.items()}
            shown = {key: good[0] for key, good in right.items() if good}
            texts = dict(zip(shown, shard.texts(list(shown.values())), strict=True))
        except ExchangeDamagedError as error:
            say(f"round {round_} of {policy.name!r} is left out: {error}")
            whole = False
            continue
        for key, mine in rows.items():
            found.setdefault(key, []).append(Visit(round_, len(right[key]), len(mine), texts.get(key)))
    return Visits(found, whole)


def _shown(run: Run, policy: Policy, row: JsonObject, visits: Visits) -> dict[str, object]:
    own = row.get("own") if isinstance(row.get("own"), list) else []
    began = number(row.get("round")) or 0
    later = [visit for visit in visits.by_prompt.get(str(row.get("prompt_id")), ()) if visit.round > began]
    answered = next((visit for visit in later if visit.right), later[-1] if later else None)
    return {
        "run": run.name,
        "policy": policy.name,
        "step": row["step"],
        "prompt": _text(row.get("prompt")),
        "own": [[_text(each.get("text")), number(each.get("reward"))] for each in own or () if isinstance(each, dict)],
        "peer": _text(row.get("peer")),
        "answer": _text(row.get("answer")),
        "later": _later(answered, visits.whole),
    }


def _later(visit: Visit | None, whole: bool) -> Any:
    if visit is None or not (visit.right or whole):
        return None if whole else UNKNOWN
    return [visit.round, visit.right, visit.of, None if visit.text is None else _text(visit.text)]


def _text(value: Any) -> str:
    """A model's text for a page: whatever it was, it is only that."""
    return clean(str(value), LONGEST)
