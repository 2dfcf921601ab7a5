"""Lanes of the tests that run where what they read has changed since they last passed.

    python .ci/lanes.py due NAME      # exit code 0 if the lane is due, 1 if not
    python .ci/lanes.py passed NAME   # record that it passed on the files as they are: commit .ci/lanes.json

A lane's entry in lanes.json: what it `reads` (files, or directories with all files that git tracks below them), and the
sha256 of these files when it last `passed`. A release runs all lanes: CI_RELEASE=1.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LANES = ROOT / ".ci" / "lanes.json"


def digest(reads: list[str]) -> str:
    """Return the sha256 of the names and contents of the tracked files below some paths."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *reads],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    total = hashlib.sha256()
    for name in sorted(set(listed.stdout.decode().split("\0")) - {""}):
        if (path := ROOT / name).is_file():
            total.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


def main(action: str, name: str) -> int:
    """Run one of the two commands."""
    lanes = json.loads(LANES.read_text(encoding="utf-8"))
    found = digest(lanes[name]["reads"])
    if action == "due":
        return int(found == lanes[name]["passed"] and os.environ.get("CI_RELEASE") != "1")
    lanes[name]["passed"] = found
    LANES.write_text(json.dumps(lanes, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
