"""The client of a served model against a real server on the loopback, with everything that such a server may do."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from endpoint import Endpoint, completion, respond, served

from mutualrl.errors import MachineError, UsageError
from mutualrl.records import Prompt
from mutualrl.sources.questions import Answer, Question
from mutualrl.sources.section import ServedSource
from mutualrl.sources.served import HIDDEN, ServedModel, key_of, preflight

pytest.importorskip("openai")

KEY = "sk-secret-5f1e"
PROMPT = Prompt("p", "What is 2 + 2?", "4", "all")
Fault = Callable[[int, Endpoint, BaseHTTPRequestHandler], bool]


def teacher(url: str, **settings: Any) -> ServedSource:
    """Return a source with what a recipe settles."""
    return ServedSource(**{"name": "t", "served": url, "model": "teacher", "max_tokens": 16, **settings})


def answered(
    endpoint: Endpoint, prompt: Prompt = PROMPT, times: int = 1, key: str = KEY, **settings: Any
) -> tuple[list[Answer], ServedModel]:
    """Return the answers to one question."""

    async def ask() -> tuple[list[Answer], ServedModel]:
        model = ServedModel(teacher(endpoint.url, **{"timeout": 5.0, "retries": 0, **settings}), key)
        questions = [Question("p", sample, 7 + sample) for sample in range(times)]
        answers = await asyncio.gather(*(model.answer(question, prompt) for question in questions))
        await model.close()
        return list(answers), model

    return asyncio.run(ask())


def test_a_question_is_one_request_with_a_seed_of_its_own() -> None:
    with served(Endpoint(lambda prompt, seed: f"{prompt} {seed}")) as endpoint:
        answers, _ = answered(endpoint, times=3, system="Be brief.", temperature=0.5, extra_body={"top_k": 4})
        assert [answer.text for answer in answers] == [f"What is 2 + 2? {seed}" for seed in (7, 8, 9)]
        assert all(answer.ended and answer.failure is None for answer in answers)
        body = sorted(endpoint.asked, key=lambda body: body["seed"])[0]
        assert endpoint.headers["authorization"] == f"Bearer {KEY}"
        assert endpoint.headers["accept-encoding"] == "identity"
    assert body == {
        "path": "/v1/chat/completions",
        "model": "teacher",
        "max_tokens": 16,
        "seed": 7,
        "temperature": 0.5,
        "top_k": 4,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 2?"}],
    }


def test_conversations_and_completions() -> None:
    chat = replace(PROMPT, messages=(("system", "Old."), ("user", "2 + 2?")))
    with served(Endpoint(lambda prompt, seed: "4")) as endpoint:
        answered(endpoint, chat)
        answered(endpoint, chat, system="New.")
        (answer,), _ = answered(endpoint, api="completions")
        roles = [[(m["role"], m["content"]) for m in body["messages"]] for body in endpoint.asked[:2]]
        assert roles[0] == [("system", "Old."), ("user", "2 + 2?")]
        assert roles[1] == [("system", "New."), ("user", "2 + 2?")]
        assert endpoint.asked[2]["path"] == "/v1/completions"
        assert endpoint.asked[2]["prompt"] == PROMPT.text
        assert "temperature" not in endpoint.asked[2]
    assert answer.text == "4"
    assert (answer.prompt_tokens, answer.completion_tokens) == (8, 2)


@pytest.mark.parametrize(
    ("reason", "ended"),
    [
        *((reason, False) for reason in ("length", "content_filter", "MAX_TOKENS")),
        *((reason, True) for reason in ("stop", "eos_token", "stop_sequence", "tool_calls", None, 7)),
    ],
)
def test_an_answer_is_complete_unless_the_server_says_that_it_was_cut_off(reason: object, ended: bool) -> None:
    def fault(number: int, endpoint: Endpoint, handler: BaseHTTPRequestHandler) -> bool:
        respond(handler, 200, completion(endpoint, endpoint.asked[-1], finish_reason=reason))
        return True

    with served(Endpoint(lambda prompt, seed: "4", fault)) as endpoint:
        (answer,), _ = answered(endpoint)
    assert (answer.text, answer.ended, answer.failure) == ("4", ended, None)


def test_reasoning_is_kept_in_a_block_or_dropped() -> None:
    def fault(number: int, endpoint: Endpoint, handler: BaseHTTPRequestHandler) -> bool:
        message = {"content": "4", "reasoning_content": "two and two"}
        respond(handler, 200, completion(endpoint, endpoint.asked[-1], message=message))
        return True

    with served(Endpoint(lambda prompt, seed: "", fault)) as endpoint:
        (kept,), _ = answered(endpoint)
        (dropped,), _ = answered(endpoint, reasoning="drop")
    assert kept.text == "<think>\ntwo and two\n</think>\n\n4"
    assert dropped.text == "4"
    with served(Endpoint(lambda prompt, seed: "<think>hm</think>\n\n4")) as endpoint:
        assert answered(endpoint, reasoning="drop")[0][0].text == "4"
        assert answered(endpoint)[0][0].text == "<think>hm</think>\n\n4"
    with served(Endpoint(lambda prompt, seed: "<think>cut")) as endpoint:
        assert not answered(endpoint)[0][0].ended


# ---- faults


def once(fault: Callable[[BaseHTTPRequestHandler], None]) -> Fault:
    """Return a fault of the first request only."""

    def first(number: int, endpoint: Endpoint, handler: BaseHTTPRequestHandler) -> bool:
        if number == 0:
            fault(handler)
        return number == 0

    return first


def always(fault: Callable[[BaseHTTPRequestHandler], None]) -> Fault:
    def every(number: int, endpoint: Endpoint, handler: BaseHTTPRequestHandler) -> bool:
        fault(handler)
        return True

    return every


def status(code: int, body: bytes = b"{}", **headers: str) -> Callable[[BaseHTTPRequestHandler], None]:
    return lambda handler: respond(handler, code, body, **headers)


@pytest.mark.parametrize("code", [429, 500, 503])
def test_a_refused_request_is_repeated(code: int) -> None:
    fault = once(status(code, Retry_After="0.2"))
    with served(Endpoint(lambda prompt, seed: "4", fault)) as endpoint:
        began = time.monotonic()
        (answer,), model = answered(endpoint, retries=1)
        waited = time.monotonic() - began
        assert len(endpoint.asked) == model.requests == 2
    assert answer.text == "4"
    assert waited >= 0.2  # as the server asked


def half(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [{"mess')
    handler.close_connection = True


def slowly(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    for _ in range(1000):
        handler.wfile.write(b" ")
        time.sleep(0.1)


def nothing(handler: BaseHTTPRequestHandler) -> None:
    time.sleep(3)


def huge(handler: BaseHTTPRequestHandler) -> None:
    text = "x" * 10_000_000
    respond(handler, 200, json.dumps({"choices": [{"message": {"content": text}, "finish_reason": "stop"}]}).encode())


def compressed(handler: BaseHTTPRequestHandler) -> None:
    respond(handler, 200, b"not gzip", Content_Encoding="gzip")


def hang_up(handler: BaseHTTPRequestHandler) -> None:
    handler.close_connection = True
    handler.connection.close()


def body(value: object) -> Callable[[BaseHTTPRequestHandler], None]:
    return status(200, json.dumps(value).encode())


FAULTS: dict[str, tuple[Callable[[BaseHTTPRequestHandler], None], str]] = {
    "500": (status(500, b'{"error": {"message": "it is broken"}}'), "status 500"),
    "429 for an hour": (status(429, Retry_After="3600"), "status 429"),
    "key refused": (status(401, json.dumps({"error": {"message": f"bad key {KEY}"}}).encode()), "status 401"),
    "redirect": (status(302, Location=f"http://elsewhere.example/?key={KEY}"), "a redirect to"),
    "garbage": (status(200, b"<html>oops</html>"), "garbage"),
    "deep": (status(200, b"[" * 100_000), "RecursionError"),
    "a list": (body([1]), "garbage"),
    "no choices": (body({"choices": []}), "garbage"),
    "choices of another kind": (body({"choices": ["4"]}), "garbage"),
    "a text of another kind": (body({"choices": [{"message": {"content": [4]}}]}), "parts that are no text"),
    "a text that is a number": (body({"choices": [{"message": {"content": 4}}]}), "garbage"),
    "calls of tools": (
        body({"choices": [{"message": {"content": None, "tool_calls": [{"id": "1"}]}, "finish_reason": "tool_calls"}]}),
        "calls of tools",
    ),
    "reasoning alone": (
        body({"choices": [{"message": {"content": None, "reasoning_content": "hm"}, "finish_reason": "stop"}]}),
        "an empty text after its reasoning",
    ),
    "an error under 200": (body({"error": {"message": "quota is spent"}}), "quota is spent"),
    "429 for two minutes": (status(429, Retry_After="120"), "Retry-After: 120"),
    "a surrogate": (status(200, b'{"choices": [{"message": {"content": "\\ud800"}}]}'), "garbage"),
    "an empty text": (body({"choices": [{"message": {"content": None}, "finish_reason": "stop"}]}), "an empty text"),
    "half": (half, "unreachable"),
    "slowly": (slowly, "no answer within 1 s"),
    "nothing": (nothing, "no answer within 1 s"),
    "ten megabytes": (huge, "more than 8,388,608 bytes"),
    "compressed": (compressed, "encoded (gzip)"),
    "hangs up": (hang_up, "unreachable"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_no_fault_of_a_server_is_more_than_a_missing_answer(name: str) -> None:
    fault, reason = FAULTS[name]
    with served(Endpoint(lambda prompt, seed: "4", always(fault))) as endpoint:
        (answer,), _ = answered(endpoint, timeout=1.0)
    assert answer.failure is not None
    assert reason in answer.failure
    assert answer.text == "" or not answer.text.strip()
    assert KEY not in repr(answer)
    assert "\n" not in answer.failure
    assert len(answer.failure) <= 300


def test_no_server_at_all() -> None:
    (answer,), model = answered(Endpoint(lambda prompt, seed: "", url="http://127.0.0.1:9/v1"), retries=1)
    assert (answer.failure or "").startswith("unreachable")
    assert model.requests == 2


def test_a_server_that_echoes_the_key_does_not_bring_it_into_a_text() -> None:
    escaped = "".join(f"\\u{ord(c):04x}" for c in KEY)
    raw = f'{{"choices": [{{"message": {{"content": "{KEY} and {escaped}"}}, "finish_reason": "stop"}}]}}'
    with served(Endpoint(lambda prompt, seed: "", always(status(200, raw.encode())))) as endpoint:
        (answer,), model = answered(endpoint)
    assert answer.text == f"{HIDDEN} and {HIDDEN}"
    assert KEY not in repr(model.source)


def test_another_name_for_the_most_tokens_takes_its_place() -> None:
    with served(Endpoint(lambda prompt, seed: "4")) as endpoint:
        answered(endpoint, extra_body={"max_completion_tokens": 32})
        (body,) = endpoint.asked
    assert body["max_completion_tokens"] == 32
    assert "max_tokens" not in body


def test_a_stand_in_for_a_key_damages_no_answer() -> None:
    """Local servers take any key; such a word is part of others."""
    for key in ("EMPTY", "token", "4"):
        with served(Endpoint(lambda prompt, seed: "The EMPTY set has 4 tokens")) as endpoint:
            (answer,), _ = answered(endpoint, key=key)
        assert answer.text == "The EMPTY set has 4 tokens"
        assert (answer.prompt_tokens, answer.failure) == (8, None)


def test_nothing_of_the_environment_reaches_the_endpoint(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.setenv(name, "another-secret")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "Authorization: Bearer another-secret\nX-Else: another-secret")
    monkeypatch.setenv("OPENAI_LOG", "debug")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # nobody: a request through it would fail

    def with_cookie(number: int, endpoint: Endpoint, handler: BaseHTTPRequestHandler) -> bool:
        respond(handler, 200, completion(endpoint, endpoint.asked[-1]), Set_Cookie="session=1")
        return True

    with served(Endpoint(lambda prompt, seed: "4", with_cookie)) as endpoint:

        async def twice() -> None:
            model = ServedModel(teacher(endpoint.url), KEY)
            for sample in range(2):
                assert (await model.answer(Question("p", sample, 7), PROMPT)).failure is None
            await model.close()

        asyncio.run(twice())
        assert "another-secret" not in repr(endpoint.headers)
        assert endpoint.headers["authorization"] == f"Bearer {KEY}"
        assert "cookie" not in endpoint.headers
    assert KEY not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("name", "value"), [("ALL_PROXY", "socks5://127.0.0.1:9"), ("SSL_CERT_FILE", "/nonexistent/ca.pem")]
)
def test_an_environment_without_a_client_is_said(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(MachineError, match=r"no client for https://models\.example/v1 can be built"):
        ServedModel(teacher("https://models.example/v1"))


def test_a_null_leaves_a_field_out_of_the_request() -> None:
    with served(Endpoint(lambda prompt, seed: "4")) as endpoint:
        answered(endpoint, extra_body={"seed": None, "max_tokens": None})
        assert set(endpoint.asked[0]) == {"path", "model", "messages"}


def test_a_long_wait_that_the_server_asks_for_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr("mutualrl.sources.served.asyncio.sleep", sleep)

    def once(number: int, endpoint: Endpoint, handler: BaseHTTPRequestHandler) -> bool:
        if number:
            return False
        respond(handler, 429, b"{}", Retry_After="150")
        return True

    with served(Endpoint(lambda prompt, seed: "4", once)) as endpoint:
        (answer,), model = answered(endpoint, timeout=200.0, retries=1)
    assert (answer.text, slept, model.requests) == ("4", [150.0], 2)


# ---- before a run


def checked(endpoint: Endpoint, **settings: Any) -> str:
    return asyncio.run(preflight(teacher(endpoint.url, **{"timeout": 2.0, **settings}), KEY)).model


def test_a_model_is_named_or_the_only_one_and_need_not_be_listed() -> None:
    with served(Endpoint(lambda prompt, seed: "4")) as endpoint:
        assert checked(endpoint) == "teacher"
        assert checked(endpoint, model=None) == "teacher"
        assert checked(endpoint, model="other") == "other"
        endpoint.models = ["teacher", "other"]
        with pytest.raises(
            UsageError, match=r"the server at .* lists teacher, other; name one: --set sources\.t\.model=NAME"
        ):
            checked(endpoint, model=None)
        assert endpoint.asked == []  # no question, which could cost something


def test_the_first_question_finds_a_path_or_a_model_that_is_none() -> None:
    settings = {"timeout": 2.0, "retries": 0}
    with served(Endpoint(lambda prompt, seed: "4")) as endpoint:
        found = asyncio.run(preflight(teacher(endpoint.url, **settings), KEY, PROMPT, seed=3))
        assert (found.model, found.answer.text, found.answer.prompt_tokens) == ("teacher", "4", 8)
        assert [(body["seed"], body["messages"][-1]["content"]) for body in endpoint.asked] == [(3, PROMPT.text)]
    with (
        served(Endpoint(lambda prompt, seed: "4", always(status(404)))) as endpoint,
        pytest.raises(MachineError, match=r"gave no answer to a first question to teacher: status 404.*/v1"),
    ):
        asyncio.run(preflight(teacher(endpoint.url, **settings), KEY, PROMPT))


def test_a_server_that_lists_the_key_does_not_show_it() -> None:
    with served(Endpoint(lambda prompt, seed: "4", models=[KEY, "other"])) as endpoint:
        with pytest.raises(UsageError) as error:
            checked(endpoint, model=None)
        assert HIDDEN in str(error.value)
        assert KEY not in str(error.value)
        endpoint.models = ["x" * 501]  # no name
        with pytest.raises(UsageError, match="lists none"):
            checked(endpoint, model=None)


def test_a_server_that_is_not_there_is_refused_before_a_run() -> None:
    with pytest.raises(MachineError, match="is the server running"):
        checked(Endpoint(lambda prompt, seed: "", url="http://127.0.0.1:9/v1"))


def test_a_key_is_read_from_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", f" {KEY}\n")
    assert key_of("TEACHER_KEY", "t") == KEY
    assert key_of(None, "t") is None
    monkeypatch.setenv("TEACHER_KEY", "sk-one\nsk-two")
    with pytest.raises(UsageError, match="has white space") as error:
        key_of("TEACHER_KEY", "t")
    assert "sk-" not in str(error.value)
    monkeypatch.delenv("TEACHER_KEY")
    with pytest.raises(UsageError, match="TEACHER_KEY is not set"):
        key_of("TEACHER_KEY", "t")
