"""Two policies, each in a training script of its own: start one per terminal; no `mutualrl train` is involved.

    python examples/two_scripts.py ada                 # terminal 1: says within 5 s that it waits for bob
    python examples/two_scripts.py bob                 # terminal 2
    mutualrl watch runs/two-scripts                    # terminal 3, while they train
    mutualrl report runs/two-scripts

    python examples/two_scripts.py ada --resume        # after a crash; bob waits meanwhile, for up to an hour
    torchrun --nproc-per-node 2 examples/two_scripts.py ada     # one policy in two processes

With `--served URL` in both commands a third member answers where a policy fails: a model behind an OpenAI-compatible
endpoint, asked by one of the scripts for both (`pip install 'mutualrl[served]'`).

Equal in both scripts: the run directory, the regime and its settings, the number of steps, and the rows with their
order, which `seed`, the number of prompts per round and of rollouts per prompt decide. Model, tokenizer, learning rate
and number of processes may differ.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from datasets import Dataset
from trl import GRPOConfig

from mutualrl.sources.script import served_source
from mutualrl.tasks import TaskSource, get_task
from mutualrl.tasks.boxed import boxed_score
from mutualrl.tiny import path_of
from mutualrl.training import MutualGRPOTrainer, Sharing

POLICIES = ("ada", "bob")  # embedded models: ada adds well and multiplies badly; bob is the reverse
PROMPTS, ROLLOUTS = 32, 4  # of a round


def exact(completions: Sequence[str], answer: Sequence[str], **columns: object) -> list[float]:
    """Reward function as for TRL: 1 for the right boxed answer."""
    return [boxed_score(text, correct) for text, correct in zip(completions, answer, strict=True)]


def main() -> None:
    """Train one of the two policies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policy", choices=POLICIES)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/two-scripts"))
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--served", help="OpenAI-compatible endpoint of a model that answers where a policy fails")
    parser.add_argument("--resume", action="store_true", help="from the newest checkpoint in CHECKPOINTS/POLICY")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the policies share the cores
    processes = int(os.environ.get("WORLD_SIZE", "1"))

    prompts = get_task("arithmetic").read("train", TaskSource(seed=0)).prompts
    rows = [{"prompt": prompt.text, "answer": prompt.answer, "prompt_id": prompt.id} for prompt in prompts]
    sources = [] if args.served is None else [served_source("teacher", args.served, rows)]
    sharing = Sharing.over(
        args.run_dir,
        policy=args.policy,
        peers=[name for name in POLICIES if name != args.policy],
        regime="sgt",
        weight=0.1,
        resume=args.resume,
        sources=sources,
    )
    trainer = MutualGRPOTrainer(
        model=str(path_of(args.policy)),
        reward_funcs=exact,
        args=GRPOConfig(
            output_dir=str(args.checkpoints / args.policy),
            max_steps=args.steps,
            per_device_train_batch_size=PROMPTS * ROLLOUTS // processes,
            num_generations=ROLLOUTS,
            max_completion_length=20,
            learning_rate=5e-4,
            seed=0,
            logging_steps=1,
            save_steps=5,
            save_total_limit=2,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(rows),
        sharing=sharing,
    )
    trainer.train(resume_from_checkpoint=args.resume)
    trainer.save_model(str(args.checkpoints / args.policy / "trained"))


if __name__ == "__main__":
    main()
