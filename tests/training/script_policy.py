"""Run by test_trainer.py, once per policy: a user's own training script."""

from __future__ import annotations

import sys
from pathlib import Path

from mutualrl.training import MutualGRPOTrainer, Sharing
from training_harness import train

policy, peer, model, root = sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4])
sharing = Sharing.over(root / "exchange", policy=policy, peers=[peer], regime="sgt", weight=0.1)
trained = train(MutualGRPOTrainer, model, root / policy, sharing)
print("pairs", sum(row["sgt/pairs"] for row in trained.kept), flush=True)
