"""Two real chat models before any training: tokenizers, and all diagnostics on short arithmetic and BoolQ.

    python benchmarks/smol_diagnostics.py --models DIR --boolq FILE    # a quarter of an hour on two cores

DIR has `smollm2-135m-instruct` and `minimind2-small`, directories written by `save_pretrained`; FILE is BoolQ's
validation split. Completions are free text: the rewards are those of word_problems.py, not a box.
Writes benchmarks/results/smol_diagnostics.{json,md}.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

import harness
from printed import keep_printed
from sweep_results import HERE
from text_source import write_rows
from word_problems import problems

MODELS = {"smollm2": "smollm2-135m-instruct", "minimind2": "minimind2-small"}
PROMPTS = 48
SAMPLES = 4


def write_inputs(directory: Path, models: Path, boolq: Path) -> None:
    """Put models, rewards, rows and pools into one directory, so that the commands read like a user's there."""
    for model in MODELS.values():
        (directory / model).symlink_to((models / model).resolve(strict=True))
    (directory / "boolq.jsonl").symlink_to(boolq.resolve(strict=True))
    (directory / "word_problems.py").symlink_to(HERE / "word_problems.py")
    write_rows(directory / "sums.jsonl", problems("sums", PROMPTS, seed=0))
    tasks = {
        "sums": {"name": "dataset", "data": "sums.jsonl", "reward": "word_problems.py:last_number"},
        "boolq": {"name": "boolq", "data": "boolq.jsonl", "reward": "word_problems.py:yes_or_no"},
    }
    for name, task in tasks.items():
        policies = [{"name": policy, "model": f"./{model}"} for policy, model in MODELS.items()]
        pool = {"policies": policies, "task": task, "hardware": {"gpus": 0}}
        (directory / f"{name}.yaml").write_text(yaml.safe_dump(pool, sort_keys=False))


def commands(*, smoke: bool) -> Iterator[Sequence[str]]:
    """Yield the commands: the tokenizers, then each diagnostic on each task; with `smoke`, two on one task."""
    yield ("thl-check", "--pool", "sums.yaml", "--suite", "tokenizers")
    models = [part for policy, model in MODELS.items() for part in ("--model", f"{policy}=./{model}")]
    prompts, samples, tokens = ("2", "1", "8") if smoke else (str(PROMPTS), str(SAMPLES), "48")
    for pool in ("sums", "boolq"):
        rollouts = ("--rollouts", f"{pool}.parquet")
        sampling = ("--prompts", prompts, "--samples", samples, "--max-new-tokens", tokens)
        yield ("complementarity", "--pool", f"{pool}.yaml", *sampling, "--save", f"{pool}.parquet")
        if smoke:
            return
        yield ("paper", "xgrpo-check", *rollouts)
        yield ("sgt-check", *rollouts, *models)
        yield ("paper", "channels", *rollouts, *models)
        yield ("paper", "cost", *rollouts, *models)


def main() -> None:
    """Run the commands, and print and write their output."""
    parser = harness.options(__doc__)
    parser.add_argument("--models", type=Path, required=True, help="directory of the two models")
    parser.add_argument("--boolq", type=Path, required=True, help="BoolQ's validation split, JSON Lines")
    args = harness.parse(parser)
    with tempfile.TemporaryDirectory() as directory:
        write_inputs(Path(directory), args.models, args.boolq)
        keep_printed("smol_diagnostics", commands(smoke=args.smoke), Path(directory), args.out)


if __name__ == "__main__":
    main()
