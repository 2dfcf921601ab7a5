"""Run by test_agent_ranks.py on several ranks: one training with tools.

python -m torch.distributed.run ... agent_rank_script.py OUT EXCHANGE ROWS_PER_RANK REGIME
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from agent_harness import Scripted, run, trainer_of, two_calls
from safetensors.torch import save_file

from mutualrl.training.worker import leave_group


class TwoCalls(Scripted):
    script = staticmethod(two_calls)


class OfResults(Scripted):
    """Answers with what a replayed call returned, else wrongly."""

    script = staticmethod(lambda prompt, results: f"\\boxed{{{results[-1]}}}" if results else "\\boxed{0}")


def main(out: Path, exchange: Path, rows: int, regime: str) -> None:
    """Train on all prompts, with `rows` per rank; write the logs, and the weights of the first rank."""
    keys = {"per_device_train_batch_size": rows, "max_steps": 2}
    kind, settings = (TwoCalls, {"samples": 3}) if regime == "hinted" else (OfResults, {})
    trainer = run(trainer_of(out / "trainer", exchange, kind, keys=keys, regime=regime, **settings))
    if trainer.accelerator.is_main_process:
        (out / "logs.json").write_text(json.dumps(trainer.logs))
        save_file(
            {name: value.detach() for name, value in trainer.model.named_parameters()}, out / "weights.safetensors"
        )
    leave_group(trainer)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
