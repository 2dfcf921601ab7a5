"""Samples behind the curves: what each policy sampled at a step, from its samples.jsonl."""

from __future__ import annotations

from collections.abc import Sequence

from mutualrl.reporting.rescues import MANY, messages, numbered, thinned
from mutualrl.runs.logs import LoggedRun, read_samples
from mutualrl.storage.files import JsonObject, finite_number

LARGEST = 20_000_000  # bytes of all samples of a page


def collect_samples(runs: Sequence[LoggedRun], notes: list[str]) -> list[JsonObject]:
    """Return the samples of at most MANY runs by run, step and policy, one record per prompt; none of more runs.

    A record: `run`, `policy`, `step`, `id` of the prompt, `prompt`, `own` (text, reward), `taught` (peer, text,
    whether the peer's text was only a hint to it, whether it is known to be correct).
    """
    records: list[JsonObject] = []
    for run in runs if len(runs) <= MANY else ():
        for policy in run.policies:
            for row in read_samples(run, policy, notes):
                records += _records(run, policy, row)
    records.sort(key=lambda sample: (sample["run"], sample["step"], sample["policy"]))
    samples = thinned(numbered(records), LARGEST)
    if len(samples) < len(records):
        notes.append(f"this page has {len(samples)} of {len(records)} prompts with samples, evenly spaced")
    return samples


def _records(run: LoggedRun, policy: str, row: JsonObject) -> list[JsonObject]:
    """Return the prompts of a line of samples.jsonl; what has another form is left out."""
    by_prompt: dict[str, JsonObject] = {}
    for rollout in _objects(row.get("rollouts")):
        key = str(rollout.get("prompt_id"))
        first = {
            **{"run": run.name, "policy": policy, "step": row["step"], "id": messages(key)},
            **{"prompt": messages(rollout.get("prompt")), "own": [], "taught": []},
        }
        record = by_prompt.setdefault(key, first)
        record["own"].append([messages(rollout.get("text")), finite_number(rollout.get("reward"))])
    for lesson in _objects(row.get("taught")):
        if (key := str(lesson.get("prompt_id"))) in by_prompt:
            from_hint = lesson.get("from_hint") is True
            taught = [messages(lesson.get("peer")), messages(lesson.get("answer")), from_hint, run.gated]
            by_prompt[key]["taught"].append(taught)
    return list(by_prompt.values())


def _objects(value: object) -> list[JsonObject]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
