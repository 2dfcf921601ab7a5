"""Runs of a file that a policy confirms before they become its tokens: judged by its reward functions with their turns,
or acted again in its environment, where they must give the same results."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from accelerate.utils import gather_object

from mutualrl.adapter.trl_compat import HookedGRPOTrainer, Inputs, of_rank, reward_completions, total_rewards
from mutualrl.adapter.trl_tools import RecordedTurn, act_again, acting, environment_of, prompt_tokens
from mutualrl.rollouts import Rollouts
from mutualrl.training.run_rows import Run, RunEncoder


def claimed_runs(peers: Mapping[str, Rollouts], names: Collection[str], prompt_ids: Collection[str]) -> list[Run]:
    """Return the distinct runs of some sources on these prompts."""
    runs: dict[Run, None] = {}
    for name in sorted(set(names) & set(peers)):
        peer = peers[name]
        for prompt_id, run in zip(peer.prompt_ids, peer.trajectories(), strict=True):
            if run is not None and not run.is_text and prompt_id in prompt_ids:
                runs[prompt_id, run] = None
    return list(runs)


def earned_rewards(
    peers: Mapping[str, Rollouts], names: Collection[str], rewards: Mapping[Run, float], *, texts: bool
) -> dict[str, list[float]]:
    """Return for some sources the rewards that their rollouts have earned here, in their order: of runs those in
    `rewards`, NaN for others. `texts`: a rollout of one message keeps its reward, which is the learner's own."""
    earned = {}
    for name in sorted(set(names) & set(peers)):
        peer, values = peers[name], []
        for prompt_id, run, reward in zip(peer.prompt_ids, peer.trajectories(), peer.rewards, strict=True):
            if run is None or run.is_text:
                values.append(reward if texts else math.nan)
            else:
                values.append(rewards.get((prompt_id, run), math.nan))
        earned[name] = values
    return earned


def rewards_here(trainer: HookedGRPOTrainer, runs: Sequence[Run], rows: RunEncoder) -> dict[Run, float]:
    """Return the reward of each run (with its prompt's id): of the trainer's reward functions or, with an environment,
    of that environment once the run was acted again in it. NaN where a result is not the run's, or the chat template
    cannot keep it. All ranks must call this with the same runs; each works on equally many, in blocks of the size of a
    generation batch."""
    ranks, rank = trainer.accelerator.num_processes, trainer.accelerator.process_index
    size = trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation
    judge = _scored if trainer.environment_factories is None else _acted_and_scored
    rewards: dict[Run, float] = {}
    for start in range(0, len(runs), size * ranks):
        block = runs[start : start + size * ranks]
        places = range(rank, -(-len(block) // ranks) * ranks, ranks)
        own = judge(trainer, [block[min(place, len(block) - 1)] for place in places], rows)
        by_rank = gather_object([own])
        rewards |= {run: by_rank[place % ranks][place // ranks] for place, run in enumerate(block)}
    return rewards


def _scored(trainer: HookedGRPOTrainer, runs: Sequence[Run], rows: RunEncoder) -> list[float]:
    """Return the rewards of runs by the reward functions, which see their turns."""
    encoded = rows.encode(runs, None)
    ids = [[] if isinstance(each, str) else list(each.ids) for each in encoded]
    inputs = [rows.rows.row(prompt_id) for prompt_id, _ in runs]
    prompts = [row["prompt"] for row in inputs]
    rewards = _rewards(trainer, inputs, prompts, runs, ids)
    return [math.nan if isinstance(each, str) else reward for each, reward in zip(encoded, rewards, strict=True)]


def _acted_and_scored(trainer: HookedGRPOTrainer, runs: Sequence[Run], rows: RunEncoder) -> list[float]:
    """Return the rewards of runs that were acted again in environments of their own."""
    inputs = [rows.rows.row(prompt_id) for prompt_id, _ in runs]
    ids, confirmed = list[list[int]](), list[bool]()
    with acting(trainer, inputs, rows.rows.environments) as prompts:
        for place, (prompt, (prompt_id, run)) in enumerate(zip(prompts, runs, strict=True)):
            found = _acted(trainer, place, rows.turns(prompt_id, prompt, run), prompt, inputs[place])
            ids.append([] if found is None else found)
            confirmed.append(found is not None)
        rewards = _rewards(trainer, inputs, prompts, runs, ids)
    return [reward if acted else math.nan for reward, acted in zip(rewards, confirmed, strict=True)]


def _rewards(
    trainer: HookedGRPOTrainer, inputs: list[Inputs], prompts: list[Any], runs: Sequence[Run], ids: list[list[int]]
) -> list[float]:
    """Return this rank's rewards of whole runs as completions."""
    completions = [run.chats for _, run in runs]
    gathered = total_rewards(trainer, reward_completions(trainer, inputs, prompts, completions, ids))
    rewards: list[float] = of_rank(trainer, gathered.tolist())
    return rewards


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
