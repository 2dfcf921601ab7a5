"""Evaluation of models, one after another, on all tasks: sample, score, store, aggregate."""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

from mutualrl.console.display import cell, print_text
from mutualrl.engines.base import Engine
from mutualrl.engines.choice import chosen_engine, load_engine
from mutualrl.engines.vllm_engine import installed_version
from mutualrl.errors import RewardError, UsageError
from mutualrl.evaluation.accuracy import figures
from mutualrl.evaluation.completion_store import Store, directory_name, identity
from mutualrl.evaluation.eval_tables import markdown
from mutualrl.evaluation.generate_rows import PART, AnsweringModel, chunks
from mutualrl.evaluation.plan import EvalModel, EvalPlan, EvalTask, plan_evaluation
from mutualrl.evaluation.request import EvalRequest
from mutualrl.evaluation.verify import verified
from mutualrl.process.loading import fast_imports
from mutualrl.records import columns_of, content_digest
from mutualrl.storage.files import write_checksummed
from mutualrl.storage.rundir import RunDirectory
from mutualrl.tasks.base import Row
from mutualrl.tasks.prompting import prompt_ids
from mutualrl.tasks.rewarding import BOXED
from mutualrl.tasks.rewards import load_rewards, require_columns
from mutualrl.tasks.turns import template_of
from mutualrl.tiny import resolve_path

if TYPE_CHECKING:
    from mutualrl.adapter.agent_engine import AgentEngine


def evaluate_models(request: EvalRequest, console: Console) -> Row:
    """Return `{"suite", "engine", "samples", "temperature", "seed", "tasks": {task: {"evaluated", "n", "dropped"}},
    "models": {name: {"engine", "tasks": {task: figures}, and the figures over all prompts}}}`; with `out` also
    `"files"`.

    Raises ModelError, UsageError or DataError.
    """
    return run_plan(plan_evaluation(request), console)


def run_plan(plan: EvalPlan, console: Console) -> Row:
    """Return what `evaluate_models` does, for a request that was checked."""
    for task in plan.tasks:
        if task.dropped:
            line = f"{task.name}: left out {len(task.dropped)} rows of {task.origin}: {'; '.join(task.dropped[:5])}"
            print_text(console, line)
    paths = {m.name: resolve_path(m.path) for m in plan.models}
    asked = plan.request.sampling.engine
    if any(task.turns is not None for task in plan.tasks):
        if asked == "vllm":
            raise UsageError("--engine vllm: a task with tools is evaluated by TRL's loop; expected transformers")
        asked = "transformers"
    engines = {
        m.name: chosen_engine(asked, paths[m.name], revision=m.revision, trust_remote_code=m.trust_remote_code)
        for m in plan.models
    }
    for task in plan.tasks:
        require_columns(load_rewards(task.rewards), columns_of(task.prompts))
    digests = {m.name: identity(paths[m.name], m.revision, m.trust_remote_code) for m in plan.models}
    store = Store.open(plan.request.out, _described(plan, digests, engines))
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    results: Row = {}
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        for model in plan.models:
            source = ModelSource(paths[model.name], digests[model.name], engines[model.name])
            results[model.name] = _evaluate(plan, model, source, store, bars)
    for task in plan.tasks:
        if task.rewards != BOXED and all(each["tasks"][task.name]["unscorable"] == 1 for each in results.values()):
            raise RewardError(
                f"{', '.join(task.rewards)}: no completion of task {task.name!r} has a reward (None, NaN or too large "
                "a number): there is no accuracy. Try the function on known answers: mutualrl train ... --dry-run"
            )
    result = {
        "suite": plan.suite,
        "engine": ", ".join(dict.fromkeys(engines.values())),
        "samples": plan.sampling.samples,
        "temperature": plan.sampling.temperature,
        "seed": plan.sampling.seed,
        "tasks": {
            t.name: {
                "evaluated": t.origin,
                "n": len(t.prompts),
                "dropped": list(t.dropped),
                "max_new_tokens": t.max_new_tokens,
                "reward": "exact match" if t.rewards == BOXED else ", ".join(t.rewards),
            }
            for t in plan.tasks
        },
        "models": results,
    }
    if plan.request.initial:
        result["initial"] = True
    if files := store.results(result, markdown(result)):
        result["files"] = files
    return result


def store_in_run(run: RunDirectory, result: Row) -> Path:
    """Write an evaluation of a run's models, before or after training, into the run, replacing an earlier one of that
    suite; return its path."""
    stage = ".initial" if result.get("initial") else ""
    path = run.evaluations / f"{directory_name(result['suite'])}{stage}.json"
    path.parent.mkdir(exist_ok=True)
    write_checksummed(path, result, root=run.root)
    return path


class ModelSource(NamedTuple):
    """Path of a model, its identity (`completion_store.identity`), and the engine that runs it."""

    path: str
    digest: str
    engine: str


def _evaluate(plan: EvalPlan, model: EvalModel, source: ModelSource, store: Store, bars: Progress) -> Row:

    with fast_imports():
        from mutualrl.engines.transformers_engine import context_of, load_tokenizer

    path, engine_name = source.path, source.engine
    revision, trust = model.revision, model.trust_remote_code
    tokenizer = load_tokenizer(path, revision=revision, trust_remote_code=trust)
    ids = {}
    for task in plan.tasks:
        template = {**model.template, **template_of(task.turns, task.rewards)}
        ids[task.name] = prompt_ids([p.content for p in task.prompts], tokenizer, template)
    longest = max(max(map(len, ids[t.name])) + t.max_new_tokens for t in plan.tasks)
    context = context_of(path, revision=revision, trust_remote_code=trust)
    size = max(1, PART[engine_name] // plan.sampling.samples)
    _warn_too_long(plan, model.name, ids, context, bars.console)
    loaded: list[Engine] = []

    def engine() -> Engine:
        """Return the engine, loaded when the first answer is generated: not where all are stored."""
        if not loaded:
            batch = max(1, plan.request.batch_size // plan.sampling.samples)
            loaded.append(
                load_engine(
                    engine_name, path, longest=longest, batch_size=batch, revision=revision, trust_remote_code=trust
                )
            )
        return loaded[0]

    def agent(task: EvalTask) -> AgentEngine:
        """Return the model with a task's tools."""
        from mutualrl.adapter.agent_engine import AgentEngine
        from mutualrl.engines.transformers_engine import TransformersEngine

        loaded_engine = engine()
        if not isinstance(loaded_engine, TransformersEngine) or task.turns is None:
            raise UsageError(f"task {task.name!r} has tools: found the engine {engine_name}, expected transformers")
        return AgentEngine(
            loaded_engine,
            task.turns,
            task.rewards,
            task.reward_weights,
            model.template,
            task.step_timeout,
            batch_size=max(1, plan.request.batch_size),
        )

    answering = AnsweringModel(model.name, source.digest, tokenizer, engine, plan.sampling, store, agent)
    rows: dict[str, list[Row]] = {}
    try:
        for task in plan.tasks:
            bar = bars.add_task(cell(f"{model.name}: {task.name}"), total=len(task.prompts))
            parts = chunks([len(row) for row in ids[task.name]], context, task.max_new_tokens, size)
            rows[task.name] = answering.rows(
                task,
                ids[task.name],
                parts,
                lambda done, bar=bar: bars.advance(bar, done),  # type: ignore[misc]
            )
    finally:
        for loaded_engine in loaded:
            loaded_engine.close()
    return {"engine": engine_name, **_counted(plan, rows, bars.console)}


def _warn_too_long(plan: EvalPlan, model: str, ids: dict[str, list[list[int]]], context: int, console: Console) -> None:
    for task in plan.tasks:
        if long := sum(len(row) >= context for row in ids[task.name]):
            line = (
                f"{model}: {long} of {len(task.prompts)} prompts of {task.name} fill its context of {context} tokens; "
                "they count as wrong"
            )
            print_text(console, line)


def _counted(plan: EvalPlan, rows: dict[str, list[Row]], console: Console) -> Row:
    samples = plan.sampling.samples
    tasks = {t.name: figures(t.prompts, rows[t.name], samples) for t in plan.tasks}
    if "math-verify" in plan.request.also:
        for task in plan.tasks:
            pairs = [(row["y_text"], row["answer"]) for row in rows[task.name]]
            tasks[task.name]["math_verify"] = verified(pairs, console)
    overall = figures(
        [p for t in plan.tasks for p in t.prompts], [row for t in plan.tasks for row in rows[t.name]], samples
    )
    if len(tasks) == 1:  # math-verify of the only task is the overall one
        overall |= next(iter(tasks.values()))
    overall["mean_accuracy"] = sum(t["accuracy"] for t in tasks.values()) / len(tasks)
    return {**overall, "tasks": tasks}


def _described(plan: EvalPlan, digests: dict[str, str], engines: dict[str, str]) -> dict[str, object]:
    """Return the request in comparable form: equal descriptions give equal completions."""
    models = {m.name: [digests[m.name], m.template] for m in plan.models}
    return {
        "tasks": {t.name: _described_task(t) for t in plan.tasks},
        "models": models,
        "engines": engines,
        "sampling": {k: v for k, v in asdict(plan.sampling).items() if k != "max_new_tokens"},
        "batch_size": plan.request.batch_size,
        "versions": {"torch": version("torch"), "transformers": version("transformers"), "vllm": installed_version()},
    }


def _described_task(task: EvalTask) -> list[object]:
    described: list[object] = [_digest(task), task.max_new_tokens, list(task.rewards)]
    if task.turns is None:
        return described
    return [*described, [task.turns.environment, *task.turns.tools], task.turns.iterations, version("trl")]


def _digest(task: EvalTask) -> str:
    return content_digest(task.prompts)
