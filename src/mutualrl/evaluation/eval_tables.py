"""Markdown tables of an evaluation: models by tasks, then accuracy by group and facet."""

from __future__ import annotations

from collections.abc import Iterator

from mutualrl.console.markdown import name, number, table
from mutualrl.tasks.base import Row

MOST_GROUPS = 12


def markdown(result: Row) -> str:
    """Return all tables of an evaluation."""
    return "\n\n".join([_main(result), *_broken_down(result), *_notes(result)])


def _main(result: Row) -> str:
    rows = [(model, task, m, t) for model, m in result["models"].items() for task, t in m["tasks"].items()]
    first = rows[0][3]
    passes = [k for k in first.get("pass_at_k", {}) if k != "1"]
    long = any(t["too_long"] for *_, t in rows)
    unscorable = any(t["unscorable"] for *_, t in rows)
    verify = any("math_verify" in t for *_, t in rows)
    head = ["model", "task", "evaluated", "engine", "n", "accuracy", "standard error"]
    head += [f"pass@{k}" for k in passes] + (["math-verify", "unverified"] if verify else [])
    boxed = any(t["no_box"] is not None for *_, t in rows)  # checked only under the boxed reward
    head += (["no box"] if boxed else []) + ["truncated"] + (["too long"] if long else [])
    head += ["no reward"] if unscorable else []
    cells = []
    for model, task, m, t in rows:
        line = [name(model), task, name(result["tasks"][task]["evaluated"]), m["engine"], str(t["n"])]
        line += [number(t["accuracy"], 3), number(t["stderr"], 3)]
        line += [number(t["pass_at_k"][k], 3) for k in passes]
        if verify:
            line += [number(t["math_verify"]["accuracy"], 3), str(t["math_verify"]["unverified"])]
        line += [number(t["no_box"], 2)] if boxed else []
        line += [number(t["truncated"], 2)] + ([number(t["too_long"], 2)] if long else [])
        line += [number(t["unscorable"], 2)] if unscorable else []
        cells.append(line)
    stage = ", before training" if result.get("initial") else ""
    return table(f"{name(result['suite'])}{stage}: {how(result)}", head, cells)


def how(result: Row) -> str:
    """Return how completions were decoded, as text."""
    rewards = "; ".join(dict.fromkeys(name(details["reward"]) for details in result["tasks"].values()))
    if result["temperature"] == 0:
        return f"greedy pass@1, {rewards}"
    return f"{result['samples']} samples at temperature {result['temperature']:g}, {rewards}"


def _broken_down(result: Row) -> Iterator[str]:
    for task in result["tasks"]:
        views: dict[str, Row] = {}
        for model, m in result["models"].items():
            t = m["tasks"][task]
            for facet, groups in {"group": t["groups"], **t["facets"]}.items():
                views.setdefault(facet, {})[model] = groups
        for facet, by_model in views.items():
            groups = sorted({g for groups in by_model.values() for g in groups})
            if not 1 < len(groups) <= MOST_GROUPS:
                continue
            first = next(iter(by_model.values()))
            head = ["model", *(f"{name(g)} ({first[g]['n']})" for g in groups)]
            rows = []
            for model, by_group in by_model.items():
                rows.append([name(model), *(number(by_group[g]["accuracy"], 3) for g in groups)])
            yield table(f"{task} by {facet} (prompts)", head, rows)


def _notes(result: Row) -> Iterator[str]:
    for task, details in result["tasks"].items():
        if details["dropped"]:
            yield f"{task}: {len(details['dropped'])} rows were left out: " + "; ".join(
                map(name, details["dropped"][:5])
            )
