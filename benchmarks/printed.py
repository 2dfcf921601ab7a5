"""Run commands as a user would, and keep their output. Used by other benchmarks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import harness


def keep_printed(name: str, commands: Iterable[Sequence[str]], directory: Path, out: Path) -> None:
    """Run each command of mutualrl in `directory`, print its output, and write `NAME.{json,md}` to `out`. Raises
    CalledProcessError if one fails."""
    parts, outputs = [], {}
    for command in commands:
        line = "mutualrl " + " ".join(command)
        print(line, flush=True)
        result = subprocess.run(
            [sys.executable, "-m", "mutualrl", *command],
            cwd=directory,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        outputs[line] = result.stdout
        parts.append(f"`{line}`\n\n{result.stdout.strip()}")
    content = {"command": f"python benchmarks/{name}.py", "outputs": outputs}
    harness.write(out, name, content, "\n\n".join(parts))
