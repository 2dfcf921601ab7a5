"""Load the rollouts of a plan: sampled from a pool, read from a run's exchange, or read from files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

from mutualrl.console.display import cell
from mutualrl.console.lines import notify
from mutualrl.diagnostics.model_pool import ModelPool
from mutualrl.diagnostics.plan import DiagnosticPlan, Recorded, SampledPool
from mutualrl.diagnostics.rollout_reader import TYPES, read_rollouts
from mutualrl.diagnostics.rollouts import ModelRollouts, to_arrays
from mutualrl.engines.choice import chosen_engine, load_engine
from mutualrl.engines.sampling import Sampling
from mutualrl.errors import DataError, MutualRLError, UsageError
from mutualrl.process.loading import fast_imports
from mutualrl.recipes.published import missing_rounds
from mutualrl.records import Completion, Prompt, columns_of
from mutualrl.see.inspection import Reader, tables
from mutualrl.see.location import record_store
from mutualrl.seeds import policy_seed
from mutualrl.storage.files import write_atomic
from mutualrl.tasks import TASKS, get_task, load_prompts
from mutualrl.tasks.prompting import Content, prompt_ids
from mutualrl.tasks.rewarding import rewards_of
from mutualrl.tasks.rewards import load_rewards, require_columns
from mutualrl.tasks.turns import template_of
from mutualrl.tiny import resolve_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mutualrl.adapter.agent_engine import AgentRun


class ProgressBars:
    """Progress bars; without a terminal, a line at the start and after each quarter."""

    def __init__(self, console: Console) -> None:
        self._console = console
        columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
        self.progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)

    def track(self, label: str, total: int) -> Callable[[int], None]:
        """Add a bar; return a callback that takes the number of newly completed items."""
        if not self._console.is_terminal:
            return self._lines(label, total)
        bar = self.progress.add_task(cell(label), total=total or None)
        return lambda done: self.progress.advance(bar, done)

    def _lines(self, label: str, total: int) -> Callable[[int], None]:
        """Return a callback that prints a line after each quarter."""
        done = quarters = 0

        def advance(completed: int) -> None:
            nonlocal done, quarters
            done += completed
            if total and 4 * done // total > quarters:
                quarters = 4 * done // total
                notify(f"{label}: {done} of {total}")

        notify(f"{label}: started" + (f", {total} to do" if total else ""))
        return advance


class Loaded(NamedTuple):
    """Rollouts of a plan as a table, the contents of their prompts by id, the number of prompts left out, and notes
    on missing rounds. Of models that were sampled: their tokenizers and context lengths."""

    table: pa.Table
    contents: Mapping[str, Content]
    left_out: int = 0
    notes: Sequence[str] = ()
    tokenizers: Mapping[str, PreTrainedTokenizerBase] = {}
    contexts: Mapping[str, int] = {}


def load_table(plan: DiagnosticPlan, bars: ProgressBars) -> Loaded | None:
    """Return the models' rollouts; None for a request with recorded texts only. Raises DataError, UsageError,
    ModelError, or ExchangeDamagedError."""
    if plan.sampled is not None:
        return _sample(plan, plan.sampled, bars)
    if plan.recorded is not None:
        return _from_run(plan.recorded, plan.origin)
    return Loaded(read_rollouts(plan.files, plan.request.reward), {}) if plan.files else None


def arranged(loaded: Loaded, plan: DiagnosticPlan, bars: ProgressBars) -> tuple[ModelRollouts, ModelPool]:
    """Return the rollouts as arrays, and the models behind them. Raises UsageError for fewer than two models."""
    more = ": add a second file, or a column 'policy' with several names" if plan.files else ""
    rollouts = to_arrays(loaded.table, plan.origin, loaded.contents, more=more)
    rollouts = replace(rollouts, left_out=rollouts.left_out + loaded.left_out)
    if unknown := sorted({text.partition("=")[0] for text in plan.request.models} - set(rollouts.policies)):
        raise UsageError(
            f"--model {unknown[0]}=...: no such policy in the rollouts; expected one of {', '.join(rollouts.policies)}"
        )
    ends = {name: end for name, end in plan.ends.items() if name in rollouts.policies}
    return rollouts, ModelPool(rollouts, ends, plan.templates, bars.track)


def _from_run(recorded: Recorded, origin: str) -> Loaded:
    run, policies = recorded.run, [p.name for p in recorded.recipe.policies]
    rounds = list(tables(record_store(run), run.info().run_id, policies, recorded.rounds))
    writers = {str(table["policy"][0]) for table in rounds if len(table)}
    if missing := [name for name in policies if name not in writers]:
        requested = "" if recorded.rounds is None else " in these rounds"
        raise UsageError(
            f"the exchange of {origin} has no records of {', '.join(missing)}{requested}; regimes that read no peer "
            "publish nothing: train with --exchange full, or sample the models with --pool"
        )
    reader = Reader(record_store(run), run.info().run_id)
    absent = missing_rounds(run, {name: reader.rounds(name) for name in policies}) if recorded.rounds is None else []
    if absent:
        raise DataError(
            f"{origin}: {'; '.join(absent)}; restore them, or name the rounds to read (--rounds FIRST:LAST)"
        )
    rounds, guided = own_rollouts(rounds)
    notes = []
    if guided:
        notes.append(f"{guided:,} rollouts are left out that began with a peer's words or turns (regime guided)")
        notify(notes[-1])
    for name in policies if recorded.rounds is None else ():
        if (first := min(reader.rounds(name))) > 0:
            notes.append(f"policy {name}: rounds before {first} are missing (pruned, or lost)")
            notify(notes[-1])
    return Loaded(pa.concat_tables(rounds), _TaskPrompts(recorded), notes=notes)


def own_rollouts(rounds: Sequence[pa.Table]) -> tuple[list[pa.Table], int]:
    """Return tables of rollouts without those that began with given tokens, which say nothing of what a policy solves
    itself; and their number."""
    own = [table.filter(pc.equal(table["prefix"], 0)) for table in rounds]
    return own, sum(map(len, rounds)) - sum(map(len, own))


class _TaskPrompts(dict[str, Content]):
    """Prompts of a run's task by id, loaded on first use."""

    def __init__(self, recorded: Recorded) -> None:
        super().__init__()
        self._recorded: Recorded | None = recorded

    def get(self, key: str, default: Any = None) -> Any:  # as of a dict
        """Return the content of a prompt; the first call loads them all."""
        if self._recorded is not None:
            recipe, self._recorded = self._recorded.recipe, None
            if recipe.task.name not in TASKS:  # a run is data: reading it must not run code that it names
                raise DataError(
                    f"the run's prompts come from {recipe.task.name}, code that is not imported from a run; record "
                    "them with --exchange full, or sample again with --pool and --task"
                )
            try:
                prompts = load_prompts(get_task(recipe.task.name), "train", recipe.task.source(recipe.run.seed))
            except MutualRLError as error:
                raise DataError(f"the run's prompts cannot be loaded again: {error}") from error
            self.update({prompt.id: prompt.content for prompt in prompts})
        return super().get(key, default)


def _sample(plan: DiagnosticPlan, sampled: SampledPool, bars: ProgressBars) -> Loaded:
    """Sample all models on the prompts. A prompt that leaves any of them no room for a response is dropped for all."""
    with fast_imports():
        from mutualrl.engines.transformers_engine import context_of, load_tokenizer

    functions = load_rewards(sampled.recipe.task.reward)  # refused before any model is sampled
    require_columns(functions, columns_of(sampled.prompts))
    names, new_tokens = [p.name for p in sampled.recipe.policies], sampled.sampling.max_new_tokens
    paths = {name: resolve_path(plan.ends[name].path) for name in names}
    ids: dict[str, list[list[int]]] = {}
    tokenizers: dict[str, PreTrainedTokenizerBase] = {}
    contexts: dict[str, int] = {}
    fits = np.ones(len(sampled.prompts), dtype=bool)
    for name in names:
        revision, trust = plan.ends[name].revision, plan.ends[name].trust_remote_code
        tokenizers[name] = load_tokenizer(paths[name], revision=revision, trust_remote_code=trust)
        template = {**(plan.templates.get(name) or {}), **template_of(plan.turns, sampled.recipe.task.reward)}
        ids[name] = prompt_ids([p.content for p in sampled.prompts], tokenizers[name], template)
        contexts[name] = context_of(paths[name], revision=revision, trust_remote_code=trust)
        longest = min(contexts[name] - new_tokens, sampled.recipe.task.max_prompt_tokens)  # as in training
        fits &= np.array([0 < len(row) <= longest for row in ids[name]], dtype=bool)
    fitting = np.flatnonzero(fits).tolist()
    if not fitting:
        shortest, most = max(min(map(len, ids[name])) for name in names), sampled.recipe.task.max_prompt_tokens
        longest = max(max(map(len, ids[name])) for name in names)
        room = min(contexts.values()) - (longest if min(contexts.values()) > longest else shortest)
        if room > 0 and shortest <= most:
            raise DataError(
                f"none of {len(sampled.prompts)} prompts leaves room for {new_tokens} new tokens within the models' "
                f"positions ({', '.join(f'{name} {context}' for name, context in contexts.items())}); expected at most "
                f"{room}: --max-new-tokens {room}"
            )
        raise DataError(
            f"none of {len(sampled.prompts)} prompts is within task.max_prompt_tokens ({most}) and the models' "
            f"positions: the shortest has {shortest} tokens; raise task.max_prompt_tokens, or choose shorter prompts"
        )
    prompts = [sampled.prompts[i] for i in fitting]
    tables = []
    for name in names:
        own_ids = [ids[name][i] for i in fitting]
        tables.append(
            _sample_policy(plan, sampled, name, tokenizers[name], list(zip(prompts, own_ids, strict=True)), bars)
        )
    table = pa.concat_tables(tables)
    if sampled.save is not None:
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd")
        write_atomic(sampled.save, sink.getvalue().to_pybytes())
    contents = {p.id: p.content for p in prompts}
    return Loaded(table, contents, len(fits) - len(fitting), (), tokenizers, contexts)


def completions(
    plan: DiagnosticPlan,
    sampled: SampledPool,
    name: str,
    ids: Sequence[list[int]],
    sampling: Sampling,
    on_batch: Callable[[int], None],
) -> list[list[Completion]]:
    """Return a model's completions of prompts given as token ids. Raises ModelError."""
    end = plan.ends[name]
    path = resolve_path(end.path)
    engine_name = chosen_engine(sampled.engine, path, revision=end.revision, trust_remote_code=end.trust_remote_code)
    engine = load_engine(
        engine_name,
        path,
        longest=max(map(len, ids)) + sampled.sampling.max_new_tokens,
        batch_size=max(1, 256 // sampling.samples),
        revision=end.revision,
        trust_remote_code=end.trust_remote_code,
    )
    try:
        return engine.generate_ids(ids, sampling, on_batch)
    finally:
        engine.close()


def _acted(
    plan: DiagnosticPlan,
    sampled: SampledPool,
    name: str,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    on_batch: Callable[[int], None],
) -> list[list[AgentRun]]:
    """Return a model's runs with tools on prompts. Raises ModelError, UsageError or RewardError."""
    from mutualrl.adapter.agent_engine import AgentEngine
    from mutualrl.engines.transformers_engine import TransformersEngine

    end, recipe = plan.ends[name], sampled.recipe
    if sampled.engine == "vllm":
        raise UsageError("--engine vllm: a task with tools is sampled by TRL's loop; expected transformers")
    engine = TransformersEngine.load(
        resolve_path(end.path), revision=end.revision, trust_remote_code=end.trust_remote_code
    )
    assert plan.turns is not None
    weights, template = recipe.trainer_settings(name).get("reward_weights"), plan.templates.get(name) or {}
    try:
        agent = AgentEngine(engine, plan.turns, recipe.task.reward, weights, template, recipe.run.step_timeout)
        return agent.run(prompts, sampling, on_batch)
    finally:
        engine.close()


def rewards_by(
    sampled: SampledPool,
    name: str,
    answered: Sequence[tuple[Prompt, Completion]],
    tokenizer: PreTrainedTokenizerBase,
) -> list[float]:
    """Return the reward of each completion under a policy's weights. Raises RewardError."""
    weights = sampled.recipe.trainer_settings(name).get("reward_weights")
    return rewards_of(sampled.recipe.task.reward, weights, answered, tokenizer, sampled.recipe.run.step_timeout)


def _sample_policy(
    plan: DiagnosticPlan,
    sampled: SampledPool,
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[tuple[Prompt, list[int]]],
    bars: ProgressBars,
) -> pa.Table:
    """Return a model's rollouts of prompts, given with their token ids."""
    sampling = replace(sampled.sampling, seed=policy_seed(plan.seed, name, 0))
    progress = bars.track(f"{name}: sampling", len(prompts))
    runs: list[AgentRun] = []
    if plan.turns is not None:
        acted = _acted(plan, sampled, name, [prompt for prompt, _ in prompts], sampling, progress)
        groups = [[run.completion for run in group] for group in acted]
        runs = [run for group in acted for run in group]
    else:
        groups = completions(plan, sampled, name, [ids for _, ids in prompts], sampling, progress)
    flat = [
        (prompt, number, c)
        for (prompt, _), group in zip(prompts, groups, strict=True)
        for number, c in enumerate(group)
    ]
    rewards = [run.reward for run in runs]
    if plan.turns is None:
        rewards = rewards_by(sampled, name, [(prompt, completion) for prompt, _, completion in flat], tokenizer)
    columns: dict[str, Sequence[object]] = {
        "policy": [name] * len(flat),
        "round": [0] * len(flat),
        "prompt_id": [prompt.id for prompt, *_ in flat],
        "rollout": [number for _, number, _ in flat],
        "reward": rewards,
        "ended": [c.ended for *_, c in flat],
        "group": [prompt.group for prompt, *_ in flat],
        "x_text": [prompt.text for prompt, *_ in flat],
        "y_text": [c.text for *_, c in flat],
        "tokens": [run.sampled for run in runs] or [len(c.token_ids) for *_, c in flat],
        "token_ids": [list(c.token_ids) for *_, c in flat],
    }
    return pa.table({column: pa.array(values, TYPES[column]) for column, values in columns.items()})
