"""What a source did: in a round, as its account says; over a run, with what came of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from mutualrl.storage.metrics import of_source


@dataclass(frozen=True, slots=True)
class Account:
    """What a source did in a round: prompts asked about, answers asked for, requests sent (with repetitions), questions
    asked again because a process ended while they were in flight, answers without a text, answers that were cut off,
    questions that the budget or a source that did not answer left out, tokens of questions and answers, and seconds.
    `over_budget`: of those left out, by the budget. `spent`: tokens that count against its budget; `budget_ended`: the
    budget into which a question did not fit, else 0. `reasons`: why questions have no answer, each with its number."""

    prompts: int = 0
    questions: int = 0
    requests: int = 0
    asked_again: int = 0
    failed: int = 0
    cut_off: int = 0
    left_out: int = 0
    over_budget: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    spent: int = 0
    budget_ended: int = 0
    reasons: Mapping[str, int] = field(default_factory=dict)

    @property
    def sent(self) -> int:
        """Return the number of questions that were sent."""
        return self.questions - self.left_out

    def plus(self, other: Account) -> Account:
        """Return the sum of two accounts; of budgets that ended, the larger one."""
        sums = {key: getattr(self, key) + getattr(other, key) for key in NUMBERS if key != "budget_ended"}
        ended = max(self.budget_ended, other.budget_ended)
        reasons = Counter(self.reasons)
        reasons.update(other.reasons)
        return Account(**sums, budget_ended=ended, reasons=dict(reasons))

    def metrics(self, name: str) -> dict[str, float]:
        """Return the numbers by metric, `source/NAME/...`."""
        own = ("spent", "budget_ended", "over_budget")
        return {of_source(name, key): float(getattr(self, key)) for key in NUMBERS if key not in own}


#: fields of an account that are numbers
NUMBERS = tuple(each.name for each in fields(Account) if each.name != "reasons")


@dataclass(frozen=True, slots=True)
class SourceFacts(Account):
    """What a source gave and cost over a run. `asked`: it answered during training; else the fields of an account are
    0. `confirmed`: complete texts above the threshold that a policy saw, a text once per round; `rescues`: rows taught
    from it, over the policies that are here. `cost`: of its tokens, at the recipe's prices; None without any.
    `partial`: others that read it are in directories of their own, so that what a text cost is not known here."""

    asked: bool = False
    confirmed: int = 0
    rescues: int = 0
    cost: float | None = None
    partial: bool = False

    @property
    def tokens(self) -> int:
        """Return the tokens of its questions and answers."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def tokens_per_rescue(self) -> float | None:
        """Return the tokens of its questions and answers per row taught from it; None without any, and where not all
        who read it are here."""
        return self.tokens / self.rescues if self.rescues and not self.partial else None
