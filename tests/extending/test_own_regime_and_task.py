"""User's own regime and task through the real command line: trained, killed, resumed, reported, refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import PATIENCE, REPOSITORY, Cli
from runs import Run, stop_at, stopped

REGIME = f"{REPOSITORY / 'examples' / 'own_regime.py'}:SPEC"
TASK = f"{REPOSITORY / 'examples' / 'own_task.py'}:TASK"
OWN = (
    "--regime",
    REGIME,
    "--task",
    TASK,
    "--steps",
    "4",
    "--set",
    "round.prompts=8",
    "--set",
    "round.optimizer_steps=2",
    "--set",
    "run.save_every=1",
    "--set",
    "run.keep_checkpoints=9",
    "--set",
    "run.validate_every=0",
    "--set",
    "run.validation_limit=4",
    "--set",
    "trainer.per_device_train_batch_size=16",
)


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_own_regime_and_task_killed_and_resumed_are_the_unbroken_run(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "unbroken").mkdir()
    (tmp_path / "broken").mkdir()
    unbroken = Run(tmp_path / "unbroken", *OWN)
    assert unbroken.process.wait(PATIENCE) == 0, unbroken.errors.read_text()

    mark = tmp_path / "mark"
    broken = Run(tmp_path / "broken", *OWN, **stop_at("in-the-loss:bob:3", mark=mark))
    stopped(mark, broken)
    broken.end()  # SIGKILL to the supervisor and every process of the run
    done = cli("train", "--resume", "--run-dir", broken.path, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr

    assert broken.weights() == unbroken.weights()
    assert len(unbroken.weights()) == 2
    for policy in ("ada", "bob"):
        for key in ("loss", "reward", "shortest/rows", "shortest/weight", "shortest/nll"):
            assert [line.get(key) for line in broken.metrics(policy)] == [
                line.get(key) for line in unbroken.metrics(policy)
            ], key
        rescues = [run.path / "policies" / policy / "rescues.jsonl" for run in (broken, unbroken)]
        assert rescues[0].exists() == rescues[1].exists()
        if rescues[0].exists():
            assert rescues[0].read_bytes() == rescues[1].read_bytes()
    weights = [line["shortest/weight"] for line in unbroken.metrics("ada") if "shortest/weight" in line]
    assert weights == pytest.approx([0.1, 0.1 * 0.5 ** (1 / 50)])  # the state counts the rounds

    page = cli("report", broken.path, "--out", tmp_path / "page", "--json")
    assert page.returncode == 0, page.stderr
    report = json.loads((tmp_path / "page" / "report.json").read_text())
    assert report["runs"][0]["arm"] == "shortest"
    titles = {panel["title"] for figure in report["figures"] for panel in figure["panels"]}
    assert {"rescued pairs", "weight", "NLL of the successes"} <= titles


def test_a_report_runs_no_code_that_a_run_names(tmp_path: Path, cli_here: Cli) -> None:
    from made_runs import made_run, set_recipe

    run = made_run(tmp_path / "r", "sgt")
    trap = tmp_path / "trap.py"
    trap.write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')\n")
    recipe = (run / "recipe.yaml").read_text()
    assert '"name": "sgt"' in recipe
    set_recipe(run, recipe.replace('"name": "sgt"', f'"name": "{trap}:SPEC"'))
    for command in (("report", run, "--out", tmp_path / "page"), ("exchange", "ls", run), ("runs", "ls", tmp_path)):
        cli_here(*command)
    assert not (tmp_path / "sprung").exists()


def test_a_misplaced_key_of_a_run_s_recipe_runs_no_code_either(tmp_path: Path) -> None:
    """Explaining a wrong key looks up which keys there are; not by importing what the run names."""
    from mutualrl.errors import RecipeError
    from mutualrl.recipes import load

    (tmp_path / "trap.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')\n")
    recipe = "policies: [{name: ada, model: 'tiny:ada'}]\nregime: {name: 'trap.py:SPEC', weight: 2}\n"
    path = tmp_path / "recipe.yaml"
    for wrong in ("task: {members: {regime: {foo: 1}}}", "policies: [{name: a, model: 'tiny:ada', regime: 3}]"):
        path.write_text(recipe.replace("policies: [{name: ada, model: 'tiny:ada'}]", "") + wrong + "\n")
        with pytest.raises(RecipeError):
            load(path)
    path.write_text(recipe)
    assert load(path).regime["weight"] == 2
    assert not (tmp_path / "sprung").exists()


def test_a_recipe_names_code_beside_itself_and_keeps_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mutualrl.recipes import Request, resolve

    beside = tmp_path / "recipes"
    beside.mkdir()
    for name in ("own_regime.py", "own_task.py"):
        (beside / name).write_bytes((REPOSITORY / "examples" / name).read_bytes())
    (beside / "r.yaml").write_text(
        "pool: tiny\nregime: {name: 'own_regime.py:SPEC', weight: 0.25}\n"
        "task: {name: 'own_task.py:TASK', max_prompt_tokens: 77}\n"
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    recipe = resolve(Request(recipe=beside / "r.yaml"))
    assert recipe.regime == {"name": f"{beside / 'own_regime.py'}:SPEC", "weight": 0.25}
    assert (recipe.task.name, recipe.task.max_prompt_tokens) == (f"{beside / 'own_task.py'}:TASK", 77)
    again = resolve(Request(recipe=beside / "r.yaml", regime="../recipes/own_regime.py:SPEC"))
    assert again.regime == recipe.regime  # the same file by another way
    by_key = resolve(Request(assignments=("regime.name=../recipes/own_regime.py:SPEC", "regime.weight=0.5")))
    assert by_key.regime == {"name": f"{beside / 'own_regime.py'}:SPEC", "weight": 0.5}


@pytest.mark.extended
@pytest.mark.slow
def test_a_run_whose_code_has_changed_is_not_resumed(tmp_path: Path, cli: Cli) -> None:
    own = tmp_path / "own.py"
    own.write_bytes((REPOSITORY / "examples" / "own_regime.py").read_bytes())
    done = cli("train", "--regime", f"{own}:SPEC", "--pool", "tiny", "--run-dir", "r", *OWN[4:8], *OWN[8:])
    assert done.returncode == 0, done.stderr
    (tmp_path / "r" / "summary.json").unlink()
    own.write_text(own.read_text().replace("weight: float = Field(0.1", "weight: float = Field(0.9"))
    done = cli("train", "--resume", "--run-dir", "r")
    assert done.returncode == 2
    assert "regime_sha256" in done.stderr


BAD = {
    "broken(\n": "SyntaxError",
    "import nothing_of_the_kind\n": "line 1: ModuleNotFoundError",
    "X = 1\n": "has no object 'SPEC'",
    "SPEC = 3\n": "found int, expected a mutualrl.regimes.RegimeSpec",
    "from mutualrl.regimes import RegimeSpec\nSPEC = RegimeSpec('sgt', '', None)\n": "belongs to a regime of mutualrl",
    "from mutualrl.regimes import RegimeSpec\nSPEC = RegimeSpec('x', '', None, settings=dict)\n": "a subclass of",
    "from mutualrl.regimes import RegimeSpec\nSPEC = RegimeSpec('../x', '', None)\n": "found '../x', expected letters a-z",
    (
        "from mutualrl.regimes import RegimeSettings, RegimeSpec\nclass S(RegimeSettings):\n    weight: float\n"
        "SPEC = RegimeSpec('x', '', None, settings=S)\n"
    ): "setting 'weight' has no default",
}


@pytest.mark.parametrize("content", BAD)
def test_a_regime_file_that_is_none_is_named_before_anything_is_made(tmp_path: Path, cli: Cli, content: str) -> None:
    path = tmp_path / "bad.py"
    path.write_text(content)
    done = cli("train", "--regime", f"{path}:SPEC", "--run-dir", "r")
    assert done.returncode == 2, done.stderr
    assert BAD[content] in done.stderr
    assert "bad.py" in done.stderr
    assert not (tmp_path / "r").exists()


HEAD = (
    "import random\n"
    "from mutualrl.regimes import ExtraRow, Plan, RegimeSpec, RowSource\n"
    "def row(view, ids=(1,), **more):\n"
    "    return ExtraRow(view.prompt_ids[0], RowSource('bob', 0, 0), ids, 'nll', **more)\n"
)
UNSOUND = {
    "Plan(advantages=tuple(random.random() for _ in view.rollouts))": "the same round gives the same plan",
    "Plan(rows=(row(view, ids=()),))": "has no token ids",
    "Plan(state={1: 2})": "changes in JSON",
    "Plan(state={'a': {1, 2}})": "is not JSON",
    "Plan(advantages=(1.0,))": "1 advantages for",
    "Plan(advantages=tuple(float('nan') for _ in view.rollouts))": "not finite",
    "Plan(rows=(row(view, mean='pool'),))": "mean 'pool' with loss 'nll'",
    "Plan(metrics={'x/y': 1.0})": "not in SPEC.metrics: x/y",
    "Plan(metrics={'first': float(list(view.peers)[0] == 'bob')})": "the order of the peers does not matter",
    "{}": "plan returned dict",
    "1 / 0": "own.py, line 5: ZeroDivisionError",
    "Plan(metrics={'n': float(len(view.peers['bob'].texts([0])[0]))})": "TypeError",
}


@pytest.mark.parametrize("plan", UNSOUND)
def test_check_says_what_is_wrong_with_a_regime(tmp_path: Path, cli_here: Cli, plan: str) -> None:
    path = tmp_path / "own.py"
    path.write_text(f"{HEAD}plan = lambda view, settings: {plan}\nSPEC = RegimeSpec('own', '', plan)\n")
    done = cli_here("regimes", "check", f"{path}:SPEC", "--json")
    assert done.returncode == 3
    result = json.loads(done.stdout)
    assert not result["passed"]
    assert any(UNSOUND[plan] in f"{c['check']}: {c['found']}" for c in result["checks"] if not c["passed"]), result


@pytest.mark.parametrize("name", ["grpo", "grpo-noise", "xgrpo", "prp", "sgt", REGIME])
def test_check_passes_what_ships(cli_here: Cli, name: str) -> None:
    done = cli_here("regimes", "check", name, "--json")
    assert done.returncode == 0, done.stdout
    assert json.loads(done.stdout)["passed"]


def test_regimes_are_listed_and_shown(cli_here: Cli) -> None:
    listed = json.loads(cli_here("regimes", "ls", "--json").stdout)["regimes"]
    shipped = ["grpo", "grpo-noise", "guided", "hacpo", "prp", "sgt", "swarm", "xgrpo"]
    assert [row["name"] for row in listed] == shipped
    both = json.loads(cli_here("regimes", "show", "xgrpo+sgt", "--json").stdout)["settings"]
    assert {row["setting"]: row["default"] for row in both}["sgt.weight"] == 0.1
    shown = json.loads(cli_here("regimes", "show", REGIME, "--json").stdout)
    assert shown["name"] == "shortest"
    assert {row["setting"]: row["default"] for row in shown["settings"]} == {"weight": 0.1, "half_life": 50.0}
    assert cli_here("regimes", "show", "srt").returncode == 2


def test_an_installed_package_offers_a_regime_by_entry_point(tmp_path: Path) -> None:
    (tmp_path / "rival.py").write_text(
        "from mutualrl.regimes import RegimeSpec\nSPEC = RegimeSpec('rival', 'a rival', None, reads_peers=False)\n"
    )
    metadata = tmp_path / "rival-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: rival\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[mutualrl.regimes]\nrival = rival:SPEC\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from mutualrl.cli.app import app; app()"
    for arguments, words in (
        (["regimes", "ls"], "rival"),
        (["train", "--regime", "rival", "--dry-run"], "rival"),
        (["regimes", "show", "rivl"], "did you mean 'rival'?"),
    ):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
        assert words in done.stdout + done.stderr, done.stderr


BAD_TASKS = {
    "TASK = 3\n": "name: found None, expected str",
    "class T:\n    name, max_new_tokens, takes_data, reads = 'x', 5, False, ''\nTASK = T()\n": "expected read(split",
    "1 / 0\n": "line 1: ZeroDivisionError",
}


@pytest.mark.parametrize("content", BAD_TASKS)
def test_a_task_file_that_is_none_is_named(tmp_path: Path, cli: Cli, content: str) -> None:
    (tmp_path / "bad.py").write_text(content)
    done = cli("train", "--task", "bad.py:TASK", "--run-dir", "r")
    assert done.returncode == 2, done.stderr
    assert BAD_TASKS[content] in done.stderr
    assert not (tmp_path / "r").exists()


@pytest.mark.extended
def test_the_narrative_example_trains_two_policies() -> None:
    script = REPOSITORY / "examples" / "minimal_sgt.py"
    assert len(script.read_text().splitlines()) <= 300
    assert len((REPOSITORY / "examples" / "own_regime.py").read_text().splitlines()) <= 60
    done = subprocess.run(
        [sys.executable, str(script), "--steps", "2"], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "ada: held-out accuracy" in done.stdout
    assert "bob: held-out accuracy" in done.stdout
