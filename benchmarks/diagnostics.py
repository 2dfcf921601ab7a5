"""Evaluation and the five diagnostics of the embedded pool, as a user types them.

    python benchmarks/diagnostics.py     # about a minute on two cores

Every command is run in a process of its own and its output kept as it is printed; the same seed gives the same output.
Writes benchmarks/results/diagnostics.{json,md}.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
COMMAND = "python benchmarks/diagnostics.py"
COMMANDS = (
    ("eval", "--pool", "tiny", "--engine", "transformers"),
    ("complementarity", "--pool", "tiny", "--save", "rollouts.parquet"),
    ("xgrpo-check", "--rollouts", "rollouts.parquet"),
    ("sgt-check", "--rollouts", "rollouts.parquet", "--model", "ada=tiny:ada", "--model", "bob=tiny:bob"),
    ("channels", "--rollouts", "rollouts.parquet", "--model", "ada=tiny:ada", "--model", "bob=tiny:bob"),
    ("cost", "--rollouts", "rollouts.parquet", "--model", "ada=tiny:ada", "--model", "bob=tiny:bob"),
)


def main() -> None:
    """Run the commands, print and write what they print."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    parts, results = [], {}
    with tempfile.TemporaryDirectory() as directory:
        for command in COMMANDS:
            done = subprocess.run(
                [sys.executable, "-m", "mutualrl", *command],
                cwd=directory,
                capture_output=True,
                text=True,
                check=True,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
            )
            typed = "mutualrl " + " ".join(command)
            results[typed] = done.stdout
            parts.append(f"`{typed}`\n\n{done.stdout.strip()}")
    text = "\n\n".join(parts) + "\n"
    print(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "diagnostics.md").write_text(text)
    (RESULTS / "diagnostics.json").write_text(json.dumps({"command": COMMAND, "outputs": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
