"""Answers of a served source in the exchange: stored before they are used, so that none is asked for twice.

A question is stored as asked before its request is sent, and as answered with what came back. A source that is started
again finds the answers, and knows which questions were in flight. Once the round is published they are deleted.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from mutualrl.console.display import clean
from mutualrl.errors import ExchangeDamagedError, FileDamagedError
from mutualrl.see.store import ExchangeStore
from mutualrl.sources.questions import Answer, Question, used_tokens
from mutualrl.storage.accounts import Account
from mutualrl.storage.files import JsonObject, checksummed_bytes, parse_checksummed

NAME = re.compile(r"answer-([0-9]{6,})-[0-9a-f]{16}\.json")
MOST_REASONS = 20  # of an account; the others are counted as one
LONGEST_REASON = 300
OTHER_REASONS = "other reasons"
LARGEST = 2**53  # of the numbers of an account: a float has them exactly
ACCOUNT = re.compile(r"asked-([0-9]{6,})\.json")


@dataclass(frozen=True)
class AnswerStore:
    """Questions and answers of one source in its exchange."""

    store: ExchangeStore
    source: str

    def asked(self, round_index: int, question: Question, times: int) -> None:
        """Store that a question is in flight, for the first, second, ... time."""
        data = self._packed(round_index, question, times, None)
        self.store.put(self.source, _name(round_index, question), data, durable=False)

    def answered(self, round_index: int, question: Question, times: int, answer: Answer) -> None:
        """Store an answer, durably."""
        self.store.put(self.source, _name(round_index, question), self._packed(round_index, question, times, answer))

    def of(self, round_index: int, question: Question) -> tuple[int, Answer | None]:
        """Return how often a question was asked, and its answer. Raises ExchangeDamagedError."""
        name = _name(round_index, question)
        if self.store.get(self.source, name) is None:
            return 0, None
        value, answer = self.read(name)
        times = value.pop("times", 1)
        if value != {"round": round_index, **asdict(question)} or type(times) is not int:
            raise ExchangeDamagedError(f"{self.store.describe(self.source, name)}: an answer to another question")
        return times, answer

    def names(self) -> list[str]:
        """Return the names of the stored questions."""
        return sorted(name for name in self.store.names(self.source) if NAME.fullmatch(name))

    def read(self, name: str) -> tuple[JsonObject, Answer | None]:
        """Return a stored question and its answer, None while it was in flight. Raises ExchangeDamagedError."""
        data, where = self.store.get(self.source, name), self.store.describe(self.source, name)
        try:
            value = parse_checksummed(data or b"", where)
            answer = value.pop("answer")
            return value, None if answer is None else Answer(**answer)
        except (FileDamagedError, KeyError, TypeError) as error:
            raise ExchangeDamagedError(f"{where}: not an answer of source {self.source!r} ({error})") from None

    def forget(self, through: int) -> None:
        """Delete the questions and answers of all rounds up to one that is published."""
        old = [name for name in self.names() if int(name.split("-")[1]) <= through]
        if old:
            self.store.delete(self.source, old)

    def _packed(self, round_index: int, question: Question, times: int, answer: Answer | None) -> bytes:
        value: JsonObject = {"round": round_index, **asdict(question), "times": times}
        return checksummed_bytes({**value, "answer": None if answer is None else asdict(answer)})


def _name(round_index: int, question: Question) -> str:
    key = f"{question.prompt_id}\x1f{question.sample}".encode("utf-8", "surrogatepass")
    return f"answer-{round_index:06d}-{hashlib.sha256(key).hexdigest()[:16]}.json"


def counted_reasons(answers: Iterable[Answer]) -> dict[str, int]:
    """Return why questions that were asked have no answer, each reason with its number; rare ones as one."""
    counts = Counter(str(answer.failure) for answer in answers if answer.outcome == "failed")
    common = counts.most_common(MOST_REASONS)
    rest = counts.total() - sum(number for _, number in common)
    return {**dict(common), **({OTHER_REASONS: rest} if rest else {})}


def first_account(answer: Answer, text: str) -> Account:
    """Return what the first question, before the start, cost. `text`: what was sent."""
    asked, said = used_tokens(answer, text)
    return Account(
        prompts=1,
        questions=1,
        requests=1,
        failed=int(answer.outcome == "failed"),
        cut_off=int(answer.outcome == "cut_off"),
        prompt_tokens=asked,
        completion_tokens=said,
        spent=asked + said,
        reasons=counted_reasons([answer]),
    )


def stored_first_account(stored: Mapping[str, object], source: str) -> Account:
    """Return what the first question cost, from what run.json says of a source; nothing if it was not asked. Raises
    FileDamagedError."""
    value = stored.get("first")
    if value is None:
        return Account()
    try:
        return _account(value)
    except TypeError as error:
        raise FileDamagedError(f"run.json: not an account of the first question to {source!r} ({error})") from None


def write_account(store: ExchangeStore, source: str, round_index: int, account: Account) -> None:
    """Store what a source did in a round, before the round is published."""
    value = {"source": source, "round": round_index, **asdict(account)}
    store.put(source, f"asked-{round_index:06d}.json", checksummed_bytes(value))


def stored_accounts(store: ExchangeStore, source: str) -> list[int]:
    """Return the rounds with an account of a source, in order."""
    matches = [ACCOUNT.fullmatch(name) for name in store.names(source)]
    return sorted(int(match[1]) for match in matches if match)


def read_account(store: ExchangeStore, source: str, round_index: int) -> Account | None:
    """Return what a source did in a round; None if that is not stored. Raises ExchangeDamagedError."""
    name = f"asked-{round_index:06d}.json"
    data, where = store.get(source, name), store.describe(source, name)
    if data is None:
        return None
    try:
        value = parse_checksummed(data, where)
        if (value.pop("source"), value.pop("round")) != (source, round_index):
            raise ExchangeDamagedError(f"{where}: an account of another round")
        return _account(value)
    except (FileDamagedError, KeyError, TypeError) as error:
        raise ExchangeDamagedError(f"{where}: not an account of source {source!r} ({error})") from None


def _account(value: object) -> Account:
    """Return an account from its fields. Raises TypeError for anything else."""
    if not isinstance(value, dict):
        raise TypeError(f"found {value!r:.40}")
    numbers = {key: number for key, number in value.items() if key != "reasons"}
    return Account(**_numbers(numbers), reasons=_counts(value.get("reasons", {})))


def _counts(value: object) -> dict[str, int]:
    """Return reasons with their numbers. Raises TypeError for anything else."""
    if not isinstance(value, dict) or len(value) > MOST_REASONS + 1:
        raise TypeError("its reasons are none")
    return {clean(reason, LONGEST_REASON): number for reason, number in _numbers(value).items()}


def _numbers(value: Mapping[str, object]) -> dict[str, int]:
    """Return the fields. Raises TypeError for one that is no number."""
    for key, number in value.items():
        if isinstance(number, bool) or not isinstance(number, int | float) or not abs(number) < LARGEST:
            raise TypeError(f"{key} is {number!r:.40}")
    return dict(value)  # type: ignore[arg-type]
