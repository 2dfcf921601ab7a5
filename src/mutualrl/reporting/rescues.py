"""What a policy failed at, what it was shown of a peer, and what it answered when it was asked again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mutualrl.display import clean
from mutualrl.errors import ExchangeDamagedError
from mutualrl.reporting.reading import Policy, Run, number
from mutualrl.see.files import committed_rounds
from mutualrl.see.survey import Reader

MOST = 50_000  # rescues in a page
LONGEST = 4_000  # characters of a text in a page


@dataclass(frozen=True, slots=True)
class Visit:
    """A later round in which the policy was asked the same prompt: how many of its rollouts were right, and the text of
    one of those, where it was published."""

    round: int
    right: int
    of: int
    text: str | None


Visits = Mapping[str, Sequence[Visit]]


def gathered(runs: Sequence[Run]) -> tuple[list[dict[str, Any]], list[str]]:
    """The rescues of all runs, in the order in which they happened, as the page shows them, and what is missing.

    A rescue: `run`, `policy`, `step`, `group` (nothing where the prompt's is not known), `prompt`, `own` (text,
    reward), `peer`, `answer`, and `later`: the first later visit with a right rollout, else the last one without; None
    where the prompt did not come again."""
    found: list[dict[str, Any]] = []
    notes: list[str] = []
    for run in runs:
        for policy in run.policies.values():
            if not policy.rescues:
                continue
            visits = _visits(run, policy, {str(row.get("prompt_id")) for row in policy.rescues}, notes.append)
            found += [_shown(run, policy, row, visits) for row in policy.rescues]
    found.sort(key=lambda rescue: (rescue["run"], rescue["step"], rescue["policy"]))
    if len(found) > MOST:
        notes.append(f"of {len(found)} rescues the page has {MOST}, evenly spaced; rescues.jsonl has all of them")
        found = [found[place * len(found) // MOST] for place in range(MOST)]
    return found, notes


def _visits(run: Run, policy: Policy, wanted: set[str], say: Callable[[str], None]) -> Visits:
    """Of each prompt the rounds in which the policy was asked it. A damaged round is said, and left out."""
    directory = run.root / "exchange"
    reader = Reader(directory, str(run.info.get("run_id")))
    found: dict[str, list[Visit]] = {}
    above = (
        number(run.recipe.get("regime", {}).get("success_above"))
        if isinstance(run.recipe.get("regime"), dict)
        else None
    )
    for round_ in committed_rounds(directory / policy.name):
        try:
            shard = reader.read(policy.name, round_)
            if shard is None:
                continue
            rows: dict[str, list[int]] = {}
            for row, key in enumerate(shard.column("prompt_id")):
                if key in wanted:
                    rows.setdefault(key, []).append(row)
            rewards = shard.column("reward")
            right = {
                key: [r for r in mine if rewards[r] > (0.8 if above is None else above)] for key, mine in rows.items()
            }
            shown = {key: good[0] for key, good in right.items() if good}
            texts = dict(zip(shown, shard.texts(list(shown.values())), strict=True))
        except ExchangeDamagedError as error:
            say(f"round {round_} of {policy.name!r} is left out: {error}")
            continue
        for key, mine in rows.items():
            found.setdefault(key, []).append(Visit(round_, len(right[key]), len(mine), texts.get(key)))
    return found


def _shown(run: Run, policy: Policy, row: dict[str, Any], visits: Visits) -> dict[str, Any]:
    own = row.get("own") if isinstance(row.get("own"), list) else []
    later = [v for v in visits.get(str(row.get("prompt_id")), ()) if v.round > (number(row.get("round")) or 0)]
    answered = next((visit for visit in later if visit.right), later[-1] if later else None)
    return {
        "run": run.name,
        "policy": policy.name,
        "step": row["step"],
        "prompt": _text(row.get("prompt")),
        "own": [[_text(each.get("text")), number(each.get("reward"))] for each in own or () if isinstance(each, dict)],
        "peer": _text(row.get("peer")),
        "answer": _text(row.get("answer")),
        "later": None
        if answered is None
        else [answered.round, answered.right, answered.of, None if answered.text is None else _text(answered.text)],
    }


def _text(value: Any) -> str:
    """A model's text for a page: whatever it was, it is only that."""
    return clean(str(value), LONGEST)
