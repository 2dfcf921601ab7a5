"""User-defined regimes and tasks through the real command line: trained, killed, resumed, reported, rejected."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import PATIENCE, REPOSITORY, Cli
from runs import Run, stop_at, stopped

ADVANTAGES = f"{REPOSITORY / 'examples' / 'own_advantages.py'}:Rare"
REGIME = f"{REPOSITORY / 'examples' / 'own_regime.py'}:Shortest"
TASK = f"{REPOSITORY / 'examples' / 'own_task.py'}:TASK"
ARGUMENTS = (
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


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_user_regime_and_task_resume_to_the_unbroken_run_unless_their_code_changed(
    tmp_path: Path, cli: Cli, cli_here: Cli
) -> None:
    (tmp_path / "unbroken").mkdir()
    (tmp_path / "killed").mkdir()
    regime = tmp_path / "own.py"
    regime.write_bytes((REPOSITORY / "examples" / "own_regime.py").read_bytes())
    arguments = ("--regime", f"{regime}:Shortest", *ARGUMENTS[2:])
    unbroken = Run(tmp_path / "unbroken", *arguments)
    assert unbroken.process.wait(PATIENCE) == 0, unbroken.errors.read_text()

    mark = tmp_path / "mark"
    killed = Run(tmp_path / "killed", *arguments, **stop_at("in-the-loss:bob:3", mark=mark))
    stopped(mark, killed)
    killed.end()  # sends SIGKILL to the supervisor and every process of the run
    result = cli("train", "--resume", "--run-dir", killed.path, timeout=PATIENCE)
    assert result.returncode == 0, result.stderr

    assert killed.weights() == unbroken.weights()
    assert len(unbroken.weights()) == 2
    for policy in ("ada", "bob"):
        for key in ("loss", "reward", "shortest/rows", "shortest/weight", "shortest/nll"):
            assert [row.get(key) for row in killed.metrics(policy)] == [
                row.get(key) for row in unbroken.metrics(policy)
            ], key
        rescues = [run.path / "policies" / policy / "rescues.jsonl" for run in (killed, unbroken)]
        assert rescues[0].exists() == rescues[1].exists()
        if rescues[0].exists():
            assert rescues[0].read_bytes() == rescues[1].read_bytes()
    weights = [row["shortest/weight"] for row in unbroken.metrics("ada") if "shortest/weight" in row]
    assert weights == pytest.approx([0.1, 0.1 * 0.5 ** (1 / 50)])  # the state counts the rounds

    result = cli_here("report", killed.path, "--out", tmp_path / "page", "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads((tmp_path / "page" / "report.json").read_text())
    assert report["runs"][0]["arm"] == "shortest"
    titles = {panel["title"] for figure in report["figures"] for panel in figure["panels"]}
    assert {"rescued pairs", "weight", "NLL of the successes"} <= titles

    (killed.path / "summary.json").unlink()
    changed = regime.read_text().replace("weight: float = setting(0.1", "weight: float = setting(0.9")
    assert changed != regime.read_text()
    regime.write_text(changed)
    result = cli_here("train", "--resume", "--run-dir", killed.path)
    assert result.returncode == 2
    assert "regime_sha256" in result.stderr


def test_reports_do_not_execute_code_named_in_a_run(tmp_path: Path, cli_here: Cli) -> None:
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


def test_error_for_a_misplaced_recipe_key_executes_no_code(tmp_path: Path) -> None:
    """The error lists the valid keys without importing the code that the recipe names."""
    from mutualrl.errors import RecipeError
    from mutualrl.recipes import load

    (tmp_path / "trap.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')\n")
    recipe = "policies: [{name: ada, model: 'tiny:ada'}]\nregime: {name: 'trap.py:SPEC', weight: 2}\n"
    path = tmp_path / "recipe.yaml"
    for misplaced in ("task: {members: {regime: {foo: 1}}}", "policies: [{name: a, model: 'tiny:ada', regime: 3}]"):
        path.write_text(recipe.replace("policies: [{name: ada, model: 'tiny:ada'}]", "") + misplaced + "\n")
        with pytest.raises(RecipeError):
            load(path)
    path.write_text(recipe)
    assert load(path).regime["weight"] == 2
    assert not (tmp_path / "sprung").exists()


def test_recipe_paths_to_code_are_relative_to_the_recipe_and_keep_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mutualrl.recipes import Request, resolve

    directory = tmp_path / "recipes"
    directory.mkdir()
    for name in ("own_regime.py", "own_task.py"):
        (directory / name).write_bytes((REPOSITORY / "examples" / name).read_bytes())
    (directory / "r.yaml").write_text(
        "pool: tiny\nregime: {name: 'own_regime.py:Shortest', weight: 0.25}\n"
        "task: {name: 'own_task.py:TASK', max_prompt_tokens: 77}\n"
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    recipe = resolve(Request(recipe=directory / "r.yaml"))
    assert recipe.regime == {"name": f"{directory / 'own_regime.py'}:Shortest", "weight": 0.25}
    assert (recipe.task.name, recipe.task.max_prompt_tokens) == (f"{directory / 'own_task.py'}:TASK", 77)
    by_option = resolve(Request(recipe=directory / "r.yaml", regime="../recipes/own_regime.py:Shortest"))
    assert by_option.regime == recipe.regime  # another path to the same file
    by_key = resolve(Request(assignments=("regime.name=../recipes/own_regime.py:Shortest", "regime.weight=0.5")))
    assert by_key.regime == {"name": f"{directory / 'own_regime.py'}:Shortest", "weight": 0.5}


INVALID_REGIMES = {
    "broken(\n": "SyntaxError",
    "import nothing_of_the_kind\n": "line 1: ModuleNotFoundError",
    "X = 1\n": "has no object 'Mine'",
    "Mine = 3\n": "found int, expected a subclass of mutualrl.regimes.Regime",
    "from mutualrl.regimes import Regime\nclass Mine(Regime):\n    name = 'sgt'\n": "belongs to a regime of mutualrl",
    "from mutualrl.regimes import Regime\nclass Mine(Regime):\n    name = '../x'\n": "found '../x', expected letters a-z",
    "from mutualrl.regimes import Regime\nclass Mine(Regime):\n    name = 'x'\n    weight: float\n": (
        "setting 'weight' has no default"
    ),
    "from mutualrl.regimes import RegimeSpec\nMine = RegimeSpec('x', '', None)\n": "write `class Mine(Regime)` with `name`",
}


@pytest.mark.parametrize("content", INVALID_REGIMES)
def test_invalid_regime_files_are_rejected_before_the_run_directory_exists(
    tmp_path: Path, cli_here: Cli, content: str
) -> None:
    path = tmp_path / "bad.py"
    path.write_text(content)
    result = cli_here("train", "--regime", f"{path}:Mine", "--run-dir", "r")
    assert result.returncode == 2, result.stderr
    assert INVALID_REGIMES[content] in result.stderr
    assert "bad.py" in result.stderr
    assert not (tmp_path / "r").exists()


HEAD = (
    "import random\n"
    "from mutualrl.regimes import ExtraRow, Plan, Regime, RowSource\n"
    "def row(view, ids=(1,), **more):\n"
    "    return ExtraRow(view.prompt_ids[0], RowSource('bob', 0, 0), ids, 'nll', **more)\n"
)
INVALID_PLANS = {
    "Plan(advantages=tuple(random.random() for _ in view.rollouts))": "the same round gives the same plan",
    "Plan(rows=(row(view, ids=()),))": "has no token ids",
    "Plan(state={1: 2})": "changes in JSON",
    "Plan(state={'a': {1, 2}})": "is not JSON",
    "Plan(advantages=(1.0,))": "1 advantages for",
    "Plan(advantages=tuple(float('nan') for _ in view.rollouts))": "not finite",
    "Plan(rows=(row(view, mean='pool'),))": "mean 'pool' with loss 'nll'",
    "Plan(metrics={'x/y': 1.0})": "not in its metrics: x/y",
    "Plan(metrics={'first': float(list(view.peers)[0] == 'bob')})": "the order of the peers does not matter",
    "{}": "plan returned dict",
    "1 / 0": "own.py, line 8: ZeroDivisionError",
    "Plan(metrics={'n': float(len(view.peers['bob'].texts([0])[0]))})": "TypeError",
}


@pytest.mark.parametrize("plan", INVALID_PLANS)
def test_regimes_check_reports_the_error(tmp_path: Path, cli_here: Cli, plan: str) -> None:
    path = tmp_path / "own.py"
    path.write_text(f"{HEAD}class Own(Regime):\n    name = 'own'\n    def plan(self, view):\n        return {plan}\n")
    result = cli_here("regimes", "check", f"{path}:Own", "--json")
    assert result.returncode == 3
    report = json.loads(result.stdout)
    assert not report["passed"]
    failed = [check for check in report["checks"] if not check["passed"]]
    assert any(INVALID_PLANS[plan] in f"{check['check']}: {check['found']}" for check in failed), report


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("def publishes(self):\n        return None", "has publishes, which nobody asks; expected needs()"),
        ("def late(self):\n        return True", "has late, which nobody asks"),
        ("def needs(self):\n        return {'peers': False}", "needs() returned dict, expected"),
    ],
)
def test_what_a_regime_says_of_itself_in_another_way_is_refused(
    tmp_path: Path, cli_here: Cli, body: str, problem: str
) -> None:
    """Unasked, it would share nothing, without a word."""
    path = tmp_path / "own.py"
    path.write_text(f"{HEAD}class Own(Regime):\n    name = 'own'\n    {body}\n")
    result = cli_here("train", "--regime", f"{path}:Own", "--pool", "tiny", "--dry-run")
    assert result.returncode == 2
    assert problem in result.stderr


def test_needs_that_are_asked_before_settings_are_known_may_not_depend_on_them(tmp_path: Path, cli_here: Cli) -> None:
    path = tmp_path / "own.py"
    path.write_text(
        f"{HEAD}from mutualrl.regimes import Needs\nclass Own(Regime):\n    name = 'own'\n    alone: bool = False\n"
        "    def needs(self):\n        return Needs(peers=not self.alone)\n"
    )
    arguments = ("train", "--regime", f"{path}:Own", "--pool", "tiny", "--dry-run")
    assert cli_here(*arguments).returncode == 0
    result = cli_here(*arguments, "--set", "regime.alone=true")
    assert result.returncode == 2
    assert "needs(): peers depends on settings" in result.stderr


@pytest.mark.parametrize("name", ["grpo", "grpo-noise", "xgrpo", "prp", "sgt", REGIME, ADVANTAGES])
def test_regimes_check_passes_for_shipped_regimes(cli_here: Cli, name: str) -> None:
    result = cli_here("regimes", "check", name, "--json")
    assert result.returncode == 0, result.stdout
    assert json.loads(result.stdout)["passed"]


def test_regimes_are_listed_and_shown(cli_here: Cli) -> None:
    listed = json.loads(cli_here("regimes", "ls", "--json").stdout)["regimes"]
    shipped = ["chord", "dense", "grpo", "grpo-noise", "guided", "hacpo", "hinted", "prp", "sgt", "swarm", "xgrpo"]
    assert [row["name"] for row in listed] == shipped
    both = json.loads(cli_here("regimes", "show", "xgrpo+sgt", "--json").stdout)["settings"]
    assert {row["setting"]: row["default"] for row in both}["sgt.weight"] == 0.1
    shown = json.loads(cli_here("regimes", "show", REGIME, "--json").stdout)
    assert shown["name"] == "shortest"
    assert {row["setting"]: row["default"] for row in shown["settings"]} == {"weight": 0.1, "half_life": 50.0}
    assert cli_here("regimes", "show", "srt").returncode == 2


def test_installed_packages_provide_regimes_by_entry_point(tmp_path: Path) -> None:
    (tmp_path / "rival.py").write_text(
        "from mutualrl.regimes import Regime\nclass Rival(Regime):\n    name = 'rival'\n    reads_peers = False\n"
    )
    metadata = tmp_path / "rival-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: rival\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[mutualrl.regimes]\nrival = rival:Rival\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from mutualrl.cli.app import app; app()"
    for arguments, message in (
        (["regimes", "ls"], "rival"),
        (["train", "--regime", "rival", "--dry-run"], "rival"),
        (["regimes", "show", "rivl"], "did you mean 'rival'?"),
    ):
        result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
        assert message in result.stdout + result.stderr, result.stderr


INVALID_TASKS = {
    "TASK = 3\n": "name: found None, expected str",
    "class T:\n    name, max_new_tokens, takes_data, reads = 'x', 5, False, ''\nTASK = T()\n": "expected read(split",
    "1 / 0\n": "line 1: ZeroDivisionError",
}


@pytest.mark.parametrize("content", INVALID_TASKS)
def test_invalid_task_files_are_rejected(tmp_path: Path, cli_here: Cli, content: str) -> None:
    (tmp_path / "bad.py").write_text(content)
    result = cli_here("train", "--task", "bad.py:TASK", "--run-dir", "r")
    assert result.returncode == 2, result.stderr
    assert INVALID_TASKS[content] in result.stderr
    assert not (tmp_path / "r").exists()


@pytest.mark.release
def test_minimal_sgt_example_trains_two_policies() -> None:
    script = REPOSITORY / "examples" / "minimal_sgt.py"
    assert len(script.read_text().splitlines()) <= 300
    assert len((REPOSITORY / "examples" / "own_regime.py").read_text().splitlines()) <= 60
    result = subprocess.run(
        [sys.executable, str(script), "--steps", "2"], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "ada: held-out accuracy" in result.stdout
    assert "bob: held-out accuracy" in result.stdout
