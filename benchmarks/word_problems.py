r"""Word problems of two skills, and the rewards of the benchmarks of real models.

- `shop`: a product, then a sum. "Ana buys 4 pens for 7 dollars each and a bag for 12 dollars. How many dollars does she
  pay?" is answered "4 * 7 = 28, and 28 + 12 = 40. The answer is 40."
- `share`: a difference, then a quotient. "Ben has 35 cards. He keeps 8 and shares the rest equally among 3 friends. How
  many cards does each friend get?" is answered "35 - 8 = 27, and 27 / 3 = 9. The answer is 9."
- `sums`: familiar to any chat model. "What is 4 + 17?" Only for off-the-shelf models.

A chat model states its answer last, in free text: `last_number` rewards the last number of a completion, and
`yes_or_no` the first yes or no.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

SKILLS = ("shop", "share")
_NAMES = ("Ana", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gina", "Hugo")
_THINGS = ("pens", "cards", "apples", "stickers", "books", "marbles", "coins", "shells")
_NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")
_VERDICT = re.compile(r"\b(yes|no|true|false)\b", re.IGNORECASE)


def problem(skill: str, draw: random.Random) -> dict[str, str]:
    """Return a problem of a skill as a row of the task `dataset`: prompt, answer, solution, group."""
    name, thing = draw.choice(_NAMES), draw.choice(_THINGS)
    if skill == "sums":
        a, b = draw.randint(2, 60), draw.randint(2, 39)
        return _row(skill, f"What is {a} + {b}?", f"{a} + {b} = {a + b}.", a + b)
    if skill == "shop":
        count, price, more = draw.randint(2, 9), draw.randint(2, 9), draw.randint(2, 20)
        cost = count * price
        text = f"{name} buys {count} {thing} for {price} dollars each and a bag for {more} dollars. "
        text += f"How many dollars does {name} pay?"
        steps = f"{count} * {price} = {cost}, and {cost} + {more} = {cost + more}."
        return _row(skill, text, steps, cost + more)
    friends, each, kept = draw.randint(2, 9), draw.randint(2, 9), draw.randint(2, 20)
    shared = friends * each
    text = f"{name} has {shared + kept} {thing}. {name} keeps {kept} and shares the rest equally among {friends} "
    text += f"friends. How many {thing} does each friend get?"
    steps = f"{shared + kept} - {kept} = {shared}, and {shared} / {friends} = {each}."
    return _row(skill, text, steps, each)


def _row(skill: str, prompt: str, steps: str, answer: int) -> dict[str, str]:
    return {"prompt": prompt, "answer": str(answer), "solution": f"{steps} The answer is {answer}.", "group": skill}


def problems(skill: str, count: int, seed: int) -> list[dict[str, str]]:
    """Return `count` problems of a skill, no two with the same prompt."""
    draw = random.Random(f"{skill} {seed}")
    rows: dict[str, dict[str, str]] = {}
    while len(rows) < count:
        row = problem(skill, draw)
        rows.setdefault(row["prompt"], row)
    return list(rows.values())


def last_number(completions: Sequence[object], answer: Sequence[str], **columns: object) -> list[float]:
    """Return 1 if the last number of a completion is the answer, else 0, as a TRL reward function."""
    rewards = []
    for completion, expected in zip(completions, answer, strict=True):
        numbers = _NUMBER.findall(_text(completion))
        rewards.append(float(bool(numbers) and float(numbers[-1].replace(",", "")) == float(expected)))
    return rewards


def yes_or_no(completions: Sequence[object], answer: Sequence[str], **columns: object) -> list[float]:
    """Return 1 if the first yes, no, true or false of a completion is the answer `Yes` or `No`, else 0."""
    rewards = []
    for completion, expected in zip(completions, answer, strict=True):
        match = _VERDICT.search(_text(completion))
        said_yes = match is not None and match[1].lower() in ("yes", "true")
        rewards.append(float(match is not None and said_yes == (expected == "Yes")))
    return rewards


def _text(completion: object) -> str:
    """Return a completion's text: a string, or the messages of a conversation."""
    if isinstance(completion, str):
        return completion
    assert isinstance(completion, list)
    return "".join(str(message["content"]) for message in completion)
