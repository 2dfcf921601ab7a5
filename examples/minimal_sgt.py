"""A whole mutual run in one file: two policies, two tokenizers, plain TRL, Success-Gated Transfer (SGT).

    python examples/minimal_sgt.py                 # both policies, 60 steps, about a minute on two CPU cores
    python examples/minimal_sgt.py --weight 0      # the control: the same run without learning from the peer

What happens in a round, from top to bottom of this file:

1. TRL samples G completions for each of P prompts, and calls `SharedReward`.
2. The reward function verifies them, publishes the rewards and the texts of successes, waits for the peer's (SEE),
   and calls the regime's plan: where all own rollouts failed and the peer succeeded, it draws one success and encodes
   it with the learner's own tokenizer (THL).
3. TRL computes advantages and its loss; `compute_loss` adds weight * mean NLL of the drawn successes.

Simpler than the toolkit (`mutualrl train --regime sgt`): one process per policy, one optimizer step per round, no
checkpoints, no supervision. A round is computed by the same functions.

Shapes: _P prompts of a round, _G rollouts of a group, _R extra rows, _T tokens.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

from mutualrl.records import Prompt, Rollout
from mutualrl.regimes import ExtraRow, Plan, RoundView
from mutualrl.regimes.losses import nll_loss, row_nll
from mutualrl.regimes.sgt import SGT
from mutualrl.rollouts import Rollouts
from mutualrl.see import Exchange, Heartbeat
from mutualrl.seeds import policy_seed
from mutualrl.tasks import TaskSource, get_task
from mutualrl.tasks.boxed import boxed_score
from mutualrl.tiny import path_of
from mutualrl.training.transfer import TokenTransfer
from mutualrl.trajectory import Trajectory

POLICIES = ("ada", "bob")  # ada adds well and multiplies badly; bob is the reverse
PROMPTS, ROLLOUTS, LONGEST = 32, 4, 20


class SharedReward:
    """Reward function for TRL that verifies completions and shares them with the peer."""

    __name__ = "boxed"

    def __init__(self, exchange: Exchange, peer: str, tokenizer: Any, weight: float) -> None:
        self.exchange = exchange
        self.peer = peer
        self.tokenizer = tokenizer
        self.transfer = TokenTransfer(tokenizer, max_length=LONGEST)
        self.regime = SGT(weight=weight)
        self.round = 0
        self.plan = Plan()

    def __call__(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        answer: Sequence[str],
        prompt_id: Sequence[str],
        **_: Any,
    ) -> list[float]:
        """Return the rewards of P * G completions, and store the round's plan in `self.plan`."""
        rewards = [boxed_score(text, correct) for text, correct in zip(completions, answer, strict=True)]
        own = []
        for row, ids in enumerate(completion_ids):
            own.append(
                Rollout(
                    prompt_id=prompt_id[row],
                    index=row % ROLLOUTS,
                    reward=rewards[row],
                    ended=ids[-1] == self.tokenizer.eos_token_id,
                    length=len(ids),
                    trajectory=Trajectory.of_text(completions[row]),
                    token_ids=np.array(ids, dtype=np.int32),
                )
            )
        rollouts = Rollouts.of(own, self.exchange.policy, self.round)

        # SEE: publish the fields that the peer's regime reads, then wait for the peer's round
        self.exchange.publish(self.round, rollouts.published(self.regime.needs().reads), policy_step=self.round)
        peers = self.exchange.wait([self.peer], self.round)

        # the regime, a pure function of the round; THL through `transfer`
        view = RoundView(self.round, self.exchange.policy, 0, rollouts, peers, self.transfer)
        self.plan = self.regime.plan(view)
        self.round += 1
        return rewards


class MutualTrainer(GRPOTrainer):
    """GRPOTrainer that adds the drawn successes to its loss."""

    def __init__(self, *args: Any, shared: SharedReward, **kwargs: Any) -> None:
        super().__init__(*args, reward_funcs=shared, **kwargs)
        self.shared = shared

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Return TRL's loss, plus weight * the mean over rows of their NLL per token."""
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        rows = self.shared.plan.rows
        if not rows:
            return loss
        logps_R_T, mask_R_T = self.logps(model, rows)
        weights_R = torch.tensor([row.weight for row in rows])
        return loss + nll_loss(row_nll(logps_R_T, mask_R_T), weight=weights_R, count=len(rows), ranks=1)

    def logps(self, model: Any, rows: Sequence[ExtraRow]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probs of the rows' tokens given their prompts, at temperature 1, and the mask of these tokens."""
        prompts = [self.processing_class(PROMPT_OF[row.prompt_id].text)["input_ids"] for row in rows]
        width = max(len(prompt) + len(row.token_ids) for prompt, row in zip(prompts, rows, strict=True))
        ids = torch.zeros((len(rows), width), dtype=torch.long)
        attention = torch.zeros_like(ids)
        counted = torch.zeros_like(ids, dtype=torch.bool)
        for at, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
            end = len(prompt) + len(row.token_ids)
            ids[at, :end] = torch.tensor([*prompt, *row.token_ids])
            attention[at, :end] = 1
            counted[at, len(prompt) : end] = True
        logits = model(input_ids=ids, attention_mask=attention).logits[:, :-1]
        logps = -F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        return logps, counted[:, 1:]


class Alive(TrainerCallback):
    """Callback that reports to the peer that this policy is alive, and its step."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self.heartbeat = heartbeat

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the heartbeat."""
        self.heartbeat.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report the step."""
        self.heartbeat.set("training", state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report that no further round will come."""
        self.heartbeat.stop("finished")


TRAINING = get_task("arithmetic").read("train", TaskSource(seed=0)).prompts
HELD_OUT = get_task("arithmetic").read("validation", TaskSource()).prompts
PROMPT_OF = {prompt.id: prompt for prompt in TRAINING}


@torch.no_grad()
def accuracy(model: Any, tokenizer: Any, prompts: Sequence[Prompt]) -> dict[str, float]:
    """Return greedy accuracy by group."""
    solved: dict[str, list[float]] = {}
    model.eval()
    for prompt in prompts:
        ids = torch.tensor([tokenizer(prompt.text)["input_ids"]])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=LONGEST, do_sample=False)
        text = tokenizer.decode(output[0, ids.size(1) :], skip_special_tokens=True)
        solved.setdefault(prompt.group, []).append(boxed_score(text, prompt.answer))
    model.train()
    return {group: sum(scores) / len(scores) for group, scores in sorted(solved.items())}


def train(policy: str, root: Path, steps: int, weight: float) -> None:
    """Train one policy of the pair. The other runs in a separate process, over the same prompts."""
    torch.set_num_threads(1)
    peer = next(name for name in POLICIES if name != policy)
    tokenizer = AutoTokenizer.from_pretrained(path_of(policy))
    model = AutoModelForCausalLM.from_pretrained(path_of(policy))
    before = accuracy(model, tokenizer, HELD_OUT)
    shared = SharedReward(Exchange(root / "exchange", policy, run_id="minimal"), peer, tokenizer, weight)
    trainer = MutualTrainer(
        model=model,
        shared=shared,
        args=GRPOConfig(
            output_dir=str(root / policy),
            max_steps=steps,
            per_device_train_batch_size=PROMPTS * ROLLOUTS,
            num_generations=ROLLOUTS,
            max_completion_length=LONGEST,
            learning_rate=5e-4,
            lr_scheduler_type="cosine",
            loss_type="grpo",
            seed=0,  # same order of prompts for both policies
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            remove_unused_columns=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            logging_strategy="no",
        ),
        train_dataset=Dataset.from_list([{"prompt": p.text, "answer": p.answer, "prompt_id": p.id} for p in TRAINING]),
        processing_class=tokenizer,
        callbacks=[Alive(Heartbeat(root / "exchange", policy))],
    )
    set_seed(policy_seed(0, policy, rank=0))  # its own sampling noise
    trainer.train()
    after = accuracy(trainer.model, tokenizer, HELD_OUT)
    changes = ", ".join(f"{group} {before[group]:.2f} -> {after[group]:.2f}" for group in after)
    print(f"{policy}: held-out accuracy {changes}", flush=True)


def main() -> None:
    """Train both policies side by side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--weight", type=float, default=0.1, help="lambda, the weight of the NLL")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        context = multiprocessing.get_context("spawn")
        arguments = [(policy, Path(directory), args.steps, args.weight) for policy in POLICIES]
        processes = [context.Process(target=train, args=each) for each in arguments]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise SystemExit("a policy failed; its traceback is above")


if __name__ == "__main__":
    main()
