"""Two real pretrained models with different tokenizers, each with one skill, on one GPU: GRPO, GRPO with twice the
rollouts, SGT, and SGT with the data's solutions.

    python benchmarks/gpu_smol_pair.py --models DIR   # everything, a quarter of an hour on one GPU; resumes
    python benchmarks/gpu_smol_pair.py --table        # the table of the existing pieces

DIR has `smollm2-135m-instruct` and `minimind2-small` as written by `save_pretrained`. Below
`benchmarks/sweeps/smol-pair/` it writes the word problems of both skills of word_problems.py, none in both files, and
`sft/NAME`: SmolLM2 after supervised training on solutions of `shop`, MiniMind2 on solutions of `share`. Then it runs
`mutualrl sweep benchmarks/sweeps/smol-pair.yaml`, whose claims were written before the runs, and writes
`benchmarks/results/gpu_smol_pair.json` and `.md`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import harness
import sweep_results as sweeps
from smol import HELD_OUT, SFT, TAUGHT, TRAINED, fine_tune
from text_source import write_rows
from word_problems import SKILLS, problems

#: model, skill, problems and settings of its supervised training: the smaller model needs more of both
SPECIALISTS: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "smollm2": ("smollm2-135m-instruct", "shop", TAUGHT, SFT),
    "minimind2": (
        "minimind2-small",
        "share",
        16_000,
        {**SFT, "per_device_train_batch_size": 32, "learning_rate": 3e-4},
    ),
}


def make(models: Path, out: Path, *, smoke: bool) -> None:
    """Make the problems and the specialists. The SFT, training and held-out problems are disjoint."""
    out.mkdir(parents=True, exist_ok=True)
    training, held = (16, 4) if smoke else (TRAINED, HELD_OUT)
    rows = {skill: problems(skill, training + held, seed=0) for skill in SKILLS}
    write_rows(out / "train.jsonl", [row for each in rows.values() for row in each[:training]])
    write_rows(out / "held_out.jsonl", [row for each in rows.values() for row in each[training:]])
    for name, (model, skill, taught, settings) in SPECIALISTS.items():
        if not (out / "sft" / name / "model.safetensors").is_file():
            count = 16 if smoke else taught
            lessons = problems(skill, training + held + count, seed=0)[training + held :]
            fine_tune(models / model, lessons, out / "sft" / name, settings)


def main() -> None:
    """Make the missing inputs and runs, and write the table."""
    parser = sweeps.options(__doc__)
    parser.add_argument("--models", type=Path, help="directory of the two pretrained models")
    parser.add_argument("--jobs", type=int, default=5, help="runs side by side, 14 GiB of the GPU each")
    parser.add_argument("--make", action="store_true", help="only make the problems and the specialists")
    args = harness.parse(parser)

    def prepare(file: Path) -> None:
        inputs = file.parent / "smol-pair"
        if args.models is not None:
            make(args.models, inputs, smoke=args.smoke)
        elif not all((inputs / "sft" / name / "model.safetensors").is_file() for name in SPECIALISTS):
            parser.error("--models DIR: the models that the specialists are made of")

    if args.make:
        prepare(sweeps.SWEEPS / "smol-pair.yaml")
        return
    cpu = {"hardware.gpus": 0, "launch.share_gpus": False, "trainer.per_device_train_batch_size": 16}
    command, jobs = "python benchmarks/gpu_smol_pair.py", 1 if args.smoke else args.jobs
    sweeps.make("smol-pair", command, args, ("sgt gold",), result="gpu_smol_pair", prepare=prepare, jobs=jobs, keys=cpu)


if __name__ == "__main__":
    main()
