"""Sources that are asked during training, as runs: the gate, faults of the server, kills, and what is left behind."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from endpoint import Endpoint, chance, prompt_of, respond, served, solutions, teacher

from conftest import PATIENCE, Cli
from mutualrl.errors import RecipeError
from mutualrl.recipes import Request, resolve
from mutualrl.regimes.advantages import group_by_prompt
from mutualrl.see import Shard
from mutualrl.see.inspection import Reader
from mutualrl.sources.answers import read_account, stored_accounts
from mutualrl.storage.accounts import Account
from mutualrl.storage.rundir import RunDirectory
from mutualrl.tasks import TaskSource, get_task
from runs import SHORT, FinishedRun, Run, members, verify_intact, wait_until

pytest.importorskip("openai")

KEY = "sk-secret-5f1e77"
NOWHERE = "http://127.0.0.1:9/v1"
SGT = ("--regime", "sgt", "--pool", "tiny", *SHORT)


def options(endpoint: Endpoint, **settings: object) -> tuple[str, ...]:
    keys = {"concurrency": 4, "retries": 1, "timeout": 5, **settings}
    sets = [part for key, value in keys.items() for part in ("--set", f"sources.teacher.{key}={value}")]
    return ("--source", f"teacher=served:{endpoint.url}", *sets)


def exchange_of(run: Path) -> Reader:
    directory = RunDirectory(run)
    return Reader(directory.exchange, directory.info().run_id)


def rounds_of(run: Path, member: str) -> Iterator[tuple[int, Shard]]:
    reader = exchange_of(run)
    for number in reader.rounds(member):
        shard = reader.read(member, number)
        assert shard is not None
        yield number, shard


def accounts(run: Path, source: str = "teacher") -> dict[int, Account]:
    store = exchange_of(run).store
    found = {number: read_account(store, source, number) for number in stored_accounts(store, source)}
    return {number: account for number, account in found.items() if account is not None}


def failed_prompts(run: Path, *policies: str) -> dict[int, set[str]]:
    """Return by round the prompts on which all rollouts of any of the policies failed."""
    failed: dict[int, set[str]] = {}
    for policy in policies:
        for number, rollouts in rounds_of(run, policy):
            groups = group_by_prompt(rollouts.prompt_ids, rollouts.rewards)
            failed.setdefault(number, set()).update(key for key, rewards in groups.items() if max(rewards) < 0.2)
    return failed


def finished(run: Run) -> FinishedRun:
    assert run.process.wait(PATIENCE) == 0, run.errors.read_text()[-3000:]
    return run


@pytest.mark.slow
def test_prompts_on_which_a_learner_failed_are_asked_once_for_all_learners(tmp_path: Path) -> None:
    with served(Endpoint(teacher)) as endpoint:
        run = finished(Run(tmp_path, *SGT, *options(endpoint, samples=2), of=()))
        failed = failed_prompts(run.path, "ada", "bob")
        texts = {prompt.id: prompt.text for prompt in get_task("arithmetic").read("train", TaskSource()).prompts}
        expected = Counter(texts[key] for prompts in failed.values() for key in prompts for _ in range(2))
        first, *asked = endpoint.asked  # before the start
        assert prompt_of(first) in texts.values()
        assert Counter(map(prompt_of, asked)) == expected
        assert max(endpoint.seeds().values()) == 1  # each with a seed of its own
        assert 1 < endpoint.most_in_flight <= 4
    assert {number: account.prompts for number, account in accounts(run.path).items()} == {
        number: len(prompts) for number, prompts in failed.items()
    }
    for _, shard in rounds_of(run.path, "teacher"):
        right = {prompt.id: prompt.solution for prompt in get_task("arithmetic").read("train", TaskSource()).prompts}
        for rollout in shard.rows("text"):  # rewards are the verifier's
            assert rollout.reward == (1.0 if rollout.text == right[rollout.prompt_id] else 0.0)
    used = [json.loads(line) for line in (run.path / "policies/ada/rescues.jsonl").read_text().splitlines()]
    assert any(rescue["peer"] == "teacher" for rescue in used)
    rows = [row for row in run.metrics("ada") if "source/teacher/prompts" in row]
    assert sum(row["source/teacher/questions"] for row in rows) == 2 * sum(map(len, failed.values()))
    assert sum(row["source/teacher/rescues"] for row in rows) == sum(rescue["peer"] == "teacher" for rescue in used)
    assert verify_intact(run.path)["damaged"] == []
    assert not list((run.path / "exchange" / "teacher").glob("answer-*"))


@pytest.mark.extended
def test_a_run_that_is_killed_while_it_asks_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with served(Endpoint(teacher)) as endpoint:
        unbroken = finished(Run(tmp_path / "a", *SGT, *options(endpoint), of=()))
        once = endpoint.seeds()
    with served(Endpoint(teacher, delay=0.3)) as endpoint:
        run = Run(tmp_path / "b", *SGT, *options(endpoint), "--set", "run.max_restarts=9", of=())
        try:
            wait_until(lambda: len(endpoint.asked) >= 6)
            run.worker("teacher").kill()  # its supervisor starts it again
            wait_until(lambda: len(endpoint.asked) >= 16)
            run.worker("ada").kill()
            wait_until(lambda: len(endpoint.asked) >= 24 and in_flight(run))
            run.process.kill()
            run.process.wait()
            wait_until(lambda: not members(run.path))
            run.begin("--resume", "--set", f"sources.teacher.served={endpoint.url}")
            finished(run)
        finally:
            run.end()
        asked = endpoint.seeds()
    assert run.weights() == unbroken.weights()
    for policy in ("ada", "bob"):
        rescues = [each.path / "policies" / policy / "rescues.jsonl" for each in (run, unbroken)]
        assert rescues[0].read_bytes() == rescues[1].read_bytes()
        for key in ("loss", "reward", "sgt/pairs", "source/teacher/prompts", "source/teacher/rescues"):
            assert [row.get(key) for row in run.metrics(policy)] == [row.get(key) for row in unbroken.metrics(policy)]
    assert asked.keys() == once.keys()  # no other question
    again = sum(asked.values()) - len(asked)
    counted = sum(account.asked_again for account in accounts(run.path).values())
    # A question is stored as asked before it is sent: a kill between the two leaves one that no server saw.
    assert 1 <= again <= counted <= 2 * 4  # two processes ended with at most four in flight
    assert verify_intact(run.path)["damaged"] == []


def in_flight(run: Run) -> bool:
    """Return whether a question is stored as asked and not as answered."""
    files = (run.path / "exchange" / "teacher").glob("answer-*")
    return any(b'"answer": null' in path.read_bytes() for path in files if path.exists())


def faulty(number: int, endpoint: Endpoint, handler: BaseHTTPRequestHandler) -> bool:
    """Do something else with every second request: refuse, break off, send garbage, markup, the key."""
    kind = (number // 2) % 6 if number % 2 else -1
    if kind == 0:
        respond(handler, 429, b'{"error": {"message": "slow down"}}', Retry_After="0.1")
    elif kind == 1:
        respond(handler, 500, json.dumps({"error": {"message": f"your key {KEY} broke it"}}).encode())
    elif kind == 2:
        respond(handler, 200, b"<html><script>alert(1)</script>")
    elif kind == 3:
        handler.close_connection = True
        handler.connection.close()
    elif kind == 4:
        respond(handler, 302, b"", Location=f"http://127.0.0.1:9/{KEY}")
    elif kind == 5:
        text = f"[red]\\u001b]0;title\\u0007</script><script>{KEY}"
        respond(
            handler, 200, f'{{"choices": [{{"message": {{"content": "{text}"}}, "finish_reason": "stop"}}]}}'.encode()
        )
    return kind >= 0


def assert_no_key(run: Path) -> None:
    for path in run.rglob("*"):
        if path.is_file():
            assert KEY.encode() not in path.read_bytes(), path


@pytest.mark.extended
def test_a_server_that_fails_costs_its_answers_and_no_secret(tmp_path: Path, cli: Cli) -> None:
    with served(Endpoint(teacher, faulty)) as endpoint:
        settings = options(endpoint, api_key_env="TEACHER_KEY", retries=0)
        run = Run(tmp_path, *SGT, *settings, of=(), TEACHER_KEY=KEY)
        finished(run)
        assert endpoint.headers["authorization"] == f"Bearer {KEY}"
    total = [account.failed for account in accounts(run.path).values()]
    assert sum(total) > 0
    for number, shard in rounds_of(run.path, "teacher"):
        account = accounts(run.path)[number]
        assert len(shard) == account.questions - account.failed
    assert_no_key(run.path)
    assert KEY not in run.errors.read_text()
    assert "questions have no answer" in next((run.path / "sources/teacher/logs").iterdir()).read_text()
    page = cli("report", run.path, "--out", "page")
    assert page.returncode == 0
    assert "<script>alert" not in (tmp_path / "page" / "index.html").read_text()
    assert KEY not in page.stdout + page.stderr
    assert verify_intact(run.path)["damaged"] == []


@pytest.mark.release
def test_a_question_without_an_answer_ends_the_run_if_the_recipe_says_so(tmp_path: Path, cli: Cli) -> None:
    def broken(number: int, endpoint: Endpoint, handler: BaseHTTPRequestHandler) -> bool:
        if number >= 3:
            respond(handler, 500, json.dumps({"error": {"message": f"key {KEY} is broken"}}).encode())
        return number >= 3

    with served(Endpoint(teacher, broken)) as endpoint:
        settings = options(endpoint, on_source_loss="fail", api_key_env="TEACHER_KEY")
        result = cli("train", *SGT, *settings, "--run-dir", "r", "--json", TEACHER_KEY=KEY)
    error = json.loads(result.stdout)["error"]
    assert result.returncode == 5
    assert error["kind"] == "source-lost"
    assert "source 'teacher' gave no answer on" in error["message"]
    assert "on_source_loss: continue" in error["message"]
    assert KEY not in result.stdout + result.stderr
    assert_no_key(tmp_path / "r")
    with served(Endpoint(teacher)) as endpoint:  # mended: the run goes on where it was
        more = ("--set", f"sources.teacher.served={endpoint.url}")
        result = cli("train", "--resume", "--run-dir", "r", *more, TEACHER_KEY=KEY)
        assert result.returncode == 0, result.stderr


@pytest.mark.release
def test_a_server_that_goes_away_does_not_hold_the_run_up(tmp_path: Path) -> None:
    with served(Endpoint(teacher)) as endpoint:
        run = Run(tmp_path, *SGT, *options(endpoint), "--set", "run.steps=12", of=())
        wait_until(lambda: len(endpoint.asked) >= 8)
    finished(run)  # the server is gone
    silent = [account for account in accounts(run.path).values() if account.failed]
    assert silent[0].failed < 2 * 4  # those in flight when the fourth failed; the rest of the round is not asked
    assert [account.failed for account in silent[1:]] == [1] * (len(silent) - 1)  # is it back?
    assert all(account.left_out == account.questions - account.failed for account in silent[1:])


@pytest.mark.release
def test_a_budget_ends_the_asking_and_not_the_run(tmp_path: Path) -> None:
    with served(Endpoint(teacher)) as endpoint:
        run = finished(Run(tmp_path, *SGT, *options(endpoint, budget_tokens=700), of=()))
        asked = len(endpoint.asked)
    sizes = [each.prompt_tokens + each.completion_tokens for each in accounts(run.path).values()]
    first = json.loads((run.path / "run.json").read_text())["asked_sources"]["teacher"]["first"]["spent"]
    largest = 40  # tokens of a question and its answer; four are in flight when the budget is spent
    assert 700 <= first + sum(sizes) < 700 + 4 * largest
    assert sum(account.questions - account.left_out for account in accounts(run.path).values()) == asked - 1
    assert list(accounts(run.path).values())[-1].left_out > 0


@pytest.mark.extended
def test_a_source_that_dies_is_started_again_and_then_given_up(tmp_path: Path) -> None:
    with served(Endpoint(teacher, delay=0.2)) as endpoint:
        run = Run(tmp_path, *SGT, *options(endpoint), "--set", "run.max_restarts=1", of=())
        try:
            wait_until(lambda: len(endpoint.asked) >= 4)
            first = run.worker("teacher")
            first.kill()
            wait_until(lambda: any(process.pid != first.pid for process in workers(run, "teacher")))
            wait_until(lambda: len(endpoint.asked) >= 12)
            run.worker("teacher").kill()
            finished(run)
        finally:
            run.end()
    assert "teacher" not in {path.name for path in (run.path / "policies").iterdir()}
    missing = json.loads((run.path / "exchange/ada/missing_peers.json").read_text())
    assert "teacher" in missing["peers"]
    report = verify_intact(run.path)
    assert report["damaged"] == []
    log = next((run.path / "policies/ada/logs").iterdir()).read_text()
    assert "peer 'teacher' is lost; the pool continues without it" in log


@pytest.mark.release
def test_a_source_that_restarts_while_its_server_is_away_ends_no_run(tmp_path: Path) -> None:
    with served(Endpoint(teacher, delay=0.2)) as endpoint:  # the model is not named
        run = Run(tmp_path, *SGT, *options(endpoint), "--set", "run.max_restarts=1", "--set", "run.steps=12", of=())
        wait_until(lambda: len(endpoint.asked) >= 8)
        assert RunDirectory(run.path).info().asked_sources["teacher"]["model"] == "teacher"
    run.worker("teacher").kill()
    finished(run)
    late = list(accounts(run.path).values())[-1]
    assert late.questions == late.failed + late.left_out > 0


@pytest.mark.release
def test_a_run_is_resumed_without_an_endpoint_that_is_gone(tmp_path: Path) -> None:
    with served(Endpoint(teacher)) as endpoint:
        run = Run(tmp_path, *SGT, *options(endpoint), "--set", "run.steps=12", of=())
        wait_until(lambda: (run.path / "run.json").exists() and len(accounts(run.path)) >= 3)
        run.process.kill()
        run.process.wait()
        wait_until(lambda: not members(run.path))
    run.begin("--resume")
    finished(run)
    assert "the run continues, without its answers while that is so" in run.errors.read_text()


def workers(run: Run, name: str) -> list[psutil.Process]:
    """Return the processes of a member that still run: one may end while it is asked."""
    found = []
    for process in members(run.path):
        with suppress(psutil.Error):
            command = process.cmdline()
            if f"--policy={name}" in command and "mutualrl.training.worker" in command:
                found.append(process)
    return found


@pytest.mark.release
def test_late_answers_are_read_in_the_next_round(tmp_path: Path) -> None:
    with served(Endpoint(teacher, delay=0.05)) as endpoint:
        settings = (*options(endpoint), "--set", "exchange.staleness=1")
        alone = ("--regime", "sgt", "--model", "tiny:ada", *SHORT, "--set", "trainer.max_completion_length=20")
        run = finished(Run(tmp_path, *alone, *settings, of=()))
        asked = sum(account.questions for account in accounts(run.path).values())
        assert len(endpoint.asked) == asked
    rows = run.metrics("ada")
    assert sum(row.get("source/teacher/rescues", 0) for row in rows) > 0
    read = sum(row.get("source/teacher/questions", 0) for row in rows)
    assert 0 < read <= asked  # the last round's may not be read
    rescues = sum(row.get("source/teacher/rescues", 0) for row in rows)
    assert sum(row.get("sgt/pairs", 0) for row in rows) == rescues
    assert sum(row.get("source/teacher/confirmed", 0) for row in rows) >= rescues
    assert sum(row.get("plan/extra_tokens", 0) for row in rows) > 0
    assert "never acted" not in run.errors.read_text()


@pytest.mark.extended
def test_several_sources_divide_the_prompts_and_one_is_asked_where_another_failed(tmp_path: Path) -> None:
    """`left` and `right` share the prompts 1 : 3; `last` is asked where `left` has no confirmed text."""

    def half(prompt: str, seed: int) -> str:
        return solutions()[prompt] if chance(prompt, seed) < 0.5 else "I do not know"

    with served(Endpoint(half)) as left, served(Endpoint(teacher)) as right, served(Endpoint(teacher)) as last:
        sources = [
            f"{{name: left, served: '{left.url}', weight: 1}}",
            f"{{name: right, served: '{right.url}', weight: 3}}",
            f"{{name: last, served: '{last.url}', after: left}}",
        ]
        run = finished(Run(tmp_path, *SGT, "--set", f"sources=[{', '.join(sources)}]", of=()))
    failed = failed_prompts(run.path, "ada", "bob")
    asked = {name: {number: set() for number in failed} for name in ("left", "right", "last")}
    confirmed: dict[int, set[str]] = {number: set() for number in failed}
    for name, rounds in asked.items():
        for number, shard in rounds_of(run.path, name):
            rounds[number] = set(shard.prompt_ids)
            if name == "left":
                confirmed[number] = {key for key, reward in zip(shard.prompt_ids, shard.rewards, strict=True) if reward}
    assert any(confirmed.values())
    for number, prompts in failed.items():
        assert asked["left"][number].isdisjoint(asked["right"][number])
        assert asked["left"][number] | asked["right"][number] == prompts
        assert asked["last"][number] == prompts - confirmed[number]
    assert 0 < sum(map(len, asked["left"].values())) < sum(map(len, asked["right"].values()))
    assert verify_intact(run.path)["damaged"] == []


@pytest.mark.release
def test_the_ranks_of_a_policy_read_the_same_answers(tmp_path: Path) -> None:
    with served(Endpoint(teacher)) as endpoint:
        ranks = ("--set", "launch.processes=2", "--set", "launch.strategy=ddp")
        alone = ("--regime", "sgt", "--model", "tiny:ada", *SHORT, "--set", "trainer.max_completion_length=20")
        run = finished(Run(tmp_path, *alone, *ranks, *options(endpoint), of=()))
        asked = {number: account.prompts for number, account in accounts(run.path).items()}
    assert asked == {number: len(prompts) for number, prompts in failed_prompts(run.path, "ada").items()}
    rows = run.metrics("ada")
    rescues = (run.path / "policies/ada/rescues.jsonl").read_text().splitlines()
    assert sum(row.get("source/teacher/rescues", 0) for row in rows) == len(rescues) > 0
    assert verify_intact(run.path)["damaged"] == []


# ---- frozen


@pytest.mark.slow
@pytest.mark.parametrize("regime", ["prp", pytest.param("xgrpo", marks=pytest.mark.release)])
def test_a_frozen_model_is_a_member_of_which_every_regime_can_read(tmp_path: Path, regime: str) -> None:
    from mutualrl.engines.transformers_engine import TransformersEngine
    from mutualrl.tasks.prompting import prompt_ids
    from mutualrl.tiny import path_of

    pool = ("--regime", regime, "--pool", "tiny", *SHORT, "--set", "trainer.temperature=0.9")
    run = finished(Run(tmp_path, *pool, "--source", "old=frozen:tiny:cyd", of=()))
    seen = {number: set(rollouts.prompt_ids) for number, rollouts in rounds_of(run.path, "ada")}
    engine = TransformersEngine.load(str(path_of("cyd")))
    texts = {prompt.id: prompt.text for prompt in get_task("arithmetic").read("train", TaskSource()).prompts}
    for number, shard in rounds_of(run.path, "old"):
        assert set(shard.prompt_ids) == seen[number]
        assert Counter(shard.prompt_ids) == dict.fromkeys(seen[number], 4)
        assert not np.isnan(shard.rewards).any()
        if regime == "prp":  # what it publishes is what it sampled with
            rows = prompt_ids([texts[key] for key in shard.prompt_ids], engine.tokenizer)
            completions = [list(ids) for ids in shard.token_ids if ids is not None]
            hot = engine.logprobs(rows, completions)
            for trace, own, ids in zip(shard.logprobs, hot, completions, strict=True):
                assert trace is not None
                assert len(trace) == len(ids)
                assert (trace != 0).all()
                assert np.sign(trace - own).any() or len(ids) == 0  # at .9, not at 1
    rows = run.metrics("ada")
    if regime == "prp":
        first = next(row["prp/rows"] for row in rows if "prp/rows" in row)
        assert first == 16 * 8  # bob's and the source's groups
    assert verify_intact(run.path)["damaged"] == []
    assert all(np.isfinite(row["loss"]) for row in rows)


@pytest.mark.extended
def test_what_a_frozen_source_cannot_give_is_refused(cli: Cli) -> None:
    pool = ("--pool", "tiny", "--source", "old=frozen:tiny:cyd", "--dry-run")
    refused = {
        ("prp", "sources.old.temperature=0.5"): "found temperature: 0.5, the run has 1.0",
        ("prp", "sources.old.ask=gated"): "pools statistics",
        ("sgt", "trainer.top_p=0.9"): "a frozen source samples without top_p",
    }
    for (regime, setting), expected in refused.items():
        result = cli("train", "--regime", regime, *pool, "--set", setting)
        assert result.returncode == 2
        assert expected in result.stderr
    assert cli("train", "--regime", "hacpo", *pool).returncode == 0


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (("after: b", "after: a"), "are each asked after another one of them"),
        (("weight: 1, learners: [ada]", "weight: 1, learners: [bob]"), "divide the prompts of the same learners"),
        (("learners: [ada]", "after: a"), "expected a source that all of these read"),
    ],
)
def test_sources_that_would_wait_for_each_other_or_leave_prompts_out_are_refused(
    cli: Cli, sources: tuple[str, str], message: str
) -> None:
    parts = [f"{{name: {n}, served: 'http://127.0.0.1:9/v1', {keys}}}" for n, keys in zip("ab", sources, strict=True)]
    result = cli("train", "--regime", "sgt", "--pool", "tiny", "--set", f"sources=[{', '.join(parts)}]", "--dry-run")
    assert result.returncode == 2
    assert message in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("regime", "assignments", "message"),
    [
        ("prp", (), "log-probs of every rollout"),
        ("xgrpo", (), "ask: all"),
        ("sgt", ("sources.teacher.timeout=1800",), "run.step_timeout"),
        ("sgt", ("sources.teacher.api=completions", "sources.teacher.system=x"), "system is"),
        ("sgt", ("sources.teacher.after=other",), "expected another source"),
    ],
)
def test_what_a_served_source_cannot_do_is_refused_by_name(
    regime: str, assignments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(RecipeError) as error:
        resolve(Request(pool="tiny", regime=regime, sources=(f"teacher=served:{NOWHERE}",), assignments=assignments))
    assert message in str(error.value)


def test_what_data_environment_and_server_lack_is_refused_before_the_start(cli: Cli) -> None:
    source = ("--source", f"teacher=served:{NOWHERE}", "--pool", "tiny")
    cases: dict[tuple[str, ...], str] = {
        ("--set", "sources.teacher.column=who", "--dry-run"): "no row of the data names a source",
        ("--set", "sources.teacher.api_key_env=NOT_THERE", "--dry-run"): "NOT_THERE is not set",
        (): "is the server running",
    }
    for arguments, expected in cases.items():
        result = cli("train", *source, "--regime", "sgt", *arguments)
        assert result.returncode in (2, 4), arguments
        assert expected in result.stderr, (arguments, result.stderr)
    result = cli("train", *source, "--regime", "sgt", "--steps", "10", "--dry-run", "--json")
    predicted: dict[str, Any] = json.loads(result.stdout)["asked_sources"]["teacher"]
    assert predicted["prompts_per_round"] == predicted["answers_per_round"] == 32
    assert predicted["rounds"] == 10


def test_a_served_source_that_is_asked_about_all_prompts_may_be_pooled() -> None:
    request = Request(pool="tiny", regime="xgrpo", sources=(f"teacher=served:{NOWHERE}",))
    assert resolve(replace(request, assignments=("sources.teacher.ask=all",))).asked_sources[0].gated is False


@pytest.mark.extended
def test_a_source_that_judges_and_is_killed_publishes_the_same(tmp_path: Path) -> None:
    """Under `dense` a round has a second part, which its marker names: a kill leaves both or none."""
    dense = ("--regime", "dense", "--model", "tiny:bob", *SHORT, "--source", "t=frozen:tiny:ada")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    unbroken = finished(Run(tmp_path / "a", *dense, of=()))
    run = Run(tmp_path / "b", *dense, "--set", "run.max_restarts=9", of=())
    try:
        wait_until((run.path / "exchange" / "t" / "000000.json").exists)
        run.worker("t").kill()
        wait_until((run.path / "exchange" / "t" / "000002.json").exists)
        run.worker("bob").kill()
        finished(run)
    finally:
        run.end()
    assert run.weights() == unbroken.weights()
    for key in ("loss", "reward", "dense/rollouts", "dense/tokens", "dense/ratio"):
        assert [row.get(key) for row in run.metrics("bob")] == [row.get(key) for row in unbroken.metrics("bob")]
    judged = 0
    for (_, one), (_, other) in zip(rounds_of(run.path, "t"), rounds_of(unbroken.path, "t"), strict=True):
        scores = [
            [(s.prompt_id, s.index, s.ends.tolist(), s.logprobs.tolist()) for s in each.scores()]
            for each in (one, other)
        ]
        assert scores[0] == scores[1]
        judged += len(scores[0])
    assert judged > 0
    assert verify_intact(run.path)["damaged"] == []
