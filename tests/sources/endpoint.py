"""OpenAI-compatible endpoint for tests, on the loopback: answers from the prompt and the seed, and faults on request."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from mutualrl.tasks import TaskSource, get_task

Answer = Callable[[str, int], str]


@dataclass
class Endpoint:
    """Endpoint with an `answer` to each (prompt, seed). `fault`: what it does in place of an answer to a request, by
    the request's number; None: it answers. `asked`: its requests, in order; `headers`: of the last one."""

    answer: Answer
    fault: Callable[[int, Endpoint, BaseHTTPRequestHandler], bool] | None = None
    models: list[str] = field(default_factory=lambda: ["teacher"])
    finish_reason: str = "stop"
    delay: float = 0.0
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    in_flight: int = 0
    most_in_flight: int = 0
    url: str = ""
    usage: bool = True
    gone: bool = False  # it answers no further request, on no connection
    lock: threading.Lock = field(default_factory=threading.Lock)

    def prompts(self) -> Counter[str]:
        """Return how often each prompt was asked."""
        return Counter(prompt_of(body) for body in self.asked)

    def seeds(self) -> Counter[tuple[str, int]]:
        """Return how often each question was asked."""
        return Counter((prompt_of(body), body["seed"]) for body in self.asked)


def prompt_of(body: dict[str, Any]) -> str:
    """Return the question in a request."""
    return str(body["prompt"] if "prompt" in body else body["messages"][-1]["content"])


def respond(handler: BaseHTTPRequestHandler, status: int, body: bytes, **headers: str) -> None:
    """Send a whole response."""
    handler.send_response(status)
    for name, value in {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(body)


def completion(endpoint: Endpoint, body: dict[str, Any], **choice: Any) -> bytes:
    """Return the body of a response."""
    prompt = prompt_of(body)
    text = endpoint.answer(prompt, int(body.get("seed", 0)))
    said = {"text": text} if "prompt" in body else {"message": {"role": "assistant", "content": text}}
    value: dict[str, Any] = {"choices": [{"index": 0, "finish_reason": endpoint.finish_reason, **said, **choice}]}
    if endpoint.usage:
        value["usage"] = {"prompt_tokens": len(prompt.split()) + 3, "completion_tokens": len(text.split()) + 1}
    return json.dumps(value).encode()


@contextmanager
def served(endpoint: Endpoint) -> Iterator[Endpoint]:
    """Serve an endpoint while the block runs."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            with endpoint.lock:
                endpoint.headers = {name.lower(): value for name, value in self.headers.items()}
            respond(self, 200, json.dumps({"data": [{"id": name} for name in endpoint.models]}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with endpoint.lock:
                endpoint.asked.append({**body, "path": self.path})
                number = len(endpoint.asked) - 1
                endpoint.headers = {name.lower(): value for name, value in self.headers.items()}
                endpoint.in_flight += 1
                endpoint.most_in_flight = max(endpoint.most_in_flight, endpoint.in_flight)
            try:
                if endpoint.gone:
                    self.close_connection = True
                    self.connection.close()
                    return
                time.sleep(endpoint.delay)
                if endpoint.fault is None or not endpoint.fault(number, endpoint, self):
                    respond(self, 200, completion(endpoint, body))
            except (BrokenPipeError, ConnectionResetError):
                pass
            finally:
                with endpoint.lock:
                    endpoint.in_flight -= 1

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    endpoint.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield endpoint
    finally:
        endpoint.gone = True
        server.shutdown()
        server.server_close()


def chance(*parts: object) -> float:
    """Return a number in [0, 1) that depends on its arguments only."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big") / 2**32


@cache
def solutions() -> dict[str, str]:
    """Return the worked solutions of the embedded task, by prompt."""
    return {prompt.text: prompt.solution or "" for prompt in get_task("arithmetic").read("train", TaskSource()).prompts}


def teacher(prompt: str, seed: int) -> str:
    """Answer nine questions of ten."""
    return solutions()[prompt] if chance(prompt, seed) < 0.9 else "I do not know"
