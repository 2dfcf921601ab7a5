"""Dead prompts of a dump of rollouts: counted by hand, read from TRL's and verifiers' files through the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conftest import Cli

#: rewards by prompt: dead, between, solved, one that is neither dead nor solved
GROUPS = {"a": (0.0, 0.0), "b": (0.0, 1.0), "c": (1.0, 1.0), "d": (0.5, 0.5)}


def rows(step: int = 1, groups: dict[str, tuple[float, ...]] | None = None, **more: Any) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "prompt": prompt,
            "completion": f"{prompt}{number}",
            "accuracy": reward,
            "advantage": 0.0,
            **more,
        }
        for prompt, rewards in (groups or GROUPS).items()
        for number, reward in enumerate(rewards)
    ]


def dump(root: Path, trainer: str, step: int, content: list[dict[str, Any]]) -> Path:
    """Write a file as TRL does with `log_completions=True`, and return the directory of its trainer."""
    path = root / trainer / "completions" / f"completions_{step:05d}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(content), path)
    return root / trainer


def found(cli_here: Cli, *arguments: object) -> list[dict[str, Any]]:
    result = cli_here("complementarity", *arguments, "--json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)["dead_prompts"]


def test_trl_dump_is_read_by_its_only_reward_function(cli_here: Cli, tmp_path: Path) -> None:
    (row,) = found(cli_here, "--rollouts", dump(tmp_path, "mine", 1, rows()))
    assert row == {
        "model": "mine",
        "prompts": 4,
        "rollouts": [2, 2],
        "dead": 1,
        "between": 2,
        "solved": 1,
        "unscored": 0,
        "revived": None,
    }


def test_prompt_counts_by_its_last_step(cli_here: Cli, tmp_path: Path) -> None:
    dump(tmp_path, "mine", 1, rows())
    dump(tmp_path, "mine", 7, rows(7, {"a": (0.0, 1.0), "b": (0.0, 0.0), "e": (0.0, 0.0)}))
    (row,) = found(cli_here, "--rollouts", tmp_path / "mine")
    assert (row["prompts"], row["dead"], row["between"], row["solved"]) == (5, 2, 2, 1)


def test_another_model_revives_where_it_succeeds(cli_here: Cli, tmp_path: Path) -> None:
    one = dump(tmp_path, "one", 1, rows())
    other = dump(tmp_path, "two", 1, rows(1, {"a": (0.0, 1.0), "b": (0.0, 0.0), "c": (0.0, 0.0), "d": (0.0, 0.0)}))
    mine, others = found(cli_here, "--rollouts", one, "--rollouts", other)
    assert (mine["dead"], mine["revived"]) == (1, 1)
    assert (others["dead"], others["revived"]) == (3, 2)  # b and c; d's rewards of .5 are no success


def test_one_screen_says_what_to_add_and_draws_one_picture(cli_here: Cli, tmp_path: Path) -> None:
    result = cli_here("complementarity", "--rollouts", dump(tmp_path, "mine", 1, rows()), "--plot", tmp_path / "plots")
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) < 20
    assert "█" * 13 + "▒" * 24 + "░" * 13 in result.stdout  # 1, 2 and 1 of 4
    assert "Every rollout fails on 1 of 4 prompts" in result.stdout
    assert "--source NAME=recorded:FILE --task dataset --data ROWS --set task.reward=FILE.py:accuracy" in result.stdout
    assert [path.name for path in sorted((tmp_path / "plots").iterdir())] == ["dead_prompts.png", "dead_prompts.svg"]


def test_of_two_reward_functions_one_is_named(cli_here: Cli, tmp_path: Path) -> None:
    path = dump(tmp_path, "mine", 1, rows(format=1.0))
    refused = cli_here("complementarity", "--rollouts", path)
    assert refused.returncode == 2
    assert "accuracy, format beside TRL's; name the one with the reward: --reward accuracy" in refused.stderr
    assert found(cli_here, "--rollouts", path, "--reward", "accuracy")[0]["dead"] == 1
    assert found(cli_here, "--rollouts", path, "--reward", "format")[0]["solved"] == 4
    assert (
        "no column 'reward2' (--reward)"
        in cli_here("complementarity", "--rollouts", path, "--reward", "reward2").stderr
    )
    assert "add --rollouts FILE" in cli_here("complementarity", "--pool", "tiny", "--reward", "format").stderr


@pytest.mark.parametrize("kind", ["trl", "verifiers"])
def test_prompts_of_messages_are_known_by_the_users_last(cli_here: Cli, tmp_path: Path, kind: str) -> None:
    def messages(text: str, role: str = "user") -> list[dict[str, str]]:
        return [{"role": role, "content": text}]

    if kind == "trl":
        content = [
            {**row, "prompt": messages(row["prompt"]), "completion": messages("x", "assistant")} for row in rows()
        ]
        path = dump(tmp_path, "mine", 1, content)
    else:
        path = tmp_path / "results.jsonl"
        lines = [
            {
                "example_id": ord(row["prompt"]),
                "prompt": messages(row["prompt"]),
                "completion": messages("x", "assistant"),
            }
            | {"reward": row["accuracy"], "answer": "1", "task": "t"}
            for row in rows()
        ]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (row,) = found(cli_here, "--rollouts", path)
    assert (row["prompts"], row["dead"]) == (4, 1)


def test_diagnostics_that_compare_models_still_need_two(cli_here: Cli, tmp_path: Path) -> None:
    refused = cli_here("sgt-check", "--rollouts", dump(tmp_path, "mine", 1, rows()))
    assert refused.returncode == 2
    assert "rollouts of one model ('mine'); a pool of two or more is needed" in refused.stderr


def test_models_are_compared_although_they_met_a_prompt_at_other_steps(cli_here: Cli, tmp_path: Path) -> None:
    one, other = dump(tmp_path, "one", 1, rows()), dump(tmp_path, "two", 5, rows(5))
    dump(tmp_path, "one", 3, rows(3, {"a": (0.0, 1.0)}))
    result = json.loads(cli_here("complementarity", "--rollouts", one, "--rollouts", other, "--json").stdout)
    assert [row["dead"] for row in result["dead_prompts"]] == [0, 1]
    assert (result["prompts"], result["rounds"]) == (4, 1)


def test_models_without_a_common_prompt_have_their_dead_prompts_and_no_comparison(
    cli_here: Cli, tmp_path: Path
) -> None:
    one = dump(tmp_path, "one", 1, rows(1, {"a": (0.0, 0.0), "b": (1.0, 1.0)}))
    other = dump(tmp_path, "two", 1, rows(1, {"c": (0.0, 0.0), "d": (0.0, 1.0)}))
    result = cli_here("complementarity", "--rollouts", one, "--rollouts", other, "--json")
    assert result.returncode == 0, result.stderr
    assert "the models are not compared" in result.stderr
    assert "no prompt was answered by all of 'one', 'two'" in result.stderr
    counts = [(row["dead"], row["revived"]) for row in json.loads(result.stdout)["dead_prompts"]]
    assert counts == [(1, None), (1, None)]  # nobody else has met them: not "revived by none"
    assert "pairs" not in json.loads(result.stdout)
    wrong = cli_here("complementarity", "--rollouts", one, "--rollouts", other, "--success-above", "three=0.3")
    assert wrong.returncode == 2
    assert "no policy 'three' in one, two; expected one of: one, two" in wrong.stderr
    refused = cli_here("paper", "xgrpo-check", "--rollouts", one, "--rollouts", other)
    assert refused.returncode == 2
    assert "no prompt was answered by all of 'one', 'two'" in refused.stderr


def test_directories_of_one_name_are_two_models(cli_here: Cli, tmp_path: Path) -> None:
    one, other = dump(tmp_path / "x", "run", 1, rows()), dump(tmp_path / "y", "run", 1, rows())
    assert [row["model"] for row in found(cli_here, "--rollouts", one, "--rollouts", other)] == ["x/run", "y/run"]


@pytest.mark.parametrize("step", [-1, 0.5, "one"])
def test_step_of_a_file_that_is_no_dump_is_not_read(cli_here: Cli, tmp_path: Path, step: Any) -> None:
    path = tmp_path / "own.jsonl"
    lines = [{"prompt_id": "p", "reward": reward, "step": step} for reward in (0.0, 1.0)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (row,) = found(cli_here, "--rollouts", path)
    assert (row["rollouts"], row["between"]) == ([2, 2], 1)


def test_conversations_differ_by_all_their_messages_and_need_no_text(cli_here: Cli, tmp_path: Path) -> None:
    path, lines = tmp_path / "results.jsonl", []
    for number in range(3):
        system = {"role": "system", "content": f"document {number}"}
        user = {"role": "user", "content": [{"type": "text", "text": "Answer."}, {"type": "image"}]}
        call = {"role": "assistant", "content": None, "tool_calls": []}
        lines.append({"prompt": [system, user], "completion": [call], "reward": float(number > 0)})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (row,) = found(cli_here, "--rollouts", path)
    assert (row["prompts"], row["dead"], row["solved"]) == (3, 1, 2)


def test_prompt_without_text_is_refused_with_its_row(cli_here: Cli, tmp_path: Path) -> None:
    content = [{"prompt": [{"role": "user", "content": "p"}], "reward": 0.0}, {"prompt": None, "reward": 1.0}]
    pq.write_table(pa.Table.from_pylist(content), tmp_path / "null.parquet")
    refused = cli_here("complementarity", "--rollouts", tmp_path / "null.parquet")
    assert refused.returncode != 0
    assert "row 2" in refused.stderr and "Traceback" not in refused.stderr


def test_groups_without_any_reward_are_counted_apart(cli_here: Cli, tmp_path: Path) -> None:
    (row,) = found(
        cli_here, "--rollouts", dump(tmp_path, "mine", 1, rows(1, {"a": (float("nan"),) * 2, "b": (0.0, 0.0)}))
    )
    assert (row["unscored"], row["dead"], row["between"]) == (1, 1, 0)


def test_columns_that_are_no_reward_function_are_not_taken_for_one(cli_here: Cli, tmp_path: Path) -> None:
    path = dump(tmp_path, "mine", 1, rows(answer="4", policy="named"))
    assert found(cli_here, "--rollouts", path)[0]["model"] == "named"


def test_reward_column_makes_rollouts_of_a_file_of_texts(cli_here: Cli, tmp_path: Path) -> None:
    path = tmp_path / "scored.jsonl"
    lines = [{"prompt": "p", "completion": "x", "score": reward} for reward in (0.0, 1.0)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert found(cli_here, "--rollouts", path, "--reward", "score")[0]["between"] == 1
