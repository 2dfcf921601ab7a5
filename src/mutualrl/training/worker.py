"""One rank of one policy: builds the trainer from the run directory, trains, and writes results.

python -m mutualrl.training.worker --run-dir DIR --policy NAME --parent PID     (started by the agent)
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from mutualrl.console.lines import notify
from mutualrl.engines.model_files import model_digest
from mutualrl.errors import (
    DIED,
    CheckpointDamagedError,
    DiskError,
    MutualRLError,
    RoundAbortedError,
    RunInterruptedError,
    exit_code_of,
)
from mutualrl.process.loading import fast_imports
from mutualrl.process.loopback import bind_stores, keep_store_socket
from mutualrl.process.parent_watch import watch_parent
from mutualrl.process.repeating import Repeater
from mutualrl.process.status import StatusReader
from mutualrl.process.stopping import StopRequest
from mutualrl.process.user_code import exit_now
from mutualrl.recipes import Recipe, stored_recipe
from mutualrl.recipes.agreement import compare_models
from mutualrl.see import Exchange, Heartbeat, WaitTimeouts
from mutualrl.see.bucket import PROBE_SECONDS
from mutualrl.see.checkpoint_copies import CheckpointCopies
from mutualrl.see.liveness import Phase
from mutualrl.see.location import record_store
from mutualrl.see.mirror import BEATS, Mirror
from mutualrl.see.store import remote_store
from mutualrl.sources.section import FrozenSource, ServedSource
from mutualrl.storage.files import is_disk_failure, is_out_of_memory, write_checksummed
from mutualrl.storage.run_info import RunInfo
from mutualrl.storage.rundir import PolicyFiles, RunDirectory
from mutualrl.tiny import resolve_path
from mutualrl.training.member import PlannedMember

if TYPE_CHECKING:
    from trl import GRPOTrainer

    from mutualrl.training.resume import PolicyProgress


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one rank. Exits with the code of the error's kind; the first rank to fail writes the error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--policy", required=True)
    parser.add_argument("--attempt", type=int, default=0)
    parser.add_argument("--parent", required=True, type=int)
    parser.add_argument("--elsewhere", action="store_true", help="this is not the supervisor's machine")
    args = parser.parse_args(arguments)
    watch_parent(args.parent)
    run = RunDirectory(args.run_dir)
    files = run.policy(args.policy)
    stop = StopRequest(run.stop_file)
    stop.install()
    try:
        work(run, args.policy, args.attempt, stop, elsewhere=args.elsewhere)
    except MutualRLError as error:
        if error.__cause__ is not None and not isinstance(error, DiskError):  # e.g. the user's code: log the traceback
            traceback.print_exception(error.__cause__)
        notify(error)
        if not isinstance(error, RunInterruptedError):  # an interrupted rank is not the cause
            _report(files, error.kind, str(error))
        leave(error.exit_code)
    except Exception as error:  # noqa: BLE001  (top level: report the error, then exit)
        traceback.print_exc()
        kind = DiskError.kind if is_disk_failure(error) else DIED
        _report(files, kind, f"{type(error).__name__}: {error}")
        leave(exit_code_of(kind) or 1)


def _report(files: PolicyFiles, kind: str, message: str) -> None:
    """Write the error for the supervisor, unless another rank of this policy already has, or the disk is full."""
    with contextlib.suppress(OSError), files.failure.open("x", encoding="utf-8") as file:
        json.dump({"kind": kind, "message": message}, file)


def work(run: RunDirectory, policy: str, attempt: int, stop: StopRequest, *, elsewhere: bool = False) -> NoReturn:
    """Run one rank: build the prompts and the trainer, validate, train, validate, save. Resume from the newest
    checkpoint, if there is one. `elsewhere`: the supervisor checked the base model on another machine, which may have
    other files."""
    info = run.info()
    recipe = stored_recipe(run)
    rank = int(os.environ.get("RANK", "0"))
    source = next((each for each in recipe.asked_sources if each.name == policy), None)
    if elsewhere and info.models.get(policy):
        model = recipe.models[policy]
        compare_models({policy: model_digest(resolve_path(model.path), model.revision)}, info.models)
    if source is not None or _is_alone(info, policy):
        for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)  # else accelerate wraps the model in DDP over one process
        keep_store_socket()
    exchange = _exchange(run, recipe, info, policy, attempt)
    heartbeat = Heartbeat(run.exchange, policy, rank=rank)
    if rank == 0:
        exchange.claim()
    heartbeat.set(Phase.LOADING)
    heartbeat.start()
    member = PlannedMember(
        run=run, info=info, recipe=recipe, exchange=exchange, heartbeat=heartbeat, stopping=lambda: bool(stop)
    )
    if recipe.bucket is not None and rank == 0:
        heartbeat.mirror_to(exchange.store, recipe.bucket.heartbeat_seconds)
    if source is not None:
        answer_source(member, source)
    mirroring = _mirroring(run, recipe, info, exchange) if rank == 0 else None
    try:
        trainer = _build_and_train(member, stop)
    finally:
        if mirroring is not None:
            mirroring.stop()
    leave_group(trainer, heartbeat)


def answer_source(member: PlannedMember, source: ServedSource | FrozenSource) -> NoReturn:
    """Answer every round as a source, and exit with code 0."""
    with fast_imports():
        from mutualrl.training.source_member import answer_rounds

    if member.recipe.bucket is not None:  # the run's page reads what its first question cost
        Mirror(remote_store(member.recipe.bucket.url, PROBE_SECONDS), member.run, source.name).write()
    answer_rounds(member, source)
    member.heartbeat.stop(Phase.FINISHED)
    leave(0)


def _mirroring(run: RunDirectory, recipe: Recipe, info: RunInfo, exchange: Exchange) -> Repeater | None:
    """Mirror the policy's small files if its exchange is in a bucket, and its checkpoints if the recipe requests it."""
    if recipe.bucket is None:
        return None
    policy, store = exchange.policy, remote_store(recipe.bucket.url, PROBE_SECONDS)

    def is_newest() -> bool:
        return exchange.newest_attempt() <= exchange.attempt

    mirror = Mirror(store, run, policy, is_newest)
    write: Callable[[], object] = mirror.write
    if recipe.bucket.checkpoints:
        model = info.models.get(policy, "")
        write = CheckpointCopies(store, run, policy, mirror, attempt=exchange.attempt, model=model).write
    repeater = Repeater(f"the mirror of {policy!r}", write, BEATS * recipe.bucket.heartbeat_seconds)
    repeater.start()
    return repeater


def _build_and_train(member: PlannedMember, stop: StopRequest) -> GRPOTrainer:
    """Build the trainer, train, and save model and result. Return the trainer, to shut down its process group."""
    run, recipe, policy, info, heartbeat = member.run, member.recipe, member.name, member.info, member.heartbeat
    rank = heartbeat.rank
    with fast_imports():
        from mutualrl.training.adapters import save_model
        from mutualrl.training.build import build_trainer, seed_policy
        from mutualrl.training.callback import MetricsCallback
        from mutualrl.training.resume import PolicyProgress, resume_point
        from mutualrl.training.trackers import validation_logger
        from mutualrl.training.validation import Validator

    bind_stores()
    trainer, sharing, prompts = build_trainer(member)
    validator = Validator(trainer, prompts.validation)
    seed_policy(recipe, policy, rank)
    files = member.files
    if rank == 0:
        write_checksummed(files.prompts, dict(prompts.counts), root=run.root)
    progress = PolicyProgress(member, sharing)
    trainer.checkpointer = progress.checkpointer(recipe, info.run_id)
    checkpoint = resume_point(trainer, progress, files)
    log_validation = [validation_logger(trainer)] if recipe.run.report_to else []
    trainer.add_callback(
        MetricsCallback(files.metrics, validator, recipe.run.validate_every, recipe.run.steps, *log_validation)
    )
    if progress.initial_validation is None:
        heartbeat.set(Phase.VALIDATING)
        progress.initial_validation = validator()
        if rank == 0:
            write_checksummed(files.before, progress.initial_validation.to_json(), root=run.root)
    _train(trainer, progress, checkpoint, stop, heartbeat)
    heartbeat.set(Phase.VALIDATING)
    final = validator()
    heartbeat.set(Phase.SAVING)
    identity = {"run_id": info.run_id, "policy": policy, "step": trainer.state.global_step}
    save_model(trainer, files.model, files.adapter, identity)
    if rank == 0:
        member.finish(progress.result(final, trainer.state.global_step))
    return trainer


def _train(
    trainer: GRPOTrainer, progress: PolicyProgress, checkpoint: str | None, stop: StopRequest, heartbeat: Heartbeat
) -> None:
    """Train to the last step. On a stop request, save a complete checkpoint and raise RunInterruptedError."""
    from mutualrl.training.callback import AlreadyTrainedError, StopCallback

    callback = StopCallback(trainer, lambda: bool(stop))
    trainer.add_callback(callback)
    stop.graceful = True
    progress.began = time.monotonic()
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    except AlreadyTrainedError:
        notify("already trained to the last step")
    except RoundAbortedError:
        heartbeat.set(Phase.SAVING)
        trainer.save_as_of_step_end()
        raise
    except MutualRLError:
        raise
    except Exception as error:
        if checkpoint is None or callback.begun or is_disk_failure(error) or is_out_of_memory(error):
            raise
        raise CheckpointDamagedError(
            f"{checkpoint}: matches its marker, but cannot be loaded ({type(error).__name__}: {error}); remove this "
            "directory to resume from an older checkpoint, or train from the start with --clean or another --run-dir"
        ) from error
    if trainer.state.global_step < trainer.args.max_steps:
        raise RunInterruptedError(f"stopped after step {trainer.state.global_step}; its checkpoint is complete")
    stop.graceful = False
    progress.end()


def _exchange(run: RunDirectory, recipe: Recipe, info: RunInfo, policy: str, attempt: int) -> Exchange:
    alone = bool(info.joined)  # peers join from other machines, possibly later
    section = recipe.run
    dispensable = frozenset(each.name for each in recipe.asked_sources if each.on_source_loss == "continue")
    timeouts = WaitTimeouts(
        section.peer_timeout,
        section.round_timeout,
        section.on_peer_loss,
        late_start=alone,
        dispensable=dispensable,
    )
    status_reader = StatusReader(run.root)
    return Exchange(
        record_store(run), policy, info.run_id, attempt=attempt, timeouts=timeouts, status_reader=status_reader
    )


def leave(code: int) -> NoReturn:
    """Exit this process without interpreter shutdown, which would destroy running communication threads (gloo's, and
    those of DeepSpeed's groups) and occasionally abort a rank (SIGABRT)."""
    sys.stdout.flush()
    sys.stderr.flush()
    exit_now(code)


def leave_group(trainer: GRPOTrainer, heartbeat: Heartbeat | None = None) -> NoReturn:
    """Leave the process group together with all ranks and exit with code 0. The heartbeat continues until then: the
    main rank may still be writing, for longer than the time-out of a silent rank."""
    from mutualrl.training.vllm_generation import shut_down

    shut_down(trainer)
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()
    if heartbeat is not None:
        heartbeat.stop(Phase.FINISHED)
    leave(0)


def _is_alone(info: RunInfo, policy: str) -> bool:
    """Return whether the policy is a single process without a process group."""
    allocation = info.placement[policy]
    return allocation.processes == 1 and not allocation.sharding.states


if __name__ == "__main__":
    main()
