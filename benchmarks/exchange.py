"""Cost of the exchange: a durable publish and a read, against other stores; by regime and pool size; of a step.

    python benchmarks/exchange.py     # about ten minutes; pip install redis ray, and Debian's redis-server, for all
    rows

One shape for the stores: a round of 32 prompts x 8 rollouts x 600 tokens with text, ids and log-probs. Every store is
asked for the same: the records of a round, on the disk when the write returns where it can (Redis: appendonly, fsync
always; SQLite: WAL, synchronous=FULL; pickle: fsync and rename), and read back as columns by another reader. Ray keeps
its objects in shared memory alone. All in one run, alternating; medians.
Writes benchmarks/results/exchange.{json,md}.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import shutil
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

import harness
from mutualrl.records import Rollout
from mutualrl.regimes import get_regime
from mutualrl.rollouts import Rollouts
from mutualrl.see import Exchange
from mutualrl.storage.files import write_atomic
from mutualrl.trajectory import Trajectory

COMMAND = "python benchmarks/exchange.py"
PROMPTS, ROLLOUTS, TOKENS = 32, 8, 600
STEP_SECONDS = 5.0
WORDS = [w for w in __doc__.split() if w.isalpha()]


def records(prompts: int, rollouts: int, tokens: int, seed: int) -> list[Rollout]:
    """Return a round of synthetic rollouts: about 4 characters per token, ids of a vocabulary of 150,000, plausible
    log-probs."""
    rng = np.random.default_rng(seed)
    rows = []
    for row in range(prompts * rollouts):
        text = " ".join(rng.choice(WORDS, size=tokens))[: 4 * tokens]
        advantage = float(rng.normal())
        token_ids = rng.integers(0, 150_000, tokens, dtype=np.int32)
        logprobs = (-rng.exponential(0.5, tokens)).astype(np.float32)
        rows.append(
            Rollout(
                f"math/train/{row // rollouts}/0123456789ab",
                row % rollouts,
                float(rng.random() < 0.4),
                ended=True,
                prompt=text[:200],
                trajectory=Trajectory.of_text(text),
                advantage=advantage,
                token_ids=token_ids,
                logprobs=logprobs,
            )
        )
    return rows


class Store(Protocol):
    """Store of rounds."""

    def publish(self, round_index: int, rows: list[Rollout]) -> None:
        """Keep a round."""

    def read(self, round_index: int) -> Any:
        """Return all columns of a round."""

    def size(self) -> int | None:
        """Return bytes on disk; None if it keeps none there."""


def _columns(rows: list[Rollout]) -> dict[str, list[Any]]:
    names = ("prompt_id", "index", "reward", "ended", "prompt", "text", "advantage", "token_ids", "logprobs")
    return {name: [getattr(row, name) for row in rows] for name in names}


def _bytes_below(root: Path) -> int:
    return sum(p.stat().st_size for p in root.rglob("*") if p.is_file())


class Ours:
    """Exchange: checksummed Parquet and a marker; the reader verifies every byte and decodes every column."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.writer = Exchange(root, "bob", "bench")
        self.reader = Exchange(root, "ada", "bench")

    def publish(self, round_index: int, rows: list[Rollout]) -> None:
        """Keep a round."""
        self.writer.publish(round_index, rows, round_index)

    def read(self, round_index: int) -> Any:
        """Return all columns, as Arrow arrays."""
        shard = self.reader.read("bob", round_index)
        assert shard is not None
        return shard.table()

    def size(self) -> int:
        """Return bytes on disk."""
        return _bytes_below(self.root)


class Pickle:
    """Baseline of a quick script: pickle, made durable in the same way; nothing is verified."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def publish(self, round_index: int, rows: list[Rollout]) -> None:
        """Keep a round."""
        write_atomic(self.root / f"{round_index}.pickle", pickle.dumps(_columns(rows), protocol=5))

    def read(self, round_index: int) -> Any:
        """Return all columns, as lists."""
        return pickle.loads((self.root / f"{round_index}.pickle").read_bytes())  # noqa: S301

    def size(self) -> int:
        """Return bytes on disk."""
        return _bytes_below(self.root)


class Sqlite:
    """SQLite in WAL mode with synchronous=FULL: one row per record, arrays as blobs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.writer, self.reader = (sqlite3.connect(root / "rounds.db", isolation_level=None) for _ in range(2))
        self.writer.execute("pragma journal_mode=wal")
        self.writer.execute("pragma synchronous=full")
        self.writer.execute("create table r (round, prompt_id, rollout, reward, ended, x, y, advantage, ids, logprobs)")
        self.writer.execute("create index by_round on r (round)")

    def publish(self, round_index: int, rows: list[Rollout]) -> None:
        """Keep a round, in one transaction."""
        values = [
            (
                round_index,
                r.prompt_id,
                r.index,
                r.reward,
                r.ended,
                r.prompt,
                r.text,
                r.advantage,
                np.asarray(r.token_ids, "int32").tobytes(),
                np.asarray(r.logprobs, "float32").tobytes(),
            )
            for r in rows
        ]
        self.writer.execute("begin")
        self.writer.executemany("insert into r values (?,?,?,?,?,?,?,?,?,?)", values)
        self.writer.execute("commit")

    def read(self, round_index: int) -> Any:
        """Return all columns, arrays as NumPy."""
        rows = self.reader.execute("select * from r where round = ?", (round_index,)).fetchall()
        return [(*r[:8], np.frombuffer(r[8], "int32"), np.frombuffer(r[9], "float32")) for r in rows]

    def size(self) -> int:
        """Return bytes on disk."""
        return _bytes_below(self.root)


class Redis:
    """Redis over loopback, one value per round (Arrow's own bytes), appendonly with fsync on every write."""

    def __init__(self, root: Path) -> None:
        import redis

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.root = root
        self.server = subprocess.Popen(
            [
                "redis-server",
                "--port",
                str(port),
                "--bind",
                "127.0.0.1",
                "--dir",
                str(root),
                "--save",
                "",
                "--appendonly",
                "yes",
                "--appendfsync",
                "always",
            ],
            stdout=subprocess.DEVNULL,
        )
        self.client = redis.Redis(port=port)
        for _ in range(100):
            with contextlib.suppress(redis.ConnectionError):
                self.client.ping()
                break
            time.sleep(0.1)

    def publish(self, round_index: int, rows: list[Rollout]) -> None:
        """Keep a round."""
        import pyarrow as pa

        table = pa.table(_columns(rows))
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        self.client.set(f"round:{round_index}", memoryview(sink.getvalue()))

    def read(self, round_index: int) -> Any:
        """Return all columns, as Arrow arrays."""
        import pyarrow as pa

        return pa.ipc.open_stream(io.BytesIO(self.client.get(f"round:{round_index}"))).read_all()

    def size(self) -> int:
        """Return bytes on disk."""
        return _bytes_below(self.root)

    def close(self) -> None:
        """Stop the server."""
        self.server.terminate()
        self.server.wait()


class Ray:
    """Ray's object store: shared memory, not durable; the columns as NumPy arrays and lists."""

    def __init__(self, root: Path) -> None:
        import ray

        self.ray = ray
        ray.init(
            num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=10**9, _temp_dir=str(root)
        )
        self.references: dict[int, Any] = {}

    def publish(self, round_index: int, rows: list[Rollout]) -> None:
        """Keep a round."""
        self.references[round_index] = self.ray.put(_columns(rows))

    def read(self, round_index: int) -> Any:
        """Return all columns, as lists."""
        return self.ray.get(self.references[round_index])

    def size(self) -> None:
        """Return None: nothing is on disk."""

    def close(self) -> None:
        """Stop Ray."""
        self.ray.shutdown()


STORES: dict[str, Callable[[Path], Store]] = {
    "mutualrl": Ours,
    "pickle file": Pickle,
    "SQLite (WAL, full)": Sqlite,
    "Redis (AOF, always)": Redis,
    "Ray object store": Ray,
}


@contextlib.contextmanager
def opened(root: Path, names: Sequence[str]) -> Iterator[tuple[dict[str, Store], dict[str, str]]]:
    """Yield the stores that are available, and the reasons why others are missing."""
    stores: dict[str, Store] = {}
    missing: dict[str, str] = {}
    for number, name in enumerate(names):
        directory = root / str(number)
        directory.mkdir()
        try:
            stores[name] = STORES[name](directory)
        except (ImportError, FileNotFoundError) as error:
            missing[name] = f"not installed ({error})"
    try:
        yield stores, missing
    finally:
        for store in stores.values():
            if hasattr(store, "close"):
                store.close()


def timed(work: Callable[[], Any]) -> float:
    """Return the milliseconds of one call."""
    began = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - began)


def against_others(root: Path, rounds: int, *, smoke: bool) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return times of publish and read for every store, alternating, and the missing stores."""
    data = [records(PROMPTS, ROLLOUTS, TOKENS, seed) for seed in range(8)]
    names = [name for name in STORES if not (smoke and name.startswith("Ray"))]  # Ray's start takes ten seconds
    with opened(root, names) as (stores, missing):
        times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in stores}
        for round_index in range(rounds + 3):
            for name, store in stores.items():
                rows = data[round_index % len(data)]
                pair = (timed(lambda: store.publish(round_index, rows)), timed(lambda: store.read(round_index)))  # noqa: B023
                if round_index >= 3:  # warm-up is over
                    for milliseconds, value in zip(times[name], pair, strict=True):
                        milliseconds.append(value)
        table_rows = []
        for name, (publish, read) in times.items():
            size = stores[name].size()
            table_rows.append(
                {
                    "store": name,
                    "publish_p50": statistics.median(publish),
                    "publish_p95": float(np.quantile(publish, 0.95)),
                    "read_p50": statistics.median(read),
                    "read_p95": float(np.quantile(read, 0.95)),
                    "megabytes_a_round": None if size is None else size / (rounds + 3) / 1e6,
                }
            )
    return table_rows, missing


def by_pool(root: Path, repeats: int) -> list[dict[str, Any]]:
    """Return a learner's cost per round of each regime's fields, by number of policies; simulated in one process."""
    rows = []
    for regime in ("xgrpo", "sgt", "prp"):
        schema = get_regime(regime)().needs().reads
        for tokens in (150, TOKENS, 2400):
            full = records(PROMPTS, ROLLOUTS, tokens, 1)
            trimmed = Rollouts.of(full).published(schema)
            for policies in (2, 4, 8, 16, 32) if tokens == TOKENS else (2,):
                directory = root / f"{regime}-{tokens}-{policies}"
                exchanges = [Exchange(directory, f"p{i}", "bench") for i in range(policies)]
                publish, read = [], []
                for round_index in range(repeats):
                    for exchange in exchanges[1:]:
                        publish.append(timed(lambda: exchange.publish(round_index, trimmed, 0)))  # noqa: B023
                    read.append(timed(lambda: _read_all(exchanges[0], policies, round_index, schema.fields)))  # noqa: B023
                marker = exchanges[0].marker_of("p1", 0)
                assert marker is not None
                rows.append(
                    {
                        "regime": regime,
                        "policies": policies,
                        "tokens": tokens,
                        "bytes_a_record": marker.bytes / marker.rows,
                        "publish_ms": statistics.median(publish),
                        "read_ms": statistics.median(read),
                    }
                )
                shutil.rmtree(directory)
    return rows


def _read_all(exchange: Exchange, policies: int, round_index: int, fields: frozenset[str]) -> None:
    """Read all peers' rounds as a regime does: rewards; eight texts if texts are drawn; traces if they are aligned."""
    shards = exchange.wait([f"p{i}" for i in range(1, policies)], round_index)
    for shard in shards.values():
        read = [shard.prompt_ids, shard.rewards]
        if "logprobs" in fields:
            read += [shard.texts(), shard.token_ids, shard.logprobs]
        elif "text" in fields:
            shard.texts(range(8))


def _read_one(exchange: Exchange, round_index: int) -> None:
    """Read a peer's round as SGT does: the rewards, and the drawn texts."""
    shard = exchange.read("bob", round_index)
    assert shard is not None
    shard.prompt_ids, shard.rewards, shard.texts(range(8))


def of_a_step(root: Path, repeats: int, steps: int) -> dict[str, float]:
    """Return the step time of a real run of the tiny pool, and the times to publish and read its own records again."""
    command = [
        sys.executable,
        "-m",
        "mutualrl",
        "train",
        "--regime",
        "sgt",
        "--pool",
        "tiny",
        "--steps",
        str(steps),
        "--json",
        "--set",
        "run.validate_every=0",
        "--set",
        "run.save_every=0",
        "--run-dir",
        str(root / "run"),
    ]
    summary = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    info = json.loads((root / "run" / "run.json").read_text())
    exchange = Exchange(root / "run" / "exchange", "reader", info["run_id"])
    step = statistics.median(p["train_seconds"] / p["steps"] for p in summary["policies"].values())
    publish, read = [], []
    writer = Exchange(root / "again", "bob", info["run_id"])
    reader = Exchange(root / "again", "ada", info["run_id"])
    for round_index in range(repeats):
        shard = exchange.read("bob", round_index)
        assert shard is not None
        rows = list(shard.rows("text"))
        publish.append(timed(lambda: writer.publish(round_index, rows, 0)))  # noqa: B023
        read.append(timed(lambda: _read_one(reader, round_index)))  # noqa: B023
    return {"step_ms": 1000 * step, "publish_ms": statistics.median(publish), "read_ms": statistics.median(read)}


def markdown(
    stores: list[dict[str, Any]], missing: dict[str, str], pools: list[dict[str, Any]], step: dict[str, float]
) -> str:
    """Return the tables of the note."""
    lines = ["| store | publish p50 (p95), ms | read p50 (p95), ms | MB per round |", "|---|---|---|---|"]
    for row in stores:
        size = "in memory" if row["megabytes_a_round"] is None else f"{row['megabytes_a_round']:.2f}"
        lines.append(
            f"| {row['store']} | {row['publish_p50']:.1f} ({row['publish_p95']:.1f}) "
            f"| {row['read_p50']:.1f} ({row['read_p95']:.1f}) | {size} |"
        )
    lines += [f"| {name} | {reason} | | |" for name, reason in missing.items()]
    ours = stores[0]
    large, small = ours["publish_p50"] + ours["read_p50"], step["publish_ms"] + step["read_ms"]
    lines += ["", "| a policy's step | publish + read, ms | of the step |", "|---|---|---|"]
    lines.append(f"| this shape, a step of {STEP_SECONDS:.0f} s | {large:.1f} | {large / 10 / STEP_SECONDS:.2f} % |")
    lines.append(f"| the tiny pool, {step['step_ms']:.0f} ms | {small:.1f} | {100 * small / step['step_ms']:.1f} % |")
    lines += ["", "| regime | tokens | bytes per record | publish, ms | read by policies: 2 | 4 | 8 | 16 | 32, ms |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for regime in ("xgrpo", "sgt", "prp"):
        for tokens in (150, TOKENS, 2400):
            rows = [r for r in pools if (r["regime"], r["tokens"]) == (regime, tokens)]
            reads = [f"{r['read_ms']:.1f}" for r in rows] + [""] * (5 - len(rows))
            lines.append(
                f"| {regime} | {tokens} | {rows[0]['bytes_a_record']:.0f} | {rows[0]['publish_ms']:.1f} | "
                f"{' | '.join(reads)} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Measure, write, print."""
    parser = harness.options(__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--directory", type=Path, default=None, help="directory on the disk to measure (default: here)")
    args = harness.parse(parser)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with tempfile.TemporaryDirectory(dir=args.directory or Path.cwd(), prefix=".exchange-") as name:
        root = Path(name)
        (root / "stores").mkdir()
        step = of_a_step(root, 2, 2) if args.smoke else of_a_step(root, 20, 60)
        stores, missing = against_others(root / "stores", 1 if args.smoke else args.rounds, smoke=args.smoke)
        pools = by_pool(root, 1 if args.smoke else max(args.rounds // 6, 5))
    text = markdown(stores, missing, pools, step)
    results = {"command": COMMAND, "stores": stores, "missing": missing, "pools": pools, "tiny": step}
    harness.write(args.out, "exchange", results, text)


if __name__ == "__main__":
    main()
