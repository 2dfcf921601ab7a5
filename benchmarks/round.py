"""A round at the paper's size: publishing, reading and planning it, beside one batched encoding of the peer's texts.

    python benchmarks/round.py     # five minutes on two cores

Rounds of 128, 256 and 1,024 prompts x 5 rollouts of about 1,000 tokens, made from MATH solutions with the tokenizers of
Qwen3 (the peer) and Llama 3 (the learner) in ../shared/data; where these are absent, the tiny ones and arithmetic. The
gate of SGT is open on 15 % of the prompts. Each plan runs in a process of its own; its time is divided into encoding,
aligning and the rest, and compared with one call of the learner's tokenizer on all of the peer's texts (medians of
three). Memory, of a separate run, is the highest of the process above what it was when the peer's round had been read,
beside the decoded Arrow bytes of that round. Writes benchmarks/results/round.{json,md}.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

import harness

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
PROMPTS, ROLLOUTS, TOKENS, OPEN = (128, 256, 1024), 5, 1000, 0.15
REGIMES = ("prp", "sgt", "xgrpo")


def tokenizers() -> tuple[Any, Any]:
    """Return the peer's and the learner's tokenizer."""
    from mutualrl.engines.transformers_engine import load_tokenizer
    from mutualrl.tiny import path_of

    if (DATA / "tokenizers").is_dir():
        return load_tokenizer(str(DATA / "tokenizers" / "qwen3")), load_tokenizer(str(DATA / "tokenizers" / "llama3"))
    return load_tokenizer(str(path_of("ada"))), load_tokenizer(str(path_of("bob")))


def texts_of(source: Any, count: int, tokens: int) -> list[tuple[str, list[int]]]:
    """Return responses of about `tokens` tokens, and the peer's ids: stretches of all solutions, one after another."""
    path = DATA / "math" / "math500.jsonl"
    solutions = ["12 + 30 = 42. "] * 200
    if path.is_file():
        solutions = [json.loads(line)["solution"] for line in path.read_text("utf-8").splitlines()]
    rng = np.random.default_rng(0)
    responses: list[tuple[str, list[int]]] = []
    while len(responses) < count:
        text = "\n\n".join(solutions[i] for i in rng.integers(len(solutions), size=12))
        ids = source.encode(text, add_special_tokens=False)[:tokens]
        text = source.decode(ids)
        if source.encode(text, add_special_tokens=False) == ids:
            responses.append((text, ids))
    return responses


def publish(root: Path, prompts: int, tokens: int) -> float:
    """Publish the peer's round; return the seconds."""
    from mutualrl.records import Rollout
    from mutualrl.see import Exchange
    from mutualrl.trajectory import Trajectory

    source, _ = tokenizers()
    rng = np.random.default_rng(1)
    rows = []
    for number, (text, ids) in enumerate(texts_of(source, prompts * ROLLOUTS, tokens)):
        prompt, index = divmod(number, ROLLOUTS)
        trace = (-rng.exponential(0.4, len(ids) + 1)).astype(np.float32)
        rows.append(
            Rollout(
                f"p{prompt}",
                index,
                float(index == 0),
                ended=True,
                length=len(ids) + 1,
                trajectory=Trajectory.of_text(text),
                token_ids=np.array([*ids, source.eos_token_id], dtype=np.int32),
                logprobs=trace,
            )
        )
    began = time.perf_counter()
    Exchange(root, "peer", "bench").publish(0, rows, 0)
    return time.perf_counter() - began


class Memory:
    """Highest memory of this process in a block above what it was before, by samples every millisecond, in bytes."""

    def __init__(self) -> None:
        self.above = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    @staticmethod
    def _resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def _sample(self) -> None:
        while not self._over.wait(0.001):
            self.above = max(self.above, self._resident() - self._before)

    def __enter__(self) -> None:
        self._before = self._resident()
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self.above = max(self.above, self._resident() - self._before)
        self._over.set()
        self._thread.join()


class Timed:
    """Transfer that counts the seconds of its two parts."""

    def __init__(self, transfer: Any) -> None:
        self._transfer = transfer
        self.seconds = {"encode": 0.0, "align": 0.0}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transfer, name)

    def _timed(self, part: str, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = work()
        self.seconds[part] += time.perf_counter() - began
        return result

    def encode(self, responses: Any) -> Any:
        """Encode, timed."""
        return self._timed("encode", lambda: self._transfer.encode(responses))

    def align(self, rollouts: Any, ids: Any, anchor: str) -> Any:
        """Align, timed."""
        return self._timed("align", lambda: self._transfer.align(rollouts, ids, anchor))


def planned(root: Path, regime_name: str, prompts: int, part: str) -> dict[str, float]:
    """Read and plan a round; return its seconds, or its megabytes, since sampling memory takes time. Runs in a process
    of its own."""
    from mutualrl.records import Rollout
    from mutualrl.regimes import RoundView, get_regime
    from mutualrl.rollouts import Rollouts
    from mutualrl.see import Exchange
    from mutualrl.thl.table import table_of
    from mutualrl.training.transfer import TokenTransfer

    source, learner = tokenizers()
    table_of(source), table_of(learner)  # made once per run
    learner.encode("warm")
    regime = get_regime(regime_name)()
    own = []
    for prompt in range(prompts):
        solved = prompt >= OPEN * prompts
        own += [Rollout(f"p{prompt}", i, float(solved and i < 2), True, TOKENS, 0.0) for i in range(ROLLOUTS)]
    began = time.perf_counter()
    shard = Exchange(root, "learner", "bench").read("peer", 0)
    assert shard is not None
    decoded = shard.table().nbytes
    read = time.perf_counter() - began
    memory = Memory()
    transfer = Timed(TokenTransfer(learner, peers={"peer": source}))
    view = RoundView(0, "learner", 0, Rollouts.of(own, "learner"), {"peer": shard}, transfer)
    with memory if part == "memory" else nullcontext():
        began = time.perf_counter()
        plan = regime.plan(view)
        total = time.perf_counter() - began
    if part == "memory":
        return {"megabytes_above": memory.above / 1e6, "megabytes_decoded": decoded / 1e6}
    texts = shard.texts()
    baseline = []
    for _ in range(3):
        began = time.perf_counter()
        learner.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        baseline.append(time.perf_counter() - began)
    return {
        "read": read,
        "plan": total,
        **transfer.seconds,
        "rest": total - sum(transfer.seconds.values()),
        "batched_encoding": statistics.median(baseline),
        "rows": len(plan.rows),
    }


def in_a_process(root: Path, regime: str, prompts: int, part: str) -> dict[str, float]:
    """Return the figures of a plan, made in a process of its own."""
    command = [sys.executable, __file__, "--plan", str(root), regime, str(prompts), part]
    figures: dict[str, float] = json.loads(
        subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    )
    return figures


def measure(sizes: tuple[int, ...], regimes: tuple[str, ...], tokens: int, repeats: int) -> list[dict[str, Any]]:
    """Return a row per size and regime, as medians over the repeats."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="round-") as directory:
        for prompts in sizes:
            root = Path(directory) / str(prompts)
            published = publish(root, prompts, tokens)
            for regime in regimes:
                timed = [in_a_process(root, regime, prompts, "time") for _ in range(repeats)]
                medians = {key: statistics.median(run[key] for run in timed) for key in timed[0]}
                memory = in_a_process(root, regime, prompts, "memory")
                row: dict[str, Any] = {"prompts": prompts, "regime": regime, "publish": published, **medians, **memory}
                row["encodings"] = row["plan"] / row["batched_encoding"]
                row["of_decoded"] = row["megabytes_above"] / row["megabytes_decoded"]
                print(json.dumps(row), file=sys.stderr, flush=True)
                rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return the table, and the growth from the smallest round to the largest."""
    lines = [
        "| prompts | regime | publish, s | read, s | plan, s | encode | align | rest | one batched encoding, s | plan "
        "in encodings | memory above the round, MB | in decoded bytes |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        times = [f"{row[key]:.2f}" for key in ("publish", "read", "plan", "encode", "align", "rest")]
        cells = [str(row["prompts"]), row["regime"], *times, f"{row['batched_encoding']:.2f}"]
        cells += [f"{row['encodings']:.2f}", f"{row['megabytes_above']:.0f}", f"{row['of_decoded']:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    first, last = (next(r for r in part if r["regime"] == "prp") for part in (rows, rows[::-1]))
    growth = last["plan"] / first["plan"]
    lines += [
        "",
        f"Planning {last['prompts']} prompts under prp takes {growth:.1f} times as long as {first['prompts']}.",
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure, write, print."""
    if sys.argv[1:2] == ["--plan"]:
        root, regime, prompts, part = sys.argv[2:]
        print(json.dumps(planned(Path(root), regime, int(prompts), part)))
        return
    args = harness.parse(harness.options(__doc__))
    rows = measure((4,), ("prp",), 50, 1) if args.smoke else measure(PROMPTS, REGIMES, TOKENS, 3)
    content = {"command": "python benchmarks/round.py", "cores": os.cpu_count(), "rows": rows}
    harness.write(args.out, "round", content, table(rows))


if __name__ == "__main__":
    main()
