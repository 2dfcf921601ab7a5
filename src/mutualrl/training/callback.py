"""Trainer callbacks: heartbeat, graceful stop, metrics."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback
from transformers import TrainerControl as Control
from transformers import TrainerState as State
from transformers import TrainingArguments as Args

from mutualrl.see.liveness import Phase
from mutualrl.storage.files import JsonObject
from mutualrl.storage.run_info import Validation
from mutualrl.training.background import Background
from mutualrl.training.peers import PeerLink
from mutualrl.training.random_state import StepEnd, random_state

if TYPE_CHECKING:
    from trl import GRPOTrainer


class SharingCallback(TrainerCallback):  # type: ignore[misc]  # TRL and transformers are followed as Any
    """Callback that publishes this policy's liveness to its peers: first heartbeat, step, end of training. At the end
    of a step it waits for what is written in the background."""

    def __init__(self, link: PeerLink, background: Background) -> None:
        self._link = link
        self._background = background

    def on_train_begin(self, args: Args, state: State, control: Control, **kwargs: object) -> None:
        """Start the heartbeat, unless it is already running."""
        if self._link.heartbeat is not None and state.is_world_process_zero:
            self._link.set_phase(Phase.TRAINING, state.global_step)
            self._link.heartbeat.start()

    def on_step_end(self, args: Args, state: State, control: Control, **kwargs: object) -> None:
        """Publish the step."""
        self._background.finish()
        self._link.set_phase(Phase.TRAINING, state.global_step)

    def on_train_end(self, args: Args, state: State, control: Control, **kwargs: object) -> None:
        """Publish that no further round follows."""
        if state.is_world_process_zero:
            self._link.set_phase(Phase.TRAINED, state.global_step)


class AlreadyTrainedError(Exception):
    """Raised if the loaded checkpoint is of the last step; transformers would continue without a step to train."""


class StopCallback(TrainerCallback):  # type: ignore[misc]  # TRL and transformers are followed as Any
    """Callback that records generator states and the token count at the end of each step, and stops training with a
    checkpoint once the main rank receives a stop request. `begun`: a step has begun, so that the checkpoint, if any, is
    loaded.

    All ranks follow the main rank, so that they stop after the same step.
    """

    def __init__(self, trainer: GRPOTrainer, stopping: Callable[[], bool]) -> None:
        self._trainer = trainer
        self._stopping = stopping
        self.begun = False

    def on_step_begin(self, args: Args, state: State, control: Control, **kwargs: object) -> None:
        """Record that a step has begun."""
        self.begun = True

    def on_train_begin(self, args: Args, state: State, control: Control, **kwargs: object) -> None:
        """Record the generator states. Raises AlreadyTrainedError if the loaded checkpoint is of the last step."""
        self._trainer.at_step_end = StepEnd(random_state(), state.num_input_tokens_seen)
        if state.global_step >= state.max_steps:
            raise AlreadyTrainedError

    def on_step_end(self, args: Args, state: State, control: Control, **kwargs: object) -> None:
        """Record the generator states; stop if requested."""
        self._trainer.at_step_end = StepEnd(random_state(), state.num_input_tokens_seen)
        if broadcast_object_list([self._stopping()], from_process=0)[0]:
            control.should_save = control.should_training_stop = True


class MetricsCallback(TrainerCallback):  # type: ignore[misc]  # TRL and transformers are followed as Any
    """Callback that writes one JSON line per logged step to `metrics.jsonl`, flushed at the end of the step, and runs
    greedy validation every N steps; never without `validate`.

    A non-finite value is written as null: JSON has no NaN. On a GPU the line has the peak memory allocated so far on
    the first rank. `log_validation` is called with every validation.
    """

    def __init__(
        self,
        path: Path,
        validate: Callable[[], Validation] | None = None,
        every: int = 0,
        steps: int = 0,
        log_validation: Callable[[Validation], None] = lambda validation: None,
    ) -> None:
        self._log_validation = log_validation
        self._path = path
        self._validate = validate
        self._every = every
        self._steps = steps
        self._validation: Validation | None = None

    def on_step_end(self, args: Args, state: State, control: Control, **kwargs: object) -> None:
        """Validate every N steps, except after the last step: the final validation is run elsewhere."""
        step = state.global_step
        if self._validate is not None and self._every and step % self._every == 0 and step < self._steps:
            self._validation = self._validate()
            self._log_validation(self._validation)

    def on_log(
        self, args: Args, state: State, control: Control, logs: JsonObject | None = None, **kwargs: object
    ) -> None:
        """Append the line of the step."""
        if not state.is_world_process_zero or not logs or "loss" not in logs:
            return
        line: JsonObject = {"step": state.global_step}
        line |= {key: _finite(value) for key, value in logs.items()}
        if torch.cuda.is_available():
            line["memory/peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        if self._validation is not None:
            line["validation"] = self._validation.model_dump(mode="json", exclude={"solved"})
            self._validation = None
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
