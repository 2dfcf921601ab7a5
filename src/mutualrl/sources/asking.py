"""Questions of a round to a served model: in flight side by side, each answer stored before it is used."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress

from mutualrl.console.lines import notify
from mutualrl.errors import RoundAbortedError, SourceLostError
from mutualrl.records import Prompt
from mutualrl.sources.answers import AnswerStore, counted_reasons
from mutualrl.sources.questions import Answer, Budget, Question, spent_tokens, used_tokens
from mutualrl.sources.served import ServedModel
from mutualrl.storage.accounts import Account

STOP_SECONDS = 0.2  # between two looks at a stop request
#: how failures of requests begin that no server answered: after as many in a row as are in flight, the rest of a round
#: is not asked, and the next round begins with one question
UNANSWERED = ("unreachable", "no answer within")


class Asking:
    """Questions to one served model over a run. `budget`: of all rounds; `fail`: a question without an answer ends the
    run."""

    def __init__(
        self,
        model: ServedModel,
        store: AnswerStore,
        budget: Budget,
        *,
        fail: bool,
        stopping: Callable[[], bool] = lambda: False,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        self._model = model
        self._store = store
        self._budget = budget
        self._fail = fail
        self._stopping = stopping
        self._progress = progress
        self._unanswered = 0  # requests in a row that no server answered
        self._times: dict[int, int] = {}  # by place: how often earlier processes asked a question
        self._left_out = 0  # questions of a round that the budget left out
        self._said_budget = False
        self._said_cut_off = False

    async def answers(
        self, round_index: int, questions: Sequence[Question], prompts: Mapping[str, Prompt]
    ) -> tuple[list[Answer], Account]:
        """Return the answers to a round's questions, in their order, and what was done for them. Stored answers are not
        asked for again. Raises RoundAbortedError on a stop request, SourceLostError under `fail`."""
        began, sent = time.monotonic(), self._model.requests
        answers: list[Answer | None] = [None] * len(questions)
        self._times = {}
        self._left_out = 0
        for place, question in enumerate(questions):
            self._times[place], answers[place] = self._store.of(round_index, question)
        earlier = sum(self._times.values())
        if in_flight := sum(1 for place, times in self._times.items() if times and answers[place] is None):
            notify(f"{in_flight} questions of round {round_index} were in flight when a process ended: asked again")
        work = asyncio.create_task(self._ask_missing(round_index, questions, prompts, answers))
        await self._until_done(work, round_index)
        known = [answer or Answer(failure="not asked", asked=False) for answer in answers]
        counts = Counter(answer.outcome for answer in known)
        texts = [self._text(prompts, question) for question in questions]
        tokens = [used_tokens(answer, text) for answer, text in zip(known, texts, strict=True)]
        spent = sum(spent_tokens(*each, self._most) for each in zip(known, texts, strict=True))
        self._budget.used += spent
        again = sum(max(0, self._times[place] - 1) for place in self._times)
        account = Account(
            prompts=len({question.prompt_id for question in questions}),
            questions=len(questions),
            requests=self._model.requests - sent + earlier,
            asked_again=again,
            failed=counts["failed"],
            cut_off=counts["cut_off"],
            left_out=counts["left_out"],
            over_budget=self._left_out,
            prompt_tokens=sum(asked for asked, _ in tokens),
            completion_tokens=sum(said for _, said in tokens),
            seconds=round(time.monotonic() - began, 3),
            spent=spent,
            budget_ended=(self._budget.limit or 0) if self._left_out else 0,
            reasons=counted_reasons(known),
        )
        self._say(round_index, known)
        return known, account

    async def _until_done(self, work: asyncio.Task[None], round_index: int) -> None:
        """Wait for the questions. On a stop request, cancel those in flight and raise RoundAbortedError."""
        while not work.done():
            await asyncio.wait({work}, timeout=STOP_SECONDS)
            if self._stopping() and not work.done():
                work.cancel()
                with suppress(asyncio.CancelledError):
                    await work
                raise RoundAbortedError(f"asked to stop while round {round_index} was asked")
        work.result()

    async def _ask_missing(
        self,
        round_index: int,
        questions: Sequence[Question],
        prompts: Mapping[str, Prompt],
        answers: list[Answer | None],
    ) -> None:
        """Ask the questions without an answer, in order, at most `concurrency` at a time."""
        in_flight: set[asyncio.Task[None]] = set()
        concurrency = self._model.source.concurrency
        used, counted = 0, 0  # tokens of the answers to the first `counted` questions
        silent = self._unanswered >= concurrency  # since an earlier round: one question finds out whether that is over
        try:
            for place, question in enumerate(questions):
                if answers[place] is not None:
                    continue
                while len(in_flight) >= concurrency:
                    in_flight = await _first_of(in_flight)
                while self._budget.limit is not None and counted <= place - concurrency:
                    if (known := answers[counted]) is None:
                        in_flight = await _first_of(in_flight)
                        continue
                    used += spent_tokens(known, self._text(prompts, questions[counted]), self._most)
                    counted += 1
                over = not (self._times[place] or self._budget.allows(used))
                if over or (self._unanswered >= concurrency and not silent):
                    self._left_out += over
                    answers[place] = Answer(failure="not asked", asked=False)
                    continue
                job = self._ask(round_index, question, place, prompts, retries=0 if silent else None)
                if silent:
                    silent = False
                    answers[place] = await job
                    continue
                task = asyncio.create_task(_stored_in(answers, place, job))
                in_flight.add(task)
            while in_flight:
                in_flight = await _first_of(in_flight)
        finally:
            for task in in_flight:
                task.cancel()
            await asyncio.gather(*in_flight, return_exceptions=True)

    async def _ask(
        self,
        round_index: int,
        question: Question,
        place: int,
        prompts: Mapping[str, Prompt],
        retries: int | None = None,
    ) -> Answer:
        """Ask one question, and store its answer. `retries`: in place of the recipe's."""
        self._times[place] = times = self._times[place] + 1
        self._store.asked(round_index, question, times)
        answer = await self._model.answer(question, prompts[question.prompt_id], retries)
        self._unanswered = self._unanswered + 1 if (answer.failure or "").startswith(UNANSWERED) else 0
        if answer.failure is not None and self._fail:
            raise SourceLostError(
                f"source {self._store.source!r} gave no answer on {question.prompt_id!r}: {answer.failure} "
                f"({self._model.source.retries} repetitions); on_source_loss: continue would go on without it"
            )
        self._store.answered(round_index, question, times, answer)
        self._progress()
        return answer

    @property
    def _most(self) -> int:
        """Return the most tokens of an answer."""
        most = self._model.source.max_tokens
        assert most is not None  # settled by `served_source`
        return most

    def _text(self, prompts: Mapping[str, Prompt], question: Question) -> str:
        """Return what is sent with a question: the system message and the prompt."""
        return (self._model.source.system or "") + prompts[question.prompt_id].text

    def _say(self, round_index: int, answers: Sequence[Answer]) -> None:
        """Say what has no answer, with the first reason; once, that all were cut off and that the budget has ended."""
        source = self._store.source
        failures = [answer.failure for answer in answers if answer.outcome == "failed"]
        if failures:
            notify(
                f"source {source!r}, round {round_index}: {len(failures)} of {len(answers)} questions have no answer "
                f"({failures[0]}); the run continues without them (on_source_loss: continue)"
            )
        outcomes = Counter(answer.outcome for answer in answers)
        if outcomes["cut_off"] and not outcomes["answered"] and not self._said_cut_off:
            self._said_cut_off = True
            notify(
                f"source {source!r}, round {round_index}: each of its {outcomes['cut_off']} answers was cut off, and a "
                f"text that was cut off is no success; raise sources.{source}.max_tokens "
                f"({self._model.source.max_tokens}), or see whether the server knows the model's end tokens"
            )
        if self._left_out and not self._said_budget:
            self._said_budget = True
            notify(
                f"source {source!r}: its budget of {self._budget.limit:,} tokens is spent ({self._budget.used:,} "
                "used): nothing more is asked"
            )


async def _stored_in(answers: list[Answer | None], place: int, job: Awaitable[Answer]) -> None:
    answers[place] = await job


async def _first_of(tasks: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    """Wait until one of the tasks has ended; return the others. Raises its error."""
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
    return pending
