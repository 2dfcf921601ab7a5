"""Exchange in a bucket (S3, GCS, Azure): `<url>/<policy>/<name>`, through `obstore` (extra `cloud`).

`create` is a put with If-None-Match, `swap` a put with If-Match on the ETag that was read with the expected bytes.
Requests that fail transiently (5xx, a refused or dropped connection, a time-out) are tried again with jittered
exponential back-off until `RETRY_SECONDS` are over. A conditional put whose answer was lost may have been applied:
who finds its own bytes there has written them.

Credentials come from the usual environment (`AWS_*`, `GOOGLE_*`, `AZURE_*`, or the machine's role), never from a URL.
"""

from __future__ import annotations

import os
import random
import re
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mutualrl.errors import ExchangeUnreachableError, MachineError, UsageError
from mutualrl.storage.bucket_url import redacted, require_url

if TYPE_CHECKING:
    from obstore.store import S3Store

PROBE_SECONDS = 20.0  # the same for the first requests: what is wrong with a bucket is said in seconds
RETRY_SECONDS = 300.0  # from the first failure of a request to the error that names it
_PAUSES = (0.2, 10.0)  # first and longest pause between two tries, in seconds
_REQUEST_SECONDS = 60.0  # for one request; a part of a round is some megabytes
_PART_BYTES = 2**25  # of a large object that is read in one request
_WORDS = 300  # characters of a server's answer in a message

T = TypeVar("T")


class BucketStore:
    """Objects below a bucket's URL. See `ExchangeStore`."""

    poll_seconds = (0.05, 1.0)
    liveness_seconds = 5.0

    def __init__(self, url: str, retry_seconds: float = RETRY_SECONDS) -> None:
        try:
            self.url = require_url(url)
        except ValueError as error:
            raise UsageError(f"{redacted(url)!r}: {error}") from None
        self._retry_seconds = retry_seconds
        self._store = _connected(self.url)

    def describe(self, policy: str, name: str = "") -> str:
        """Return the object's URL."""
        return "/".join(part for part in (self.url, policy, name) if part)

    def policies(self) -> list[str]:
        """Return the prefixes below the URL, sorted."""
        import obstore

        listed = self._tried("list", "", lambda: obstore.list_with_delimiter(self._store))
        return sorted(prefix.rpartition("/")[2] for prefix in listed["common_prefixes"])

    def names(self, policy: str) -> list[str]:
        """Return the names below the policy's prefix."""
        import obstore

        listed = self._tried("list", policy, lambda: obstore.list_with_delimiter(self._store, policy or None))
        begins = f"{policy}/" if policy else ""  # some stores list the emptied prefix itself
        return [path.removeprefix(begins) for each in listed["objects"] if (path := each["path"]).startswith(begins)]

    def get(self, policy: str, name: str) -> bytes | None:
        """Return an object's bytes; None while there is none."""
        read = self._read(policy, name)
        return None if read is None else read[0]

    def size(self, policy: str, name: str) -> int:
        """Return an object's size; 0 where there is none."""
        import obstore

        path = _path(policy, name)
        try:
            return int(self._tried("head", path, lambda: obstore.head(self._store, path))["size"])
        except FileNotFoundError:
            return 0

    def put(self, policy: str, name: str, data: bytes, *, durable: bool = True) -> None:
        """Put the object; a bucket keeps what it has acknowledged. Not durable: tried once."""
        import obstore

        path = _path(policy, name)
        self._tried("put", path, lambda: obstore.put(self._store, path, data), again=durable)

    def put_file(self, policy: str, name: str, path: Path) -> None:
        """Put a file of any size, in parts where it is large."""
        import obstore

        key = _path(policy, name)
        self._tried("put", key, lambda: obstore.put(self._store, key, path))

    def get_file(self, policy: str, name: str, path: Path) -> None:
        """Write an object of any size to a file. Raises FileNotFoundError where there is none."""
        import obstore

        key = _path(policy, name)
        size = int(self._tried("head", key, lambda: obstore.head(self._store, key))["size"])
        with path.open("wb") as file:
            for start in range(0, size, _PART_BYTES):
                end = min(start + _PART_BYTES, size)
                part = partial(obstore.get_range, self._store, key, start=start, end=end)
                file.write(bytes(self._tried("get", key, part)))  # each part has its own time and its own retries

    def create(self, policy: str, name: str, data: bytes) -> bool:
        """Put the object if there is none."""
        return self._put_if(policy, name, data, "create")

    def swap(self, policy: str, name: str, expected: bytes, data: bytes) -> bool:
        """Put the object if it still is the one that was read, and held `expected`."""
        read = self._read(policy, name)
        if read is None or read[0] != expected:
            return read is not None and read[0] == data
        return self._put_if(policy, name, data, read[1])

    def delete(self, policy: str, names: Iterable[str]) -> None:
        """Delete the objects."""
        import obstore

        for name in names:
            path = _path(policy, name)
            with suppress(FileNotFoundError):
                self._tried("delete", path, partial(obstore.delete, self._store, path))

    def probe(self) -> None:
        """Write, list, read and delete an object; create it twice; replace it by who has read it, and by who has read
        what it was before. Raises MachineError naming what the store does not do.

        A store that accepts a second create, or a replacement that is out of date, lets two writers of a round both
        win.
        """
        name = f".probe-{uuid.uuid4().hex}"
        try:
            self.put("", name, b"put")
            self._require(self.get("", name) == b"put", "what was put is not what is read")
            self._require(name in self.names(""), "what was put is not listed")
            self.delete("", [name])
            self._require(self.get("", name) is None, "what was deleted is still read")
            self._require(self.create("", name, b"first"), "an object cannot be created")
            self._require(not self.create("", name, b"second"), "it accepts a second create (If-None-Match is ignored)")
            before = self._read("", name)
            self._require(self.swap("", name, b"first", b"third"), "who has read an object cannot replace it")
            assert before is not None
            stale = self._put_if("", name, b"fourth", before[1])
            self._require(not stale, "it accepts a replacement that is out of date (If-Match is ignored)")
        finally:
            with suppress(MachineError):
                self.delete("", [name])

    def _require(self, kept: bool, problem: str) -> None:
        if not kept:
            raise MachineError(
                f"{self.url}: its store cannot hold an exchange: {problem}, so that two writers could both win; use a "
                "store with conditional puts"
            )

    def _read(self, policy: str, name: str) -> tuple[bytes, dict[str, str]] | None:
        """Return an object's bytes, and the ETag and version by which it is replaced."""
        import obstore

        path = _path(policy, name)

        def read() -> tuple[bytes, dict[str, str]]:
            answer = obstore.get(self._store, path)
            tags = {"e_tag": answer.meta["e_tag"], "version": answer.meta["version"]}
            return bytes(answer.bytes()), {key: tag for key, tag in tags.items() if tag is not None}

        try:
            return self._tried("get", path, read)
        except FileNotFoundError:
            return None

    def _put_if(self, policy: str, name: str, data: bytes, mode: Any) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError, NotSupportedError, PreconditionError

        path = _path(policy, name)
        try:
            self._tried("put", path, lambda: obstore.put(self._store, path, data, mode=mode, use_multipart=False))
        except (AlreadyExistsError, PreconditionError, FileNotFoundError):
            return self.get(policy, name) == data  # an earlier try of ours whose answer was lost
        except NotSupportedError as error:
            raise MachineError(f"{self.describe(policy, name)}: its store has no conditional put ({error})") from None
        return True

    def _tried(self, what: str, path: str, request: Callable[[], T], *, again: bool = True) -> T:
        """Return a request's answer; a transient failure is retried. Raises FileNotFoundError for an
        object that is not there, MachineError for what no second try can change, ExchangeUnreachableError once
        the time for retries is over."""
        from obstore.exceptions import AlreadyExistsError, BaseError, NotSupportedError, PreconditionError

        began, pause = time.monotonic(), _PAUSES[0]
        while True:
            try:
                return request()
            except FileNotFoundError as error:
                if what != "put" and "NoSuchBucket" not in str(error):
                    raise
                raise MachineError(f"{self.url}/{path}: {what} failed: {_lasting(error)} ({_words(error)})") from None
            except (AlreadyExistsError, PreconditionError, NotSupportedError):
                raise  # answers to a conditional put
            except (BaseError, PermissionError) as error:
                if why := _lasting(error):
                    raise MachineError(f"{self.url}/{path}: {what} failed: {why} ({_words(error)})") from None
                if not again or time.monotonic() + pause - began > self._retry_seconds:
                    seconds = time.monotonic() - began
                    raise ExchangeUnreachableError(
                        f"{self.url}/{path}: {what} failed for {seconds:.0f} s ({_words(error)}){_hint(error)}"
                    ) from None
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, _PAUSES[1])


_CREDENTIALS = "docs/operations.md#a-bucket for the credentials and rights that an exchange needs"


#: statuses that a later try may not have: a time-out, a conflict with a write in progress, too many requests
_PASSING = (408, 409, 429)


def _lasting(error: Exception) -> str:
    """Return why a failure is permanent; an empty string where it may be transient."""
    text = str(error)
    if isinstance(error, FileNotFoundError) or "NoSuchBucket" in text or "ContainerNotFound" in text:
        return "there is no such bucket; make it, or correct exchange.url"
    if "RequestTimeTooSkewed" in text:
        return "this machine's clock is off by more than the store allows; set it (ntp)"
    if "Received redirect" in text:
        return "the bucket is in another region; set AWS_REGION"
    match = re.search(r"status code: ([0-9]{3})", text)
    status = 0 if match is None or _asks_the_machine(error) else int(match[1])
    if status in (401, 403) or isinstance(error, PermissionError) or "ExpiredToken" in text:
        return f"the credentials are not accepted, lack the right, or there is no such bucket; see {_CREDENTIALS}"
    if 400 <= status < 500 and status not in _PASSING:
        return "the store refuses the request"
    return "the store does not know this request" if status == 501 else ""


def _asks_the_machine(error: Exception) -> bool:
    """Return whether the credentials were looked for in the machine's role."""
    return any(name in str(error) for name in ("169.254.169.254", "metadata.google.internal"))


def _hint(error: Exception) -> str:
    """Return what a failure that may pass would mean if it did not."""
    return f"; no credentials were found: see {_CREDENTIALS}" if _asks_the_machine(error) else ""


def _words(error: Exception) -> str:
    """Return the beginning of a server's answer, on one line."""
    words = " ".join(str(error).partition("Debug source")[0].split())
    return words if len(words) <= _WORDS else f"{words[:_WORDS]}..."


def _path(policy: str, name: str) -> str:
    return f"{policy}/{name}" if policy else name


def _connected(url: str) -> S3Store:
    try:
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ImportError:
        raise MachineError(f"{url}: a bucket needs the extra `cloud`: pip install 'mutualrl[cloud]'") from None
    options: Any = {"timeout": timedelta(seconds=_REQUEST_SECONDS), "connect_timeout": timedelta(seconds=10)}
    endpoint = os.environ.get("AWS_ENDPOINT_URL", os.environ.get("AWS_ENDPOINT", ""))
    if endpoint and not endpoint.startswith(("http://", "https://")):
        raise MachineError(f"AWS_ENDPOINT_URL: found {redacted(endpoint)!r}, expected http://HOST or https://HOST")
    if endpoint.startswith("http://"):
        options["allow_http"] = True
    retry: Any = {"max_retries": 0}  # one place decides about retries: `_tried`
    try:
        store: Any = from_url(url, client_options=options, retry_config=retry)
    except (BaseError, ValueError) as error:
        raise MachineError(f"{url}: cannot be opened ({_words(error)}); see {_CREDENTIALS}") from None
    return store  # type: ignore[no-any-return]
