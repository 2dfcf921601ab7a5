"""Every command that a page or the header of a recipe prints is executed as printed.

`train`, `sweep` and `distill` run as far as `--dry-run`, which shares every check with the start. The workspace has what
the pages assume: the pool, the data, the reward and the models under the printed names, and finished runs.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conftest import REPOSITORY, Cli
from made_runs import made_run
from mutualrl.sources.recorded import embedded
from mutualrl.study.sweep_directory import SWEEP
from mutualrl.tasks import TaskSource, get_task
from mutualrl.tiny import path_of
from runs import FinishedRun

PAGES = (REPOSITORY / "README.md", REPOSITORY / "SKILL.md", *sorted((REPOSITORY / "docs").glob("*.md")))
RECIPES = [path for kind in ("pools", "regimes", "tasks") for path in sorted((REPOSITORY / "recipes" / kind).glob("*"))]
DRY = {"train", "sweep", "distill"}
#: what cannot run here, and the test that runs it with a bucket, a cluster or pretrained models
ELSEWHERE = {
    "other.yaml": "tests/study/test_sweep.py",
    "s3://": "tests/cli/test_join.py",
    "--launcher ray": "tests/faults/test_ray.py",
    "--resume": "tests/faults/test_resume.py",
    "my-run/pool.yaml": "tests/cli/test_skill.py",
    "init my-run": "tests/cli/test_skill.py",
    "paper/": "tests/recipes/test_paper_values.py",
}
#: commands whose check fails on what the workspace has: the embedded families have no reasoning
FAILS = "--suite turns"
#: what the errors say that are right here: data of the hub, and packages that are not installed
ABSENT = ("cannot be loaded from the hub: HF_HUB_OFFLINE is set", "bitsandbytes, for", "tensorboard, for")


def fenced(path: Path) -> Iterator[str]:
    """Yield the lines of a page's shell blocks."""
    language: str | None = None
    for line in path.read_text().splitlines():
        if (fence := re.match(r"\s*```(\w*)", line)) is not None:
            language = fence[1] if language is None else None
        elif language in ("", "bash", "console"):
            yield line


def headers(path: Path) -> Iterator[str]:
    """Yield the command lines in a recipe's header, for any pool and without the optional arguments."""
    for line in path.read_text().splitlines():
        if line.startswith("#   mutualrl "):
            yield re.sub(r"\s*\[[^\]]*\]", "", line.removeprefix("#   ")).replace("POOL", "tiny")


def commands() -> list[tuple[str, str]]:
    """Return all printed commands with their pages, each command once."""
    found: dict[str, str] = {}
    for path in (*PAGES, *RECIPES):
        for line in fenced(path) if path.suffix == ".md" else headers(path):
            for part in re.split(r"&&|;", re.split(r"\s+#\s", line)[0]):
                command = part.strip().removeprefix("$ ")
                if command.startswith("mutualrl "):
                    found.setdefault(command, path.name)
    return [(page, command) for command, page in found.items()]


COMMANDS = commands()


def block(page: Path, first_line: str) -> str:
    """Return the fenced block of a page that begins with a line."""
    return next(
        b for b in re.findall(r"```\w*\n(.*?)```", page.read_text(), flags=re.DOTALL) if b.startswith(first_line)
    )


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, tiny: dict[str, Path], unbroken: FinishedRun) -> Path:
    """Return a directory with the files that the pages name."""
    root = tmp_path_factory.mktemp("workspace")
    shutil.copytree(REPOSITORY / "examples", root / "examples")
    for name, directory in (("ada", "Qwen/Qwen3-0.6B-Base"), ("bob", "checkpoints/my-llama")):
        shutil.copytree(tiny[name], root / directory)
    shutil.copytree(path_of("jan"), root / "Qwen/Qwen3-0.6B")
    (root / "my_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}<eos>{% endfor %}")
    chat = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    (root / "runs.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    (root / "my-pool.yaml").write_text(block(REPOSITORY / "docs" / "your-own.md", "# my-pool.yaml"))
    (root / "my_rewards.py").write_text(block(REPOSITORY / "docs" / "your-own.md", "# my_rewards.py"))
    problems = [{"problem": f"{i}+1:", "answer": str(i + 1)} for i in range(2000)]
    rows = [{"prompt": f"{i}+1:", "answer": i + 1} for i in range(2000)]
    for name, values in (("math_train", problems), ("math_test", problems), ("rows", rows)):
        (root / f"{name}.jsonl").write_text("".join(json.dumps(value) + "\n" for value in values))
    shutil.copy(embedded("tiny:book"), root / "solutions.jsonl")
    prompts = get_task("arithmetic").read("train", TaskSource()).prompts
    dump = {"policy": ["mine"] * len(prompts), "prompt_id": [p.id for p in prompts], "reward": [0.0] * len(prompts)}
    pq.write_table(pa.table(dump), root / "mine.parquet")
    return root


@pytest.fixture(scope="module")
def finished(workspace: Path, unbroken: FinishedRun) -> Path:
    """Return a workspace with finished runs under the printed names."""
    root = workspace.with_name("finished")
    shutil.copytree(workspace, root)
    for name in ("RUN", "runs/NAME", "runs/sgt", "runs/two-scripts", "runs/with-book", "runs/alone"):
        shutil.copytree(unbroken.path, root / name)
    for regime in ("grpo", "sgt"):
        for seed in (0, 1):
            made_run(root / "runs" / f"{regime}-{seed}", regime, seed=seed)
    made_run(root / "runs" / "grpo")
    made_run(root / "runs" / "plans", "sgt")
    made_run(root / "runs" / "sweep" / "pieces" / "tiny" / "grpo-0")
    (root / "runs" / "sweep" / SWEEP).write_text("{}")
    return root


def words_of(command: str) -> list[str]:
    """Return a command's arguments, with patterns of existing files expanded as a shell does."""
    words = []
    for word in shlex.split(command)[1:]:
        words += sorted(map(str, Path.cwd().glob(word))) or [word] if "*" in word else [word]
    return words


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=[f"{page}: {command}" for page, command in COMMANDS])
def test_printed_command_runs(
    page: str,
    command: str,
    workspace: Path,
    finished: Path,
    cli_here: Cli,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for text, test in ELSEWHERE.items():
        if text in command:
            assert (REPOSITORY / test).exists()
            return
    monkeypatch.chdir(workspace if DRY & set(command.split()[1:3]) else finished)
    words = words_of(command)
    kind = words[1] if words[0] == "paper" else words[0]
    if kind in DRY and "--dry-run" not in words:
        words.append("--dry-run")
    if kind in ("complementarity", "cost") and "--prompts" in words:
        words += ["--samples", "2", "--max-new-tokens", "4"]
    result = cli_here(*words)
    absent = any(text in result.stderr for text in ABSENT)
    failed = FAILS in command and result.returncode == 3
    assert result.returncode == 0 or absent or failed, f"{result.stdout}\n{result.stderr}"


def test_pages_and_recipes_print_commands() -> None:
    assert len(COMMANDS) > 60
    assert {"README.md", "operations.md", "your-own.md", "tiny-three.yaml", "gsm8k.yaml"} <= {
        page for page, _ in COMMANDS
    }
