"""One model and a recorded file: gate, ungated mixing, SFT first, and GRPO alone, on the embedded pool `tiny-recorded`.

    python benchmarks/one_model.py              # everything, half an hour; resumes after an interruption
    python benchmarks/one_model.py --table      # the table of the existing pieces
    python benchmarks/one_model.py --seeds      # seven more seeds, with CHORD and pass@64; an hour
    python benchmarks/one_model.py --chord      # CHORD on the first three seeds; five minutes

It fine-tunes `tiny:ada` on the texts of `tiny:book` with TRL's SFTTrainer, on the confirmed ones and on all (into
`benchmarks/sweeps/one-model/`), runs `mutualrl sweep benchmarks/sweeps/one-model.yaml` (or `one-model-seeds.yaml`,
`one-model-chord.yaml`), and writes `benchmarks/results/one_model.json` and `.md` (or of the sweep's name). The models
after SFT are the same for every seed.
"""

from __future__ import annotations

from pathlib import Path

import harness
import sweep_results as sweeps
from mutualrl.paper.embedded.book import rows as book_rows
from mutualrl.tasks import TaskSource, get_task
from mutualrl.tasks.boxed import boxed_score
from mutualrl.tiny import path_of

LEARNER = "ada"
INPUTS = ("confirmed", "all")
#: SFT on the file: eight passes over it, at the rate of the reinforcement learning
SFT = {"num_train_epochs": 8, "per_device_train_batch_size": 32, "learning_rate": 5e-4, "seed": 0, "data_seed": 0}


def examples(kind: str) -> list[tuple[str, str]]:
    """Return (prompt, text) of the file's distinct texts: those that earn the reward, or all."""
    answers = {prompt.text: prompt.answer for prompt in get_task("arithmetic").read("train", TaskSource()).prompts}
    pairs = []
    for row in book_rows():
        prompt, texts = str(row["problem"]), row["generations"]
        assert isinstance(texts, list)
        for text in dict.fromkeys(texts):
            if prompt in answers and (kind == "all" or boxed_score(text, answers[prompt])):
                pairs.append((prompt, text))
    return pairs


def fine_tune(pairs: list[tuple[str, str]], target: Path) -> None:
    """Train the model on prompt and text, tokenised separately as in sampling, with loss on the text."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(path_of(LEARNER))
    rows = []
    for prompt, text in pairs:
        asked = tokenizer.encode(prompt, add_special_tokens=False)
        answered = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        rows.append({"input_ids": asked + answered, "completion_mask": [0] * len(asked) + [1] * len(answered)})
    settings = SFTConfig(
        output_dir=str(target),
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        lr_scheduler_type="cosine",
        completion_only_loss=True,
        **SFT,
    )
    trainer = SFTTrainer(model=str(path_of(LEARNER)), args=settings, train_dataset=Dataset.from_list(rows))
    trainer.train()
    trainer.save_model(str(target))


def prepare(file: Path) -> None:
    """Make the missing models below the sweep file."""
    for kind in INPUTS:
        target = file.parent / "one-model" / kind
        if not (target / "model.safetensors").is_file():
            fine_tune(examples(kind), target)


def main() -> None:
    """Make the missing runs, and write the table."""
    parser = sweeps.options(__doc__)
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--seeds", action="store_const", dest="part", const="seeds", help="seven more, CHORD and pass@64")
    part.add_argument(
        "--chord", action="store_const", dest="part", const="chord", help="CHORD on the first three seeds"
    )
    args = harness.parse(parser)
    name, command = "one-model", "python benchmarks/one_model.py"
    if args.part is not None:
        name, command = f"one-model-{args.part}", f"{command} --{args.part}"
    few = {"samples": 2, "limit": 2}
    sweeps.make(name, command, args, ("sgt",), result=name.replace("-", "_"), prepare=prepare, evaluate=few)


if __name__ == "__main__":
    main()
