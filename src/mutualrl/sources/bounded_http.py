"""HTTP client with a deadline over a whole request and a bound on the bytes of a response."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import httpx2
import openai


def is_loopback(url: str) -> bool:
    """Return whether a URL is of this machine."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


class TooLongError(httpx2.ReadError):
    """A response has more bytes than are read."""


class BoundedClient(openai.DefaultAsyncHttpxClient):
    """Client of one `url` that ends a request after `seconds`, from its start to its last byte, and after `most_bytes`.
    It follows no redirect: the key is for the server that the recipe names. It keeps no cookies, and uses the proxies
    of the environment for other hosts than this machine. `sent` is called before each request."""

    def __init__(self, url: str, seconds: float, most_bytes: int, sent: Callable[[], None]) -> None:
        super().__init__(
            timeout=seconds,
            trust_env=not is_loopback(url),
            follow_redirects=False,
            headers={"Accept-Encoding": "identity"},  # a compressed response could expand without bound
            event_hooks={"response": [self._bound]},
        )
        self._seconds = seconds
        self._most_bytes = most_bytes
        self._sent = sent

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """Send a request and read its response. Raises ReadTimeout after the deadline, TooLongError."""
        self._sent()
        request.headers.pop("cookie", None)
        self.cookies.clear()
        try:
            async with asyncio.timeout(self._seconds):
                return await super().send(request, **options)
        except TimeoutError:
            raise httpx2.ReadTimeout(f"no complete response within {self._seconds:g} s", request=request) from None

    async def _bound(self, response: httpx2.Response) -> None:
        if response.headers.get("content-encoding", "identity") != "identity":
            raise TooLongError(f"a response that is encoded ({response.headers['content-encoding'][:40]})")
        response.stream = _Bounded(response.stream, self._most_bytes)


class _Bounded(httpx2.AsyncByteStream):
    """Stream of at most a number of bytes."""

    def __init__(self, stream: Any, most_bytes: int) -> None:
        self._stream = stream
        self._most_bytes = most_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        read = 0
        async for chunk in self._stream:
            read += len(chunk)
            if read > self._most_bytes:
                raise TooLongError(f"a response of more than {self._most_bytes:,} bytes")
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()
