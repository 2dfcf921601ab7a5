"""Which prompts of a round a source is asked about, and when its budget ends. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mutualrl.records import Prompt
from mutualrl.seeds import seed_of, seeded

#: tokens that a chat template may add to a question, for the largest that its tokens can be
TEMPLATE_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Question:
    """One request for one answer: the prompt, the number of the answer, and the seed of its sampling."""

    prompt_id: str
    sample: int
    seed: int


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to a question. `ended`: it is complete, not cut off. Tokens are the server's counts, None where it gives
    none. `failure`: why there is no text; None if there is one. `asked`: False for a question that the budget left
    out, or that was not sent because the source does not answer."""

    text: str = ""
    ended: bool = False
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    failure: str | None = None
    asked: bool = True

    @property
    def outcome(self) -> Literal["left_out", "failed", "cut_off", "answered"]:
        """Return what became of the question."""
        if not self.asked:
            return "left_out"
        if self.failure is not None:
            return "failed"
        return "answered" if self.ended else "cut_off"


@dataclass(frozen=True, slots=True)
class PromptShare:
    """Which of the prompts are a source's. `column`: only rows that name it there. `weights`: of the sources that
    divide the prompts, this one's included; empty: it is asked about each."""

    name: str
    column: str | None = None
    weights: Mapping[str, float] | None = None


def prompts_to_ask(
    wanted: Iterable[Collection[str]],
    prompts: Mapping[str, Prompt],
    share: PromptShare,
    confirmed: Collection[str],
    *,
    run_seed: int,
    round_index: int,
) -> list[str]:
    """Return the ids of the prompts to ask about in a round, sorted: those that any learner wants (`wanted`: one set
    per learner), each once; of these the source's share, without those that another source has `confirmed`."""
    asked = sorted(set().union(*wanted) - set(confirmed))
    mine = [prompt_id for prompt_id in asked if share.column is None or names(prompts[prompt_id], share)]
    return [prompt_id for prompt_id in mine if _drawn(share, prompt_id, run_seed, round_index) == share.name]


def names(prompt: Prompt, share: PromptShare) -> bool:
    """Return whether a row of the data names the source."""
    return share.column is not None and prompt.columns.get(share.column) == share.name


def _drawn(share: PromptShare, prompt_id: str, run_seed: int, round_index: int) -> str:
    """Return the source that a prompt falls to in a round: a draw in proportion to the weights."""
    if not share.weights:
        return share.name
    known = sorted(share.weights)
    total = sum(share.weights.values())
    draw = seeded(run_seed, round_index, f"source of {prompt_id}", "").random() * total
    for name in known:
        draw -= share.weights[name]
        if draw < 0:
            return name
    return known[-1]


def questions_on(
    prompt_ids: Sequence[str], samples: int, source: str, *, run_seed: int, round_index: int
) -> list[Question]:
    """Return the questions of a round, in order: `samples` per prompt, each with a seed of its own. A server that is
    given one seed for several answers gives one answer."""
    return [
        Question(prompt_id, sample, seed_of(run_seed, round_index, source, prompt_id, sample))
        for prompt_id in prompt_ids
        for sample in range(samples)
    ]


@dataclass
class Budget:
    """Budget of a source, in tokens of its questions and answers. `used`: by the answers of earlier rounds.

    What came is counted: a question is asked while the answers known before it have used less than `limit`, and the
    answers in flight may exceed it. Which answers are known must not depend on their order of arrival, else a resumed
    run could ask other questions: with c requests in flight, those of the questions at least c places before it."""

    limit: int | None
    used: int = 0

    def allows(self, used_in_round: int) -> bool:
        """Return whether another question is asked, after answers of this round that used so many tokens."""
        return self.limit is None or self.used + used_in_round < self.limit


def most_tokens(text: str, max_tokens: int) -> int:
    """Return the most tokens that a question and its answer can have: a token has at least one byte. `text`: the prompt
    and the system message."""
    return len(text.encode("utf-8", "surrogatepass")) + TEMPLATE_TOKENS + max_tokens


def spent_tokens(answer: Answer, text: str, max_tokens: int) -> int:
    """Return what an answer counts against a budget: its tokens, at most `most_tokens`, so that a server's counts do
    not change in which order questions are asked."""
    return min(sum(used_tokens(answer, text)), most_tokens(text, max_tokens))


def used_tokens(answer: Answer, text: str) -> tuple[int, int]:
    """Return the tokens of a question and of its answer, as the server counts them; where it gives no count, the most
    that these texts can have. None of a question that was not asked or that failed."""
    if answer.failure is not None and answer.prompt_tokens is None and answer.completion_tokens is None:
        return 0, 0
    most_asked = len(text.encode("utf-8", "surrogatepass")) + TEMPLATE_TOKENS
    most_said = len(answer.text.encode("utf-8", "surrogatepass"))
    asked, said = answer.prompt_tokens, answer.completion_tokens
    return most_asked if asked is None else asked, most_said if said is None else said
