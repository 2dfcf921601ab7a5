"""Run by test_trainer.py on two ranks: SGT with a given number of solved prompts, all else failing."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from mutualrl.training.worker import leave_group
from training_harness import BY_ID, Exchange, MutualGRPOTrainer, publish_peer, sharing, train

model, root, solved = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
keys = {"per_device_train_batch_size": 16, "max_steps": 2}


class Failing:
    """The verifier of a task that the learner cannot do: every rollout fails, so every solved prompt is gated."""

    __name__ = "failing"

    def __call__(self, completions: list[str], **_: object) -> list[float]:
        return [0.0] * len(completions)


import training_harness  # noqa: E402

training_harness.boxed_reward = Failing()  # type: ignore[assignment]
probe = train(MutualGRPOTrainer, model, root / "p", sharing(root / "probe", "grpo", publish="full"), **keys)
reader = Exchange(root / "probe", "eve", "script")
rounds = [reader.read("ada", r).column("prompt_id") for r in range(2)]  # type: ignore[union-attr]
if probe.accelerator.is_main_process:
    publish_peer(root / "x", rounds, solved=list(dict.fromkeys(rounds[0]))[:solved] if solved else [])
probe.accelerator.wait_for_everyone()
learner = train(MutualGRPOTrainer, model, root / "a", sharing(root / "x", "sgt"), **keys)
digest = hashlib.sha256(
    b"".join(t.numpy().tobytes() for t in learner.accelerator.unwrap_model(learner.model).state_dict().values())
)
uses = learner.sharing.uses
assert set(uses) <= set(BY_ID)
rank = learner.accelerator.process_index  # a file each: lines of two ranks on one stdout can run into each other
(root / f"rank-{rank}.txt").write_text(f"pairs={int(learner.kept[0]['sgt/pairs'])} {digest.hexdigest()}")
leave_group(learner)
