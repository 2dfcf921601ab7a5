"""Time of a training step in bfloat16 autocast and in float32 on the CPU, by model size, in one run.

    python benchmarks/bf16_on_cpu.py     # eight minutes on two idle cores

Llama models with random weights and the tokenizer of `tiny:bob` train alone (GRPO, one thread) with `trainer.bf16` off
and on, alternating. The ratio of the median `step_time`, over all steps but the first, shows the size from which
bfloat16 is faster on this CPU; `mutualrl init` sets it from there. Writes benchmarks/results/bf16_on_cpu.{json,md}.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import harness
from mutualrl.storage.rundir import versions
from mutualrl.tiny import resolve_path

#: hidden size, layers, and number of steps
SHAPES = {"1 M": (128, 4, 12), "12 M": (384, 6, 9), "50 M": (640, 10, 5), "150 M": (960, 14, 5)}
BATCH = ("round.prompts=4", "trainer.num_generations=4", "trainer.per_device_train_batch_size=16")
LENGTH = ("trainer.max_completion_length=32", "trainer.generation_kwargs={min_new_tokens: 32}")
QUIET = ("run.validate_every=0", "run.validation_limit=1", "run.save_every=0")


def make_model(directory: Path, hidden: int, layers: int) -> int:
    """Save a Llama model with random weights, and return their number."""
    tokenizer = AutoTokenizer.from_pretrained(resolve_path("tiny:bob"))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return int(model.num_parameters())


def median_step(directory: Path, model: Path, steps: int, bf16: bool) -> float:
    """Train a model alone, and return the median seconds of its steps, except the first."""
    pool = directory.with_suffix(".yaml")
    pool.write_text(f'policies: [{{name: ada, model: "{model}"}}]\nhardware: {{gpus: 0}}\n')
    command = [sys.executable, "-m", "mutualrl", "train", "--pool", str(pool), "--no-report"]
    command += ["--steps", str(steps), "--run-dir", str(directory)]
    for setting in (*BATCH, *LENGTH, *QUIET, f"trainer.bf16={str(bf16).lower()}"):
        command += ["--set", setting]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(result.stderr)
    rows = [json.loads(line) for line in (directory / "policies" / "ada" / "metrics.jsonl").read_text().splitlines()]
    return float(statistics.median([row["step_time"] for row in rows if "step_time" in row][1:]))


def main() -> None:
    """Make the runs and write the table."""
    parser = harness.options(__doc__)
    parser.add_argument("--steps", type=int, help="steps of a run (default: per size)")
    args = harness.parse(parser)
    repeats, steps_override = (1, 2) if args.smoke else (2, args.steps)
    shapes = {"0.1 M": (64, 1, 2)} if args.smoke else SHAPES
    capabilities = torch.cpu.get_capabilities()
    cpu = {name: bool(capabilities.get(name)) for name in ("avx512_bf16", "amx_bf16")}
    sizes = {}
    lines = ["| weights | float32, s per step | bfloat16, s per step | bfloat16 to float32 |", "|---|---|---|---|"]
    with tempfile.TemporaryDirectory(prefix="bf16-on-cpu-") as scratch:
        for name, (hidden, layers, steps) in shapes.items():
            model = Path(scratch) / f"{hidden}-{layers}"
            parameters = make_model(model, hidden, layers)
            seconds: dict[str, list[float]] = {"float32": [], "bfloat16": []}
            for number in range(repeats):
                for kind, values in seconds.items():
                    directory = Path(scratch) / f"{hidden}-{kind}-{number}"
                    values.append(median_step(directory, model, steps_override or steps, kind == "bfloat16"))
            single, half = (statistics.median(values) for values in seconds.values())
            median, ratio = {"float32": single, "bfloat16": half}, half / single
            sizes[name] = {"parameters": parameters, "seconds": seconds, "median": median, "ratio": ratio}
            lines.append(f"| {parameters / 1e6:.1f} M | {single:.2f} | {half:.2f} | {ratio:.2f} |")
            print(lines[-1], flush=True)
    result = {"command": "python benchmarks/bf16_on_cpu.py", "versions": versions(), "cpu": cpu, "sizes": sizes}
    harness.write(args.out, "bf16_on_cpu", result, "\n".join(lines))


if __name__ == "__main__":
    main()
