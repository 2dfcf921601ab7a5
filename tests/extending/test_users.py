"""Users, each a script of the documented commands: every command ends as it should, and no page says what is
false of its kind of member."""

from __future__ import annotations

import html
import os
import re
import subprocess
from pathlib import Path

import pytest
from endpoint import Endpoint, served

from conftest import PATIENCE, REPOSITORY
from mutualrl.tasks import TaskSource, get_task

USERS = Path(__file__).parent / "users"
#: sentences that are false for these users
FALSE = (
    *(
        "nobody to share with",
        "a peer's succeed",
        "0.00x extra",
        "mean of the pool, 64 problems). One run does not show what",
    ),
    *("newer than the claim", "older than the claims"),
)
SAID = {
    "one_model": ("One run does not show what book gave", "it was taught", "mutualrl train --regime grpo"),
    "endpoint": ("Source teacher: ", "its budget of 60 tokens was spent"),
    "scripts": ("was trained by scripts", "mutualrl eval --model SAVED_MODEL_OF_ADA --model SAVED_MODEL_OF_BOB"),
    "agent": ("20 that are no run (20 with a result without a call before it)", "tiny:jan | 200 | 180"),
    "cluster": ("Source teacher: ", "to the policies of this directory; the whole run's page has what a text cost"),
    "study": ("shortest against grpo", "sgt against grpo"),
    "pages": (
        "sgt against grpo",
        "One run does not show the gain of sharing",
        "One run does not show what book gave",
        "has not finished",
    ),
}


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.parametrize("user", sorted(path.stem for path in USERS.glob("*.sh")))
def test_user(tmp_path: Path, user: str) -> None:
    solutions = {p.text: p.solution or "" for p in get_task("arithmetic").read("train", TaskSource()).prompts}
    with served(Endpoint(lambda prompt, seed: solutions.get(prompt, "7"))) as endpoint:
        variables = {
            "ENDPOINT": endpoint.url,
            "EXAMPLES": str(REPOSITORY / "examples"),
            "BENCHMARKS": str(REPOSITORY / "benchmarks"),
        }
        done = subprocess.run(
            ["bash", "-euo", "pipefail", str(USERS / f"{user}.sh")],
            cwd=tmp_path,
            env={**os.environ, **variables, "COLUMNS": "200", "MUTUALRL_REPORT": "1"},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
    assert done.returncode == 0, (done.stdout[-3000:], done.stderr[-3000:])
    pages = [re.sub(r"<[^>]+>", " ", path.read_text()) for path in sorted(tmp_path.rglob("index.html"))]
    words = " ".join(html.unescape(" ".join([done.stdout, *pages])).split())
    assert [sentence for sentence in FALSE if sentence in words] == []
    assert [sentence for sentence in SAID[user] if sentence not in words] == []
