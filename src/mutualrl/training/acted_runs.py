"""Runs of a file that a policy's environment confirms: acted again in it, they give the same results and a reward."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from accelerate.utils import gather_object

from mutualrl.adapter.trl_compat import HookedGRPOTrainer, Inputs, of_rank, reward_completions, total_rewards
from mutualrl.adapter.trl_tools import RecordedTurn, act_again, acting, environment_of, prompt_tokens
from mutualrl.rollouts import Rollouts
from mutualrl.tasks.trajectories import as_chats, from_json
from mutualrl.training.run_rows import Run, RunEncoder


def claimed_runs(peers: Mapping[str, Rollouts], names: Collection[str], prompt_ids: Collection[str]) -> list[Run]:
    """Return the distinct runs of some sources on these prompts."""
    runs: dict[Run, None] = {}
    for name in sorted(set(names) & set(peers)):
        peer = peers[name]
        for prompt_id, run in zip(peer.prompt_ids, peer.messages(range(len(peer))), strict=True):
            if run is not None and prompt_id in prompt_ids:
                runs[prompt_id, run] = None
    return list(runs)


def rewards_acted_again(trainer: HookedGRPOTrainer, runs: Sequence[Run], rows: RunEncoder) -> dict[Run, float]:
    """Return what the environment gives each run (prompt id, messages) that is acted again in it; NaN where a result is
    not the run's, or the chat template cannot keep it. All ranks must call this with the same runs; each acts a part,
    all equally many."""
    if not runs:
        return {}
    ranks, rank = trainer.accelerator.num_processes, trainer.accelerator.process_index
    own = [runs[min(place, len(runs) - 1)] for place in range(rank, -(-len(runs) // ranks) * ranks, ranks)]
    inputs = [rows.rows.row(prompt_id) for prompt_id, _ in own]
    ids, confirmed = list[list[int]](), list[bool]()
    with acting(trainer, inputs, rows.rows.environments) as prompts:
        for place, (prompt, (prompt_id, run)) in enumerate(zip(prompts, own, strict=True)):
            found = _acted(trainer, place, rows.turns(prompt_id, prompt, run), prompt, inputs[place])
            ids.append([] if found is None else found)
            confirmed.append(found is not None)
        completions = [as_chats(from_json(run)) for _, run in own]
        gathered = total_rewards(trainer, reward_completions(trainer, inputs, prompts, completions, ids))
    rewards = [
        reward if acted else math.nan
        for reward, acted in zip(of_rank(trainer, gathered.tolist()), confirmed, strict=True)
    ]
    by_rank = gather_object([rewards])
    return {run: by_rank[place % ranks][place // ranks] for place, run in enumerate(runs)}


def _acted(
    trainer: HookedGRPOTrainer, place: int, turns: Sequence[RecordedTurn] | None, prompt: Any, data: Inputs
) -> list[int] | None:
    """Return the token ids of a run acted again in the environment at `place`; None if it is not what it says."""
    if not turns or turns[-1].results or not all(turn.results for turn in turns[:-1]):
        return None
    ids = prompt_tokens(trainer, prompt, environment_of(trainer, data))
    if len(turns) == 1:
        return turns[0].ids
    replay = act_again(trainer, place, ids, turns[:-1], trainer.max_completion_length)
    return None if replay.too_long or replay.diverged else [*replay.ids, *turns[-1].ids]
