"""What keeps a small model's own skill while it is taught another: MiniMind2-Small and verified solutions.

    python benchmarks/minimind_keep.py --model DIR     # everything, an hour on 2 cores; resumes
    python benchmarks/minimind_keep.py --table         # the table of the existing pieces

DIR is MiniMind2-Small as written by `save_pretrained`. Beside SmolLM2 on one GPU it lost its own skill under SGT, with
a peer's texts and with the data's solutions alike (docs/real-models.md), so this sweep has no peer. Below
`benchmarks/sweeps/minimind-keep/` it writes `train.jsonl` and `held_out.jsonl`, word problems of both skills of
word_problems.py with their solutions, and `sft/share`, the model after supervised training on solutions of `share`.
Then it runs `mutualrl sweep benchmarks/sweeps/minimind-keep.yaml`, whose claims were written before the runs, and
writes `benchmarks/results/minimind_keep.json` and `.md`. The model and the problems are the same for every seed.
"""

from __future__ import annotations

from pathlib import Path

from gpu_smol_pair import SPECIALISTS
from smol import fine_tune, of_model
from text_source import write_rows
from word_problems import SKILLS, problems

TRAINED, HELD_OUT = 256, 64  # problems of each skill
_, SKILL, TAUGHT, LESSONS = SPECIALISTS["minimind2"]  # as beside SmolLM2; 3,200 problems taught it next to nothing


def make(model: Path, out: Path, *, smoke: bool) -> None:
    """Make the problems and the specialist. The SFT, training and held-out problems are disjoint."""
    out.mkdir(parents=True, exist_ok=True)
    taught, trained, held = (32, 16, 4) if smoke else (TAUGHT, TRAINED, HELD_OUT)
    rows = {skill: problems(skill, trained + held, seed=2) for skill in SKILLS}
    write_rows(out / "train.jsonl", [row for each in rows.values() for row in each[:trained]])
    write_rows(out / "held_out.jsonl", [row for each in rows.values() for row in each[trained:]])
    lessons = problems(SKILL, trained + held + taught, seed=2)[trained + held :]
    fine_tune(model, lessons, out / "sft" / "share", LESSONS)


def main() -> None:
    """Make the missing inputs and runs, and write the table."""
    learner = "MiniMind2-Small, which is taught"
    of_model("minimind-keep", __doc__, learner, make, "sft/share/model.safetensors")


if __name__ == "__main__":
    main()
