"""Evaluation and the five diagnostics of the embedded pool, as a user types them.

    python benchmarks/diagnostics.py     # about a minute on two cores

Every command is run in a process of its own and its output kept as it is printed; the same seed gives the same output.
Writes benchmarks/results/diagnostics.{json,md}.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from printed import keep_printed

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
    with tempfile.TemporaryDirectory() as directory:
        keep_printed("diagnostics", COMMANDS, Path(directory))


if __name__ == "__main__":
    main()
