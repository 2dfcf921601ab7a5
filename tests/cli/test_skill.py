"""The order of work that SKILL.md gives coding agents, executed as written."""

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
def test_order_of_work_runs_as_written(cli_here: Cli, tmp_path: Path) -> None:
    block = re.search(r"```bash\n(.*?)```", SKILL.split("## Order of work")[1], flags=re.DOTALL)
    assert block is not None
    outputs = {}
    for line in block[1].splitlines():
        arguments = shlex.split(line)
        result = cli_here(*arguments[1:])
        assert result.returncode == 0, (line, result.stderr)
        if "--json" in arguments:
            outputs[arguments[1]] = json.loads(result.stdout)
    assert outputs["thl-check"]["safe"]
    assert outputs["complementarity"]["recommended"] in ("sgt", "none")
    assert (tmp_path / "runs" / "sgt" / "summary.json").is_file()


def test_exit_codes_are_those_of_the_errors() -> None:
    from mutualrl import errors

    codes = {
        kind.exit_code
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.MutualRLError)
    }
    table = SKILL.split("## Exit codes")[1].split("## Settings")[0]
    listed = {int(code) for code in re.findall(r"(?m)^\| (\d+) \|", table)}
    assert listed == codes | {0, 3}  # 3: a failed check, which is not an error


def test_header_has_a_name_and_a_use() -> None:
    head = SKILL.split("---")[1]
    assert "name: mutualrl" in head
    assert "Use when" in head
