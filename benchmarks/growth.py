"""How a round grows: seconds and bytes against prompts, rollouts, tokens, members, and rounds kept.

    python benchmarks/growth.py     # about four minutes on two cores

One learner and its peers in one process: each peer publishes a round with texts and traces, the learner reads all of
them and plans under SGT and PRP, with the tokenizers of `tiny:ada` (peers) and `tiny:bob` (learner). One axis changes
at a time; medians of five. Each quantity has the exponent of its growth, the slope of a line through the logarithms of
the three largest sizes, at which fixed costs hide least: 1 is linear, 0 does not grow. With 2 to 16 members a learner
has 1 to 15 peers, which is what its work is fitted to. Writes benchmarks/results/growth.{json,md}.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import harness
from mutualrl.engines.transformers_engine import load_tokenizer
from mutualrl.records import Rollout
from mutualrl.regimes import RoundView, get_regime
from mutualrl.rollouts import Rollouts
from mutualrl.see import Exchange
from mutualrl.see.files import committed_rounds
from mutualrl.see.inspection import inspect_policy
from mutualrl.tiny import path_of
from mutualrl.training.transfer import TokenTransfer
from mutualrl.trajectory import Trajectory

REPEATS = 5
FITTED = 3  # the largest sizes, through which the line goes
OPEN = 0.25  # share of prompts on which the learner fails
REGIMES = ("sgt", "prp")


class Size(NamedTuple):
    """Size of a round. `peers`: members other than the learner."""

    prompts: int = 64
    rollouts: int = 4
    tokens: int = 100
    peers: int = 1


AXES: dict[str, tuple[int, ...]] = {
    "prompts": (32, 64, 128, 256, 512),
    "rollouts": (4, 8, 16, 32, 64),
    "tokens": (50, 100, 200, 400, 800),
    "peers": (1, 3, 7, 15),
}
KEPT = (10, 100, 1_000, 10_000)


def peer_rounds(size: Size, tokenizer: Any) -> list[Rollout]:
    """Return the rollouts of a peer, of which the first of each prompt is right."""
    rng = np.random.default_rng(0)
    rows = []
    for number in range(size.prompts * size.rollouts):
        prompt, index = divmod(number, size.rollouts)
        text = " ".join(f"{a}+{b}" for a, b in rng.integers(10, 99, (size.tokens, 2)))
        ids = tokenizer.encode(text, add_special_tokens=False)[: size.tokens - 1]
        rows.append(
            Rollout(
                f"p{prompt}",
                index,
                float(index == 0),
                ended=True,
                length=len(ids) + 1,
                trajectory=Trajectory.of_text(tokenizer.decode(ids)),
                token_ids=np.array([*ids, tokenizer.eos_token_id], dtype=np.int32),
                logprobs=(-rng.exponential(0.4, len(ids) + 1)).astype(np.float32),
            )
        )
    return rows


def own_rounds(size: Size) -> Rollouts:
    """Return the learner's rollouts, all wrong on `OPEN` of the prompts."""
    rows = []
    for prompt in range(size.prompts):
        solved = prompt >= OPEN * size.prompts
        rows += [
            Rollout(f"p{prompt}", i, float(solved and i < 2), True, size.tokens, 0.0) for i in range(size.rollouts)
        ]
    return Rollouts.of(rows, "learner")


def seconds_of(work: Callable[..., Any], *arguments: Any) -> float:
    """Return the seconds of a call."""
    began = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - began


def measured(size: Size) -> dict[str, float]:
    """Return the seconds of publishing one peer's round, and of reading and planning all peers'; bytes of a round."""
    peer, learner = load_tokenizer(str(path_of("ada"))), load_tokenizer(str(path_of("bob")))
    names = [f"peer{number}" for number in range(size.peers)]
    rows, own = peer_rounds(size, peer), own_rounds(size)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for each in names[1:]:
            Exchange(root, each, "bench").publish(0, rows, 0)
        publish = seconds_of(Exchange(root, names[0], "bench").publish, 0, rows, 0)
        exchange = Exchange(root, "learner", "bench")
        began = time.perf_counter()
        peers = {each: exchange.read(each, 0) for each in names}
        for shard in peers.values():
            assert shard is not None
            shard.table()
        read = time.perf_counter() - began
        figures = {"publish": publish, "read": read}
        for regime in REGIMES:
            transfer = TokenTransfer(learner, 4 * size.tokens, dict.fromkeys(names, peer))
            view = RoundView(0, "learner", 0, own, {k: v for k, v in peers.items() if v is not None}, transfer)
            figures[f"plan {regime}"] = seconds_of(get_regime(regime)().plan, view)
        files = list((root / names[0]).iterdir())
        figures["bytes"] = sum(path.stat().st_size for path in files)
    return figures


def kept(rounds: int) -> dict[str, float]:
    """Return the seconds of reading a round, publishing the next, and listing, among `rounds` of them."""
    tokenizer = load_tokenizer(str(path_of("ada")))
    rows = peer_rounds(Size(prompts=2, rollouts=2, tokens=20), tokenizer)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        writer, reader = Exchange(root, "peer", "bench"), Exchange(root, "learner", "bench")
        for number in range(rounds):
            writer.publish(number, rows, 0)
        reads = [seconds_of(reader.read, "peer", rounds - 1) for _ in range(20)]
        listings = [seconds_of(committed_rounds, reader.store, "peer") for _ in range(5)]
        more = [seconds_of(writer.publish, number, rows, 0) for number in range(rounds, rounds + 20)]
        began = time.perf_counter()
        inspect_policy(root, "bench", "peer", verify=True)
        return {
            "read one": statistics.median(reads),
            "publish one": statistics.median(more),
            "list": statistics.median(listings),
            "verify all": time.perf_counter() - began,
        }


def at_size(axis: str, value: int) -> dict[str, float]:
    """Return the figures with one axis changed."""
    return measured(Size()._replace(**{axis: value}))


def exponent(sizes: Sequence[int], values: Sequence[float]) -> float:
    """Return the slope of a line through the logarithms, by least squares."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def along(sizes: Sequence[int], measure: Callable[[int], dict[str, float]], repeats: int) -> dict[str, Any]:
    """Return the medians of each quantity by size, and its exponent."""
    rows = []
    for size in sizes:
        print(f"  {size}", file=sys.stderr)
        runs = [measure(size) for _ in range(repeats)]
        rows.append({key: statistics.median(run[key] for run in runs) for key in runs[0]})
    fitted = slice(-FITTED, None)
    exponents = {key: exponent(sizes[fitted], [row[key] for row in rows[fitted]]) for key in rows[0]}
    return {"sizes": list(sizes), "medians": rows, "exponents": exponents}


def shown(quantity: str, value: float) -> str:
    """Return a value with its unit."""
    return f"{value / 1e6:.2f} MB" if quantity == "bytes" else f"{1000 * value:.1f} ms"


def table(axes: dict[str, Any]) -> str:
    """Return the table of docs/results.md: smallest and largest value, and the exponent."""
    lines = ["| axis | from, to | quantity | smallest | largest | exponent |", "|---|---|---|---|---|---|"]
    for axis, result in axes.items():
        sizes, first, last = result["sizes"], result["medians"][0], result["medians"][-1]
        for quantity, value in result["exponents"].items():
            ends = " | ".join(shown(quantity, row[quantity]) for row in (first, last))
            lines.append(f"| {axis} | {sizes[0]:,}, {sizes[-1]:,} | {quantity} | {ends} | {value:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, write, print."""
    args = harness.parse(harness.options(__doc__))
    repeats = 1 if args.smoke else REPEATS
    measured(Size(prompts=2))  # tables of the tokenizers are made once per run
    axes: dict[str, Any] = {}
    for axis, sizes in AXES.items():
        print(axis, file=sys.stderr)
        axes[axis] = along(sizes[:2] if args.smoke else sizes, partial(at_size, axis), repeats)
    print("rounds kept", file=sys.stderr)
    axes["rounds kept"] = along(KEPT[:2] if args.smoke else KEPT, kept, 1)
    harness.write(args.out, "growth", {"command": "python benchmarks/growth.py", "axes": axes}, table(axes))


if __name__ == "__main__":
    main()
