"""Generation of a model's completions on a task, part by part; parts in the store are reused."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mutualrl.engines.base import Engine
from mutualrl.engines.sampling import Sampling
from mutualrl.errors import FileDamagedError
from mutualrl.evaluation.completion_store import CompletionPart, Store
from mutualrl.evaluation.plan import EvalTask
from mutualrl.records import Completion, Prompt
from mutualrl.seeds import seed_of
from mutualrl.tasks.base import Row
from mutualrl.tasks.boxed import content_score, last_boxed
from mutualrl.tasks.rewarding import BOXED, rewards_of
from mutualrl.trajectory import NO_TEXT, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mutualrl.adapter.agent_engine import AgentEngine

#: completions per part: the most that a kill loses. vLLM batches on its own and needs many.
PART = {"transformers": 512, "vllm": 4096}


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Prompts, by index in the task, that are generated together with room for `new_tokens`; 0: no room."""

    number: int
    places: tuple[int, ...]
    new_tokens: int


def chunks(lengths: Sequence[int], context: int, max_new_tokens: int, size: int) -> list[PromptChunk]:
    """Split the prompts of a task into parts of at most `size`, sorted by length to limit padding.

    A prompt that leaves less room in the context than `max_new_tokens` shares a part only with others of the same room,
    so no completion exceeds the context. Nothing is generated for a prompt that leaves no room.
    """
    rooms: dict[int, list[int]] = {}
    for place in sorted(range(len(lengths)), key=lambda place: (lengths[place], place)):
        rooms.setdefault(max(0, min(max_new_tokens, context - lengths[place])), []).append(place)
    results: list[PromptChunk] = []
    for room in sorted(rooms, reverse=True):
        places = rooms[room]
        for start in range(0, len(places), size):
            results.append(PromptChunk(len(results), tuple(places[start : start + size]), room))
    return results


def part_seed(seed: int, task: str, number: int) -> int:
    """Return the sampling seed of a part, which does not depend on the parts that are already stored."""
    return seed_of(seed, task, number)


@dataclass(frozen=True)
class AnsweringModel:
    """A model that is evaluated: its name and identity (`completion_store.identity`), its tokenizer, how it is sampled,
    and where its completions are stored. `engine`: returns it loaded; called only if a part has to be generated.
    `agent`: returns it with a task's tools."""

    name: str
    digest: str
    tokenizer: PreTrainedTokenizerBase
    engine: Callable[[], Engine]
    sampling: Sampling
    store: Store
    agent: Callable[[EvalTask], AgentEngine] | None = None

    def rows(
        self, task: EvalTask, ids: Sequence[list[int]], cut: Sequence[PromptChunk], on_done: Callable[[int], None]
    ) -> list[Row]:
        """Return the rows of all completions of a task, in the order of prompts, then of samples. `ids`: the prompts'
        tokens; `cut`: the parts.

        Raises FileDamagedError for a stored part that was changed.
        """
        by_place: dict[int, list[Row]] = {}
        samples = self.sampling.samples
        for chunk in cut:
            part = self._part(task, chunk)
            rows = self.store.get(part)
            if rows is None:
                rows = list(self._generated(task, ids, chunk))
                self.store.put(part, rows)
            else:
                rows = self._rescored(rows, part, task, chunk)
            for place, start in zip(chunk.places, range(0, len(rows), samples), strict=True):
                by_place[place] = rows[start : start + samples]
            on_done(len(chunk.places))
        return [row for place in range(len(task.prompts)) for row in by_place[place]]

    def _part(self, task: EvalTask, chunk: PromptChunk) -> CompletionPart:
        ids = "\n".join(task.prompts[place].id for place in chunk.places)
        digest = hashlib.sha256(ids.encode("utf-8", "surrogatepass")).hexdigest()
        return CompletionPart(
            self.name, self.digest, task.name, chunk.number, digest, len(chunk.places) * self.sampling.samples
        )

    def _rescored(self, rows: list[Row], part: CompletionPart, task: EvalTask, chunk: PromptChunk) -> list[Row]:
        """Return stored rows with their rewards recomputed. Raises FileDamagedError where an exact-match reward differs
        from the stored one: a text or a reward was changed. (Custom reward functions may return another value.)"""
        samples = self.sampling.samples
        prompts = [task.prompts[place] for place in chunk.places for _ in range(samples)]
        where = f"part {part.number} of task {task.name!r}, model {part.model!r}"
        answered = []
        for number, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
            if (row["prompt_id"], row["rollout"]) != (prompt.id, number % samples):
                raise FileDamagedError(
                    f"{where}: row {number} is of prompt {row['prompt_id']!r}, expected {prompt.id!r}"
                )
            written = Trajectory.of_stored(row["y_text"], row["messages"] or None) or NO_TEXT
            answered.append((prompt, Completion(tuple(row["token_ids"] or ()), written, row["ended"])))
        if task.turns is not None and task.turns.environment is not None:
            return rows  # judged by what the environment was, which is gone
        rewards = rewards_of(task.rewards, task.reward_weights, answered, self.tokenizer, task.step_timeout)
        if task.rewards == BOXED and (wrong := [n for n, row in enumerate(rows) if row["reward"] != rewards[n]]):
            raise FileDamagedError(
                f"{where}: row {wrong[0]} has reward {rows[wrong[0]]['reward']}, expected {rewards[wrong[0]]} for its "
                "text"
            )
        return [{**row, "reward": reward} for row, reward in zip(rows, rewards, strict=True)]

    def _acted(self, task: EvalTask, chunk: PromptChunk) -> Iterator[Row]:
        """Yield the rows of runs with tools."""
        assert self.agent is not None
        seed = part_seed(self.sampling.seed, task.name, chunk.number)
        sampling = replace(self.sampling, max_new_tokens=chunk.new_tokens, seed=seed)
        prompts = [task.prompts[place] for place in chunk.places]
        for prompt, group in zip(prompts, self.agent(task).run(prompts, sampling), strict=True):
            for number, run in enumerate(group):
                yield {
                    **_row(self.name, task.name, prompt, number, run.completion),
                    "tokens": run.sampled,
                    "reward": run.reward,
                    "no_box": last_boxed(run.completion.text) is None if task.rewards == BOXED else None,
                    "too_long": False,
                }

    def _generated(self, task: EvalTask, ids: Sequence[list[int]], chunk: PromptChunk) -> Iterator[Row]:
        if task.turns is not None and chunk.new_tokens:
            yield from self._acted(task, chunk)
            return
        sampling = self.sampling
        chosen = [ids[place] for place in chunk.places]
        if chunk.new_tokens:
            seed = part_seed(sampling.seed, task.name, chunk.number)
            groups = self.engine().generate_ids(chosen, replace(sampling, max_new_tokens=chunk.new_tokens, seed=seed))
        else:
            groups = [[Completion((), NO_TEXT, False)] * sampling.samples for _ in chosen]
        answered = [
            (task.prompts[place], completion)
            for place, group in zip(chunk.places, groups, strict=True)
            for completion in group
        ]
        boxes = [last_boxed(completion.text) for _, completion in answered]
        if task.rewards == BOXED:
            rewards = [content_score(box, prompt.answer) for box, (prompt, _) in zip(boxes, answered, strict=True)]
        else:
            rewards = rewards_of(task.rewards, task.reward_weights, answered, self.tokenizer, task.step_timeout)
        for number, (prompt, completion) in enumerate(answered):
            yield {
                **_row(self.name, task.name, prompt, number % sampling.samples, completion),
                "reward": rewards[number],
                "no_box": boxes[number] is None if task.rewards == BOXED else None,
                "too_long": not chunk.new_tokens,
            }


def _row(model: str, task: str, prompt: Prompt, number: int, completion: Completion) -> dict[str, object]:
    return {
        "policy": model,
        "round": 0,
        "task": task,
        "group": prompt.group,
        "prompt_id": prompt.id,
        "rollout": number,
        "ended": completion.ended,
        "tokens": len(completion.token_ids),
        "x_text": prompt.text,
        "y_text": completion.text,
        "answer": prompt.answer,
        "token_ids": list(completion.token_ids),
        "messages": completion.trajectory.stored,
    }
