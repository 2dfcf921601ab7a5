"""The order of work that SKILL.md gives coding agents, executed as it stands there."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from conftest import REPOSITORY, Cli

SKILL = (REPOSITORY / "SKILL.md").read_text()


@pytest.mark.extended
@pytest.mark.slow
def test_the_order_of_work_runs_as_it_stands(cli: Cli, tmp_path: Path) -> None:
    block = re.search(r"```bash\n(.*?)```", SKILL.split("## Order of work")[1], flags=re.DOTALL)
    assert block is not None
    answers = {}
    for line in block[1].splitlines():
        words = shlex.split(line)
        done = cli(*words[1:])
        assert done.returncode == 0, (line, done.stderr)
        if "--json" in words:
            answers[words[1]] = json.loads(done.stdout)
    assert answers["thl-check"]["safe"]
    assert answers["complementarity"]["recommended"] in ("sgt", "none")
    assert (tmp_path / "runs" / "sgt" / "summary.json").is_file()


def test_its_exit_codes_are_those_of_the_errors() -> None:
    from mutualrl import errors

    codes = {
        kind.exit_code
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.MutualRLError)
    }
    table = SKILL.split("## Exit codes")[1].split("## Settings")[0]
    listed = {int(code) for code in re.findall(r"(?m)^\| (\d+) \|", table)}
    assert listed == codes | {0, 3}  # 3: a check that was not passed is no error


def test_it_has_a_name_and_says_when_to_use_it() -> None:
    head = SKILL.split("---")[1]
    assert "name: mutualrl" in head
    assert "Use when" in head
