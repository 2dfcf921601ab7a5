"""A run of users' own scripts, one per policy: its files, so that `report`, `watch` and `runs` read it as any run.

Scripts have no supervisor. The first that begins training writes run.json, and each further one compares what all must
share; each holds a lock while it trains, writes its metrics and rescues, and at its last step its result.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import TrainerCallback
from transformers import TrainerControl as Control
from transformers import TrainerState as State
from transformers import TrainingArguments as Args

from mutualrl.errors import RunDirectoryError, UsageError
from mutualrl.recipes import yaml_file
from mutualrl.recipes.differences import by_dotted_key
from mutualrl.regimes import Regime
from mutualrl.regimes.info import RegimeInfo
from mutualrl.storage.files import create_checksummed, parse_or_none, write_atomic, write_checksummed
from mutualrl.storage.run_info import PolicyResult, RunInfo
from mutualrl.storage.run_logs import LOGS, current_sums, log_paths
from mutualrl.storage.rundir import FORMAT, RunDirectory, command_line, hold, versions

if TYPE_CHECKING:
    from mutualrl.training.trainer import MutualGRPOTrainer


@dataclass(frozen=True, slots=True)
class ScriptRun:
    """What the scripts of one run share: its directory and id, all policies, the regime with its settings, the seed of
    the regime's draws, whether advantages are whitened."""

    run: RunDirectory
    run_id: str
    policies: tuple[str, ...]
    regime: Regime
    seed: int
    whiten: bool = False

    def info(self, steps: int, rewards: Sequence[str]) -> RunInfo:
        """Return the content of run.json. Its recipe has what the scripts share; each has its own model and trainer."""
        recipe = yaml_file.dump(
            {
                "policies": [{"name": name} for name in self.policies],
                "regime": {"name": self.regime.name, **self.regime.model_dump(mode="json")},
                "task": {"name": "script", "reward": list(rewards)},
                "run": {"steps": steps, "seed": self.seed},
                "round": {"whiten_advantages": self.whiten},
            }
        )
        return RunInfo(
            format=FORMAT,
            run_id=self.run_id,
            created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            command=command_line(),
            versions=versions(),
            seed=self.seed,
            regime=self.regime.name,
            regime_info=RegimeInfo.of(type(self.regime)).model_dump(mode="json"),
            recipe=recipe,
            scripts=True,
        )

    def join(self, info: RunInfo) -> None:
        """Write run.json, or compare it with that of the script that began first. Raises UsageError naming the keys
        that differ, RunDirectoryError if the directory is a run of `mutualrl train`."""
        self.run.root.mkdir(parents=True, exist_ok=True)
        if create_checksummed(self.run.run_json, info.to_json(), root=self.run.root):
            write_atomic(self.run.recipe, info.recipe.encode())
            return
        other = self.run.info()
        if not other.scripts:
            raise RunDirectoryError(
                f"{self.run.root} is a run of `mutualrl train`; give Sharing.over a directory of its own"
            )
        where = str(self.run.run_json)
        theirs = by_dotted_key({"run_id": other.run_id, **yaml_file.parse_mapping(other.recipe, where)})
        ours = by_dotted_key({"run_id": info.run_id, **yaml_file.parse_mapping(info.recipe, where)})
        differing = []
        for key in {**theirs, **ours}:
            if theirs.get(key) != ours.get(key):
                differing.append(f"{key}: found {json.dumps(theirs.get(key))}, here {json.dumps(ours.get(key))}")
        if differing:
            raise UsageError(
                f"the scripts of {self.run.root} must agree and differ: {'; '.join(differing)}. Settings of one policy "
                "alone need a recipe (mutualrl train)"
            )


class ScriptRunCallback(TrainerCallback):  # type: ignore[misc]  # TRL and transformers are followed as Any
    """Callback that joins the run when training begins, and writes the policy's result after its last step."""

    def __init__(self, trainer: MutualGRPOTrainer, script: ScriptRun) -> None:
        self._trainer = trainer
        self._script = script
        self._held = ExitStack()
        self._began = 0.0
        self._resumed_from: list[int] = []

    def on_train_begin(self, args: Args, state: State, control: Control, **kwargs: object) -> None:
        """Hold the policy's lock, join the run, and cut the logs back to the step from which training continues."""
        if not state.is_world_process_zero:
            return
        sharing, script = self._trainer.sharing, self._script
        assert sharing is not None
        script.join(script.info(state.max_steps, self._trainer.reward_func_names))
        files = script.run.policy(sharing.link.policy)
        files.root.mkdir(parents=True, exist_ok=True)
        self._held.enter_context(hold(files.lock, f"{script.run.root}, policy {sharing.link.policy!r},"))
        files.result.unlink(missing_ok=True)
        for path in log_paths(files):
            cut_after(path, state.global_step)
        self._resumed_from = [state.global_step] if state.global_step else []
        self._began = time.monotonic()

    def on_train_end(self, args: Args, state: State, control: Control, **kwargs: object) -> None:
        """Write the result if no step is left, and release the lock."""
        if not state.is_world_process_zero:
            return
        sharing = self._trainer.sharing
        assert sharing is not None
        link, files = sharing.link, self._script.run.policy(sharing.link.policy)
        if state.global_step >= state.max_steps:
            result = PolicyResult(
                initial_validation=None,
                validation=None,
                steps=state.global_step,
                rescued_pairs=sum(sharing.uses.values()),
                rescued_prompts=len(sharing.uses),
                train_seconds=time.monotonic() - self._began,
                wait_seconds=link.wait_seconds,
                waited_for_seconds=dict(sorted(link.waited_for.items())),
                lost_peers=link.missing_peers.current(),
                attempts=link.exchange.attempt + 1,
                resumed_from=self._resumed_from,
            )
            write_checksummed(files.result, {**result.to_json(), LOGS: current_sums(files)}, root=self._script.run.root)
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
