"""Served model: an OpenAI-compatible endpoint, one request per answer.

The `openai` client retries, waits as the server asks (`Retry-After`), and authenticates. Ours are a deadline over the
whole request, which the client's time-out is not (it starts again with every byte), a bound on the bytes of a
response, and the reader of its JSON: what a server sends is untrusted.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from email.utils import mktime_tz, parsedate_tz
from typing import TYPE_CHECKING, NamedTuple

from mutualrl.console.display import clean
from mutualrl.errors import MachineError, UsageError
from mutualrl.records import Prompt
from mutualrl.sources.layouts import LONGEST
from mutualrl.sources.questions import Answer, Question
from mutualrl.sources.section import ServedSource
from mutualrl.storage.files import JsonObject
from mutualrl.tasks.messages import is_cut_off, opens_reasoning, read_message, without_reasoning
from mutualrl.trajectory import Message

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai._types import RequestOptions

MOST_BYTES = 8 * 2**20  # of a response
PREFLIGHT_SECONDS = 30.0
CONNECT_SECONDS = 15.0
NO_KEY = "none"  # sent where no key is named: the client demands one
HIDDEN = "[key]"
SHORTEST_KEY = 8  # characters: a shorter one is a stand-in that a local server ignores, and part of other words
LONGEST_NAME = 500  # characters of a model's name
MOST_TOKENS = 2**24  # of a question or an answer: a larger count is none
INSTALL = "pip install 'mutualrl[served]'"


def key_of(variable: str | None, source: str) -> str | None:
    """Return the key in an environment variable. Raises UsageError if it is not set."""
    if variable is None:
        return None
    if not (key := os.environ.get(variable, "").strip()):
        raise UsageError(f"sources.{source}.api_key_env: the environment variable {variable} is not set; export it")
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise UsageError(
            f"sources.{source}.api_key_env: the environment variable {variable} has white space or another character "
            "within that no key has; export the key alone"
        )
    return key


@contextmanager
def _without_settings_of_the_client() -> Iterator[None]:
    """Hide the environment variables of the `openai` client, which are another service's: headers, which could replace
    the key, addresses, and a log of all headers."""
    hidden = {name: value for name, value in os.environ.items() if name.startswith("OPENAI_")}
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)


def require_client() -> None:
    """Raise MachineError where the client is not installed."""
    try:
        with _without_settings_of_the_client():
            import openai  # noqa: F401
    except ImportError as error:
        raise MachineError(f"served sources need the openai client ({error}); install it with: {INSTALL}") from None


class ServedModel:
    """Client of the endpoint of a source, used within one event loop. `key`: sent to the server, shown nowhere.
    `on_request` is called before each request, also a repeated one; `requests` counts them."""

    def __init__(
        self, source: ServedSource, key: str | None = None, on_request: Callable[[], None] = lambda: None
    ) -> None:
        require_client()
        self.source = source
        self.model = source.model
        self._key = key
        self.requests = 0
        self.no_list = ""  # why the server has no list of models
        self._on_request = on_request
        self._client = self._open()

    def _open(self) -> AsyncOpenAI:
        import openai

        from mutualrl.sources.bounded_http import BoundedClient

        def sent() -> None:
            self.requests += 1
            self._on_request()

        import httpx2

        seconds = httpx2.Timeout(self.source.timeout, connect=min(self.source.timeout, CONNECT_SECONDS))
        try:
            with _without_settings_of_the_client():
                return openai.AsyncOpenAI(
                    api_key=self._key or NO_KEY,
                    base_url=self.source.served,
                    max_retries=self.source.retries,
                    timeout=seconds,
                    http_client=BoundedClient(self.source.served, self.source.timeout, MOST_BYTES, sent),
                )
        except (ImportError, OSError, ValueError, httpx2.HTTPError, httpx2.InvalidURL) as error:
            # of a proxy or of certificates that the environment names
            raise MachineError(
                f"source {self.source.name!r}: no client for {self.source.served} can be built: "
                f"{clean(str(error), 300)}; see "
                "the environment: HTTPS_PROXY, ALL_PROXY, NO_PROXY, SSL_CERT_FILE"
            ) from None

    async def close(self) -> None:
        """Close its connections."""
        await self._client.close()

    async def models(self) -> list[str] | None:
        """Return the names of the models that the server lists; None if it has no list (`transformers serve` without a
        hub answers with an error). Raises MachineError if it does not answer or refuses the key."""
        import httpx2
        import openai

        try:
            response = await self._client.get("/models", cast_to=httpx2.Response, options={"max_retries": 0})
            value = _parsed(response.content)
        except (openai.OpenAIError, ValueError, RecursionError) as error:
            failure = self._failure(error)
            unanswered = failure.startswith(("unreachable", "no answer"))
            if not unanswered and not failure.startswith(("status 401", "status 403", "status 3")):
                self.no_list = failure
                return None
            hint = "; is the server running?" if unanswered else ""
            raise MachineError(
                f"source {self.source.name!r}: {self.source.served} cannot be used: {failure}{hint}"
            ) from None
        entries = value.get("data")
        if not isinstance(entries, list):
            return None
        names = [each.get("id") for each in entries if isinstance(each, Mapping)]
        return [self._hidden(name) for name in names if isinstance(name, str) and len(name) <= LONGEST_NAME]

    async def settle_model(self) -> str:
        """Return the model's name: the recipe's, or the only one that the server lists. Raises UsageError where the
        list lacks it or has several, MachineError as `models` does."""
        if self.model is None:
            listed = await self.models()
            if not listed or len(listed) != 1:
                found = "lists " + (", ".join(clean(name, 100) for name in (listed or [])[:10]) or "none")
                if listed is None:
                    found = (
                        f"has no list of models ({self.no_list or 'none in its answer'}; does its path end with /v1?)"
                    )
                raise UsageError(
                    f"sources.{self.source.name}.model: the server at {self.source.served} {found}; name one: --set "
                    f"sources.{self.source.name}.model=NAME"
                )
            self.model = listed[0]
        return self.model

    async def answer(self, question: Question, prompt: Prompt, retries: int | None = None) -> Answer:
        """Return the answer to a question, or why there is none. `retries`: in place of the recipe's."""
        import httpx2
        import openai

        body = {**self.source.extra_body, **self._body_of(question, prompt)}
        body = {key: value for key, value in body.items() if self.source.extra_body.get(key, value) is not None}
        path = "/chat/completions" if self.source.api == "chat" else "/completions"
        left = self.source.retries if retries is None else retries
        # not a copy of the client, which would read the environment again
        options: RequestOptions = {} if retries is None else {"max_retries": retries}
        while True:
            try:
                response = await self._client.post(path, body=body, cast_to=httpx2.Response, options=options)
                return self._answer(_parsed(response.content))
            except (openai.OpenAIError, ValueError, RecursionError) as error:  # the client's, and those of its JSON
                # the client waits for short times itself, and gives up on long ones
                wait = _asked_to_wait(error)
                if wait is None or left < 1 or not CLIENT_WAITS < wait <= self.source.timeout:
                    return Answer(failure=self._failure(error))
                left -= 1
                await asyncio.sleep(wait)

    def _body_of(self, question: Question, prompt: Prompt) -> dict[str, object]:
        """Return the fields of a request."""
        body: dict[str, object] = {"model": self.model, "seed": question.seed}
        if "max_completion_tokens" not in self.source.extra_body:  # what some servers demand in its place
            body["max_tokens"] = self.source.max_tokens
        if self.source.temperature is not None:
            body["temperature"] = self.source.temperature
        if self.source.api == "completions":
            return {**body, "prompt": prompt.text}
        messages = [{"role": role, "content": text} for role, text in prompt.messages or (("user", prompt.text),)]
        if self.source.system is not None:
            others = messages[1:] if messages[0]["role"] == "system" else messages
            messages = [{"role": "system", "content": self.source.system}, *others]
        return {**body, "messages": messages}

    def _hidden(self, text: str) -> str:
        """Return a text of the server without the key."""
        key = self._key
        return text if key is None or len(key) < SHORTEST_KEY else text.replace(key, HIDDEN)

    def _answer(self, value: JsonObject) -> Answer:
        """Return what a response says. Raises ValueError for one that is none."""
        if (problem := value.get("error")) and not value.get("choices"):
            words = problem.get("message", problem) if isinstance(problem, Mapping) else problem
            raise ValueError(f"an error in place of an answer: {words}")
        choices = value.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
            raise ValueError(f"no choices (its keys: {', '.join(map(str, list(value)[:8])) or 'none'})")
        choice = choices[0]
        message = self._message(choice)
        prompt_tokens, completion_tokens = _usage(value.get("usage"))
        ended = not is_cut_off(choice.get("finish_reason")) and not opens_reasoning(message.text)
        if self.source.reasoning == "drop":
            text = without_reasoning(message.text) if ended else message.text
        else:
            text = message.with_reasoning if message.text.strip() else ""
        if not ended and not text.strip():  # cut off while it reasoned
            text = f"<think>\n{message.reasoning}"
        text.encode()  # raises for a lone surrogate
        text = self._hidden(text)
        if len(text) > LONGEST:
            raise ValueError(f"a text of {len(text):,} characters")
        failure = _no_answer(message, text)
        return Answer(text, ended, prompt_tokens, completion_tokens, failure)

    def _message(self, choice: Mapping[str, object]) -> Message:
        """Return the message of a choice. Raises ValueError for one that is none."""
        if self.source.api == "completions":
            choice = {"message": {"role": "assistant", "content": choice.get("text")}}
        if not isinstance(choice.get("message"), Mapping):
            raise ValueError("a choice without a message")
        message = read_message({"role": "assistant", **choice["message"]})  # type: ignore[dict-item]
        if message is None:
            raise ValueError("a message whose content is neither a string nor parts")
        return message

    def _failure(self, error: Exception) -> str:
        """Return why a request has no answer, in one line without the key."""
        import openai

        if isinstance(error, openai.APIStatusError):
            text = f"status {error.status_code}: {error.message}"
            if wait := error.response.headers.get("retry-after"):
                text = f"{text} (Retry-After: {wait})"
            if location := error.response.headers.get("location"):
                text = f"status {error.status_code}: a redirect to {location}, which is not followed"
        elif isinstance(error, openai.APITimeoutError):
            text = f"no answer within {self.source.timeout:g} s"
        elif isinstance(error, openai.APIConnectionError):
            cause = error.__cause__
            text = f"unreachable ({type(cause).__name__}: {cause})" if cause is not None else "unreachable"
            if type(cause).__name__ == "TooLongError":
                text = str(cause)
        elif isinstance(error, ValueError):  # also of json and of str.encode
            text = f"garbage: {error}"
        else:
            text = f"{type(error).__name__}: {error}"
        text = self._hidden(text)
        return clean(" ".join(text.split()), 300)


def _parsed(data: bytes) -> JsonObject:
    value = json.loads(data)
    if not isinstance(value, dict):
        raise ValueError(f"JSON of kind {type(value).__name__}, expected an object")
    return value


def _usage(value: object) -> tuple[int | None, int | None]:
    """Return the tokens of the question and of the answer, as the server counts them."""
    counts = [value.get(key) if isinstance(value, Mapping) else None for key in ("prompt_tokens", "completion_tokens")]
    known = [
        count if isinstance(count, int) and not isinstance(count, bool) and 0 <= count < MOST_TOKENS else None
        for count in counts
    ]
    return known[0], known[1]


EMPTY, NO_TEXT = "an empty text", "a message with "  # how reasons begin for which an answer is none
#: how failures of the first question begin that no other prompt would mend
FATAL = ("unreachable", "garbage", "status 3", "status 401", "status 403", "status 404", "status 405")
QUESTION_SECONDS = 120.0  # for the first question: a cold server is no reason to wait for hours
CLIENT_WAITS = 60.0  # seconds of Retry-After up to which the client waits by itself


def _asked_to_wait(error: Exception) -> float | None:
    """Return the seconds for which a server asks to wait; None if it does not."""
    response = getattr(error, "response", None)
    value = None if response is None else response.headers.get("retry-after")
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        when = parsedate_tz(value)  # None for what is no date
    return None if when is None else max(0.0, mktime_tz(when) - time.time())


def _no_answer(message: Message, text: str) -> str | None:
    """Return why a message is no answer to learn; None if it is one."""
    if message.tool_calls:
        return NO_TEXT + "calls of tools"
    if message.others:
        return NO_TEXT + "parts that are no text"
    if text.strip():
        return None
    return "an empty text after its reasoning" if message.reasoning.strip() else EMPTY


class Preflight(NamedTuple):
    """What an endpoint said before the start: the model's name, and the answer to one question."""

    model: str
    answer: Answer


async def preflight(source: ServedSource, key: str | None, prompt: Prompt | None = None, seed: int = 0) -> Preflight:
    """Check an endpoint before a run: reachable, the key accepted, a model named, and a first question answered: a path
    or a model that is none shows there only. Raises MachineError, UsageError."""
    client = ServedModel(source.model_copy(update={"timeout": min(source.timeout, PREFLIGHT_SECONDS)}), key)
    try:
        if source.model is None:
            await client.settle_model()
        else:
            await client.models()
        model = client.model or ""
    finally:
        await client.close()
    if prompt is None:
        return Preflight(model, Answer(failure="not asked", asked=False))
    client = ServedModel(
        source.model_copy(update={"model": model, "timeout": min(source.timeout, QUESTION_SECONDS)}), key
    )
    try:
        answer = await client.answer(Question(prompt.id, 0, seed), prompt, retries=0)
    finally:
        await client.close()
    if answer.failure is not None and answer.failure.startswith(FATAL):
        hint = "; does its path end with /v1?" if answer.failure.startswith("status 404") else ""
        raise MachineError(
            f"source {source.name!r}: {source.served} gave no answer to a first question to {clean(model, 100)}: "
            f"{answer.failure}{hint}"
        )
    return Preflight(model, answer)
