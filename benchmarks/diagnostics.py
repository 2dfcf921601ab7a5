"""Evaluation and the five diagnostics of the embedded pool, run as a user would.

    python benchmarks/diagnostics.py     # about a minute on two cores

Every command runs in a separate process, and its output is kept verbatim; the same seed gives the same output.
Writes benchmarks/results/diagnostics.{json,md}.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import harness
from printed import keep_printed

COMMANDS = (
    ("eval", "--pool", "tiny", "--engine", "transformers"),
    ("complementarity", "--pool", "tiny", "--save", "rollouts.parquet"),
    ("paper", "xgrpo-check", "--rollouts", "rollouts.parquet"),
    ("sgt-check", "--rollouts", "rollouts.parquet", "--model", "ada=tiny:ada", "--model", "bob=tiny:bob"),
    ("paper", "channels", "--rollouts", "rollouts.parquet", "--model", "ada=tiny:ada", "--model", "bob=tiny:bob"),
    ("paper", "cost", "--rollouts", "rollouts.parquet", "--model", "ada=tiny:ada", "--model", "bob=tiny:bob"),
)


def main() -> None:
    """Run the commands, and print and write their output."""
    args = harness.parse(harness.options(__doc__))
    commands = list(COMMANDS)
    if args.smoke:
        commands = [(*COMMANDS[0], "--limit", "8"), (*COMMANDS[1], "--prompts", "8"), *COMMANDS[4:5]]
    with tempfile.TemporaryDirectory() as directory:
        keep_printed("diagnostics", commands, Path(directory), args.out)


if __name__ == "__main__":
    main()
