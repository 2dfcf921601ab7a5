"""Evaluate models one after another: greedy, one completion a prompt, exact boxed match."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from mutualrl.display import cell
from mutualrl.engines.base import Sampling
from mutualrl.evaluation.request import EvalRequest
from mutualrl.tasks.scoring import score


def evaluate_models(request: EvalRequest, console: Console) -> dict[str, Any]:
    """`{"suite", "engine", "models": {name: {"n", "accuracy", "by_group", "no_box", "truncated"}}}`."""
    from mutualrl.engines.transformers_engine import TransformersEngine
    from mutualrl.tiny.cache import located

    texts = [p.content for p in request.prompts]
    sampling = Sampling(max_new_tokens=request.max_new_tokens)
    models: dict[str, Any] = {}
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bars:
        for name, model in request.models.items():
            engine = TransformersEngine.load(located(model), trust_remote_code=request.trust_remote_code)
            bar = bars.add_task(cell(name), total=len(texts))
            groups = engine.generate(texts, sampling, lambda done, bar=bar: bars.advance(bar, done))  # type: ignore[misc]
            result = score(request.prompts, [group[0].text for group in groups]).to_json()
            truncated = sum(not group[0].ended for group in groups) / len(groups)
            models[name] = result | {"truncated": truncated}
    return {"suite": request.suite, "engine": "transformers", "models": models}


def show(results: dict[str, Any]) -> None:
    """The table of an evaluation."""
    groups = sorted({g for m in results["models"].values() for g in m["by_group"]})
    table = Table(
        "model", "n", "accuracy", *map(cell, groups), "no box", "truncated", title=f"{results['suite']}, greedy pass@1"
    )
    for name, m in results["models"].items():
        cells = [f"{m['by_group'][g]:.3f}" if g in m["by_group"] else "" for g in groups]
        table.add_row(
            cell(name), str(m["n"]), f"{m['accuracy']:.3f}", *cells, f"{m['no_box']:.2f}", f"{m['truncated']:.2f}"
        )
    Console().print(table)
