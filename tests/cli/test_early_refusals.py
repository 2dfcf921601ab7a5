"""What would end a run in its first minute is refused before a model is loaded: by the dry run and by the start."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conftest import Cli
from mutualrl.errors import UsageError
from mutualrl.mwra.model_shape import adapter_problem
from mutualrl.recipes.schema import LoraSection, Policy
from mutualrl.tasks.turns import load_environment, load_tools

ROWS = [{"prompt": f"What is {n} plus 1?", "answer": str(n + 1)} for n in range(64)]
SEARCH = '''def search(query: str) -> str:
    """Search.

    Args:
        query: What to look for.
    """
'''


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.fixture
def start(rows: Path, cli_here: Cli) -> Callable[..., CompletedProcess[str]]:
    """Return a function that starts a run on the rows with settings; by default only its dry run."""

    def run(*settings: str, model: str = "tiny:jan", rest: Sequence[str] = ("--dry-run",)) -> CompletedProcess[str]:
        sets = [part for each in settings for part in ("--set", each)]
        return cli_here(
            *("train", "--regime", "grpo", "--model", model, "--task", "dataset", "--data", rows, *sets), *rest
        )

    return run


@pytest.mark.parametrize(
    ("files", "setting", "message"),
    [
        (
            {"notes.py": SEARCH + '    return "a"\n', "web.py": SEARCH + '    return "b"\n'},
            "task.tools=[notes.py:search, web.py:search]",
            "task.tools: found two tools called 'search'",
        ),
        ({"bare.py": 'def f(a: str) -> str:\n    return "x"\n'}, "task.tools=[bare.py:f]", "has no docstring"),
        ({"bare.py": 'def f(a):\n    """F."""\n'}, "task.tools=[bare.py:f]", "has no type for a"),
        (
            {"bare.py": 'def f(a: str) -> str:\n    """F."""\n    return "x"\n'},
            "task.tools=[bare.py:f]",
            "'f' cannot be described to a model",
        ),
        ({"raises.py": 'raise OSError("no key")\n'}, "task.tools=[raises.py:f]", "raises.py, line 1: OSError: no key"),
        ({"ends.py": "import os\nos._exit(0)\nf = 0\n"}, "task.tools=[ends.py:f]", "called os._exit(0)"),
        (
            {"dies.py": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\nf = 0\n"},
            "task.tools=[dies.py:f]",
            "dies.py:f ended the process that imported them",
        ),
        (
            {
                "game.py": "class G:\n    def __init__(self): raise OSError('no board')\n    def reset(self, **row): pass\n"
            },
            "task.environment=game.py:G",
            "environment G: OSError: no board (game.py, line 2)",
        ),
        (
            {"game.py": "class G:\n    def reset(self, **row): raise KeyError('level')\n"},
            "task.environment=game.py:G",
            "environment G: KeyError: 'level' (game.py, line 2)",
        ),
        (
            {"game.py": "class G:\n    def reset(self, level, size, **row): pass\n"},
            "task.environment=game.py:G",
            "reset takes 'level', 'size', of which the data have no column",
        ),
        (
            {"game.py": "class G:\n    def reset(self, **row):\n        while True: pass\n"},
            "task.environment=game.py:G",
            "no progress for 1 s in building it or in its reset with the first row",
        ),
    ],
)
def test_tools_and_environments_are_tried_before_anything_starts(
    tmp_path: Path, start: Any, files: dict[str, str], setting: str, message: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    result = start(setting, "task.reward=boxed", "run.step_timeout=1")
    assert result.returncode == 2, result.stderr
    assert message in " ".join(result.stderr.split())


def test_a_start_refuses_a_file_that_raises_before_its_run_exists(tmp_path: Path, start: Any) -> None:
    (tmp_path / "raises.py").write_text('raise OSError("no key")\n')
    result = start("task.tools=[raises.py:f]", rest=("--run-dir", "run", "--steps", "1"))
    assert result.returncode == 2
    assert "raises.py, line 1: OSError: no key" in " ".join(result.stderr.split())
    assert not (tmp_path / "run").exists()


def test_a_file_of_tools_imports_what_lies_beside_it(tmp_path: Path, start: Any) -> None:
    shop = tmp_path / "shop"
    shop.mkdir()
    (shop / "prices.py").write_text('PRICES = {"pen": 2}\n')
    (shop / "tools.py").write_text("from prices import PRICES\n\n\n" + SEARCH + "    return str(PRICES[query])\n")
    result = start("task.tools=[shop/tools.py:search]")
    assert result.returncode == 0, result.stderr
    (tool,) = load_tools([f"{shop / 'tools.py'}:search"])
    assert tool(query="pen") == "2"


def test_all_columns_that_rewards_take_and_the_data_lack_are_named_together(tmp_path: Path, start: Any) -> None:
    (tmp_path / "judge.py").write_text(
        "def judge(completions, answer, level, topic, prompts, extra=1, **kwargs): ...\n"
    )
    result = start("task.reward=judge.py:judge", model="tiny:ada")
    assert result.returncode == 2
    assert "task.reward: judge takes 'level', 'topic', of which the data have no column" in result.stderr


def test_complementarity_names_the_columns_before_it_samples(tmp_path: Path, rows: Path, cli_here: Cli) -> None:
    (tmp_path / "judge.py").write_text("def judge(completions, level, topic, **kwargs): ...\n")
    settings = ("--set", "task.reward=judge.py:judge", "--set", "task.name=dataset", "--set", f"task.data={rows}")
    result = cli_here("complementarity", "--pool", "tiny", *settings, "--prompts", "8")
    assert result.returncode == 2
    assert "judge takes 'level', 'topic'" in result.stderr
    assert "started" not in result.stderr


def test_all_fields_that_rows_lack_are_named_together(tmp_path: Path, cli_here: Cli) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "a", "label": "b"}\n')
    result = cli_here("tasks", "show", "dataset", "--data", path)
    assert "no fields 'prompt', 'answer' (found: label, question); if others have them" in result.stderr
    assert "--set task.template={FIELD} --set task.answer=FIELD" in result.stderr
    result = cli_here("tasks", "show", "dataset", "--data", path, "--template", "{x} {y}", "--answer", "z")
    assert "no fields 'x', 'y', 'z' (found: label, question)" in result.stderr


@pytest.mark.parametrize(
    "values",
    [pa.array([Decimal("1.50")] * 4), pa.array([5, 6, 7, 8], pa.duration("us")), pa.array([b"a"] * 4)],
    ids=["decimal", "duration", "bytes"],
)
@pytest.mark.parametrize("ids", [True, False])
def test_columns_of_any_type_are_passed_to_the_reward(
    tmp_path: Path, cli_here: Cli, values: pa.Array, ids: bool
) -> None:
    path = tmp_path / "rows.parquet"
    columns = {"prompt": [f"{n} plus 1?" for n in range(4)], "answer": list("1234"), "extra": values}
    pq.write_table(pa.table({**columns, **({"prompt_id": list("abcd")} if ids else {})}), path)
    (tmp_path / "judge.py").write_text(
        f"def judge(completions, extra, **kwargs):\n    assert type(extra[0]).__name__ == {type(values[0].as_py()).__name__!r}\n"
        "    return [1.0] * len(completions)\n"
    )
    result = cli_here(
        *("train", "--regime", "grpo", "--model", "tiny:ada", "--task", "dataset", "--data", path, "--dry-run"),
        *("--set", "task.reward=judge.py:judge", "--set", "task.validation_data=" + str(path)),
        *("--set", "round.prompts=2"),
    )
    assert result.returncode == 0, result.stderr


def test_a_column_without_bytes_is_refused_by_its_name() -> None:
    from mutualrl.records import Prompt, content_digest

    with pytest.raises(UsageError, match=r"column 'shape': found object.*convert it to text or numbers, or drop"):
        content_digest([Prompt("p", "a", "b", "g", columns={"x": 1, "shape": {"a": object()}})])


@pytest.mark.parametrize(
    ("targets", "problem"),
    [
        (("q_proj", "embed_tokens"), None),
        (("input_layernorm",), "is not supported"),
        (("self_attn",), "is not supported"),
        (("nothing",), "no layer 'nothing' in tiny:ada; expected some of: "),
        ("all-linear", None),
    ],
)
def test_targets_of_an_adapter_are_tried_without_weights(targets: Any, problem: str | None) -> None:
    found = adapter_problem(Policy(name="a", model="tiny:ada"), LoraSection(r=4, target_modules=targets))
    assert (found is None) if problem is None else problem in str(found)


def test_an_adapter_on_embeddings_that_are_the_output_layer_is_refused(tmp_path: Path) -> None:
    from mutualrl.tiny import path_of

    config = json.loads((path_of("ada") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    section = LoraSection(r=4, target_modules=("embed_tokens",))
    assert "merged, it would change both" in str(adapter_problem(Policy(name="a", model=str(tmp_path)), section))


TOOLS = '''import os, sys


def leave() -> str:
    """Leave."""
    sys.exit(3)


def end() -> str:
    """End."""
    os._exit(4)


class Odd(BaseException):
    pass


def odd() -> str:
    """Raise."""
    raise Odd("x")


def fails() -> str:
    """Raise."""
    raise KeyError("x")


async def later() -> str:
    """Leave later."""
    sys.exit(5)


def forks() -> str:
    """Fork."""
    os.fork()
    return "one"


def surrogate() -> str:
    """Return what UTF-8 cannot have."""
    return "a\\ud800b"


def long() -> str:
    """Return much."""
    return "x" * 1_000_000


def parts() -> list:
    """Return parts."""
    return [{"type": "text", "text": "a"}]


class Game:
    def reset(self, **row):
        sys.exit(6)

    def get_reward(self) -> float:
        raise Odd("y")

    @staticmethod
    def still(a: int) -> int:
        """Stay.

        Args:
            a: What.
        """
        return a

    def leave(self) -> str:
        """Leave."""
        sys.exit(7)
'''


@pytest.fixture
def tools(tmp_path: Path) -> Callable[..., Any]:
    (tmp_path / "tools.py").write_text(TOOLS)
    return lambda name, **more: load_tools([f"{tmp_path / 'tools.py'}:{name}"], **more)[0]


@pytest.mark.parametrize(
    ("name", "error"),
    [("leave", "called sys.exit(3)"), ("end", "called os._exit(4)"), ("odd", "Odd: x")],
)
def test_a_tool_that_leaves_is_an_error_for_the_policy_to_read(
    tools: Any, name: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tool = tools(name)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="^" + error.replace("(", r"\(").replace(")", r"\)") + "$"):
            tool()
    assert capsys.readouterr().err.count(f"tool {name}") <= 1  # said once


def test_an_asynchronous_tool_that_leaves_is_an_error_too(tools: Any) -> None:
    import asyncio

    with pytest.raises(RuntimeError, match=r"called sys.exit\(5\)"):
        asyncio.run(tools("later")())


def test_an_exception_of_a_tool_is_its_own(tools: Any) -> None:
    with pytest.raises(KeyError):
        tools("fails")()


def test_a_child_that_a_tool_forks_does_not_go_on_as_a_trainer(tools: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert tools("forks")() == "one"
    import os

    os.wait()
    assert "a process that tool forks forked returned from it, and ends here" in capfd.readouterr().err


def test_results_can_be_tokenized_and_are_cut_to_what_may_fit(tools: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert tools("surrogate")() == "a?b"
    assert tools("long")() == "x" * 1_000_000
    cut = tools("long", room=16)()
    assert cut.startswith("x" * 512)
    assert cut.endswith(" [... 999488 more characters]")
    assert "a result of 1,000,000 characters is cut to 512" in capsys.readouterr().err
    assert tools("parts", room=16)() == [{"type": "text", "text": "a"}]


def test_methods_of_an_environment_are_contained_and_named(tmp_path: Path) -> None:
    from mutualrl.errors import RewardError
    from mutualrl.tasks.turns import methods_of

    (tmp_path / "tools.py").write_text(TOOLS)
    game: Any = load_environment(f"{tmp_path / 'tools.py'}:Game", owns_reward=True)()
    assert [tool.__name__ for tool in methods_of(game)] == ["leave", "still"]
    assert game.still(3) == "3"
    with pytest.raises(RuntimeError, match=r"^called sys.exit\(7\)$"):
        game.leave()
    for call, problem in ((game.reset, r"called sys.exit\(6\)"), (game.get_reward, "Odd: y")):
        with pytest.raises(RewardError, match=f"^environment Game: {problem} \\(tools.py, line"):
            call()
