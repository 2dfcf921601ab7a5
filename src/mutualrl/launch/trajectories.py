"""Whether policies' chat templates keep the runs with tools that their regimes learn, before a start."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc

from mutualrl.console.display import clean
from mutualrl.errors import ModelError
from mutualrl.process.loading import fast_imports
from mutualrl.recipes import Recipe
from mutualrl.recipes.pool_tokenizers import load_tokenizers
from mutualrl.records import Prompt
from mutualrl.regimes.hinted import Hinted
from mutualrl.rollouts import Rollouts
from mutualrl.sources.source import StoredSource
from mutualrl.tasks.rewards import callable_name
from mutualrl.tasks.trajectories import messages_of
from mutualrl.tasks.turns import template_of
from mutualrl.trajectory import Message, Trajectory

if TYPE_CHECKING:
    from mutualrl.adapter.rendering import Renderer
    from mutualrl.sources.prepare import Prepared
    from mutualrl.storage.files import JsonObject

#: runs of a file that are looked at before a start
LOOKED_AT = 500


def check_trajectories(recipe: Recipe, prompts: Sequence[Prompt], sources: Mapping[str, Prepared]) -> list[str]:
    """Return which recorded sources have runs that call a tool which the task does not have, whatever the regime, and
    runs of which a policy cannot learn more than half. Raises ModelError for a policy whose chat template keeps no
    call, where runs become its tokens."""
    if not recipe.task.has_turns:
        return []
    notes = [note for each in sources.values() if (note := _tools_note(recipe, each.source)) is not None]
    learners = [each.name for each in recipe.policies if recipe.regime_of(each.name).needs().renders_runs]
    if not learners:
        return notes
    with fast_imports():
        from mutualrl.diagnostics.turns import schema
    for name, tokenizer in load_tokenizers(recipe).items():
        if name not in learners:
            continue
        _require_calls(name, _renderer(recipe, name, tokenizer, [schema()]), recipe.regime_of(name).name)
        for source in (each.source for each in sources.values()):
            if source.learners is None or name in source.learners:
                notes += _runs_note(recipe, name, tokenizer, source, prompts)
    return notes


def _renderer(recipe: Recipe, policy: str, tokenizer: Any, tools: Sequence[JsonObject]) -> Renderer:
    """Return the renderer that TRL's trainer of this policy would have."""
    from mutualrl.adapter.rendering import Renderer, as_trained

    settings = recipe.trainer_settings(policy).get("chat_template_kwargs") or {}
    try:
        trained = as_trained(tokenizer)
    except Exception as error:  # noqa: BLE001  (a template may raise anything)
        raise ModelError(
            f"policy {policy!r}: TRL cannot train its chat template with tools "
            f"({clean(str(error).splitlines()[0], 200)}); expected a model that calls tools, such as Qwen/Qwen3-0.6B"
        ) from None
    return Renderer(trained, tools, settings)


def _require_calls(policy: str, renderer: Renderer, regime: str) -> None:
    """Raise ModelError unless the template keeps one of the kinds of conversations with a call."""
    from mutualrl.adapter.rendering import Unrenderable
    from mutualrl.diagnostics.turns import KINDS

    reason = ""
    for kind, (prompt, after) in KINDS.items():
        if not any(message.tool_calls for message in after):
            continue
        try:
            renderer.row(prompt, after)
            return
        except Unrenderable as lost:
            reason = reason or f"{kind}: {lost}"
    instead = "hinted, which shows it" if regime != Hinted.name else "no regime.fallback"
    raise ModelError(
        f"policy {policy!r}: its chat template keeps no conversation with a call ({reason}), and regime {regime!r} "
        f"learns a peer's run on this template; expected {instead}, or a model whose template keeps calls (mutualrl "
        "thl-check --suite turns --source MODEL)"
    )


def _runs_of(source: StoredSource) -> list[tuple[str, Trajectory]]:
    """Return the first runs of a source with their prompts' ids."""
    runs = source.table.filter(pc.is_valid(source.table["messages"])).slice(0, LOOKED_AT)
    return [(each.prompt_id, each.trajectory) for each in Rollouts(runs).rows("text") if each.trajectory]


def _tool_names(recipe: Recipe) -> frozenset[str]:
    tools = template_of(recipe.task.turns, recipe.task.reward)["tools"]
    return frozenset(callable_name(tool) for tool in tools)


def _tools_note(recipe: Recipe, source: StoredSource) -> str | None:
    """Return how many runs of a source call a tool that the task does not have; None if none does."""
    runs = _runs_of(source)
    known = _tool_names(recipe) if runs else frozenset[str]()
    unknown = [{call.name for call in run.calls} - known for _, run in runs]
    if not any(unknown):
        return None
    names = ", ".join(map(repr, sorted(set().union(*unknown))[:5]))
    of = f"{len(runs):,}" if len(runs) < LOOKED_AT else f"the first {LOOKED_AT:,}"
    return (
        f"source {source.name}: {sum(map(bool, unknown)):,} of {of} runs call {clean(names, 200)}, which is no tool of "
        f"the task ({', '.join(sorted(known)) or 'none'}); no policy can learn or follow them"
    )


def _runs_note(
    recipe: Recipe, policy: str, tokenizer: Any, source: StoredSource, prompts: Sequence[Prompt]
) -> list[str]:
    """Return a note if a policy can learn at most half of a source's runs."""
    from transformers.utils import get_json_schema

    known = _tool_names(recipe)
    runs = [(prompt_id, run) for prompt_id, run in _runs_of(source) if {call.name for call in run.calls} <= known]
    if not runs:
        return []
    tools = [get_json_schema(tool) for tool in template_of(recipe.task.turns, recipe.task.reward)["tools"]]
    renderer = _renderer(recipe, policy, tokenizer, json.loads(json.dumps(tools)))
    contents = {prompt.id: prompt.content for prompt in prompts}
    lost: Counter[str] = Counter()
    for prompt_id, run in runs:
        content = contents[prompt_id]
        prompt = [Message("user", content)] if isinstance(content, str) else messages_of(content)
        try:
            renderer.row(prompt, run.messages)
        except (ValueError, TypeError, RecursionError) as reason:
            lost[str(reason)] += 1
    if 2 * lost.total() <= len(runs):
        return []
    (why, count), *_ = lost.most_common(1)
    counted = ", ".join(each.key for each in recipe.regime_of(policy).metrics if each.key.endswith("/unrenderable"))
    of = f"{len(runs):,}" if len(runs) < LOOKED_AT else f"the first {LOOKED_AT:,}"
    return [
        f"source {source.name}: {policy}'s chat template cannot keep {lost.total():,} of {of} runs ({count:,}: "
        f"{why}); they are not learnt, and counted ({counted})"
    ]
