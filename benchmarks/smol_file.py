"""A real pretrained chat model and a file of worked solutions in another's style, two in five of them wrong.

    python benchmarks/smol_file.py --model DIR     # everything, an hour and a half on 2 cores; resumes
    python benchmarks/smol_file.py --table         # the table of the existing pieces

DIR is SmolLM2-135M-Instruct as written by `save_pretrained`. Below `benchmarks/sweeps/smol-file/` it writes

- `train.jsonl` and `held_out.jsonl`: word problems of both skills of word_problems.py, none in both files;
- `recorded.jsonl`: for each training problem a solution in words, where the model writes symbols;
- `sft/shop`: the model after short supervised training on solutions of `shop`, in symbols: it lacks `share`;
- `sft/file`: that one after one pass over the file's verified solutions.

Then it runs `mutualrl sweep benchmarks/sweeps/smol-file.yaml`, whose claims were written before the runs, and writes
`benchmarks/results/smol_file.json` and `.md`. The models and problems are the same for every seed.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from pathlib import Path

from smol import fine_tune, of_model
from text_source import write_rows
from word_problems import SKILLS, last_number, problems

TAUGHT, TRAINED, HELD_OUT = 256, 256, 48  # problems of each skill
WRONG = 0.4  # fraction of the file's solutions
VERBS = {"shop": ("times", "plus", "So the total is"), "share": ("minus", "divided by", "So each friend gets")}


def retold(row: Mapping[str, str], draw: random.Random) -> str:
    """Return a problem's solution in words, wrong in its last step in two of five."""
    first, second, middle, _, last, result = map(int, re.findall(r"\d+", row["solution"])[:6])
    if draw.random() < WRONG:
        result += draw.choice((1, 2, 3))
    one, two, so = VERBS[row["group"]]
    return f"First, {first} {one} {second} is {middle}. Then {middle} {two} {last} is {result}. {so} {result}."


def make(model: Path, out: Path, *, smoke: bool) -> None:
    """Make the problems, the file and both models. The SFT, training and held-out problems are disjoint."""
    out.mkdir(parents=True, exist_ok=True)
    taught, trained, held = (16, 16, 4) if smoke else (TAUGHT, TRAINED, HELD_OUT)
    rows = {skill: problems(skill, taught + trained + held, seed=1) for skill in SKILLS}
    training = [row for each in rows.values() for row in each[taught:-held]]
    draw = random.Random(0)
    recorded = [{"problem": row["prompt"], "generations": [retold(row, draw)]} for row in training]
    write_rows(out / "train.jsonl", training)
    write_rows(out / "recorded.jsonl", recorded)
    write_rows(out / "held_out.jsonl", [row for each in rows.values() for row in each[-held:]])
    confirmed = []
    for row, record in zip(training, recorded, strict=True):
        (text,) = record["generations"]
        if last_number([text], [row["answer"]]) == [1.0]:
            confirmed.append({"prompt": row["prompt"], "solution": text})
    if not (out / "sft" / "shop" / "model.safetensors").is_file():
        fine_tune(model, rows["shop"][:taught], out / "sft" / "shop")
    if not (out / "sft" / "file" / "model.safetensors").is_file():
        fine_tune(out / "sft" / "shop", confirmed, out / "sft" / "file")


def main() -> None:
    """Make the missing inputs and runs, and write the table."""
    learner = "SmolLM2-135M-Instruct, which learns from the file"
    of_model("smol-file", __doc__, learner, make, "sft/file/model.safetensors")


if __name__ == "__main__":
    main()
