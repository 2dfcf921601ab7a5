"""Callback of a run of users' own scripts: each joins the run when training begins, and writes its result."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from transformers import TrainerCallback
from transformers import TrainerControl as Control
from transformers import TrainerState as State
from transformers import TrainingArguments as Args

from mutualrl.regimes.resample import Resample
from mutualrl.storage.files import parse_or_none, write_atomic
from mutualrl.storage.run_logs import log_paths
from mutualrl.storage.rundir import hold
from mutualrl.training.resume import PolicyProgress
from mutualrl.training.script_run import ScriptRun
from mutualrl.training.sharing import Sharing


class ScriptRunCallback(TrainerCallback):  # type: ignore[misc]  # TRL and transformers are followed as Any
    """Callback that joins the run when training begins, and writes the policy's result after its last step."""

    def __init__(
        self,
        sharing: Sharing,
        script: ScriptRun,
        reward_names: Callable[[], Sequence[str]],
        resample: Resample | None = None,
    ) -> None:
        self._sharing = sharing
        self._script = script
        self._reward_names = reward_names
        self._resample = resample
        self._held = ExitStack()
        self._progress: PolicyProgress

    def on_train_begin(self, args: Args, state: State, control: Control, **kwargs: object) -> None:
        """Hold the policy's lock, join the run, and cut the logs back to the step from which training continues."""
        if not state.is_world_process_zero:
            return
        sharing, script = self._sharing, self._script
        served = [source.settle(args.max_completion_length) for source in sharing.threads]
        script.join(script.info(state.max_steps, self._reward_names(), self._resample, served))
        files = script.member.files
        files.root.mkdir(parents=True, exist_ok=True)
        self._held.enter_context(hold(files.lock, f"{script.member.run.root}, policy {script.member.name!r},"))
        files.result.unlink(missing_ok=True)
        for path in log_paths(files):
            cut_after(path, state.global_step)
        self._progress = PolicyProgress(script.member, sharing)
        if state.global_step:
            self._progress.resumed_from = [state.global_step]
        rounds = state.global_step * args.gradient_accumulation_steps
        sharing.link.missing_peers.readmit_all(rounds // (args.steps_per_generation * args.num_iterations))
        for source in sharing.threads:
            source.start()
        self._progress.began = time.monotonic()

    def on_train_end(self, args: Args, state: State, control: Control, **kwargs: object) -> None:
        """Write the result if no step is left, and release the lock."""
        if not state.is_world_process_zero:
            return
        for source in self._sharing.threads:
            source.stop()
        if state.global_step >= state.max_steps:
            self._script.member.finish(self._progress.result(None, state.global_step))
        self._held.close()


def cut_after(path: Path, step: int) -> None:
    """Drop the lines of a log that are of steps after `step`, and a line that a kill has torn."""
    if not path.exists():
        return
    kept = []
    for line in path.read_bytes().splitlines(keepends=True):
        row = parse_or_none(line) if line.endswith(b"\n") else None
        if row is not None and type(row.get("step")) is int and row["step"] <= step:
            kept.append(line)
    write_atomic(path, b"".join(kept))
