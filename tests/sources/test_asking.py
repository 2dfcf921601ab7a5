"""Questions of rounds to a served model: servers that hang, budgets, and what earlier processes asked."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from endpoint import Endpoint, respond, served

from mutualrl.records import Prompt
from mutualrl.runs.facts import accounts_of
from mutualrl.see.store import LocalStore
from mutualrl.sources.answers import AnswerStore
from mutualrl.sources.asking import Asking
from mutualrl.sources.questions import Answer, Budget, questions_on
from mutualrl.sources.section import ServedSource
from mutualrl.sources.served import ServedModel
from mutualrl.storage.accounts import Account

pytest.importorskip("openai")

TWELVE = {f"p{i:02d}": Prompt(f"p{i:02d}", f"q{i}", "4", "all") for i in range(12)}


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    (tmp_path / "t").mkdir()
    return LocalStore(tmp_path)


class Process:
    """One process that asks, round after round."""

    def __init__(self, endpoint: Endpoint, store: LocalStore, budget: Budget | None = None, **settings: Any) -> None:
        common: dict[str, Any] = {"max_tokens": 16, "timeout": 5.0, "retries": 0, "concurrency": 4}
        source = ServedSource(name="t", served=endpoint.url, model="teacher", **{**common, **settings})
        self.runner = asyncio.Runner()
        self.model = self.runner.run(self._open(source))
        self.budget = budget or Budget(None)
        self.asking = Asking(self.model, AnswerStore(store, "t"), self.budget, fail=False)

    async def _open(self, source: ServedSource) -> ServedModel:
        return ServedModel(source)

    def round(self, number: int, prompts: Mapping[str, Prompt] = TWELVE) -> tuple[list[Answer], Account]:
        questions = questions_on(sorted(prompts), 1, "t", run_seed=0, round_index=number)
        return self.runner.run(self.asking.answers(number, questions, prompts))

    def killed(self, number: int, until: Callable[[], bool], prompts: Mapping[str, Prompt] = TWELVE) -> None:
        """Ask a round, and end with requests in flight."""
        questions = questions_on(sorted(prompts), 1, "t", run_seed=0, round_index=number)

        async def cut() -> None:
            work = asyncio.create_task(self.asking.answers(number, questions, prompts))
            while not until():
                await asyncio.sleep(0.01)
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            await asyncio.gather(work, return_exceptions=True)

        self.runner.run(cut())


def test_a_server_that_hangs_costs_one_wave_and_then_one_question_per_round(store: LocalStore) -> None:
    over = threading.Event()

    def hang(number: int, endpoint: Endpoint, handler: BaseHTTPRequestHandler) -> bool:
        return over.wait(60)

    with served(Endpoint(lambda prompt, seed: "4", hang)) as endpoint:
        process = Process(endpoint, store, timeout=2.0, concurrency=3, retries=1)
        _, first = process.round(0)
        assert 3 <= first.failed < 2 * 3  # those in flight when the third was given up are two at most
        assert (first.left_out, first.requests) == (12 - first.failed, 2 * first.failed)
        _, second = process.round(1)
        assert (second.failed, second.left_out, second.requests) == (1, 11, 1)  # not repeated
        endpoint.fault = None
        answers, third = process.round(2)
        over.set()
    assert (third.failed, third.left_out) == (0, 0)
    assert all(answer.text == "4" for answer in answers)


def prompt_usage(number: int, endpoint: Endpoint, handler: BaseHTTPRequestHandler) -> bool:
    """Count a token per four characters, also of the system message."""
    characters = sum(len(message["content"]) for message in endpoint.asked[number]["messages"])
    choice = {"message": {"content": "4"}, "finish_reason": "stop"}
    usage = {"prompt_tokens": characters // 4, "completion_tokens": 4}
    respond(handler, 200, json.dumps({"choices": [choice], "usage": usage}).encode())
    return True


@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_budget_counts_what_came_in_any_order(tmp_path: Path, concurrency: int) -> None:
    """Each question and its answer have 300 + 4 tokens; the second round begins with what the first used."""
    (tmp_path / "t").mkdir(parents=True)
    delays = iter([0.2, 0.0, 0.1, 0.0] * 6)

    def late(number: int, endpoint: Endpoint, handler: BaseHTTPRequestHandler) -> bool:
        time.sleep(next(delays))
        return prompt_usage(number, endpoint, handler)

    with served(Endpoint(lambda prompt, seed: "4", late)) as endpoint:
        settings = {"system": "Be careful. " * 100, "concurrency": concurrency}
        process = Process(endpoint, LocalStore(tmp_path), Budget(1600), **settings)
        _, first = process.round(0)
        _, second = process.round(1)
        asked = {body["messages"][-1]["content"] for body in endpoint.asked}
    expected = 6 + concurrency - 1  # the sixth is asked after 5 x 304 tokens; those in flight meanwhile as well
    assert (len(asked), first.left_out) == (expected, 12 - expected)
    assert first.spent == process.budget.used == expected * 304
    assert first.budget_ended == 1600
    assert (second.left_out, second.requests, second.budget_ended) == (12, 0, 1600)


@pytest.mark.parametrize("count", [2**31, 10**400, -1, True, "7", None])
def test_an_implausible_count_of_tokens_is_none(count: Any, store: LocalStore) -> None:
    def lie(number: int, endpoint: Endpoint, handler: BaseHTTPRequestHandler) -> bool:
        choice = {"message": {"content": "four"}, "finish_reason": "stop"}
        usage = {"prompt_tokens": count, "completion_tokens": count}
        respond(handler, 200, json.dumps({"choices": [choice], "usage": usage}).encode())
        return True

    with served(Endpoint(lambda prompt, seed: "4", lie)) as endpoint:
        answers, account = Process(endpoint, store).round(0)
    assert {(answer.prompt_tokens, answer.completion_tokens) for answer in answers} == {(None, None)}
    assert account.completion_tokens == 12 * len("four")
    assert all(value < 2**31 for value in account.metrics("t").values())


def test_requests_of_processes_that_ended_are_counted(store: LocalStore) -> None:
    with served(Endpoint(lambda prompt, seed: "4", delay=0.3)) as endpoint:
        for so_far in (4, 8):
            Process(endpoint, store).killed(0, lambda so_far=so_far: len(endpoint.asked) >= so_far)  # type: ignore[misc]
        _, account = Process(endpoint, store).round(0)
        sent, questions = len(endpoint.asked), endpoint.seeds()
    assert account.requests == sent
    assert account.asked_again == sent - len(questions) > 0
    assert len(questions) == 12


def test_damaged_account_of_the_first_question_is_noted_and_not_counted(store: LocalStore) -> None:
    notes: list[str] = []
    first = {"questions": 1, "spent": 40, "reasons": {"no answer": 1}}
    stored = {"t": {"first": first}, "u": {"first": {**first, "spent": "many"}}, "v": {"first": None}}
    counted = accounts_of(store, stored, notes)
    assert counted == {
        "t": Account(questions=1, spent=40, reasons={"no answer": 1}),
        "u": Account(),
        "v": Account(),
    }
    assert notes == ["run.json: not an account of the first question to 'u' (spent is 'many'); it is not counted"]
