"""One rank of one policy: builds the trainer from the run directory, trains, and reports.

python -m mutualrl.training.worker --run-dir DIR --policy NAME --parent PID     (started by the agent)
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from mutualrl.errors import MutualRLError, RunInterruptedError
from mutualrl.files import write_json
from mutualrl.recipes import load
from mutualrl.rundir import PolicyFiles, RunDirectory
from mutualrl.see import Heartbeat
from mutualrl.watch import watch_parent


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one rank. Ends with the exit code of the error's kind; the first rank that fails says why."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--policy", required=True)
    parser.add_argument("--parent", required=True, type=int)
    given = parser.parse_args(arguments)
    watch_parent(given.parent)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _on_signal)
    run = RunDirectory(given.run_dir)
    files = run.policy(given.policy)
    try:
        work(run, given.policy)
    except MutualRLError as error:
        print(f"mutualrl: {error}", file=sys.stderr)
        if not isinstance(error, RunInterruptedError):  # who was told to stop is not the cause of anything
            _report(files, error.kind, str(error))
        sys.exit(error.exit_code)
    except Exception as error:  # noqa: BLE001  (the last line of the process: reported, then exit 1)
        traceback.print_exc()
        _report(files, "died", f"{type(error).__name__}: {error}")
        sys.exit(1)


def _report(files: PolicyFiles, kind: str, message: str) -> None:
    """Leave the error for the supervisor, unless another rank of this policy was first."""
    try:
        with files.failure.open("x", encoding="utf-8") as file:
            json.dump({"kind": kind, "message": message}, file)
    except FileExistsError:
        return


def _on_signal(number: int, frame: FrameType | None) -> None:
    raise RunInterruptedError(f"stopped by {signal.Signals(number).name}")


def work(run: RunDirectory, policy: str) -> None:
    """The life of a rank: prompts, trainer, validation, training, validation, model, result."""
    info = run.info()
    recipe = load(run.recipe)
    rank = int(os.environ.get("RANK", "0"))
    if _is_alone(info, policy):
        for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)  # else accelerate wraps the model in DDP over one process
    heartbeat = Heartbeat(run.exchange / policy, policy)
    if rank == 0:
        heartbeat.set("loading")
        heartbeat.start()

    from mutualrl.training.build import build_trainer, seed_policy
    from mutualrl.training.callback import MetricsCallback
    from mutualrl.training.validation import Validator

    trainer, sharing, validation = build_trainer(run, recipe, policy, info, heartbeat)
    validator = Validator(trainer, validation)
    seed_policy(recipe, policy, rank)
    files = run.policy(policy)
    trainer.add_callback(MetricsCallback(files.metrics, validator, recipe.run.validate_every, recipe.run.steps))
    heartbeat.set("validating")
    initial = validator()
    began = time.monotonic()
    trainer.train()
    train_seconds = time.monotonic() - began
    heartbeat.set("validating")
    final = validator()
    heartbeat.set("saving")
    save_model(trainer, files.model, files.adapter)
    if rank == 0:
        write_json(
            files.result,
            {
                "initial_validation": initial,
                "validation": final,
                "steps": trainer.state.global_step,
                "rescued_pairs": sum(sharing.uses.values()),
                "rescued_prompts": len(sharing.uses),
                "train_seconds": train_seconds,
                "wait_seconds": sharing.wait_seconds,
            },
        )
        heartbeat.stop("finished")
    leave_group(trainer)


def leave_group(trainer: Any) -> NoReturn:
    """Leave the process group together and end this process, with exit code 0. Everything is written by now.

    The interpreter's own end would destroy communication threads that may still run (gloo's, and those of the groups
    that DeepSpeed makes), which aborts a finished rank now and then (SIGABRT).
    """
    from mutualrl.training.vllm_engine import shut_down

    trainer.accelerator.wait_for_everyone()
    shut_down(trainer)
    trainer.accelerator.end_training()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def save_model(trainer: Any, directory: Path, adapter: Path) -> None:
    """Save what transformers needs to load the model: safetensors, configurations, tokenizer. A policy that trained an
    adapter gets it merged there, and alone in `adapter`.

    (`Trainer.save_model` would add its arguments as a pickle; run.json and recipe.yaml say it all.)
    """
    from mutualrl.training.adapters import save_adapter

    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if trainer.accelerator.is_main_process:
        model = trainer.accelerator.unwrap_model(trainer.model)
        if hasattr(model, "peft_config"):
            save_adapter(trainer, state, directory, adapter)
        else:
            model.save_pretrained(directory, state_dict=state)
        trainer.processing_class.save_pretrained(directory)


def _is_alone(info: dict[str, Any], policy: str) -> bool:
    """Whether the policy is one process that needs no process group."""
    seat = info["placement"][policy]
    return bool(seat["processes"] == 1 and seat["strategy"] == "ddp")


if __name__ == "__main__":
    main()
