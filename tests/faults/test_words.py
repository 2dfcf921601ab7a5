"""What people read of a run, recomputed from its exchange by code that shares nothing with ours: dead and revived
prompts, texts taught, tokens, what a source was asked; in summary.json, on the page, and in the last table."""

from __future__ import annotations

import html
import json
import math
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from endpoint import Endpoint, chance, prompt_of, respond, served
from tokenizers import Tokenizer

from conftest import Cli
from mutualrl.tasks import TaskSource, get_task

SHORT = (
    "--steps",
    "5",
    "--set",
    "run.validation_limit=8",
    "--set",
    "run.validate_every=0",
    "--set",
    "run.save_every=0",
)
FULL = ("--exchange", "full")
MODELS = Path(__file__).resolve().parents[2] / "src" / "mutualrl" / "tiny" / "models"


def rounds(run: Path, member: str) -> list[list[dict[str, Any]]]:
    """Return the rows of each round that a member published."""
    files = sorted((run / "exchange" / member).glob("*.parquet"))
    return [pq.read_table(file).to_pylist() for file in files]


def dead_and_revived(run: Path, policy: str) -> tuple[int, int, int]:
    """Return the dead prompts at the end, the most in any round, and how often one had a success again."""
    counts, revived = dead_by_round(run, policy)
    return counts[-1], max(counts), revived


def came_back(run: Path, policy: str, revived: int) -> str:
    """Return what is said of prompts that came again."""
    prompts = [prompt for rows in rounds(run, policy) for prompt in {row["prompt_id"] for row in rows}]
    if len(prompts) == len(set(prompts)):
        return "no prompt came a second time"
    return "came back once" if revived == 1 else f"came back {revived} times"


def dead_by_round(run: Path, policy: str) -> tuple[list[int], int]:
    """Return the dead prompts after each round, and how often one had a success again."""
    dead: set[str] = set()
    counts, revived = [], 0
    for rows in rounds(run, policy):
        best: dict[str, float] = {}
        for row in rows:
            if not row["prefix"] and not math.isnan(row["reward"]):
                best[row["prompt_id"]] = max(best.get(row["prompt_id"], -math.inf), row["reward"])
        for prompt, reward in best.items():
            if reward > 0:
                revived += prompt in dead
                dead.discard(prompt)
            else:
                dead.add(prompt)
        counts.append(len(dead))
    return counts, revived


def lessons(run: Path, policy: str) -> list[dict[str, Any]]:
    path = run / "policies" / policy / "rescues.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def tokens_of(policy: str, texts: list[str]) -> int:
    """Return the tokens of texts in a policy's vocabulary, each with the one that ends it."""
    tokenizer = Tokenizer.from_file(str(MODELS / policy / "tokenizer.json"))
    return sum(len(tokenizer.encode(text, add_special_tokens=False).ids) + 1 for text in texts)


def words_of_page(cli_here: Cli, run: Path, out: Path) -> str:
    result = cli_here("report", run, "--out", out)
    assert result.returncode == 0, result.stderr
    verdict = re.search(r'<section class="verdict".*?</section>', (out / "index.html").read_text(), re.DOTALL)
    assert verdict is not None
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", verdict[0])).split())


def trained(cli: Cli, run: Path, *arguments: str) -> str:
    result = cli("train", "--run-dir", run, *arguments, *SHORT, *FULL)
    assert result.returncode == 0, result.stderr
    return result.stdout


TEACHING = {"sgt", "hinted"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "regime",
    [
        "grpo",
        "sgt",
        *(pytest.param(name, marks=pytest.mark.extended) for name in ("prp", "hinted")),
        *(pytest.param(name, marks=pytest.mark.release) for name in ("xgrpo", "hacpo", "swarm", "guided")),
    ],
)
def test_what_a_run_says_agrees_with_its_exchange(cli: Cli, cli_here: Cli, tmp_path: Path, regime: str) -> None:
    run = tmp_path / "r"
    table = trained(cli, run, "--regime", regime, "--pool", "tiny-hints" if regime == "hinted" else "tiny")
    summary = json.loads((run / "summary.json").read_text())
    page = words_of_page(cli_here, run, tmp_path / "page")
    for policy, result in summary["policies"].items():
        dead, most, revived = dead_and_revived(run, policy)
        texts = lessons(run, policy)
        facts = result["facts"]
        assert (facts["dead"], facts["most_dead"], facts["revived"]) == (dead, most, revived)
        assert (facts["taught"] or 0) == len(texts) == result["rescued_pairs"]
        assert (facts["taught"] is not None) == ("texts taught" in table) == (regime in TEACHING)
        first = dead_by_round(run, policy)[0][0]
        assert facts["first_dead"] == first
        assert f"{policy} {first} → {most} → {dead} {came_back(run, policy, revived)}" in page
        assert (f"taught {len(texts)} text" in page) == (regime in TEACHING)
        assert f"{dead} (most: {most})" in table
        if regime == "sgt":
            assert texts
            assert facts["extra_tokens"] == tokens_of(policy, [line["answer"] for line in texts])
        if regime in ("grpo", "xgrpo", "guided"):
            assert facts["extra_rows"] == facts["extra_tokens"] == 0
        if regime in ("prp", "hacpo", "swarm"):
            assert facts["extra_rows"] > 0
    assert ("One run does not show the gain of sharing" in page) == (regime != "grpo")
    assert ("This is a baseline" in page) == (regime == "grpo")
    assert "nobody to share with" not in page
    assert "mutualrl train --pool" in page  # what to try next


@pytest.mark.slow
def test_one_model_and_a_file(cli: Cli, cli_here: Cli, tmp_path: Path) -> None:
    run = tmp_path / "r"
    trained(cli, run, "--regime", "sgt", "--pool", "tiny-recorded")
    summary = json.loads((run / "summary.json").read_text())
    texts, page = lessons(run, "ada"), words_of_page(cli_here, run, tmp_path / "page")
    assert {line["peer"] for line in texts} == {"book"}
    facts = summary["policies"]["ada"]["facts"]
    assert facts["taught"] == summary["source_facts"]["book"]["rescues"] == len(texts) > 0
    assert facts["extra_tokens"] == tokens_of("ada", [line["answer"] for line in texts])
    dead, most, revived = dead_and_revived(run, "ada")
    assert f"→ {most} → {dead} {came_back(run, 'ada', revived)}" in page
    assert f"taught {len(texts)} texts" in page
    assert "One run does not show what book gave" in page
    baseline = re.search(r"mutualrl train [^\n]*--regime grpo", page)
    assert baseline is not None
    assert "nobody to share with" not in page


@pytest.mark.slow
@pytest.mark.extended
def test_one_model_and_an_endpoint(cli: Cli, cli_here: Cli, tmp_path: Path) -> None:
    """The endpoint counts what it was asked, and fails on one question of four; the rest has a budget."""
    solutions = {p.text: p.solution or "" for p in get_task("arithmetic").read("train", TaskSource()).prompts}
    given: dict[str, int] = defaultdict(int)

    def answer(number: int, endpoint: Endpoint, handler: Any) -> bool:
        body = endpoint.asked[number]
        prompt, seed = prompt_of(body), int(body["seed"])
        if number and chance(prompt, seed) < 0.25:  # the first question is answered
            given["failed"] += 1
            respond(handler, 400, json.dumps({"error": {"message": "no quota left"}}).encode())
            return True
        usage = {"prompt_tokens": len(prompt) + 3, "completion_tokens": len(solutions[prompt])}
        given["tokens"] += sum(usage.values())
        choice = {"message": {"content": solutions[prompt]}, "finish_reason": "eos"}
        respond(handler, 200, json.dumps({"choices": [choice], "usage": usage}).encode())
        return True

    run = tmp_path / "r"
    with served(Endpoint(lambda prompt, seed: "", answer)) as endpoint:
        source = ("--source", f"teacher=served:{endpoint.url}", "--set", "sources.teacher.retries=0")
        table = trained(cli, run, "--regime", "sgt", "--model", "tiny:ada", *source, "--set", "round.prompts=16")
        asked = len(endpoint.asked)
    summary = json.loads((run / "summary.json").read_text())
    facts, page = summary["source_facts"]["teacher"], words_of_page(cli_here, run, tmp_path / "page")
    assert (facts["questions"], facts["failed"]) == (asked, given["failed"])
    assert facts["prompt_tokens"] + facts["completion_tokens"] == given["tokens"]
    assert sum(facts["reasons"].values()) == given["failed"] > 0
    assert all("no quota left" in reason for reason in facts["reasons"])
    rescues = len(lessons(run, "ada"))
    assert facts["rescues"] == rescues > 0
    per_rescue = f"{given['tokens'] / rescues:,.0f}"
    assert f"Source teacher: {asked:,} questions ({given['failed']:,} without an answer)" in page
    assert f"{given['tokens']:,} tokens; {rescues:,} texts taught, {per_rescue} tokens per text" in page
    (note,) = [note for note in summary["notes"] if note.startswith("source teacher")]
    assert "no quota left" in note and note in " ".join(table.split())
    row = next(line for line in table.splitlines() if line.startswith("| teacher"))
    assert [cell.strip() for cell in row.split("|")[2:7]] == [
        *(f"{asked:,}", f"{given['failed']:,}", f"{given['tokens']:,}", f"{rescues:,}", per_rescue)
    ]


@pytest.mark.slow
@pytest.mark.extended
def test_an_endpoint_without_answers_and_a_spent_budget_are_said(cli: Cli, tmp_path: Path) -> None:
    def refuse(number: int, endpoint: Endpoint, handler: Any) -> bool:
        if number == 0:
            return False
        respond(handler, 400, json.dumps({"error": {"message": "quota is spent"}}).encode())
        return True

    for name, fault, keys in (("refuses", refuse, {}), ("budget", None, {"budget_tokens": 1})):
        run = tmp_path / name
        with served(Endpoint(lambda prompt, seed: "7", fault)) as endpoint:
            sets = [part for key, value in keys.items() for part in ("--set", f"sources.teacher.{key}={value}")]
            source = ("--source", f"teacher=served:{endpoint.url}", *sets)
            trained(cli, run, "--regime", "sgt", "--model", "tiny:ada", *source, "--set", "round.prompts=16")
        summary = json.loads((run / "summary.json").read_text())
        notes = " ".join(summary["notes"])
        assert "a peer's succeed" not in notes
        assert ("quota is spent" in notes) == (name == "refuses")
        assert ("its budget of 1 tokens was spent" in notes) == (name == "budget")
        assert "the regime never acted in all 5 steps" in notes
        assert summary["source_facts"]["teacher"]["rescues"] == 0


@pytest.mark.slow
@pytest.mark.extended
def test_dead_prompts_are_the_same_rows_whether_a_run_publishes_or_not(cli: Cli, tmp_path: Path) -> None:
    """`tiny` has 234 rows with 211 texts: two rows of one text are two prompts in every run."""
    counted = []
    for name, publish in (("alone", ()), ("full", FULL)):
        run = tmp_path / name
        result = cli("train", "--run-dir", run, "--regime", "grpo", "--pool", "tiny", *SHORT, "--steps", "10", *publish)
        assert result.returncode == 0, result.stderr
        policies = json.loads((run / "summary.json").read_text())["policies"]
        counted.append({name: (each["facts"]["dead"], each["facts"]["revived"]) for name, each in policies.items()})
    assert counted[0] == counted[1]
    assert counted[1] == {policy: dead_and_revived(tmp_path / "full", policy)[::2] for policy in ("ada", "bob")}
