"""Text sources at a fixed gate: problems, lessons, models after SFT, the sweep, and its table.

    python benchmarks/text_source.py                # everything; resumes after an interruption
    python benchmarks/text_source.py --table        # the table of the existing pieces

Below `benchmarks/sweeps/text-source/` it writes

- `train.jsonl` and `held_out.jsonl`: problems of task countdown-three, with the data's solution in each style (columns
  `solution`, `mirrored`, `bare`), and for each policy the first success among 64 completions drawn before training
  (`own_fay`, `own_gus`; empty if there is none);
- `sft/fay` and `sft/gus`: the policies after supervised training on the data's solutions, each in its own style.

That takes four minutes on two cores. Then it runs `mutualrl sweep benchmarks/sweeps/text-source.yaml` (a minute and a
half per piece), and writes `benchmarks/results/text_source.json` and `.md`. The training problems are the same for
every seed: a seed determines their order and the sampling.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq

import harness
import sweep_results as sweeps
from mutualrl.paper.embedded.spec import POLICIES, Countdown
from mutualrl.tasks import Split, TaskSource, get_task
from mutualrl.tiny import path_of

POOL = sweeps.SWEEPS / "text-source-pool.yaml"
LEARNERS = ("fay", "gus")
PROBLEMS = 1024
SAMPLES = 64
TASK = "countdown-three"
#: SFT on the data's solutions: two epochs, at the rate of the reinforcement learning
SFT = {"num_train_epochs": 2, "per_device_train_batch_size": 32, "learning_rate": 2e-4, "seed": 0, "data_seed": 0}


def rows_of(split: Split) -> list[dict[str, object]]:
    """Return the problems of a split as rows of the task `dataset`, with one column per style of the solution."""
    prompts = get_task(TASK).read(split, TaskSource()).prompts
    return [{"prompt": row.text, "answer": row.answer, "group": row.group, **row.columns} for row in prompts]


def write_rows(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows as JSON Lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def first_successes(directory: Path) -> dict[str, dict[str, str]]:
    """Return the first success of each policy on each prompt, from the completions kept by `mutualrl eval`."""
    successes: dict[str, dict[str, str]] = {}
    columns = ["policy", "rollout", "reward", "ended", "x_text", "y_text"]
    for path in sorted(directory.glob("completions/*/*.parquet")):
        for row in sorted(pq.read_table(path, columns=columns).to_pylist(), key=lambda one: one["rollout"]):
            if row["reward"] == 1.0 and row["ended"]:
                successes.setdefault(row["policy"], {}).setdefault(row["x_text"], row["y_text"])
    return successes


def fine_tune(learner: str, rows: Sequence[Mapping[str, object]], target: Path) -> None:
    """Train a policy on the data's solutions in its own style, with TRL's SFTTrainer.

    Prompt and solution are tokenised separately, as in sampling. Tokenised together, a token would join the full stop
    of the prompt to the space of the solution, and SFT would teach tokens that are never sampled.
    """
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    warm_up = POLICIES[learner].warm_up
    assert isinstance(warm_up, Countdown)
    tokenizer = AutoTokenizer.from_pretrained(path_of(learner))
    examples = []
    for row in rows:
        prompt = tokenizer.encode(str(row["prompt"]), add_special_tokens=False)
        solution = tokenizer.encode(str(row[warm_up.style]), add_special_tokens=False)
        solution.append(tokenizer.eos_token_id)
        mask = [0] * len(prompt) + [1] * len(solution)
        examples.append({"input_ids": prompt + solution, "completion_mask": mask})
    data = Dataset.from_list(examples)
    settings = SFTConfig(
        output_dir=str(target),
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        lr_scheduler_type="cosine",
        completion_only_loss=True,
        **SFT,
    )
    trainer = SFTTrainer(model=str(path_of(learner)), args=settings, train_dataset=data)
    trainer.train()
    trainer.save_model(str(target))


def make(out: Path, *, smoke: bool) -> None:
    """Make the problems, the lessons and the models. The evaluation resumes after an interruption."""
    out.mkdir(parents=True, exist_ok=True)
    count, samples = (64, 2) if smoke else (PROBLEMS, SAMPLES)
    rows = rows_of("train")[:count]
    write_rows(out / "held_out.jsonl", rows_of("validation"))
    write_rows(out / "train.jsonl", rows)
    evaluate = ["eval", "--suite", "dataset", "--pool", str(POOL), "--data", str(out / "train.jsonl"), "--engine"]
    sampling = ["transformers", "--samples", str(samples), "--batch-size", "1024", "--out", str(out / "own")]
    subprocess.run([sys.executable, "-m", "mutualrl", *evaluate, *sampling], check=True)
    successes = first_successes(out / "own")
    for row in rows:
        for learner in LEARNERS:
            row[f"own_{learner}"] = successes[learner].get(str(row["prompt"]), "")
    write_rows(out / "train.jsonl", rows)
    for learner in LEARNERS:
        solved = sum(bool(row[f"own_{learner}"]) for row in rows)
        print(f"{learner}: {solved} of {len(rows)} problems solved in {samples} completions", flush=True)
        fine_tune(learner, rows, out / "sft" / learner)


def prepare(file: Path, *, smoke: bool) -> None:
    """Make the missing inputs below the sweep file."""
    inputs = file.parent / "text-source"
    if not (inputs / "sft" / LEARNERS[-1] / "model.safetensors").is_file():
        make(inputs, smoke=smoke)


def main() -> None:
    """Make the missing inputs and runs, and write the table."""
    args = harness.parse(sweeps.options(__doc__))
    sweeps.make(
        "text-source",
        "python benchmarks/text_source.py",
        args,
        ("sgt gold own style",),
        result="text_source",
        prepare=partial(prepare, smoke=args.smoke),
        evaluate={"samples": 2, "limit": 2},
    )


if __name__ == "__main__":
    main()
