"""Model cards of trained models: base model, training, results, citation."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from mutualrl.console.display import clean, group_label, last_parts
from mutualrl.console.markdown import name, number, table
from mutualrl.regimes import baseline
from mutualrl.runs.read import read_run
from mutualrl.runs.record import PolicyRecord, Run
from mutualrl.storage.files import JsonObject, write_atomic
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


def card(run: Run, policy: PolicyRecord) -> str:
    """Return the card of one policy in the hub's format; paths are cut to their last part."""
    hub_id = bool(policy.model) and not policy.model.startswith(("tiny:", "/"))
    head: JsonObject = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if hub_id:
        head["base_model"] = policy.model
    head["tags"] = ["mutualrl", "trl", baseline().name, "reinforcement-learning", run.info.regime]
    peers = [other for other in run.policies.values() if other.name != policy.name]
    description = name(run.rule.summary or run.info.regime, 400)
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


def _with_model(policy: PolicyRecord) -> str:
    return f"`{name(policy.name)}` (`{name(last_parts(policy.model))}`)"


def _figures(run: Run, policy: PolicyRecord) -> str:
    result = policy.result
    rows = []
    if result is not None and result.validation is not None:
        before, after = result.initial_validation, result.validation
        rows.append([group_label(None), "" if before is None else number(before.accuracy), number(after.accuracy)])
        for group, accuracy in sorted(after.by_group.items()):
            first = None if before is None else before.by_group.get(group)
            rows.append([name(group_label(group)), "" if first is None else number(first), number(accuracy)])
    n = "?" if policy.validation is None else policy.validation.n
    text = table(f"Greedy accuracy on {n} held-out prompts of {name(run.task)}", ("group", "before", "after"), rows)
    if result is None or not result.rescued_pairs:
        return text
    return f"{text}\n\nTexts taught: {result.rescued_pairs}, on {result.rescued_prompts} prompts."


def _training(run: Run) -> str:
    trainer, task = run.section("trainer"), run.section("task")
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
        ["prompts per round", str(run.info.fingerprint.get("prompts_per_round", ""))],
        ["steps", str(run.section("run").get("steps", ""))],
        ["seed", str(run.seed)],
        ["regime", last_parts(json.dumps(run.section("regime"), default=str))],
        *([key, str(trainer[key])] for key in keys if key in trainer),
        ["versions", ", ".join(f"{package} {v}" for package, v in run.info.versions.items())],
    ]
    return table("Training", ("setting", "value"), [[name(key), name(value, 1000)] for key, value in rows])
