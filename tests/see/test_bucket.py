"""A bucket as exchange store: S3 servers on the loopback that are slow, failing, unreachable or inconsistent."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
from obstore.exceptions import GenericError

from buckets import Faults, Server, proxied, reachable, serving
from conftest import REPEATS
from mutualrl.errors import ExchangeUnreachableError, MachineError, UsageError
from mutualrl.see import Exchange, open_store
from mutualrl.see.bucket import BucketStore, _permanent_cause
from mutualrl.see.retention import prune_rounds
from mutualrl.storage.bucket_url import require_url
from store_contract import check_exchange, check_objects


@pytest.fixture(scope="module", params=["moto", pytest.param("seaweedfs", marks=pytest.mark.extended)])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(request.param, tmp_path_factory.mktemp("server")) as server, reachable(server):
        yield server


@pytest.fixture
def store(server: Server) -> BucketStore:
    return BucketStore(server.bucket())


def test_objects_are_put_created_once_swapped_and_deleted(store: BucketStore) -> None:
    assert store.policies() == []
    check_objects(store)
    store.probe()
    assert store.names("") == []


def test_exchange_runs_over_a_bucket(store: BucketStore) -> None:
    check_exchange(open_store(store.url))
    reader = Exchange(store.url, "ada", "run")  # a URL is accepted
    assert reader.rounds("bob") == [1]
    assert prune_rounds(store.url, "bob", needed=1, keep=1)[0] == []


def test_failed_requests_are_retried_and_applied_once(server: Server) -> None:
    url, faults = server.bucket(), Faults(failing=0.2)
    with proxied(server, faults) as proxy, reachable(proxy):
        store = BucketStore(url)
        for number in range(12):
            name = f"o{number}"
            assert store.create("bob", name, b"%d" % number)  # although some responses were lost
            assert not store.create("bob", name, b"other")
            assert store.swap("bob", name, b"%d" % number, b"new %d" % number)
            assert not store.swap("bob", name, b"%d" % number, b"stale")
            assert store.get("bob", name) == b"new %d" % number
        assert len(store.names("bob")) == 12
        store.delete("bob", [f"o{number}" for number in range(12)])
    assert faults.failed > 10
    assert BucketStore(url).names("bob") == []


def test_unreachable_store_is_retried_and_then_named(server: Server) -> None:
    url, faults = server.bucket(), Faults(down=True)
    with proxied(server, faults) as proxy, reachable(proxy):
        with pytest.raises(ExchangeUnreachableError, match="put failed for"):
            BucketStore(url, retry_seconds=1).put("bob", "a", b"1")
        BucketStore(url, retry_seconds=0)
        timer = threading.Timer(1.5, lambda: setattr(faults, "down", False))
        timer.start()
        BucketStore(url).put("bob", "a", b"1")
        faults.down = True
        with pytest.raises(ExchangeUnreachableError):
            BucketStore(url).put("bob", "heartbeat", b"1", durable=False)  # not retried: the next heartbeat replaces it
    assert BucketStore(url).get("bob", "a") == b"1"


def test_missing_bucket_is_named_immediately(server: Server) -> None:
    store = BucketStore("s3://no-such-bucket/run")
    for request in (store.probe, lambda: store.create("bob", "a", b"")):  # some stores report only a refusal
        with pytest.raises(MachineError, match="the bucket does not exist"):
            request()


def test_store_without_conditional_puts_is_rejected(tmp_path_factory: pytest.TempPathFactory) -> None:
    with (
        serving("rclone", tmp_path_factory.mktemp("rclone")) as server,
        reachable(server),
        pytest.raises(MachineError, match="accepts a second create"),
    ):
        BucketStore(server.bucket()).probe()


def test_missing_credentials_are_named(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    url = server.bucket()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(MachineError, match="credentials") as caught:
        BucketStore(url, retry_seconds=0).get("bob", "a")
    assert os.environ["AWS_ENDPOINT_URL"] not in str(caught.value)


RESPONSES = {
    "status code: 403 Forbidden: <Code>AccessDenied": "missing permission",
    "status code: 400 Bad Request: <Code>ExpiredToken": "expired credentials",
    "status code: 403: <Code>RequestTimeTooSkewed": "clock",
    "Received redirect without LOCATION": "another region",
    "status code: 501 Not Implemented": "does not implement this request",
    "status code: 404: <Code>NoSuchBucket": "bucket does not exist",
    "status code: 503 Slow Down": "",
    "status code: 429 Too Many Requests": "",
    "status code: 409 Conflict": "",
    "error sending request": "",
}


@pytest.mark.parametrize("response", RESPONSES)
def test_permanent_errors_are_distinguished_from_transient_ones(response: str) -> None:
    cause = _permanent_cause(GenericError(response))
    assert (RESPONSES[response] in cause) and (bool(cause) == bool(RESPONSES[response]))


def test_endpoint_without_a_scheme_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "localhost:9000")
    with pytest.raises(MachineError, match="AWS_ENDPOINT_URL: found 'localhost:9000'"):
        BucketStore("s3://bucket/run")


@pytest.mark.parametrize("url", ["az://container/run", "s3://bucket/a//b"])
def test_bucket_that_cannot_be_opened_raises_machine_error(url: str) -> None:
    with pytest.raises(MachineError, match="cannot be opened"):
        BucketStore(url)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("ftp://bucket/run", "expected s3://"),
        ("s3://", "expected s3://"),
        ("s3://key:secret@bucket/run", "contains credentials"),
        ("s3://bucket/run?key=1", "without a query"),
        ("s3://bucket/../other", "'..'"),
    ],
)
def test_invalid_url_is_rejected(url: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem.replace("?", r"\?")):
        require_url(url)
    with pytest.raises(UsageError):
        open_store(url)


def test_one_of_eight_writers_of_a_marker_wins(store: BucketStore) -> None:
    stores = [BucketStore(store.url) for _ in range(8)]
    for number in range(10 * REPEATS):
        winners: list[int] = []
        barrier = threading.Barrier(8)

        def compete(
            writer: int, name: str = f"m{number}", barrier: threading.Barrier = barrier, winners: list[int] = winners
        ) -> None:
            barrier.wait()
            if stores[writer].create("bob", name, b"writer %d" % writer):
                winners.append(writer)

        threads = [threading.Thread(target=compete, args=(writer,)) for writer in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(winners) == 1
        assert store.get("bob", f"m{number}") == b"writer %d" % winners[0]
