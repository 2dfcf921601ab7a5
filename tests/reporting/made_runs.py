"""Synthetic run directories for tests of reports, written without training."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from mutualrl.records import Rollout
from mutualrl.see import Exchange
from mutualrl.storage.artifacts import commit_directory
from mutualrl.storage.files import read_checksummed, write_checksummed
from mutualrl.storage.format import FORMAT
from mutualrl.storage.run_info import PolicyResult, Summary, Validation
from mutualrl.trajectory import Trajectory

REGIMES: dict[str, dict[str, Any]] = {
    "grpo": {"name": "grpo"},
    "sgt": {"name": "sgt", "weight": 0.1, "success_above": 0.8, "failure_below": 0.2},
    "prp": {"name": "prp", "denominator": "peer"},
    "xgrpo": {"name": "xgrpo", "mix": 0.2},
    "grpo-noise": {"name": "grpo-noise", "noise": 0.1},
}


def validation(accuracy: float) -> dict[str, Any]:
    """Return a validation of two groups with mean `accuracy`."""
    return {"n": 64, "accuracy": accuracy, "by_group": {"+": accuracy + 0.1, "*": accuracy - 0.1}, "no_box": 0.0}


def made_run(
    root: Path,
    regime: str = "grpo",
    *,
    seed: int = 0,
    steps: int = 20,
    settings: dict[str, Any] | None = None,
    task: str = "arithmetic",
    policies: Sequence[str] = ("ada", "bob"),
    finished: bool = True,
    gain: float = 0.2,
    **changes: Any,
) -> Path:
    """Write a run of `steps` steps whose curves rise by `gain`, and return its directory."""
    root.mkdir(parents=True)
    info = {
        "format": FORMAT,
        "run_id": "made",
        "created": "2026-01-01T00:00:00Z",
        "command": ["mutualrl", "train"],
        "versions": {"mutualrl": "0.1.0"},
        "seed": seed,
        "regime": regime,
        "pool": "tiny",
        "exchange": "",
        "fingerprint": {
            "task": task,
            "steps": steps,
            "prompts_per_round": 8,
            "rollouts_per_prompt": 4,
            "optimizer_steps_per_round": 1,
        },
        **changes,
    }
    recipe = {
        "pool": "tiny",
        "policies": [{"name": name, "model": f"tiny:{name}"} for name in policies],
        "regime": {**REGIMES.get(regime, {"name": regime}), **(settings or {})},
        "task": {"name": task},
        "run": {"steps": steps, "seed": seed},
        "trainer": {"learning_rate": 0.0005},
    }
    text = "# made\n" + json.dumps(recipe)
    (root / "recipe.yaml").write_text(text)
    write_checksummed(root / "run.json", {**info, "recipe": text}, root=root)
    for index, name in enumerate(policies):
        directory = root / "policies" / name
        directory.mkdir(parents=True)
        rows = []
        for step in range(1, steps + 1):
            progress = step / steps
            row: dict[str, Any] = {
                "step": step,
                "loss": -0.01 * progress,
                "reward": 0.3 + gain * progress + 0.01 * seed,
                "entropy": 0.5 - 0.2 * progress,
                "ppo_kl": 0.001 * step,
                "kl": 0.01 * step,
                "num_tokens": 1000.0 * step,
                "step_time": 0.5,
                "see/wait_seconds": 0.1,
            }
            if regime == "sgt":
                row |= {"sgt/gate_rate": 0.4 - 0.3 * progress, "sgt/pairs": 2.0, "plan/taught": 2.0}
            if regime == "prp":
                row |= {"prp/ratio_p99": 1.0 + progress, "prp/clip_rate": 0.1}
            if step % 5 == 0 and step < steps:
                row["validation"] = validation(0.3 + gain * progress + 0.02 * index + 0.01 * seed)
            rows.append(row)
        (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        write_checksummed(directory / "before.json", validation(0.3), root=root)
        if finished:
            result = {
                "initial_validation": validation(0.3),
                "validation": validation(0.3 + gain + 0.02 * index + 0.01 * seed),
                "steps": steps,
                "rescued_pairs": 0,
                "rescued_prompts": 0,
                "train_seconds": 10.0,
                "wait_seconds": 1.0,
                "lost_peers": {},
                "attempts": 1,
            }
            write_checksummed(directory / "result.json", result, root=root)
    if finished:
        results = {n: json.loads((root / "policies" / n / "result.json").read_text()) for n in policies}
        summary = {
            "regime": regime,
            "pool": "tiny",
            "task": task,
            "seed": seed,
            "steps": steps,
            "seconds": 12.5,
            "policies": results,
            "lost": [],
        }
        write_checksummed(root / "summary.json", summary, root=root)
    return root


def made_summary(validation: Validation, **changes: Any) -> Summary:
    """Return the summary of a run of one policy that was validated so before and after training."""
    result = PolicyResult(
        initial_validation=validation,
        validation=validation,
        steps=1,
        train_seconds=1.0,
    )
    fields = {"regime": "sgt", "task": "t", "seed": 0, "steps": 1, "seconds": 1.0, "policies": {"ada": result}}
    return Summary.model_validate(fields | changes)


def set_recipe(run: Path, text: str) -> None:
    """Replace a run's recipe, in both files that contain it."""
    info = read_checksummed(run / "run.json", root=run)
    assert info is not None
    write_checksummed(run / "run.json", {**info, "recipe": text}, root=run)
    (run / "recipe.yaml").write_text(text)


def edit_recipe(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a run's recipe."""
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    change(recipe)
    set_recipe(run, json.dumps(recipe))


def add_model(run: Path, policy: str, of: Path | None = None, **files: str) -> Path:
    """Add a trained model to a policy of a run: the files of `of`, or only a configuration. Return its directory."""
    root = run / "policies" / policy
    staging = root / ".model.partial"
    staging.mkdir(parents=True)
    for path in [] if of is None else of.iterdir():
        shutil.copy2(path, staging)
    for name, text in {**({} if of else {"config.json": "{}"}), **files}.items():
        (staging / name).write_text(text)
    run_id = json.loads((run / "run.json").read_text())["run_id"]
    commit_directory(staging, root / "model", {"run_id": run_id, "policy": policy, "step": 20})
    return root / "model"


def rescue(step: int, prompt_id: str = "p", **changes: Any) -> dict[str, Any]:
    """Return a line of rescues.jsonl."""
    return {
        "step": step,
        "round": step - 1,
        "prompt_id": prompt_id,
        "prompt": "2*3:",
        "own": [{"text": " \\boxed{5}", "reward": 0.0}, {"text": "", "reward": 0.0}],
        "peer": "bob",
        "rollout": 1,
        "answer": " \\boxed{6}",
        **changes,
    }


def with_rescues(root: Path, policy: str, rows: Sequence[dict[str, Any]]) -> Path:
    """Write rescues into a run, and return its directory."""
    path = root / "policies" / policy / "rescues.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def publish(
    root: Path, policy: str, rounds: Sequence[Sequence[tuple[str, float, str | None]]], run_id: str = "made"
) -> None:
    """Publish rounds of (prompt id, reward, text) in the run's exchange."""
    exchange = Exchange(root / "exchange", policy, run_id)
    for number, rows in enumerate(rounds):
        records = [
            Rollout(prompt, index, reward, True, prompt=prompt, trajectory=Trajectory.of_stored(text, None))
            for index, (prompt, reward, text) in enumerate(rows)
        ]
        exchange.publish(number, records, number)
