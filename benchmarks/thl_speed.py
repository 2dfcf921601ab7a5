"""Cost of an alignment, against encoding the texts, the paper's algorithm, and TRL GOLD's byte-offset grouping.

    python benchmarks/thl_speed.py --data DIR     # about two minutes; DIR has tokenizers/ and math/math500.jsonl

All on the same 300 MATH solutions, from Qwen3's tokens to Llama 3's, one text at a time on one core; medians over
alternating repeats. Also: the size and build time of the offset tables, and the time of one alignment by length.
Writes benchmarks/results/thl_speed.{json,md} and thl_speed_length.{png,svg}.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import harness

COMMAND = "python benchmarks/thl_speed.py"
SOURCE, TARGET = "qwen3", "llama3"
TEXTS = 300
LENGTHS = [1024 * 2**k for k in range(6)]  # source tokens, up to 32k


def seconds(work: Callable[[], Any]) -> float:
    """Return the wall time of one call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def gold_offsets(ids: list[int], tokenizer: Any) -> list[tuple[int, int]]:
    """Return byte offsets as TRL's GOLD trainer computes them for sampled ids
    (`_maybe_add_completion_byte_offsets`)."""
    from trl.experimental.utils import piece_byte_len

    offsets, start = [], 0
    for token in ids:
        width = piece_byte_len(tokenizer.convert_ids_to_tokens([token])[0])
        offsets.append((start, start + width))
        start += width
    return offsets


def compare(texts: list[str], source: Any, target: Any, repeats: int) -> dict[str, list[float]]:
    """Return seconds per text for each kind of work, in alternating repeats."""
    from trl.experimental.gold.gold_trainer import ULDLoss

    from mutualrl.thl import align_batch, align_logprobs
    from mutualrl.thl.offsets import locate_tokens
    from mutualrl.thl.table import table_of
    from mutualrl.thl.units import span_units

    rng = np.random.default_rng(0)
    a = [source.encode(text, add_special_tokens=False) for text in texts]
    b = [target.encode(text, add_special_tokens=False) for text in texts]
    traces = [(-rng.exponential(size=len(ids))).tolist() for ids in a]
    group = ULDLoss._align_by_byte_offsets
    offsets = [(gold_offsets(i, source), gold_offsets(j, target)) for i, j in zip(a, b, strict=True)]
    tables = table_of(source), table_of(target)

    def placed(i: list[int], j: list[int], text: str) -> Any:
        data = text.encode()
        return (
            locate_tokens(tables[0].check(i), tables[0], data),
            locate_tokens(tables[1].check(j), tables[1], data),
            len(data),
        )

    def align(anchor: str, ids: Any = None) -> Callable[[], Any]:
        return lambda: [
            align_logprobs(t, i, trace, source, target, anchor=anchor, target_ids=None if ids is None else j)  # type: ignore[arg-type]
            for t, i, trace, j in zip(texts, a, traces, b, strict=True)
        ]

    places = [placed(i, j, text) for i, j, text in zip(a, b, texts, strict=True)]
    first = align_logprobs(texts[0], a[0], traces[0], source, target, target_ids=b[0])
    gold = group(*offsets[0])
    assert [list(g.source) for g in first.groups] == gold[0] and [list(g.target) for g in first.groups] == gold[1]
    work: dict[str, Callable[[], Any]] = {
        "encode": lambda: [t.encode(text, add_special_tokens=False) for t in (source, target) for text in texts],
        "span": align("span"),
        "span, target ids given": align("span", b),
        "word": align("word"),
        "word, target ids given": align("word", b),
        "batch of all, span": lambda: align_batch(texts, a, traces, source, target),
        "paper": align("paper"),
        "GOLD from ids": lambda: [
            group(gold_offsets(i, source), gold_offsets(j, target)) for i, j in zip(a, b, strict=True)
        ],
        "ours from ids": lambda: [span_units(*placed(i, j, t)) for i, j, t in zip(a, b, texts, strict=True)],
        "GOLD from offsets": lambda: [group(*pair) for pair in offsets],
        "ours from offsets": lambda: [span_units(*pair) for pair in places],
    }
    results: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(repeats):
        for name, run in work.items():
            results[name].append(seconds(run) / len(texts))
    return results


def by_length(texts: list[str], source: Any, target: Any, repeats: int, lengths: list[int]) -> list[dict[str, float]]:
    """Return median seconds of one alignment by the number of source tokens."""
    from mutualrl.thl import align_logprobs, decode_completion

    joined = "\n\n".join(texts)
    ids = source.encode(joined * 2, add_special_tokens=False)
    rows = []
    for length in lengths:
        part = ids[:length]
        text = decode_completion(part, source)
        target_ids = target.encode(text, add_special_tokens=False)
        trace = [-1.0] * length
        row: dict[str, float] = {"tokens": length}
        for anchor in ("span", "word"):
            row[anchor] = statistics.median(
                seconds(
                    lambda: align_logprobs(text, part, trace, source, target, target_ids=target_ids, anchor=anchor)  # noqa: B023
                )
                for _ in range(repeats)
            )
        rows.append(row)
    return rows


def tables(data: Path, names: list[str] | None = None) -> list[dict[str, Any]]:
    """Return the size and build time of each tokenizer's offset table; with `names`, of those."""
    from mutualrl.engines.transformers_engine import load_tokenizer
    from mutualrl.thl.table import table_of

    rows = []
    for directory in sorted((data / "tokenizers").iterdir()):
        if names is not None and directory.name not in names:
            continue
        tokenizer = load_tokenizer(str(directory))
        elapsed = seconds(lambda tokenizer=tokenizer: table_of(tokenizer))  # type: ignore[misc]
        table = table_of(tokenizer)
        arrays = table.lengths.nbytes + table.control.nbytes + table.byte_tokens.nbytes
        size = sys.getsizeof(table.pieces) + sum(map(sys.getsizeof, table.pieces)) + arrays
        rows.append(
            {"tokenizer": directory.name, "vocabulary": len(table.pieces), "megabytes": size / 1e6, "seconds": elapsed}
        )
    return rows


def markdown(results: dict[str, list[float]], table_rows: list[dict[str, Any]], lengths: list[dict[str, float]]) -> str:
    """Return the tables of the note."""
    median = {name: statistics.median(values) for name, values in results.items()}
    lines = ["| work, a text | microseconds (median) | of encoding | of the paper's |", "|---|---|---|---|"]
    for name, value in median.items():
        lines.append(f"| {name} | {1e6 * value:.0f} | {value / median['encode']:.2f} | {value / median['paper']:.3f} |")
    lines += ["", "| tokenizer | vocabulary | table, MB | made in, s |", "|---|---|---|---|"]
    lines += [
        f"| {row['tokenizer']} | {row['vocabulary']} | {row['megabytes']:.1f} | {row['seconds']:.2f} |"
        for row in table_rows
    ]
    lines += ["", "| source tokens | span, ms | µs a token | word, ms | µs a token |", "|---|---|---|---|---|"]
    for row in lengths:
        n = row["tokens"]
        lines.append(
            f"| {n} | {1e3 * row['span']:.2f} | {1e6 * row['span'] / n:.2f} "
            f"| {1e3 * row['word']:.2f} | {1e6 * row['word'] / n:.2f} |"
        )
    return "\n".join(lines)


def plot(lengths: list[dict[str, float]], out: Path) -> None:
    """Plot time by length, with a line of slope one for reference."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(5.5, 4), layout="constrained")
    tokens = [row["tokens"] for row in lengths]
    for anchor in ("span", "word"):
        axis.plot(tokens, [1e3 * row[anchor] for row in lengths], marker="o", label=anchor)
    axis.plot(tokens, [1e3 * lengths[-1]["span"] * n / tokens[-1] for n in tokens], "k:", label="linear")
    axis.set(xscale="log", yscale="log", xlabel="source tokens", ylabel="one alignment (ms)")
    axis.legend()
    for suffix in ("png", "svg"):
        figure.savefig(
            out / f"thl_speed_length.{suffix}", dpi=150, metadata={"Date": None} if suffix == "svg" else None
        )


def main() -> None:
    """Measure, write, print."""
    parser = harness.options(__doc__)
    parser.add_argument("--data", type=Path, default=Path(__file__).resolve().parents[2] / "shared" / "data")
    parser.add_argument("--repeats", type=int, default=7)
    args = harness.parse(parser)
    texts_used, repeats, lengths_used = (3, 1, LENGTHS[:1]) if args.smoke else (TEXTS, args.repeats, LENGTHS)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from mutualrl.engines.transformers_engine import load_tokenizer

    lines = (args.data / "math" / "math500.jsonl").read_text("utf-8").splitlines()[:texts_used]
    texts = [json.loads(line)["solution"] for line in lines]
    table_rows = tables(args.data, [SOURCE] if args.smoke else None)
    source, target = (load_tokenizer(str(args.data / "tokenizers" / name)) for name in (SOURCE, TARGET))
    results = compare(texts, source, target, repeats)
    lengths = by_length(texts, source, target, 4 * repeats, lengths_used)
    text = markdown(results, table_rows, lengths)
    result = {
        "command": COMMAND,
        "source": SOURCE,
        "target": TARGET,
        "texts": texts_used,
        "repeats": repeats,
        "seconds_a_text": results,
        "tables": table_rows,
        "by_length": lengths,
    }
    harness.write(args.out, "thl_speed", result, text)
    plot(lengths, args.out)


if __name__ == "__main__":
    main()
