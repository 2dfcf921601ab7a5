"""What a run did, one function per fact: its page, last table, summary.json, notes and comparisons all read it here.

A policy's facts come from its metrics.jsonl; those of a source that is asked, from the accounts in the exchange.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict

from mutualrl.console.display import counted
from mutualrl.errors import ExchangeDamagedError, FileDamagedError
from mutualrl.see.store import ExchangeStore
from mutualrl.sources.answers import read_account, stored_accounts, stored_first_account
from mutualrl.storage.accounts import Account, SourceFacts
from mutualrl.storage.files import JsonObject, finite_number
from mutualrl.storage.metrics import DEAD, EXTRA_ROWS, EXTRA_TOKENS, REVIVED, TAUGHT, of_source
from mutualrl.storage.run_info import PolicyFacts, PolicyResult, policy_result
from mutualrl.storage.rundir import RunDirectory

#: measured values of a metric of one policy, in the order of its steps
Values = Callable[[str], Sequence[float]]


def values_of(rows: Iterable[JsonObject]) -> Values:
    """Return the measured values in the rows of a metrics.jsonl."""
    stored = list(rows)

    def values(metric: str) -> list[float]:
        numbers = (finite_number(row.get(metric)) for row in stored if metric in row)
        return [number for number in numbers if number is not None]

    return values


def finished_policies(run: RunDirectory, policies: Mapping[str, Values], *, teaches: bool) -> dict[str, PolicyResult]:
    """Return the results of the policies that have finished, each with its facts. `policies`: the values of their
    metrics.jsonl."""
    results = {}
    for name, values in policies.items():
        if (result := policy_result(run.policy(name).result, run.root)) is not None:
            results[name] = result.model_copy(update={"facts": policy_facts(values, teaches=teaches)})
    return results


def facts_of_sources(
    policies: Mapping[str, Values],
    sources: Mapping[str, tuple[Collection[str], Sequence[float] | None]],
    accounts: Mapping[str, Account],
) -> dict[str, SourceFacts]:
    """Return what the sources gave and cost. `policies`: the values of their metrics.jsonl; `sources`: by name, the
    policies that read it and its prices; `accounts`: of those that were asked."""
    return {
        name: source_facts(name, policies, accounts.get(name), readers, prices)
        for name, (readers, prices) in sources.items()
    }


def policy_facts(values: Values, *, teaches: bool) -> PolicyFacts:
    """Return what a policy's prompts and rounds came to. Dead prompts are None if no round counted them, the texts
    that it was taught if its regime does not say that it teaches, and taught none."""
    dead, taught = values(DEAD.key), int(sum(values(TAUGHT.key)))
    return PolicyFacts(
        dead=int(dead[-1]) if dead else None,
        first_dead=int(dead[0]) if dead else None,
        most_dead=int(max(dead)) if dead else None,
        revived=int(sum(values(REVIVED.key))),
        taught=taught if teaches or taught else None,
        extra_rows=int(sum(values(EXTRA_ROWS.key))),
        extra_tokens=int(sum(values(EXTRA_TOKENS.key))),
    )


def source_facts(
    name: str,
    policies: Mapping[str, Values],
    account: Account | None = None,
    readers: Collection[str] = (),
    prices: Sequence[float] | None = None,
) -> SourceFacts:
    """Return what a source gave and cost over a run. `account`: the sum of its accounts, of one that was asked;
    `readers`: the policies of the run that read it, which need not all be among `policies`; `prices`: of a million
    tokens of questions and of answers."""

    def of(values: Values, key: str) -> Sequence[float]:
        return values(of_source(name, key))

    confirmed = max((sum(of(values, "confirmed")) for values in policies.values()), default=0.0)
    return SourceFacts(
        **asdict(account or Account()),
        asked=account is not None,
        confirmed=int(confirmed),
        rescues=int(sum(sum(of(values, "rescues")) for values in policies.values())),
        cost=None if prices is None or account is None else _cost(account, prices),
        partial=not set(readers) <= policies.keys(),
    )


def _cost(account: Account, prices: Sequence[float]) -> float:
    asked, answered = prices
    return (account.prompt_tokens * asked + account.completion_tokens * answered) / 1e6


def accounts_of(
    store: ExchangeStore, sources: Mapping[str, Mapping[str, object]], notes: list[str]
) -> dict[str, Account]:
    """Return the sum of each source's accounts in an exchange, and of its first question; a damaged account is noted
    and left out. `sources`: what run.json says of those that are asked."""
    totals = {}
    for name, stored in sources.items():
        total = Account()
        try:
            total = stored_first_account(stored, name)
        except FileDamagedError as error:
            notes.append(f"{error}; it is not counted")
        for number in stored_accounts(store, name):
            try:
                account = read_account(store, name, number)
            except ExchangeDamagedError as error:
                notes.append(f"{error}; what source {name!r} did in round {number} is not counted")
                continue
            total = total if account is None else total.plus(account)
        totals[name] = total
    return totals


def cost_of_source(name: str, facts: SourceFacts, *, teaches: bool = True) -> str:
    """Return what a source that was asked cost and gave. `teaches`: the regime learns texts."""
    per_rescue = facts.tokens_per_rescue
    each = "" if per_rescue is None else f", {per_rescue:,.0f} tokens per text"
    each = " to the policies of this directory; the whole run's page has what a text cost" if facts.partial else each
    failed = f" ({facts.failed:,} without an answer)" if facts.failed else ""
    price = "" if facts.cost is None else f", which cost {price_of(facts.cost)} at the recipe's prices"
    taught = f"; {counted(facts.rescues, 'text')} taught{each}" if teaches else ""
    return f"Source {name}: {counted(facts.sent, 'question')}{failed}, {facts.tokens:,} tokens{price}{taught}."


def price_of(cost: float) -> str:
    """Return an amount in the unit of the recipe's prices, with two digits after the first that counts."""
    return f"{cost:.2f}" if cost >= 0.1 or not cost else f"{cost:.2g}"


def silence_note(name: str, facts: SourceFacts) -> str | None:
    """Return why a source that was asked gave nothing, or less than it could: questions without an answer, with the
    reasons counted, and questions that its budget left out. None if there is nothing to say."""
    parts = []
    if facts.failed:
        which = "none" if facts.failed == facts.sent else f"{facts.failed:,}"
        words = "of its {:,} questions has an answer" if which == "none" else "of its {:,} questions have no answer"
        parts.append(f"{which} {words.format(facts.sent)} ({reasons(facts.reasons)})")
    if facts.over_budget:
        parts.append(
            f"its budget of {facts.budget_ended:,} tokens was spent, which left out {facts.over_budget:,} questions"
        )
    if silent := facts.left_out - facts.over_budget:
        parts.append(f"{silent:,} questions were not sent, since it did not answer")
    return f"source {name}: {'; '.join(parts)}" if parts else None


def reasons(counts: Mapping[str, int], most: int = 3) -> str:
    """Return the most frequent reasons with their counts, for a person."""
    common = Counter(counts).most_common()
    shown = [reason if len(common) == 1 else f"{count:,} times: {reason}" for reason, count in common[:most]]
    return "; ".join([*shown, *([f"{len(common) - most} other reasons"] if len(common) > most else [])]) or "no reason"
