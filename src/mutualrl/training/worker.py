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
from typing import Any

from mutualrl.errors import DataError, ModelError, MutualRLError, RunInterruptedError
from mutualrl.files import write_json
from mutualrl.recipes import load
from mutualrl.recipes.schema import Recipe
from mutualrl.rundir import PolicyFiles, RunDirectory
from mutualrl.see import Exchange, Heartbeat, Patience
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

    from mutualrl.training.validation import Validator

    trainer, validation = build_trainer(run, recipe, policy, info, heartbeat)
    validator = Validator(trainer, validation)
    seed_policy(recipe, policy, rank)
    from mutualrl.training.callback import MetricsCallback

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
    save_model(trainer, files.model)
    if rank == 0:
        sharing = trainer.sharing
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


def save_model(trainer: Any, directory: Path) -> None:
    """Save what transformers needs to load the model: safetensors, configurations, tokenizer.

    (`Trainer.save_model` would add its arguments as a pickle; run.json and recipe.yaml say it all.)
    """
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if trainer.accelerator.is_main_process:
        trainer.accelerator.unwrap_model(trainer.model).save_pretrained(directory, state_dict=state)
        trainer.processing_class.save_pretrained(directory)


def _is_alone(info: dict[str, Any], policy: str) -> bool:
    """Whether the policy is one process that needs no process group."""
    seat = info["placement"][policy]
    return bool(seat["processes"] == 1 and seat["strategy"] == "ddp")


def seed_policy(recipe: Recipe, policy: str, rank: int) -> None:
    """Give this policy its own sampling noise. Must follow the trainer's construction, which seeds all alike."""
    from transformers import set_seed

    from mutualrl.training.plan import policy_seed

    trainer = recipe.trainer_settings(policy)
    if trainer.get("use_vllm"):  # ranks that share a vLLM engine must sample the same tokens
        rank //= int(trainer.get("vllm_tensor_parallel_size", 1))
    set_seed(policy_seed(recipe.run.seed, policy, rank))


def build_trainer(
    run: RunDirectory, recipe: Recipe, policy: str, info: dict[str, Any], heartbeat: Heartbeat
) -> tuple[Any, list[Any]]:
    """The trainer of one policy and its validation prompts, after the batch plan was found to be the run's."""
    import torch
    from safetensors import SafetensorError
    from transformers import PrinterCallback
    from transformers.utils import logging

    from mutualrl.recipes.batch import plan_batch
    from mutualrl.tasks.boxed import boxed_reward
    from mutualrl.training.config import grpo_config
    from mutualrl.training.data import as_dataset, within_limit
    from mutualrl.training.models import load_tokenizers, model_path
    from mutualrl.training.plan import compare, fingerprint, load_prompts, require_enough
    from mutualrl.training.sharing import Sharing
    from mutualrl.training.trainer import MutualGRPOTrainer

    logging.disable_progress_bar()
    seat = info["placement"][policy]
    batch = plan_batch(recipe, policy, seat["processes"])
    prompts = load_prompts(recipe, "train")
    compare(policy, fingerprint(recipe, batch, prompts), info["fingerprint"])
    tokenizers = load_tokenizers(recipe)
    limit = recipe.task.max_prompt_tokens
    readers = [
        (tokenizer, recipe.trainer_settings(name).get("chat_template_kwargs") or {})
        for name, tokenizer in tokenizers.items()
    ]
    prompts = within_limit(prompts, readers, limit)
    validation = within_limit(load_prompts(recipe, "validation"), readers, limit)
    require_enough(prompts, batch)
    if not validation:
        raise DataError(f"no validation prompt is within task.max_prompt_tokens ({limit}) for every policy")
    cpu = not torch.cuda.is_available() or not seat["gpus"]
    args = grpo_config(recipe, policy, batch, seat["strategy"], run.policy(policy).root / "trainer", cpu=cpu)
    patience = Patience(recipe.run.peer_timeout, recipe.run.round_timeout)
    sharing = Sharing(
        exchange=Exchange(run.exchange, policy, info["run_id"], patience=patience),
        peers=[p.name for p in recipe.policies if p.name != policy],
        regime=recipe.regime_name,
        settings=recipe.regime_settings(policy),
        run_seed=recipe.run.seed,
        max_length=args.max_completion_length,
        publish=recipe.run.publish,
        heartbeat=heartbeat,
    )
    model = model_path(recipe.policy(policy))
    try:
        trainer = MutualGRPOTrainer(
            model=model,
            reward_funcs=boxed_reward,
            args=args,
            train_dataset=as_dataset(prompts, tokenizers[policy]),
            processing_class=tokenizers[policy],
            sharing=sharing,
        )
    except (OSError, SafetensorError) as error:
        raise ModelError(f"policy {policy!r}: the model {model!r} cannot be loaded: {error}") from error
    trainer.remove_callback(PrinterCallback)  # metrics.jsonl has every step
    return trainer, validation


if __name__ == "__main__":
    main()
