from __future__ import annotations

from pathlib import Path

import pytest

from made_runs import made_summary
from mutualrl.console.display import clean
from mutualrl.errors import UsageError
from mutualrl.records import Prompt, prompt_id
from mutualrl.storage.run_info import Validation
from mutualrl.tasks.rewards import require_rewards
from mutualrl.tasks.scoring import score


def test_accuracy_by_group() -> None:
    prompts = [Prompt(str(i), "t", "1", group) for i, group in enumerate("++*")]
    got = score(prompts, [r"\boxed{1}", r"\boxed{2}", "1"])
    assert (got.n, got.accuracy, got.by_group) == (3, pytest.approx(1 / 3), {"*": 0.0, "+": 0.5})
    assert got.no_box == pytest.approx(1 / 3)


def test_fewer_completions_than_prompts_are_rejected() -> None:
    with pytest.raises(ValueError, match="1 completions for 2 prompts"):
        score([Prompt("a", "t", "1", "g"), Prompt("b", "t", "1", "g")], ["x"])
    with pytest.raises(ValueError, match="0 completions"):
        score([], [])


def test_prompt_ids_are_stable() -> None:
    assert prompt_id("math", "train", 7, "text") == "math/train/7/982d9e3eb996"
    assert prompt_id("math", "train", 7, "text") != prompt_id("math", "train", 7, "texts")


def test_hostile_names_are_inert_in_tables(capsys: pytest.CaptureFixture[str]) -> None:
    from pathlib import Path

    from mutualrl.cli.results import show_summary

    groups = {"[/x]": 1.0, "\x1b[31m\u202e": 0.5}
    validation = Validation(n=64, accuracy=1.0, by_group=groups, no_box=0.0)
    show_summary(made_summary(validation, lost=["[/x]"]), Path("d"))
    output = capsys.readouterr().out
    assert "[/x]" in output
    assert not {"\x1b", "\u202e"} & set(output)


def test_terminal_control_characters_are_replaced() -> None:
    assert clean("a\x1b[31mb\x07\u202ec\u200bd\n\te") == "a\ufffd[31mb\ufffd\ufffdc\ufffdd\n\te"
    assert clean("x" * 30, 10) == "x" * 10 + " ... (30 characters)"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def other(): ...", "has no function 'score'"),
        ("import os\nother = os.name", "has no function 'score'"),
        ("def score(): raise SystemExit('run')", None),
        ("score = print", None),
        ("a, (b, score) = 1, (2, print)", None),
        ("from json import loads as score", None),
        ("from json import *", None),  # may define it
        ("if True:\n    def score(): ...", None),
        ("def score(:", None),  # the import reports it better
    ],
)
def test_reward_missing_from_its_file_is_rejected_without_running_it(
    tmp_path: Path, source: str, message: str | None
) -> None:
    file = tmp_path / "own.py"
    file.write_text(source)
    if message is None:
        require_rewards(["boxed", f"{file}:score"])
    else:
        with pytest.raises(UsageError, match=message):
            require_rewards(f"{file}:score")


def test_rewards_of_missing_files_and_packages_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside.py").write_text("")
    require_rewards(["json:loads", "beside:f", "os.path:join"])
    with pytest.raises(UsageError, match="no such file"):
        require_rewards("absent.py:f")
    with pytest.raises(UsageError, match="No module named 'no_such_package'"):
        require_rewards("no_such_package.inner:f")
