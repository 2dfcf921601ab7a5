"""Files of recorded texts in the layouts of public data sets, all with the same texts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Texts = Mapping[str, Sequence[str]]  # by prompt


def write_jsonl(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def open_r1(path: Path, texts: Texts) -> Path:
    """OpenR1-Math-220k: a list of generations, with parallel lists of verdicts and finish reasons."""
    rows = [
        {
            "problem": prompt,
            "solution": "see the generations",
            "uuid": f"u{number}",
            "generations": [*own, "not finished \\boxed{"],
            "is_reasoning_complete": [True] * len(own) + [False],
            "correctness_math_verify": [True] * (len(own) + 1),
            "finish_reasons": None,
            "messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": "other"}],
        }
        for number, (prompt, own) in enumerate(texts.items())
    ]
    pq.write_table(pa.Table.from_pylist(rows), path.with_suffix(".parquet"))
    return path.with_suffix(".parquet")


def deep_math(path: Path, texts: Texts) -> Path:
    """DeepMath-103K: one column per solution."""
    longest = max(map(len, texts.values()))
    rows = []
    for prompt, own in texts.items():
        columns = {f"r1_solution_{n + 1}": own[n] if n < len(own) else None for n in range(longest)}
        rows.append({"question": prompt, "final_answer": "?", "difficulty": 1.0, **columns})
    return write_jsonl(path.with_suffix(".jsonl"), rows)


def open_thoughts(path: Path, texts: Texts) -> Path:
    """OpenThoughts: conversations of `from` and `value`, one text per row."""
    rows = [
        {
            "system": "You are helpful.",
            "conversations": [{"from": "user", "value": f"  {prompt}\n"}, {"from": "assistant", "value": text}],
        }
        for prompt, own in texts.items()
        for text in reversed(own)
    ]
    return write_jsonl(path.with_suffix(".jsonl"), rows)


def synthetic_1(path: Path, texts: Texts) -> Path:
    """SYNTHETIC-1: one response per row, some of them twice."""
    rows = [
        {"response_id": f"r{n}", "problem_id": "p", "prompt": prompt, "llm_response": text, "score": 1.0}
        for prompt, own in texts.items()
        for n, text in enumerate([*own, *own[:1]])
    ]
    return write_jsonl(path.with_suffix(".jsonl"), rows)


def trl(path: Path, texts: Texts) -> Path:
    """TRL's log of completions: a Parquet file with the rendered prompts."""
    rows = [
        {"step": "1", "prompt": prompt, "completion": text, "reward": 0.0, "advantage": 0.0}
        for prompt, own in texts.items()
        for text in own
    ]
    pq.write_table(pa.Table.from_pylist(rows), path.with_suffix(".parquet"))
    return path.with_suffix(".parquet")


def verifiers_results(path: Path, texts: Texts) -> Path:
    """Results of verifiers: prompt and completion are messages."""
    rows = [
        {
            "example_id": n,
            "prompt": [{"role": "system", "content": "Think."}, {"role": "user", "content": prompt}],
            "completion": [{"role": "assistant", "content": text}],
            "reward": 0.0,
            "is_truncated": False,
        }
        for n, (prompt, own) in enumerate(texts.items())
        for text in own
    ]
    return write_jsonl(path.with_suffix(".jsonl"), rows)


def traces(path: Path, texts: Texts) -> Path:
    """Traces of verifiers 1.0 and prime-rl: nodes with a message each."""
    rows = [
        {
            "version": 1,
            "id": f"{n}",
            "task": {"type": "T", "data": {"prompt": prompt}},
            "nodes": [
                {"message": {"role": "user", "content": prompt}, "mask": []},
                {"message": {"role": "assistant", "content": [{"type": "text", "text": text}]}, "mask": []},
            ],
            "calls": [{"node": 1, "finish_reason": "stop"}],
            "rewards": {"correct": {"score": 0.0}},
        }
        for n, (prompt, own) in enumerate(texts.items())
        for text in own
    ]
    return write_jsonl(path.with_suffix(".jsonl"), rows)


LAYOUTS: dict[str, Callable[[Path, Texts], Path]] = {
    layout.__name__: layout
    for layout in (open_r1, deep_math, open_thoughts, synthetic_1, trl, verifiers_results, traces)
}
