"""Overhead of `eval` over bare generation, and cost of the diagnostics on 100,000 records.

    python benchmarks/evaluation.py     # about three minutes; with vLLM installed, its rows too

Generation: the tiny pool on 2,662 arithmetic problems, greedy and with four samples each; `eval` from the loaded model
to its results on disk (prompts encoded, parts cut, generated, decoded, verified, written as Parquet, counted), against
the same engine's own call on the same prompts with the same batches, texts decoded. Alternating, medians of the runs,
in one process. Diagnostics: 100,000 records of two models in a Parquet file and in JSON Lines, each command in a
process of its own; seconds and peak memory with the interpreter's start in them, against reading the same file with
pandas. Writes benchmarks/results/evaluation.{json,md}."""

from __future__ import annotations

import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

import harness

COMMAND = "python benchmarks/evaluation.py"
REPEATS = 7
RECORDS, ROLLOUTS = 100_000, 8


class ReusedEngine:
    """Engine that stays loaded between evaluations."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def close(self) -> None:
        """Do nothing: the engine is used again."""

    def end(self) -> None:
        """Close the engine."""
        self._engine.close()


def transformers_bare(engine: Any, ids: list[list[int]], samples: int) -> Callable[[], int]:
    """Return model.generate over batches by length, with decoding, as a user's script would do it. Seeds where `eval`
    does, so that both sample the same tokens."""
    import torch

    from mutualrl.evaluation.generate_rows import PART, part_seed

    order = sorted(range(len(ids)), key=lambda i: (len(ids[i]), i))
    size, part = max(1, 64 // samples), PART["transformers"] // samples
    sampling: dict[str, Any] = (
        {"do_sample": False} if samples == 1 else {"do_sample": True, "temperature": 1.0, "top_k": 0}
    )

    def run() -> int:
        texts = 0
        for start in range(0, len(order), size):
            if start % part == 0:
                torch.manual_seed(part_seed(0, "dataset", start // part))
            rows = [ids[i] for i in order[start : start + size]]
            width, pad = max(map(len, rows)), engine.tokenizer.pad_token_id
            tokens = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
            mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
            with torch.no_grad():
                output = engine.model.generate(
                    input_ids=tokens,
                    attention_mask=mask,
                    max_new_tokens=64,
                    num_return_sequences=samples,
                    pad_token_id=pad,
                    disable_compile=True,
                    **sampling,
                )
            texts += len(engine.tokenizer.batch_decode(output[:, width:], skip_special_tokens=True))
        return texts

    return run


def vllm_bare(engine: Any, ids: list[list[int]], samples: int) -> Callable[[], int]:
    """Return LLM.generate over all prompts in one call, with one seed per prompt if it samples."""
    from vllm import SamplingParams

    sampling_params = [
        SamplingParams(
            n=samples,
            temperature=0.0 if samples == 1 else 1.0,
            max_tokens=64,
            stop_token_ids=engine.eos_token_ids,
            seed=None if samples == 1 else index,
        )
        for index in range(len(ids))
    ]

    def run() -> int:
        outputs = engine._llm.generate([{"prompt_token_ids": row} for row in ids], sampling_params, use_tqdm=False)
        return sum(len(answer.text) >= 0 for output in outputs for answer in output.outputs)

    return run


def generation(engine_name: str, model: str, samples: int, directory: Path, repeats: int) -> dict[str, Any]:
    """Return median seconds of eval and of the bare engine, alternating."""
    from rich.console import Console

    from mutualrl.engines import choice
    from mutualrl.engines.sampling import SamplingOptions
    from mutualrl.engines.transformers_engine import load_tokenizer
    from mutualrl.evaluation.evaluate import run_plan
    from mutualrl.evaluation.plan import plan_evaluation
    from mutualrl.evaluation.request import EvalRequest
    from mutualrl.tasks.options import RowOptions
    from mutualrl.tasks.prompting import prompt_ids
    from mutualrl.tiny import path_of

    problems = [op.join(map(str, t)) + ":" for op in "+*" for t in itertools.product(range(2, 13), repeat=3)]
    data = directory / "problems.jsonl"
    data.write_text("".join(json.dumps({"prompt": text, "answer": "1", "group": text[1]}) + "\n" for text in problems))
    path = str(path_of(model))
    ids = prompt_ids(problems, load_tokenizer(path))
    size = max(1, 64 // samples)
    engine = ReusedEngine(
        choice.load_engine(engine_name, path, longest=128, batch_size=size, revision=None, trust_remote_code=False)
    )
    bare = (vllm_bare if engine_name == "vllm" else transformers_bare)(engine, ids, samples)
    load, choice.load_engine = choice.load_engine, lambda *a, **k: engine
    sampling = SamplingOptions(samples=samples, engine=engine_name, max_new_tokens=64)
    request = EvalRequest(models=(f"tiny:{model}",), suite="dataset", rows=RowOptions(data=data), sampling=sampling)
    plan = plan_evaluation(request)
    seconds: dict[str, list[float]] = {"eval": [], "bare": []}
    try:
        for number in range(repeats + 1):
            began = time.perf_counter()
            assert bare() == samples * len(ids)
            middle = time.perf_counter()
            out = directory / f"{engine_name}-{model}-{samples}-{number}"
            run_plan(replace(plan, request=replace(request, out=out)), Console(quiet=True))
            if number:  # the first run of each is a warm-up
                seconds["bare"].append(middle - began)
                seconds["eval"].append(time.perf_counter() - middle)
    finally:
        choice.load_engine = load
        engine.end()
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "engine": engine_name,
        "model": model,
        "prompts": len(ids),
        "samples": samples,
        **medians,
        "ratio": medians["eval"] / medians["bare"],
        "runs": seconds,
    }


def records(directory: Path, count: int) -> dict[str, Path]:
    """Return records of two models, with texts of about 400 characters, as Parquet and as JSON Lines."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(0)
    prompts = count // (2 * ROLLOUTS)
    skill = rng.beta(0.5, 0.8, size=(2, prompts))
    rewards = (rng.random((2, prompts, ROLLOUTS)) < skill[:, :, None]).astype(float)
    words = np.array(COMMAND.split() + __doc__.split())
    rows = [
        {
            "policy": f"model-{m}",
            "round": p % 50,
            "prompt_id": f"math/train/{p}/{p:012x}",
            "rollout": g,
            "reward": float(rewards[m, p, g]),
            "ended": True,
            "tokens": 100,
            "y_text": " ".join(words[rng.integers(len(words), size=60)]),
        }
        for m in range(2)
        for p in range(prompts)
        for g in range(ROLLOUTS)
    ]
    pq.write_table(pa.Table.from_pylist(rows), directory / "records.parquet")
    (directory / "records.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"Parquet": directory / "records.parquet", "JSON Lines": directory / "records.jsonl"}


#: a small process in between, since a child's peak includes its parent's memory at the fork
LAUNCHER = """
import json, os, subprocess, sys, time
began = time.perf_counter()
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(process.pid, 0)
print(json.dumps([os.waitstatus_to_exitcode(status), time.perf_counter() - began, usage.ru_maxrss / 1e6]))
"""


def measured(command: list[str]) -> tuple[float, float]:
    """Return wall seconds and peak resident memory (GB) of a process."""
    result = subprocess.run([sys.executable, "-c", LAUNCHER, *command], check=True, capture_output=True, text=True)
    code, seconds, gigabytes = json.loads(result.stdout)
    assert code == 0, (command, result.stderr)
    return seconds, gigabytes


def diagnostics(directory: Path, *, smoke: bool) -> list[dict[str, Any]]:
    """Return seconds and memory of each diagnostic without a model, and of reading the file with pandas; with `smoke`,
    of one diagnostic on few records."""
    rows = []
    names = ("complementarity",) if smoke else ("complementarity", "paper xgrpo-check", "sgt-check", "paper cost")
    for kind, path in records(directory, 160 if smoke else RECORDS).items():
        read = "read_parquet" if kind == "Parquet" else "read_json"
        options = "" if kind == "Parquet" else ", lines=True"
        script = f"import pandas as pd; d = pd.{read}({str(path)!r}{options}); print(d.groupby('policy').reward.mean())"
        commands = {"pandas: read and one mean": [sys.executable, "-c", script]}
        for name in names:
            commands[name] = [sys.executable, "-m", "mutualrl", *name.split(), "--rollouts", str(path), "--json"]
        for name, command in commands.items():
            runs = [measured(command) for _ in range(1 if smoke else 3)]
            rows.append(
                {
                    "file": kind,
                    "what": name,
                    "seconds": statistics.median(s for s, _ in runs),
                    "gigabytes": max(g for _, g in runs),
                }
            )
    return rows


def markdown(result: dict[str, Any]) -> str:
    """Return the two tables."""
    lines = [
        "| engine | model | prompts x samples | bare generation (s) | `eval` (s) | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for r in result["generation"]:
        lines.append(
            f"| {r['engine']} | {r['model']} | {r['prompts']} x {r['samples']} | {r['bare']:.2f} | {r['eval']:.2f} | "
            f"{r['ratio']:.2f} |"
        )
    lines += ["", "| 100,000 records as | what | seconds | peak memory (GB) |", "|---|---|---|---|"]
    for r in result["diagnostics"]:
        lines.append(f"| {r['file']} | {r['what']} | {r['seconds']:.1f} | {r['gigabytes']:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print and write."""
    args = harness.parse(harness.options(__doc__))
    engines = ["transformers", *(["vllm"] if find_spec("vllm") and not args.smoke else [])]
    repeats, models, samplings = (1, ("ada",), (1,)) if args.smoke else (REPEATS, ("ada", "bob"), (1, 4))
    with tempfile.TemporaryDirectory() as text:
        directory = Path(text)
        results: dict[str, Any] = {
            "command": COMMAND,
            "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "repeats": repeats},
            "generation": [
                generation(engine, model, samples, directory, repeats)
                for engine in engines
                for model in models
                for samples in samplings
            ],
            "diagnostics": diagnostics(directory, smoke=args.smoke),
        }
    harness.write(args.out, "evaluation", results, markdown(results))


if __name__ == "__main__":
    main()
