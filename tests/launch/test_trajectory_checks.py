"""What a start says of runs with tools that a policy's chat template cannot keep."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from conftest import Cli
from mutualrl.tasks import TaskSource, get_task
from mutualrl.tiny import path_of

PROMPTS = get_task("calculator").read("train", TaskSource()).prompts[:40]


def runs(path: Path, *, reasoning: int) -> Path:
    """Write a run for each prompt, of which the first `reasoning` have reasoning, which the template drops."""
    lines = []
    for number, prompt in enumerate(PROMPTS):
        arguments = {"operation": "plus", "a": 1, "b": 2}
        call = {"type": "function", "function": {"name": "calculate", "arguments": arguments}}
        thought = {"reasoning_content": "I calculate."} if number < reasoning else {}
        messages = [
            {"role": "user", "content": prompt.text},
            {"role": "assistant", "content": "", "tool_calls": [call], **thought},
            {"role": "tool", "name": "calculate", "content": prompt.answer},
            {"role": "assistant", "content": f"\\boxed{{{prompt.answer}}}"},
        ]
        lines.append(json.dumps({"messages": messages}) + "\n")
    path.write_text("".join(lines))
    return path


def dry_run(cli: Cli, regime: str, *options: object) -> Any:
    return cli("train", "--regime", regime, "--pool", "tiny-tools", *options, "--dry-run")


@pytest.mark.parametrize(("reasoning", "said"), [(20, False), (21, True)])
def test_more_than_half_of_a_files_runs_that_are_lost_are_said(
    cli_here: Cli, tmp_path: Path, reasoning: int, said: bool
) -> None:
    file = runs(tmp_path / "runs.jsonl", reasoning=reasoning)
    result = dry_run(cli_here, "sgt", "--source", f"book=recorded:{file}")
    assert result.returncode == 0, result.stderr
    words = (
        f"jan's chat template cannot keep {reasoning} of 40 runs ({reasoning}: the reasoning is left out or changed)"
    )
    assert (words in result.stderr + result.stdout) is said
    assert "shown as hints" not in result.stderr + result.stdout
    hinted = dry_run(cli_here, "hinted", "--source", f"book=recorded:{file}")
    assert "cannot keep" not in hinted.stderr + hinted.stdout


@pytest.mark.parametrize("regime", ["sgt", "guided", "hinted"])
def test_calls_of_a_tool_that_the_task_lacks_are_said_whatever_the_regime(
    cli_here: Cli, tmp_path: Path, regime: str
) -> None:
    """Once, and not as a template's loss: jan's template keeps any call."""
    file = runs(tmp_path / "runs.jsonl", reasoning=0)
    file.write_text(file.read_text().replace('"calculate"', '"search"'))
    result = dry_run(cli_here, regime, "--source", f"book=recorded:{file}")
    assert result.returncode == 0, result.stderr
    said = " ".join((result.stdout + result.stderr).split())
    assert said.count("source book: 40 of 40 runs call 'search', which is no tool of the task (calculate)") == 1
    assert "cannot keep" not in said


def test_roles_of_other_formats_are_those_of_chats(cli_here: Cli, tmp_path: Path) -> None:
    lines = []
    for prompt in PROMPTS:
        call = json.dumps({"name": "calculate", "arguments": {"operation": "plus", "a": 1, "b": 2}})
        turns = [("human", prompt.text), ("function_call", call), ("observation", prompt.answer)]
        turns.append(("gpt", f"\\boxed{{{prompt.answer}}}"))
        lines.append(json.dumps({"conversations": [{"from": who, "value": what} for who, what in turns]}) + "\n")
    file = tmp_path / "runs.jsonl"
    file.write_text("".join(lines))
    result = dry_run(cli_here, "sgt", "--source", f"book=recorded:{file}")
    assert result.returncode == 0, result.stderr
    assert "40 are runs with tools" in result.stderr + result.stdout
    assert "cannot keep" not in result.stderr + result.stdout


@pytest.mark.parametrize("regime", ["sgt", "guided", "hinted"])
def test_a_template_that_keeps_no_call_is_refused_by_name(cli_here: Cli, tmp_path: Path, regime: str) -> None:
    mute = tmp_path / "mute"
    shutil.copytree(path_of("jan"), mute)
    template = (mute / "chat_template.jinja").read_text()
    assert "tool_calls" in template
    (mute / "chat_template.jinja").write_text(template.replace("tool_calls", "no_calls"))
    pool = tmp_path / "pool.yaml"
    policies = [{"name": "jan", "model": "tiny:jan"}, {"name": "mute", "model": str(mute)}]
    pool.write_text(yaml.safe_dump({"policies": policies, "task": "calculator"}))
    options = ("--set", "regime.hint=plan") if regime == "hinted" else ()
    result = cli_here("train", "--regime", regime, "--pool", pool, *options, "--dry-run")
    if regime == "hinted":
        assert result.returncode == 0, result.stderr
        return
    assert result.returncode == 4
    assert "policy 'mute': its chat template keeps no conversation with a call" in result.stderr
    assert "expected hinted" in result.stderr
    followed = cli_here("train", "--regime", "hinted", "--pool", pool, "--set", "regime.fallback=sgt", "--dry-run")
    assert followed.returncode == 4
    assert "expected no regime.fallback" in followed.stderr
