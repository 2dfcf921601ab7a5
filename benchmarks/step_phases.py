"""What a round adds to a TRL step, by phase: plain TRL, our trainer without sharing, SGT with a recorded source.

    python benchmarks/step_time.py --phases                       # about two minutes on 2 cores
    python benchmarks/step_time.py --phases --layers 8 --hidden 1024 --device cuda     # 135 M weights

One process, a Llama of random weights with the tokenizer of `tiny:ada`, 256 rollouts of 20 tokens, every prompt gated:
the model solves nothing, the file everything. The three kinds alternate in processes of their own; medians over the
steps after the third. Writes benchmarks/results/step_time_phases.{json,md}.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness

KINDS = {"plain": "plain TRL", "ours": "`MutualGRPOTrainer` without sharing", "sgt": "SGT with a recorded source"}
PROMPTS, ROLLOUTS, TOKENS = 32, 8, 20
FIRST = 3  # steps that are not counted
#: steps of `Rounds.run`, in order
ROUND = ("collect", "publish", "wait", "read", "request", "view", "plan", "apply", "log")


def solved(completions: list[str], **_: Any) -> list[float]:
    """Reward the texts of the file: the model cannot write their first word."""
    return [float("boxed" in completion) for completion in completions]


def train(kind: str, steps: int, layers: int, hidden: int, device: str) -> dict[str, Any]:
    """Train one kind; return the seconds of each step, and of each phase in it."""
    import torch
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, TrainerCallback, set_seed
    from trl import GRPOConfig, GRPOTrainer

    from mutualrl.engines.transformers_engine import load_tokenizer
    from mutualrl.sources.script import recorded_source
    from mutualrl.tiny import path_of
    from mutualrl.training import MutualGRPOTrainer, Sharing

    cpu = device == "cpu"
    torch.set_num_threads(1)
    set_seed(0)
    tokenizer = load_tokenizer(str(path_of("ada")))
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=max(hidden // 64, 1),
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    rows = [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a in range(10, 10 + PROMPTS) for b in range(10, 20)]
    with tempfile.TemporaryDirectory() as name:
        book = Path(name) / "book.jsonl"
        texts = [{"prompt": row["prompt"], "text": f" \\boxed{{{row['answer']}}}"} for row in rows]
        book.write_text("".join(json.dumps(row) + "\n" for row in texts))
        arguments: dict[str, Any] = {}
        if kind == "sgt":
            source = recorded_source("book", str(book), rows)
            sharing = Sharing.over(Path(name) / "run", policy="ada", peers=[], regime="sgt", sources=[source])
            arguments["sharing"] = sharing
        trainer: Any = (GRPOTrainer if kind == "plain" else MutualGRPOTrainer)(
            model=LlamaForCausalLM(config),
            reward_funcs=solved,
            args=GRPOConfig(
                output_dir=f"{name}/out",
                use_cpu=cpu,
                bf16=not cpu,
                gradient_checkpointing=False,
                dataloader_pin_memory=False,
                report_to="none",
                disable_tqdm=True,
                save_strategy="no",
                logging_steps=1,
                max_steps=steps,
                learning_rate=1e-5,
                per_device_train_batch_size=PROMPTS * ROLLOUTS,
                num_generations=ROLLOUTS,
                max_completion_length=TOKENS,
                beta=0.0,
                generation_kwargs={"min_new_tokens": TOKENS},
                seed=0,
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            **arguments,
        )
        trainer.remove_callback(PrinterCallback)
        clock = Clock(lambda: None if cpu else torch.cuda.synchronize())
        clock.time(trainer, "_generate", "sampling")
        if kind == "sgt":
            for phase in ROUND:
                clock.time(trainer.rounds, phase, phase)
            clock.time(trainer.sharing.background, "finish", "waiting for the log of rescues")

        class Steps(TrainerCallback):  # type: ignore[misc]
            def on_step_end(self, *_: Any, **__: Any) -> None:
                clock.step()

        trainer.add_callback(Steps())
        trainer.train()
        peak = 0.0 if cpu else torch.cuda.max_memory_allocated() / 2**30
        weights = trainer.model.num_parameters()
    gated = [row["sgt/pairs"] for row in trainer.state.log_history if "sgt/pairs" in row]
    return {"steps": clock.steps, "phases": clock.phases, "peak_gib": peak, "weights": weights, "pairs": gated}


class Clock:
    """Seconds of steps, and of the methods called in each."""

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self._synchronize = synchronize
        self._began = time.perf_counter()
        self._current: defaultdict[str, float] = defaultdict(float)
        self.steps: list[float] = []
        self.phases: list[dict[str, float]] = []

    def time(self, owner: Any, method: str, phase: str) -> None:
        """Time a method from here on."""
        original = getattr(owner, method)

        @functools.wraps(original)
        def timed(*arguments: Any, **keys: Any) -> Any:
            self._synchronize()
            began = time.perf_counter()
            try:
                return original(*arguments, **keys)
            finally:
                self._synchronize()
                self._current[phase] += time.perf_counter() - began

        setattr(owner, method, timed)

    def step(self) -> None:
        """End a step."""
        self._synchronize()
        now = time.perf_counter()
        self.steps.append(now - self._began)
        self.phases.append(dict(self._current))
        self._began, self._current = now, defaultdict(float)


def measure(args: argparse.Namespace, repeats: int, steps: int) -> dict[str, Any]:
    """Return what each kind's processes measured, alternating."""
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    shape = ["--layers", str(args.layers), "--hidden", str(args.hidden), "--device", args.device, "--steps", str(steps)]
    for repeat in range(repeats):
        print(f"repeat {repeat + 1} of {repeats}", file=sys.stderr)
        for kind in KINDS:
            command = [sys.executable, __file__, kind, *shape]
            result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            runs[kind].append(json.loads(result.stdout.splitlines()[-1]))
    return runs


def median_phases(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Return the median seconds of each phase, and of the rest of a step, over all counted steps."""
    rows: list[dict[str, float]] = []
    for run in runs:
        counted = list(zip(run["steps"], run["phases"], strict=True))
        for seconds, phases in counted[FIRST:] or counted[-1:]:
            rows.append({**phases, "passes and all else": seconds - sum(phases.values()), "step": seconds})
    names = sorted({name for row in rows for name in row})
    return {name: statistics.median(row.get(name, 0.0) for row in rows) for name in names}


def table(medians: dict[str, dict[str, float]]) -> str:
    """Return the table of docs/results.md: milliseconds per step."""
    order = ("step", "sampling", "passes and all else", *ROUND, "waiting for the log of rescues")
    lines = ["| per step, ms | " + " | ".join(KINDS.values()) + " |", "|---|" + "---|" * len(KINDS)]
    for name in order:
        cells = [f"{1000 * medians[kind][name]:.1f}" if name in medians[kind] else "" for kind in KINDS]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def report(args: argparse.Namespace, repeats: int, steps: int) -> None:
    """Measure, write, print."""
    runs = measure(args, repeats, steps)
    medians = {kind: median_phases(each) for kind, each in runs.items()}
    facts = {"weights": runs["plain"][0]["weights"], "device": args.device, "repeats": repeats, "steps": steps}
    content = {"command": "python benchmarks/step_time.py --phases", **facts, "medians": medians}
    harness.write(args.out, "step_time_phases", {**content, "runs": runs}, table(medians))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the model and the device."""
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))


if __name__ == "__main__":
    own = argparse.ArgumentParser()
    own.add_argument("kind", choices=KINDS)
    own.add_argument("--steps", type=int, required=True)
    add_options(own)
    given = own.parse_args()
    print(json.dumps(train(given.kind, given.steps, given.layers, given.hidden, given.device)))
