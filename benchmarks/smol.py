"""Specialists of a real pretrained chat model under GRPO and SGT: problems, two SFT runs, the sweep, its table.

    python benchmarks/smol.py --model DIR     # everything; resumes after an interruption
    python benchmarks/smol.py --table         # the table of the existing pieces

DIR is SmolLM2-135M-Instruct as written by `save_pretrained`. Below `benchmarks/sweeps/smol/` it writes

- `train.jsonl` and `held_out.jsonl`: word problems of both skills of word_problems.py, none in both files;
- `sft/shop` and `sft/share`: the model after short supervised training on one skill's solutions.

Then it runs `mutualrl sweep benchmarks/sweeps/smol.yaml`, whose claims were written before the runs, and writes
`benchmarks/results/smol.json` and `.md`. The models start from the same weights and have the same tokenizer; each
lacks the skill that its peer was taught. The training problems are the same for every seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import harness
import sweep_results as sweeps
from text_source import write_rows
from word_problems import SKILLS, problems

TAUGHT, TRAINED, HELD_OUT = 384, 512, 64  # problems of each skill
#: one epoch of SFT on a skill's solutions
SFT = {"num_train_epochs": 1, "per_device_train_batch_size": 16, "learning_rate": 3e-5, "seed": 0, "data_seed": 0}


def fine_tune(
    model: Path, rows: Sequence[Mapping[str, str]], target: Path, sft: Mapping[str, Any] = MappingProxyType(SFT)
) -> None:
    """Train a model on solutions as assistant turns, with TRL's SFTTrainer, in bf16, on the GPU if there is one."""
    import torch
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    examples = []
    for row in rows:
        prompt = [{"role": "user", "content": row["prompt"]}]
        examples.append({"prompt": prompt, "completion": [{"role": "assistant", "content": row["solution"]}]})
    settings = SFTConfig(
        output_dir=str(target),
        use_cpu=not torch.cuda.is_available(),
        bf16=True,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        logging_steps=4,
        lr_scheduler_type="cosine",
        completion_only_loss=True,
        model_init_kwargs={"dtype": "float32"},
        **sft,
    )
    trainer = SFTTrainer(model=str(model), args=settings, train_dataset=Dataset.from_list(examples))
    trainer.train()
    trainer.save_model(str(target))


def make(model: Path, out: Path, *, smoke: bool) -> None:
    """Make the problems and the specialists. The SFT, training and held-out problems are disjoint."""
    out.mkdir(parents=True, exist_ok=True)
    taught, training, held = (16, 16, 4) if smoke else (TAUGHT, TRAINED, HELD_OUT)
    trained: list[dict[str, str]] = []
    held_out: list[dict[str, str]] = []
    for skill in SKILLS:
        rows = problems(skill, taught + training + held, seed=0)
        trained += rows[taught:-held]
        held_out += rows[-held:]
        if not (out / "sft" / skill / "model.safetensors").is_file():
            fine_tune(model, rows[:taught], out / "sft" / skill)
    write_rows(out / "train.jsonl", trained)
    write_rows(out / "held_out.jsonl", held_out)


def of_model(name: str, description: str | None, model: str, make: Callable[..., None], last: str) -> None:
    """Make the missing inputs and runs of a sweep, and write its table.

    `make(model, directory, smoke=...)` makes its inputs from the model of `--model`, `last` as the last of them.
    """
    parser = sweeps.options(description)
    parser.add_argument("--model", type=Path, help=model)
    args = harness.parse(parser)

    def prepare(file: Path) -> None:
        inputs = file.parent / name
        if not (inputs / last).is_file():
            if args.model is None:
                parser.error(f"--model DIR: {model}")
            make(args.model, inputs, smoke=args.smoke)

    result = name.replace("-", "_")
    sweeps.make(name, f"python benchmarks/{result}.py", args, ("sgt",), result=result, prepare=prepare)


def main() -> None:
    """Make the missing inputs and runs, and write the table."""
    of_model("smol", __doc__, "SmolLM2-135M-Instruct, of which the specialists are made", make, "held_out.jsonl")


if __name__ == "__main__":
    main()
