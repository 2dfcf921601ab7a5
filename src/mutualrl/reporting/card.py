"""Model cards of trained models: base model, training, results, citation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from mutualrl.console.display import clean, last_parts
from mutualrl.console.markdown import name, number, table
from mutualrl.regimes import baseline
from mutualrl.reporting.report_tables import group_label
from mutualrl.reporting.run_reader import PolicyRun, Run, part, read_run
from mutualrl.storage.files import write_atomic
from mutualrl.storage.rundir import RunDirectory
from mutualrl.storage.trained_model import has_trained_model

CARD = "README.md"
TITLE = "Experience Sharing in Mutual Reinforcement Learning for Heterogeneous Language Models"
CITATION = f"""@article{{liu2026mutual,
  title  = {{{TITLE}}},
  author = {{Xiaoze Liu and Dhananjay Ram and Yuting Zhang and Zhaoyang Zhang and Wei Xia and Stefano Soatto}},
  year   = {{2026}}
}}"""


def write_cards(root: Path) -> list[Path]:
    """Write policies/<name>/model/README.md for every trained model of a run; return the files."""
    run = read_run(root)
    written = []
    for policy in run.policies.values():
        directory = RunDirectory(run.root).policy(policy.name).model
        if has_trained_model(RunDirectory(run.root), policy.name):
            write_atomic(directory / CARD, card(run, policy).encode(), durable=False)
            written.append(directory / CARD)
    return written


def card(run: Run, policy: PolicyRun) -> str:
    """Return the card of one policy in the hub's format; paths are cut to their last part."""
    hub_id = bool(policy.model) and not policy.model.startswith(("tiny:", "/"))
    head: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if hub_id:
        head["base_model"] = policy.model
    head["tags"] = ["mutualrl", "trl", baseline().name, "reinforcement-learning", run.regime]
    peers = [other for other in run.policies.values() if other.name != policy.name]
    description = name(run.rule.summary or run.regime, 400)
    parts = [
        "---\n" + yaml.safe_dump(head, sort_keys=False) + "---",
        f"# {name(policy.name)}, trained with mutualrl",
        f"A policy of the pool `{name(run.pool)}`, trained together with "
        + (", ".join(map(_with_model, peers)) or "no other policy")
        + f". Regime: **{name(run.arm)}**, {description}. Base model: `{name(last_parts(policy.model))}`.",
        _figures(run, policy),
        _training(run),
        "```bash\n" + clean(last_parts(run.command), 2000).replace("`", "'").replace("\n", " ") + "\n```",
        "## Citation\n\n```bibtex\n" + CITATION + "\n```",
    ]
    return "\n\n".join(parts) + "\n"


def _with_model(policy: PolicyRun) -> str:
    return f"`{name(policy.name)}` (`{name(last_parts(policy.model))}`)"


def _figures(run: Run, policy: PolicyRun) -> str:
    rows = []
    for group in (None, *policy.groups):
        points = policy.accuracy(group)
        if points:
            before = number(points[0].value) if points[0].step == 0 else ""
            rows.append([name(group_label(group)), before, number(points[-1].value)])
    result = policy.result or {}
    n = part(result, "validation").get("n", "?")
    text = table(f"Greedy accuracy on {n} held-out prompts of {name(run.task)}", ("group", "before", "after"), rows)
    pairs = result.get("rescued_pairs")
    return text + (f"\n\nRescued pairs: {pairs}, on {result.get('rescued_prompts')} prompts." if pairs else "")


def _training(run: Run) -> str:
    trainer, task = part(run.recipe, "trainer"), part(run.recipe, "task")
    keys = (
        "learning_rate",
        "lr_scheduler_type",
        "num_generations",
        "max_completion_length",
        "beta",
        "epsilon",
        "temperature",
        "loss_type",
        "scale_rewards",
    )
    data = {key: task[key] for key in ("name", "data", "validation_data") if task.get(key) is not None}
    rows = [
        ["data", last_parts(json.dumps(data, default=str))],
        ["prompts per round", str(part(run.info, "fingerprint").get("prompts_per_round", ""))],
        ["steps", str(part(run.recipe, "run").get("steps", ""))],
        ["seed", str(run.seed)],
        ["regime", last_parts(json.dumps(part(run.recipe, "regime"), default=str))],
        *([key, str(trainer[key])] for key in keys if key in trainer),
        ["versions", ", ".join(f"{package} {v}" for package, v in part(run.info, "versions").items())],
    ]
    return table("Training", ("setting", "value"), [[name(key), name(value, 1000)] for key, value in rows])
