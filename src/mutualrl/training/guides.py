"""With what rollouts begin before they are sampled: a prefix of a peer's success, or turns that are acted again."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from accelerate.utils import gather_object

from mutualrl.adapter.trl_compat import (
    HookedGRPOTrainer,
    Inputs,
    Replay,
    log_value,
    micro_step,
    micro_steps_per_round,
)
from mutualrl.adapter.trl_tools import RecordedTurn, act_again, environment_of, prompt_tokens, reset_again
from mutualrl.records import row_id
from mutualrl.regimes import GuideView
from mutualrl.storage.metrics import REPLAYED
from mutualrl.training.run_rows import RunEncoder
from mutualrl.training.samples import longest_sequence
from mutualrl.training.sharing import Sharing


@dataclass
class Guides:
    """The beginnings of a policy's rollouts. `runs`: encodes peers' runs with tools; None without tools."""

    trainer: HookedGRPOTrainer
    sharing: Sharing
    runs: RunEncoder | None

    def prefixes(self, inputs: Sequence[Inputs]) -> list[tuple[int, ...]] | None:
        """Return the prefix of each of this rank's next rollouts; None if no rank has any."""
        if not self.sharing.regime.needs().guides or self.runs is not None:
            return None
        prefixes = self.sharing.regime.prefixes(self._guide_view(inputs))
        return prefixes if any(gather_object([any(prefixes)])) else None  # all ranks must sample in the same mode

    def replays(self, inputs: Sequence[Inputs], prompts: Sequence[Any]) -> list[Replay] | None:
        """Act the turns again with which each of this rank's next rollouts begins, in the environments of TRL's batch;
        None if no rank has any. `prompts`: as messages, with what the environments observed."""
        runs = self.runs
        if not self.sharing.regime.needs().guides or runs is None:
            return None
        given = self.sharing.regime.replays(self._guide_view(inputs))
        replays = []
        for row, (data, prompt, run) in enumerate(zip(inputs, prompts, given, strict=True)):
            replays.append(self._replay(row, data, prompt, runs.turns(row_id(data), prompt, run)) if run else Replay())
        made = [each for each in replays if each.ids]
        counts = (len(made), sum(each.diverged for each in made), sum(each.too_long for each in replays))
        for metric, ranks in zip(REPLAYED, zip(*gather_object([counts]), strict=True), strict=True):
            log_value(self.trainer, metric.key, float(sum(ranks)))
        return replays if any(gather_object([bool(made)])) else None  # all ranks must sample in the same mode

    def _replay(self, row: int, data: Inputs, prompt: Any, turns: Sequence[RecordedTurn] | None) -> Replay:
        """Act turns again in the environment of a row; None: those that cannot be rendered."""
        trainer = self.trainer
        ids = prompt_tokens(trainer, prompt, environment_of(trainer, data))
        longest = longest_sequence(trainer) - trainer.max_completion_length - len(ids)
        most = min(trainer.max_completion_length, longest)
        if turns is None or sum(len(turn.ids) for turn in turns) >= most:
            return Replay(too_long=True)
        replay = act_again(trainer, row, ids, turns, most)
        if replay.too_long:
            reset_again(trainer, row, data)
        return replay

    def _guide_view(self, inputs: Sequence[Inputs]) -> GuideView:
        """Return the regime's view of this rank's next rollouts."""
        trainer, sharing = self.trainer, self.sharing
        first = trainer.accelerator.process_index * len(inputs)
        return GuideView(
            round=micro_step(trainer) // micro_steps_per_round(trainer),
            learner=sharing.link.policy,
            run_seed=sharing.run_seed,
            prompt_ids=[row_id(example) for example in inputs],
            indices=[(first + row) % trainer.num_generations for row in range(len(inputs))],
            group=trainer.num_generations,
            max_length=trainer.max_completion_length,
            state=copy.deepcopy(sharing.memory.state),
        )
