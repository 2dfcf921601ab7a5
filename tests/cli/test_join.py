"""Runs over a bucket: one command for all policies, or one command per policy without a shared directory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml
from endpoint import Endpoint, served, teacher

from buckets import Server, reachable, serving
from conftest import PATIENCE, Cli, on_core
from mutualrl.launch.plan import rehearse
from mutualrl.launch.session import Launch
from mutualrl.machine.devices import Machine
from mutualrl.recipes import Request, resolve, templates
from mutualrl.runs.logs import read_logged
from mutualrl.runs.remote import fetch_run
from mutualrl.see import open_store
from mutualrl.see.files import committed_rounds
from mutualrl.sources.answers import read_account, stored_accounts
from runs import SHORT, FinishedRun, Run, members, stop_at, wait_until

SGT = ("--regime", "sgt", "--pool", "tiny")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving("moto", tmp_path_factory.mktemp("server")) as server, reachable(server):
        yield server


class Joined:
    """`mutualrl join` of one policy, in its own directory and on its own core, as on a separate machine: a policy has
    as many threads as cores, and those of two policies would wait for each other in busy loops."""

    def __init__(
        self, directory: Path, url: str, policy: str, *arguments: str, core: int = 0, **environment: str
    ) -> None:
        self.policy = policy
        self.core = core
        self.directory = directory / policy
        self.directory.mkdir(exist_ok=True)
        self.path = self.directory / "r"
        self.command = [sys.executable, "-m", "mutualrl", "join", url, "--policy", policy, *SGT, *SHORT]
        self.command += ["--run-dir", str(self.path), "--set", "exchange.heartbeat_seconds=1", *arguments]
        self.environment = {**os.environ, "COLUMNS": "200", **environment}
        self.begin()

    def begin(self) -> None:
        with (self.directory / "stderr.txt").open("ab") as errors, on_core(self.core):
            self.process = subprocess.Popen(
                self.command, cwd=self.directory, stdout=subprocess.DEVNULL, stderr=errors, env=self.environment
            )

    @property
    def errors(self) -> str:
        return (self.directory / "stderr.txt").read_text()

    def weights(self) -> str:
        return FinishedRun(self.directory).weights()[self.policy]


def finish(*joined: Joined) -> None:
    for each in joined:
        assert each.process.wait(PATIENCE) == 0, each.errors


@pytest.mark.release
@pytest.mark.slow
def test_run_over_a_bucket_equals_the_run_over_a_directory(
    server: Server, unbroken: FinishedRun, tmp_path: Path, cli: Cli
) -> None:
    url = server.bucket()
    run = Run(tmp_path, *SHORT, "--set", f"exchange.url={url}")
    try:
        assert run.process.wait(PATIENCE) == 0, run.errors.read_text()
    finally:
        run.end()
    assert run.weights() == unbroken.weights()
    assert not list((run.path / "exchange").glob("*/*.parquet"))  # every record is in the bucket
    listed, local = (json.loads(cli("exchange", "ls", path, "--json").stdout) for path in (run.path, unbroken.path))
    assert [entry["last"] for entry in listed["policies"]] == [entry["last"] for entry in local["policies"]] == [2, 2]
    assert cli("runs", "verify", run.path).returncode == 0
    assert cli("exchange", "export", run.path, "--out", tmp_path / "all.jsonl").returncode == 0
    assert cli("runs", "verify", run.path).returncode == 0
    again = cli("train", *SGT, *SHORT, "--run-dir", tmp_path / "other", "--set", f"exchange.url={url}")
    assert again.returncode == 2
    assert "holds run" in again.stderr
    assert "give every run its own URL" in again.stderr
    assert not (tmp_path / "other").exists()
    collected = cli("exchange", "gc", run.path)
    assert collected.returncode == 0, collected.stderr
    store = open_store(url)
    part = next(name for name in store.names("ada") if name.endswith(".parquet"))
    store.put("ada", part, b"damaged")
    verified = cli("runs", "verify", run.path)
    assert verified.returncode == 6
    assert f"{url}/ada/{part}" in verified.stdout + verified.stderr


@pytest.mark.extended
def test_policies_joined_from_separate_directories_equal_the_run(
    server: Server, unbroken: FinishedRun, tmp_path: Path, cli: Cli
) -> None:
    url = server.bucket()
    ada = Joined(tmp_path, url, "ada")
    store = open_store(url)
    wait_until(lambda: "000000.json" in store.names("ada"))  # bob starts late; ada waits for it
    bob = Joined(tmp_path, url, "bob", core=1)
    finish(ada, bob)
    assert {"ada": ada.weights(), "bob": bob.weights()} == unbroken.weights()
    assert "waits for a lost policy" in ada.errors
    result = cli("join", url, "--policy", "ada", *SGT, *SHORT, "--run-dir", ada.path)
    assert result.returncode == 0
    assert "has finished" in result.stderr
    other = cli("join", url, "--policy", "ada", "--regime", "xgrpo", "--pool", "tiny", *SHORT, "--run-dir", ada.path)
    assert (other.returncode, "regime" in other.stderr) == (2, True)  # its results are not what is asked for
    assert "6/6" in cli("runs", "ls", ada.path).stdout  # of the member that is here, not of bob, who is elsewhere
    summary = json.loads((bob.path / "summary.json").read_text())
    assert list(summary["policies"]) == ["bob"]
    for arguments, message in (
        ((url, "--policy", "bob", "--run-dir", ada.path), "has ada of the run in"),
        ((server.bucket(), "--policy", "ada", "--run-dir", ada.path), "has ada of the run in"),
        ((url, "--policy", "ada", "--run-dir", tmp_path / "new"), "has published 3 rounds"),
    ):
        rejected = cli("join", *arguments, *SGT, *SHORT)
        assert rejected.returncode == 2, rejected.stderr
        assert message in rejected.stderr
    watched = json.loads(cli("watch", url, "--json").stdout)
    assert watched["state"] == "finished"
    assert {name: policy["step"] for name, policy in watched["policies"].items()} == {"ada": 6, "bob": 6}
    with_json = cli("join", url, "--policy", "ada", *SGT, *SHORT, "--run-dir", ada.path, "--json")
    assert list(json.loads(with_json.stdout)["policies"]) == ["ada"]


@pytest.mark.release
def test_joined_policies_read_one_source_over_a_bucket(tmp_path: Path, cli: Cli) -> None:
    """Each machine reads the file itself; the first to reach a round publishes it, and other texts are refused."""
    source = ("--source", "book=recorded:tiny:book")
    whole = Run(tmp_path, *SHORT, *source)
    assert whole.process.wait(PATIENCE) == 0, whole.errors.read_text()
    url = f"file://{tmp_path}/bucket"
    ada, bob = Joined(tmp_path, url, "ada", *source), Joined(tmp_path, url, "bob", *source, core=1)
    finish(ada, bob)
    assert {"ada": ada.weights(), "bob": bob.weights()} == whole.weights()
    store = open_store(url)
    markers = sorted(name for name in store.names("book") if name.endswith(".json"))
    assert markers == [f"{number:06d}.json" for number in range(3)]
    assert not (ada.path / "exchange" / "book").exists()
    rescues = (ada.path / "policies" / "ada" / "rescues.jsonl").read_text().splitlines()
    assert {json.loads(line)["peer"] for line in rescues} == {"bob", "book"}
    solutions = tmp_path / "other.jsonl"
    solutions.write_text(json.dumps({"problem": "2+3:", "generations": [" 5 \\boxed{5}"]}) + "\n")
    other = ("--source", f"book=recorded:{solutions}", "--run-dir", tmp_path / "new")
    result = cli("join", url, "--policy", "ada", *SGT, *SHORT, *other)
    assert result.returncode == 2
    assert "source book: " in result.stderr


def killed(joined: Joined) -> None:
    """Kill a member with all its processes, as a machine that is gone."""
    for process in members(joined.path):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    joined.process.kill()
    joined.process.wait(PATIENCE)


def one_account_of_the_source(url: str, tmp_path: Path, policies: Sequence[Joined], first_questions: int) -> None:
    """The page of the whole run has what a text cost; a policy's own, which knows its own texts only, does not say."""
    store = open_store(url)
    seen = read_logged(fetch_run(url, tmp_path / "seen").root).source_facts("teacher")
    alone = [read_logged(each.path).source_facts("teacher") for each in policies]
    assert [(each.partial, each.tokens_per_rescue) for each in alone] == [(True, None)] * len(policies)
    assert (seen.partial, seen.rescues) == (False, sum(each.rescues for each in alone))
    accounts = [read_account(store, "teacher", number) for number in stored_accounts(store, "teacher")]
    asked = sum(each.questions for each in accounts if each is not None)
    assert seen.questions == asked + first_questions
    assert seen.tokens_per_rescue == (seen.tokens / seen.rescues if seen.rescues else None)


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["served", pytest.param("frozen", marks=pytest.mark.release)])
def test_a_source_joins_as_a_policy_does_and_is_taken_over_by_name(
    kind: str, server: Server, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process of it asks for all learners. Killed in the second round with its directory lost, another machine
    takes it over: the weights are those of one machine. Only its own process has the key."""
    pytest.importorskip("openai")
    with served(Endpoint(teacher, delay=0.05 if kind == "served" else 0)) as endpoint:
        source = ("--source", "teacher=frozen:tiny:ada")
        key = {"TEACHER_KEY": "sk-secret"}
        if kind == "served":
            pytest.importorskip("openai")
            source = ("--source", f"teacher=served:{endpoint.url}", "--set", "sources.teacher.api_key_env=TEACHER_KEY")
        (tmp_path / "whole").mkdir()
        monkeypatch.setenv("TEACHER_KEY", "sk-secret")
        whole = Run(tmp_path / "whole", *SHORT, *source)
        assert whole.process.wait(PATIENCE) == 0, whole.errors.read_text()
        monkeypatch.delenv("TEACHER_KEY")
        url = server.bucket()
        ada, bob = Joined(tmp_path, url, "ada", *source), Joined(tmp_path, url, "bob", *source, core=1)
        first = Joined(tmp_path, url, "teacher", *source, **key)
        store = open_store(url)
        try:
            wait_until(lambda: "000000.json" in store.names("teacher") or first.process.poll() is not None)
            assert first.process.poll() is None, first.errors
            killed(first)
            (tmp_path / "second").mkdir()
            second = Joined(tmp_path / "second", url, "teacher", *source, **key)
            finish(ada, bob, second)
        finally:
            for each in (ada, bob, first):
                each.process.kill()
    assert {"ada": ada.weights(), "bob": bob.weights()} == whole.weights()
    assert committed_rounds(store, "teacher") == [0, 1, 2]
    one_account_of_the_source(url, tmp_path, (ada, bob), first_questions=int(kind == "served"))
    for joined in (ada, bob, second):
        assert b"sk-secret" not in b"".join(path.read_bytes() for path in joined.path.rglob("*") if path.is_file())
    again = cli("join", url, "--policy", "teacher", *SGT, *SHORT, *source, "--run-dir", second.path)
    assert again.returncode == 0, again.stderr
    assert "teacher has finished" in again.stderr
    for command in ("report", "watch", "runs verify"):
        read = cli(*command.split(), second.path)
        assert read.returncode == 0, read.stderr
        assert "cannot be read" not in read.stdout + read.stderr
    (row,) = json.loads(cli("runs", "ls", second.path, "--json").stdout)["runs"]
    assert row["state"] == "finished"
    resumed = cli("train", "--resume", "--run-dir", second.path)
    assert resumed.returncode == 2
    assert f"mutualrl join {url} --policy teacher" in resumed.stderr
    refused = cli("join", url, "--policy", "teacher", *SGT, *SHORT, *source, "--restart", "--run-dir", tmp_path / "x")
    assert refused.returncode == 2
    assert "'teacher' is a source" in refused.stderr


@pytest.mark.release
def test_a_source_is_taken_over_where_rounds_are_deleted(tmp_path: Path) -> None:
    """One policy, whose checkpoints say what it needs; the source's rounds before that are gone, and are not asked
    again by the machine that takes it over."""
    pytest.importorskip("openai")
    url = f"file://{tmp_path}/bucket"
    pool = tmp_path / "one.yaml"
    pool.write_text('policies: [{name: ada, model: "tiny:ada"}]\ntask: arithmetic\n')
    settings = ("run.steps=16", "run.save_every=2", "run.keep_rounds=1", "round.prompts=8")
    assignments = [part for each in settings for part in ("--set", each)]
    with served(Endpoint(teacher, delay=0.02)) as endpoint:
        keys = ("--source", f"teacher=served:{endpoint.url}", *assignments)
        command = [sys.executable, "-m", "mutualrl", "join", url, "--regime", "sgt", "--pool", str(pool), *keys]
        command += ["--set", "exchange.heartbeat_seconds=1", "--set", "run.round_timeout=60", "--seed", "0"]

        def start(member: str, name: str) -> subprocess.Popen[bytes]:
            directory = tmp_path / name
            with (tmp_path / f"{name}.txt").open("wb") as log:
                return subprocess.Popen([*command, "--policy", member, "--run-dir", directory], stdout=log, stderr=log)

        ada, first = start("ada", "ada"), start("teacher", "first")
        store = open_store(url)
        try:
            wait_until(lambda: (committed_rounds(store, "teacher") or [0])[0] > 1 or ada.poll() is not None)
            assert ada.poll() is None, (tmp_path / "ada.txt").read_text()
            for process in members(tmp_path / "first"):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            first.kill()
            first.wait(PATIENCE)
            second = start("teacher", "second")
            assert ada.wait(PATIENCE) == 0, (tmp_path / "ada.txt").read_text()
            assert second.wait(PATIENCE) == 0, (tmp_path / "second.txt").read_text()
        finally:
            for each in (ada, first):
                each.kill()
        assert max(endpoint.seeds().values()) <= 2  # again only what was in flight


def test_a_source_that_joins_needs_nothing_of_the_policies(tmp_path: Path) -> None:
    """Neither their GPUs, nor DeepSpeed, nor processes that divide a round: six prompts of two rollouts divide by two
    processes with six rows each, not by one with eight."""
    settings = ("round.prompts=6", "trainer.num_generations=2", "launch.processes=2", "launch.strategy=zero3")
    recipe = resolve(
        Request(
            pool="tiny",
            regime="sgt",
            sources=("teacher=frozen:tiny:ada",),
            assignments=(*settings, "hardware.gpus=8", f"exchange.url=file://{tmp_path}/bucket"),
        )
    )
    made = rehearse(recipe, Machine((), 2), Launch(member="teacher"))
    assert made.problems == []
    assert made.missing == []
    assert (made.batch.prompts, made.batch.rollouts) == (6, 2)
    assert [each.policy for each in made.placement.sources] == ["teacher"]
    assert made.placement.allocations == ()


REJECTED = {
    "--policy eve: the recipe has ada, bob": ["--policy", "eve", *SGT],
    "has sgt with policies ada, bob": ["--policy", "bob", "--regime", "xgrpo", "--pool", "tiny"],
    "run.seed: 1, the run has 0": ["--policy", "bob", *SGT, "--seed", "1"],
    "regime.weight: 0.3, the run has 0.1": ["--policy", "bob", *SGT, "--set", "regime.weight=0.3"],
    "--policy dee: the run in": ["--policy", "dee", "--regime", "sgt", "--pool", "tiny-near"],
    "policy 'ada' is already running": ["--policy", "ada", *SGT],
}


@pytest.mark.extended
def test_join_rejects_policies_of_other_runs_and_running_ones(server: Server, tmp_path: Path, cli: Cli) -> None:
    url = server.bucket()
    ada = Joined(tmp_path, url, "ada")
    try:
        store = open_store(url)
        wait_until(lambda: "heartbeat.json" in store.names("ada") or ada.process.poll() is not None)
        for message, arguments in REJECTED.items():
            result = cli("join", url, *arguments, *SHORT, "--set", "exchange.heartbeat_seconds=1")
            assert result.returncode == 2, result.stderr
            assert message in result.stderr
        assert not (tmp_path / "runs").exists()
    finally:
        ada.process.terminate()
        ada.process.wait(PATIENCE)


def test_invalid_bucket_urls_are_rejected(cli_here: Cli, server: Server) -> None:
    for url, message in (
        ("/some/where", "expected s3://"),
        ("s3://key:secret@bucket/run", "contains credentials"),
        ("s3://bucket/run?sig=secret", "without a query"),
    ):
        for command in (("join", url, "--policy", "ada", *SGT), ("train", *SGT, "--set", f"exchange.url={url}")):
            result = cli_here(*command)
            assert result.returncode == 2, result.stderr
            assert message in result.stderr
            assert "secret" not in result.stderr + result.stdout
    result = cli_here("train", *SGT, "--set", "exchange.url=s3://no-such-bucket/run")
    assert result.returncode == 4
    assert "the bucket does not exist" in result.stderr


def job(kind: str, source: Path, index: int, policy: str) -> tuple[str, dict[str, str]]:
    """Return the shell command of a scheduler's template and the variables that the scheduler sets for a policy."""
    if kind == "slurm":
        return source.read_text(), {"SLURM_ARRAY_TASK_ID": str(index)}
    if kind == "skypilot":
        group, *tasks = yaml.safe_load_all(source.read_text())
        assert group["execution"] == "parallel"
        assert len({task["name"] for task in tasks}) == 2
        assert {task["envs"].pop("POLICY") for task in tasks} == {"qwen2.5-math-1.5b", "qwen3-1.7b-base"}
        assert tasks[0]["envs"] == tasks[1]["envs"]
        assert tasks[0]["run"] == tasks[1]["run"]
        return tasks[0]["run"], {"POLICY": policy}
    job = yaml.safe_load(source.read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    assert container["command"] == ["bash", "-c"]
    return container["args"][0], {"JOB_COMPLETION_INDEX": str(index)}


@pytest.mark.release
def test_template_commands_train_a_run(server: Server, tmp_path: Path, cli: Cli) -> None:
    """Train one run of three policies, each started by another scheduler's job."""
    pool = ("--regime", "sgt", "--pool", "tiny-three")
    recipe = json.loads(cli("train", *pool, *SHORT, "--dry-run", "--json").stdout)["recipe"]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    policies = [each["name"] for each in recipe["policies"]]
    common = {"EXCHANGE": server.bucket(), "POLICIES": " ".join(policies), "RECIPE": "recipe.yaml", "DATA": ""}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    processes = []
    join_templates = [each for each in templates() if each[1] in ("join", "group")]
    assert len(join_templates) == len(policies)
    for index, (kind, name, source) in enumerate(join_templates):
        assert cli("recipes", "cp", f"{kind}/{name}").returncode == 0
        script, variables = job(kind, tmp_path / source.name, index, policies[index])
        environment = {**os.environ, **common, **variables, "PATH": path}
        with on_core(index):
            processes.append(subprocess.Popen(["bash", "-c", script], cwd=tmp_path, env=environment))
    for process in processes:
        assert process.wait(PATIENCE) == 0
    for policy in policies:
        lines = (tmp_path / "runs" / f"one-{policy}" / "policies" / policy / "metrics.jsonl").read_text().splitlines()
        assert json.loads(lines[-1])["step"] == 6
        assert max(json.loads(line).get("see/peers", 0) for line in lines) == 2


def test_kubernetes_job_is_valid() -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for kind, _, source in templates():
        if kind == "kubernetes":
            validate.validate(yaml.safe_load(source.read_text()), validate.latest_version(), strict=True)


SKYPILOT = """
import sys
from sky.utils import dag_utils

dag = dag_utils.load_job_group_from_yaml(sys.argv[1])
assert dag.is_job_group()
print([task.name for task in dag.tasks])
"""


def test_skypilot_loads_the_job_group(tmp_path: Path) -> None:
    """Run SkyPilot's loader on the template and on misspelt copies; its dependencies conflict with ours."""
    python = os.environ.get("SKYPILOT_PYTHON")
    if python is None:
        pytest.skip("SKYPILOT_PYTHON names no Python that has SkyPilot")
    (source,) = (source for kind, _, source in templates() if kind == "skypilot")
    text = source.read_text()
    misspelt = {"paralel": ("parallel", "paralel"), "use_spott": ("use_spot", "use_spott")}
    for unknown_key, change in {"": ("", ""), **misspelt}.items():
        path = tmp_path / "group.yaml"
        path.write_text(text.replace(*change) if unknown_key else text)
        environment = {**os.environ, "HOME": str(tmp_path)}
        command = [python, "-c", SKYPILOT, str(path)]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if unknown_key:
            assert result.returncode != 0
            assert unknown_key in result.stderr
        else:
            assert result.returncode == 0, result.stderr
            assert "['qwen2-5-math-1-5b', 'qwen3-1-7b-base']" in result.stdout


def test_doctor_and_dry_run_report_on_the_bucket(
    cli_here: Cli, server: Server, tmp_path_factory: pytest.TempPathFactory
) -> None:
    url = server.bucket()
    checks = {row["check"]: row for row in json.loads(cli_here("doctor", "--exchange", url, "--json").stdout)["checks"]}
    assert checks["exchange"]["status"] == "ok"
    missing = cli_here("doctor", "--exchange", "s3://no-such-bucket/run", "--json")
    assert missing.returncode == 4
    assert "the bucket does not exist" in missing.stdout
    with serving("rclone", tmp_path_factory.mktemp("rclone")) as rclone, reachable(rclone):
        unsound = cli_here("doctor", "--exchange", rclone.bucket(), "--json")
        rejected = cli_here("train", *SGT, "--set", f"exchange.url={rclone.bucket()}")
    assert unsound.returncode == 4
    assert "accepts a second create" in unsound.stdout
    assert rejected.returncode == 4
    assert "accepts a second create" in rejected.stderr
    settings = ("--set", f"exchange.url={url}", "--set", "exchange.heartbeat_seconds=20")
    shown = cli_here("train", *SGT, *settings, "--dry-run")
    assert (
        "180 heartbeat puts per hour, at most 90 puts of files for `watch`; 2 puts and at least 7 gets" in shown.stdout
    )
    assert json.loads(cli_here("train", *SGT, *settings, "--dry-run", "--json").stdout)["exchange"] == {
        "heartbeat_puts_per_hour": 180,
        "mirror_puts_per_hour": 90,
        "puts_per_round": 2,
        "gets_per_round": 7,
    }


@pytest.mark.release
@pytest.mark.parametrize(("server_kind", "regime"), [("moto", "xgrpo"), ("seaweedfs", "prp")])
def test_other_regimes_share_over_a_bucket_as_over_a_directory(tmp_path: Path, server_kind: str, regime: str) -> None:
    arguments = (*SHORT, "--regime", regime)  # the last --regime counts
    (tmp_path / "local").mkdir()
    local = Run(tmp_path / "local", *arguments)
    assert local.process.wait(PATIENCE) == 0, local.errors.read_text()
    with serving(server_kind, tmp_path / "server") as server, reachable(server):
        url = server.bucket()
        ada = Joined(tmp_path, url, "ada", "--regime", regime)
        bob = Joined(tmp_path, url, "bob", "--regime", regime, core=1)
        finish(ada, bob)
    assert {"ada": ada.weights(), "bob": bob.weights()} == local.weights()


@pytest.mark.extended
def test_policy_resumes_on_another_machine_from_its_checkpoint_in_the_bucket(
    server: Server, unbroken: FinishedRun, tmp_path: Path
) -> None:
    """Twice: killed during training, and after its end; the second machine has no files of the first."""
    url = server.bucket()
    keep = ("--set", "exchange.checkpoints=true")
    ada = Joined(tmp_path, url, "ada", *keep, **stop_at("in-the-loss:ada:4", mark=tmp_path / "mark"))
    bob = Joined(tmp_path, url, "bob", *keep, core=1)
    store = open_store(url)
    wait_until(lambda: "checkpoint.json" in store.names("ada"))
    wait_until((tmp_path / "mark.0").exists)  # within the step after the checkpoint's round
    ada.process.kill()
    ada.process.wait()
    wait_until(lambda: not members(ada.path))
    shutil.rmtree(ada.directory)
    ada = Joined(tmp_path, url, "ada", *keep)
    finish(ada, bob)
    assert "policy ada resumes from its checkpoint of step 3" in ada.errors
    assert {"ada": ada.weights(), "bob": bob.weights()} == unbroken.weights()
    shutil.rmtree(ada.directory)
    again = Joined(tmp_path, url, "ada", *keep)
    finish(again)
    assert again.weights() == unbroken.weights()["ada"]


@pytest.mark.release
def test_policies_share_over_a_mounted_directory(unbroken: FinishedRun, tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "mount").mkdir()
    url = f"file://{tmp_path}/mount/one"
    keep = ("--set", "exchange.checkpoints=true")
    ada, bob = (Joined(tmp_path, url, name, *keep, core=core) for core, name in enumerate(("ada", "bob")))
    finish(ada, bob)
    assert {"ada": ada.weights(), "bob": bob.weights()} == unbroken.weights()
    assert json.loads(cli("watch", url, "--json").stdout)["state"] == "finished"
    assert cli("doctor", "--exchange", url, "--json").returncode in (0, 4)  # 4: of the machine, not the exchange
    shutil.rmtree(ada.directory)
    again = Joined(tmp_path, url, "ada")
    finish(again)
    assert again.weights() == unbroken.weights()["ada"]


@pytest.mark.extended
@pytest.mark.parametrize("copies", [False, True])
def test_joined_policies_delete_rounds_that_nobody_needs(
    server: Server, tmp_path: Path, cli: Cli, copies: bool
) -> None:
    """Neither sees the other's checkpoints; one is stopped, and resumes from rounds that are still there."""
    url = server.bucket()
    options = ("--steps", "16", "--set", "run.save_every=2", "--set", "run.keep_rounds=1")
    options = (*options, "--set", f"exchange.checkpoints={str(copies).lower()}")
    policies = [Joined(tmp_path, url, name, *options, core=core) for core, name in enumerate(("ada", "bob"))]
    bob = policies[1]
    wait_until((bob.path / "policies/bob/checkpoints/step-000004/complete.json").exists)
    bob.process.kill()
    bob.process.wait()
    wait_until(lambda: not members(bob.path))
    bob.begin()
    finish(*policies)
    store = open_store(url)
    for name in ("ada", "bob"):
        rounds = committed_rounds(store, name)
        assert rounds[-1] == 7
        assert 0 not in rounds
        assert len(rounds) < 8
    assert ("whose run directory is lost cannot go on" in bob.errors) == (not copies)
    if copies:
        copied = store.get("bob", "checkpoint.json")
        command = ("join", url, "--policy", "bob", *SGT, *SHORT, *options, "--run-dir", tmp_path / "new", "--restart")
        result = cli(*command)
        assert result.returncode == 2
        assert "--restart: 'bob' would need rounds of 'ada' from 0 on" in result.stderr
        assert store.get("bob", "checkpoint.json") == copied is not None  # nothing was deleted
