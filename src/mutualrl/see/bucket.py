"""Exchange in a bucket (S3, GCS, Azure): `<url>/<policy>/<name>`, through `obstore` (extra `cloud`).

`create` is a put with If-None-Match, `swap` a put with If-Match on the ETag that was read with the expected bytes.
Transient failures (5xx, a refused or dropped connection, a time-out) are retried with jittered exponential back-off
for up to `RETRY_SECONDS`. A conditional put whose response was lost may have been applied: a writer that reads its own
bytes back treats the put as successful.

Credentials come from the usual environment (`AWS_*`, `GOOGLE_*`, `AZURE_*`, or the instance role), never from a URL.
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

PROBE_SECONDS = 20.0  # `RETRY_SECONDS` for the first requests, so that a misconfigured bucket is reported early
RETRY_SECONDS = 300.0  # from the first failure of a request to the error
_BACK_OFF_SECONDS = (0.2, 10.0)  # first and longest pause between two attempts
_REQUEST_SECONDS = 60.0  # time-out of one request; a part of a round is a few megabytes
_RANGE_BYTES = 2**25  # read per request from a large object
_EXCERPT_CHARACTERS = 300  # of a server's response in a message

T = TypeVar("T")


class BucketStore:
    """Objects under a bucket's URL. See `ExchangeStore`."""

    poll_seconds = (0.05, 1.0)
    liveness_seconds = 5.0
    rereads = 3

    def __init__(self, url: str, retry_seconds: float = RETRY_SECONDS) -> None:
        try:
            self.url = require_url(url)
        except ValueError as error:
            raise UsageError(f"{redacted(url)!r}: {error}") from None
        self._retry_seconds = retry_seconds
        self._store = _connect(self.url)

    def describe(self, policy: str, name: str = "") -> str:
        """Return the object's URL."""
        return "/".join(part for part in (self.url, policy, name) if part)

    def policies(self) -> list[str]:
        """Return the prefixes under the URL, sorted."""
        import obstore

        listing = self._request("list", "", lambda: obstore.list_with_delimiter(self._store))
        return sorted(prefix.rpartition("/")[2] for prefix in listing["common_prefixes"])

    def names(self, policy: str) -> list[str]:
        """Return the names under the policy's prefix."""
        import obstore

        listing = self._request("list", policy, lambda: obstore.list_with_delimiter(self._store, policy or None))
        prefix = f"{policy}/" if policy else ""  # some stores list the emptied prefix itself
        paths = [entry["path"] for entry in listing["objects"]]
        return [path.removeprefix(prefix) for path in paths if path.startswith(prefix)]

    def get(self, policy: str, name: str) -> bytes | None:
        """Return an object's bytes; None if it does not exist."""
        result = self._read(policy, name)
        return None if result is None else result[0]

    def size(self, policy: str, name: str) -> int:
        """Return an object's size; 0 if it does not exist."""
        import obstore

        path = _path(policy, name)
        try:
            return int(self._request("head", path, lambda: obstore.head(self._store, path))["size"])
        except FileNotFoundError:
            return 0

    def put(self, policy: str, name: str, data: bytes, *, durable: bool = True) -> None:
        """Put the object; an acknowledged put is durable. With `durable=False`: one attempt, no retries."""
        import obstore

        path = _path(policy, name)
        self._request("put", path, lambda: obstore.put(self._store, path, data), retry=durable)

    def put_file(self, policy: str, name: str, path: Path) -> None:
        """Put a file of any size, with a multipart upload if it is large."""
        import obstore

        key = _path(policy, name)
        self._request("put", key, lambda: obstore.put(self._store, key, path))

    def get_file(self, policy: str, name: str, path: Path) -> None:
        """Write an object of any size to a file. Raises FileNotFoundError if it does not exist."""
        import obstore

        key = _path(policy, name)
        size = int(self._request("head", key, lambda: obstore.head(self._store, key))["size"])
        with path.open("wb") as file:
            for start in range(0, size, _RANGE_BYTES):
                end = min(start + _RANGE_BYTES, size)
                part = partial(obstore.get_range, self._store, key, start=start, end=end)
                file.write(bytes(self._request("get", key, part)))  # each range has its own time-out and retries

    def create(self, policy: str, name: str, data: bytes) -> bool:
        """Put the object unless it exists."""
        return self._put_if(policy, name, data, "create")

    def swap(self, policy: str, name: str, expected: bytes, data: bytes) -> bool:
        """Replace the object if its bytes are `expected` and its ETag has not changed since they were read."""
        result = self._read(policy, name)
        if result is None:
            return False
        current, version = result
        if current != expected:
            return current == data
        return self._put_if(policy, name, data, version)

    def delete(self, policy: str, names: Iterable[str]) -> None:
        """Delete the objects."""
        import obstore

        for name in names:
            path = _path(policy, name)
            with suppress(FileNotFoundError):
                self._request("delete", path, partial(obstore.delete, self._store, path))

    def probe(self) -> None:
        """Write, list, read and delete an object; create it twice; replace it with its current and with a stale ETag.
        Raises MachineError naming the first operation that the store does not support.

        A store that accepts a second create, or a replacement with a stale ETag, lets two writers of a round both win.
        """
        name = f".probe-{uuid.uuid4().hex}"
        try:
            self.put("", name, b"put")
            self._require(self.get("", name) == b"put", "a read does not return what was written")
            self._require(name in self.names(""), "a new object is not listed")
            self.delete("", [name])
            self._require(self.get("", name) is None, "a deleted object can still be read")
            self._require(self.create("", name, b"first"), "an object cannot be created")
            self._require(not self.create("", name, b"second"), "it accepts a second create (If-None-Match is ignored)")
            before = self._read("", name)
            self._require(self.swap("", name, b"first", b"third"), "a replacement of the current version fails")
            assert before is not None
            stale = self._put_if("", name, b"fourth", before[1])
            self._require(not stale, "it accepts a replacement of a stale version (If-Match is ignored)")
        finally:
            with suppress(MachineError):
                self.delete("", [name])

    def _require(self, condition: bool, problem: str) -> None:
        if not condition:
            raise MachineError(
                f"{self.url}: the store cannot hold an exchange: {problem}, so two writers could both win; use a "
                "store with conditional puts"
            )

    def _read(self, policy: str, name: str) -> tuple[bytes, dict[str, str]] | None:
        """Return an object's bytes, and the ETag and version for a conditional replacement."""
        import obstore

        path = _path(policy, name)

        def read() -> tuple[bytes, dict[str, str]]:
            response = obstore.get(self._store, path)
            tags = {"e_tag": response.meta["e_tag"], "version": response.meta["version"]}
            return bytes(response.bytes()), {key: tag for key, tag in tags.items() if tag is not None}

        try:
            return self._request("get", path, read)
        except FileNotFoundError:
            return None

    def _put_if(self, policy: str, name: str, data: bytes, mode: Any) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError, NotSupportedError, PreconditionError

        path = _path(policy, name)
        try:
            self._request("put", path, lambda: obstore.put(self._store, path, data, mode=mode, use_multipart=False))
        except (AlreadyExistsError, PreconditionError, FileNotFoundError):
            return self.get(policy, name) == data  # true after an attempt whose response was lost
        except NotSupportedError as error:
            raise MachineError(f"{self.describe(policy, name)}: the store has no conditional put ({error})") from None
        return True

    def _request(self, operation: str, path: str, send: Callable[[], T], *, retry: bool = True) -> T:
        """Send a request and return its result; retry transient failures. Raises FileNotFoundError for an object that
        does not exist, MachineError for a permanent failure, ExchangeUnreachableError once the retries time out."""
        from obstore.exceptions import AlreadyExistsError, BaseError, NotSupportedError, PreconditionError

        start, pause = time.monotonic(), _BACK_OFF_SECONDS[0]
        while True:
            try:
                return send()
            except FileNotFoundError as error:
                if operation != "put" and "NoSuchBucket" not in str(error):
                    raise
                reason = _permanent_cause(error)
                raise MachineError(f"{self.url}/{path}: {operation} failed: {reason} ({_excerpt(error)})") from None
            except (AlreadyExistsError, PreconditionError, NotSupportedError):
                raise  # results of a conditional put
            except (BaseError, PermissionError) as error:
                if reason := _permanent_cause(error):
                    raise MachineError(f"{self.url}/{path}: {operation} failed: {reason} ({_excerpt(error)})") from None
                if not retry or time.monotonic() + pause - start > self._retry_seconds:
                    seconds = time.monotonic() - start
                    raise ExchangeUnreachableError(
                        f"{self.url}/{path}: {operation} failed for {seconds:.0f} s ({_excerpt(error)}){_hint(error)}"
                    ) from None
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, _BACK_OFF_SECONDS[1])


_CREDENTIALS = "docs/operations.md#a-bucket for the credentials and permissions that an exchange needs"


#: 4xx statuses worth a retry: time-out, conflict with a write in progress, too many requests
_TRANSIENT_STATUSES = (408, 409, 429)


def _permanent_cause(error: Exception) -> str:
    """Return why a failure is permanent; an empty string if it may be transient."""
    text = str(error)
    if isinstance(error, FileNotFoundError) or "NoSuchBucket" in text or "ContainerNotFound" in text:
        return "the bucket does not exist; create it, or correct exchange.url"
    if "RequestTimeTooSkewed" in text:
        return "this machine's clock differs by more than the store allows; synchronize it (NTP)"
    if "Received redirect" in text:
        return "the bucket is in another region; set AWS_REGION"
    match = re.search(r"status code: ([0-9]{3})", text)
    status = 0 if match is None or _used_instance_metadata(error) else int(match[1])
    if status in (401, 403) or isinstance(error, PermissionError) or "ExpiredToken" in text:
        return f"invalid or expired credentials, missing permission, or the bucket does not exist; see {_CREDENTIALS}"
    if 400 <= status < 500 and status not in _TRANSIENT_STATUSES:
        return "the store rejects the request"
    return "the store does not implement this request" if status == 501 else ""


def _used_instance_metadata(error: Exception) -> bool:
    """Return whether the credentials were requested from the cloud's instance metadata service."""
    return any(name in str(error) for name in ("169.254.169.254", "metadata.google.internal"))


def _hint(error: Exception) -> str:
    """Return the likely cause of a transient failure that persists."""
    return f"; no credentials were found: see {_CREDENTIALS}" if _used_instance_metadata(error) else ""


def _excerpt(error: Exception) -> str:
    """Return the beginning of a server's response, on one line."""
    text = " ".join(str(error).partition("Debug source")[0].split())
    return text if len(text) <= _EXCERPT_CHARACTERS else f"{text[:_EXCERPT_CHARACTERS]}..."


def _path(policy: str, name: str) -> str:
    return f"{policy}/{name}" if policy else name


def _connect(url: str) -> S3Store:
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
    retry: Any = {"max_retries": 0}  # only `_request` retries
    try:
        store: Any = from_url(url, client_options=options, retry_config=retry)
    except (BaseError, ValueError) as error:
        raise MachineError(f"{url}: cannot be opened ({_excerpt(error)}); see {_CREDENTIALS}") from None
    return store  # type: ignore[no-any-return]
