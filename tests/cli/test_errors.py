from __future__ import annotations

import json
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from conftest import HEAVY, PATIENCE, Cli, imported, without_importtime
from mutualrl.storage.files import write_checksummed
from mutualrl.storage.format import FORMAT

TRAIN = "train"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Return pools and data with one fault each, in the command's working directory."""
    pools = {
        "one": '[{name: a, model: "tiny:ada"}]',
        "twins": '[{name: a, model: "tiny:ada"}, {name: a, model: "tiny:bob"}]',
        "upper": '[{name: Ada, model: "tiny:ada"}, {name: b, model: "tiny:bob"}]',
        "climber": '[{name: ../a, model: "tiny:ada"}, {name: b, model: "tiny:bob"}]',
        "gone": '[{name: a, model: ./gone}, {name: b, model: "tiny:bob"}]',
    }
    for name, policies in pools.items():
        (tmp_path / f"{name}.yaml").write_text(f"policies: {policies}\n")
    (tmp_path / "noanswer.jsonl").write_text('{"problem": "x", "answer": "1"}\n{"problem": "y"}\n')
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "run.json").write_text("{}")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    return tmp_path


CASES = [
    (["--set", "run.stepz=3"], 2, "did you mean 'steps'?"),
    (["--set", "trainer.learning_rat=1"], 2, "did you mean 'learning_rate'?"),
    (["--set", "run.steps=many"], 2, "found 'many'"),
    (["--set", "trainer.learning_rate=-1.0"], 2, "expected at least 0"),
    (["--set", "trainer.learning_rate=.nan"], 2, "expected a finite number"),
    (["--regime", "sgt", "--set", "regime.weight=.nan"], 2, "finite number"),
    (["--steps", "-3"], 2, "found -3"),
    (["--regime", "sgt", "--pool", "one.yaml"], 2, "or use --regime grpo"),
    (["--regime", "sgt", "--pool", "twins.yaml"], 2, "two policies are named 'a'"),
    (["--regime", "sgt", "--pool", "upper.yaml"], 2, "found 'Ada'"),
    (["--regime", "sgt", "--pool", "climber.yaml"], 2, "found '../a'"),
    (["--regime", "sgt", "--pool", "gone.yaml"], 2, "model not found: './gone'"),
    (["--pool", "nothere.yaml"], 2, "file not found: nothere.yaml"),
    (["--pool", "tinny"], 2, "unknown pool 'tinny'"),
    (["nothere.yaml"], 2, "cannot be read"),
    (["--task", "math"], 2, "add --data FILE"),
    (["--task", "math", "--data", "nothere.jsonl"], 2, "data file not found"),
    (["--task", "math", "--data", "noanswer.jsonl"], 2, "row 2: no field 'answer'"),
    (["--run-dir", "used"], 2, "already holds a run"),
    (["--run-dir", "full"], 2, "not empty"),
    (["--run-dir", "noanswer.jsonl"], 2, "already exists"),
    (["--run-dir", "/proc/nowhere/run"], 2, "cannot be written"),
    (["--pool", "2qwen", "--regime", "sgt", "--task", "arithmetic"], 4, "8 of the 8 GPUs"),
]


@pytest.mark.parametrize(
    ("arguments", "code", "expected"), CASES, ids=lambda value: " ".join(value) if isinstance(value, list) else None
)
def test_invalid_input_gives_one_clear_error_and_writes_nothing(
    cli: Cli, files: Path, arguments: list[str], code: int, expected: str
) -> None:
    before = sorted(p.relative_to(files) for p in files.rglob("*"))
    result = cli(TRAIN, *arguments, CUDA_VISIBLE_DEVICES="", PYTHONPROFILEIMPORTTIME="1")
    message = without_importtime(result.stderr)
    assert (result.returncode, result.stdout) == (code, "")
    assert expected in message
    assert message.count("mutualrl:") == 1
    assert "Traceback" not in message
    assert not imported(result.stderr) & HEAVY  # slow to import
    assert sorted(p.relative_to(files) for p in files.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "either --run DIR, or --model PATH"),
        (["--model", "./gone"], "model not found"),
        (["--run", "gone"], "not a run directory"),
        (["--model", "tiny:ada", "--suite", "physics"], "unknown task 'physics'"),
        (["--model", "tiny:ada", "--suite", "math"], "add --data FILE"),
        (["--model", "tiny:ada", "--suite", "math", "--data", "noanswer.jsonl"], "row 2: no field 'answer'"),
    ],
)
def test_eval_rejects_invalid_options(cli_here: Cli, files: Path, arguments: list[str], message: str) -> None:
    result = cli_here("eval", *arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_json_error_is_one_object_on_stdout(cli: Cli) -> None:
    result = cli(TRAIN, "--pool", "tinny", "--json")
    error = json.loads(result.stdout)["error"]
    assert (result.returncode, error["exit_code"], error["kind"]) == (2, 2, "recipe")
    assert "unknown pool 'tinny'" in error["message"]


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("{}", "policies"),
        ("policies: [{name: ../../../up}]\ntask: {name: math}\ntrainer: {max_completion_length: 8}", "policies"),
        ("policies: []", "policies"),
        ("policies: [{name: a}]\ntask: {name: [a]}\ntrainer: {max_completion_length: 8}", "task.name"),
        ("policies: [{name: a}]\ntask: {name: math}\ntrainer: {max_completion_length: x}", "max_completion_length"),
    ],
)
def test_eval_of_a_damaged_run_is_rejected(cli_here: Cli, tmp_path: Path, recipe: str, message: str) -> None:
    (tmp_path / "r").mkdir()
    content = {"format": FORMAT, "run_id": "x", "recipe": recipe + "\n"}
    write_checksummed(tmp_path / "r" / "run.json", content, root=tmp_path / "r")
    (tmp_path / "r" / "recipe.yaml").write_text(recipe + "\n")
    result = cli_here("eval", "--run", "r")
    assert result.returncode == 2
    assert "is damaged" in result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_unwritable_stdout_gives_no_traceback(cli: Cli) -> None:
    command = f"{sys.executable} -m mutualrl recipes ls --json"
    closed = subprocess.run(["bash", "-c", command + " >&-"], capture_output=True, text=True)
    assert "Traceback" not in closed.stderr
    full = subprocess.run(["bash", "-c", command + " >/dev/full"], capture_output=True, text=True)
    assert full.returncode == 4
    assert "No space left on device" in full.stderr


def test_placement_on_many_gpus_is_fast(cli: Cli) -> None:
    result = cli(
        TRAIN,
        "--pool",
        "4qwen",
        "--task",
        "arithmetic",
        "--dry-run",
        "--json",
        "--set",
        "hardware.gpus=128",
        "--set",
        "round.prompts=128",
        timeout=PATIENCE,
    )
    assert result.returncode == 0


def test_dry_run_names_trl_defaults_that_affect_training(cli_here: Cli) -> None:
    def defaults_line(*settings: str) -> str:
        assignments = [word for setting in settings for word in ("--set", setting)]
        result = cli_here("train", "--pool", "tiny", "--dry-run", *assignments)
        assert result.returncode == 0, result.stderr
        return next((line for line in result.stdout.splitlines() if line.startswith("Left to TRL's defaults")), "")

    assert defaults_line() == ""
    vllm = "trainer.use_vllm=true"
    assert "vllm_importance_sampling_mode sequence_mask, vllm_importance_sampling_clip_max 3.0" in defaults_line(vllm)
    line = defaults_line(vllm, "trainer.vllm_importance_sampling_mode=token_truncate")
    assert "mode" not in line
    assert "clip_max 3.0" in line
    assert defaults_line(vllm, "trainer.vllm_importance_sampling_correction=false") == ""


def test_dry_run_shows_recipe_and_placement_and_writes_nothing(cli: Cli, tmp_path: Path) -> None:
    result = cli(TRAIN, "--regime", "sgt", "--pool", "2qwen", "--dry-run", CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 0, result.stderr
    for text in (
        "Qwen/Qwen2.5-Math-1.5B",
        "weight: 0.1",
        "GPU 0,1,2,3",
        "GPU 4,5,6,7",
        "zero3",
        "this machine: 0 GPUs",
        "This machine lacks: 8 of the 8 GPUs",
    ):
        assert text in result.stdout
    assert list(tmp_path.iterdir()) == []
    as_json = json.loads(cli(TRAIN, "--pool", "3qwen", "--dry-run", "--json", CUDA_VISIBLE_DEVICES="").stdout)
    allocations = as_json["placement"]["the recipe's hardware: 8 GPUs"]["allocations"]
    assert [len(allocation["gpus"]) for allocation in allocations] == [2, 2, 4]


def test_dry_run_counts_the_steps_of_a_round_that_is_used_twice(cli_here: Cli) -> None:
    result = cli_here(
        TRAIN,
        "--pool",
        "tiny",
        "--dry-run",
        "--set",
        "trainer.num_iterations=2",
        COLUMNS="200",
        CUDA_VISIBLE_DEVICES="",
    )
    assert result.returncode == 0, result.stderr
    assert "32 prompts x 4 rollouts = 2 step(s)" in result.stdout


def test_recipes_are_listed_and_shown(cli: Cli) -> None:
    listed = json.loads(cli("recipes", "ls", "--json").stdout)["recipes"]
    assert {r["name"] for r in listed if r["kind"] == "pools"} == {
        "tiny",
        "tiny-countdown",
        "tiny-hints",
        "tiny-near",
        "tiny-judge",
        "tiny-recorded",
        "tiny-three",
        "tiny-tools",
        "2qwen",
        "3qwen",
        "4qwen",
        "llama-mist",
        "qwen-phi4",
        "smol",
    }
    assert all(r["about"] for r in listed)
    shown = cli("recipes", "show", "2qwen").stdout
    assert "# | qwen3-1.7b-base | Qwen/Qwen3-1.7B-Base | 1.72e+09 |  |" in shown
    assert len(yaml.safe_load(shown)["policies"]) == 2  # the output is still the recipe
    assert cli("recipes", "show", "nothing").returncode == 2
    narrow = cli("recipes", "ls", COLUMNS="80").stdout.splitlines()
    assert all(len(line) <= 80 for line in narrow)
    assert len([line for line in narrow if line.strip()]) == len(listed) + 2  # one line each below the header
    names = [line.split("|")[2].strip() for line in narrow if line.count("|") == 4][2:]
    assert names == [f"paper/{r['name']}" if r["kind"] == "paper" else r["name"] for r in listed]
    verbose = cli("recipes", "ls", "-v", COLUMNS="80").stdout
    assert len(verbose.splitlines()) > len(narrow)
    assert "…" not in verbose


@pytest.mark.parametrize("command", [[], ["train"], ["eval"], ["recipes"], ["recipes", "ls"], ["recipes", "show"]])
def test_help_does_not_import_torch(command: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "mutualrl", *command, "--help"], capture_output=True, text=True
    )
    assert result.returncode == 0
    assert not imported(result.stderr) & (HEAVY | {"numpy", "pyarrow"})


def test_version(cli: Cli) -> None:
    from mutualrl import __version__

    version = cli("--version").stdout.strip()
    assert version.startswith(f"mutualrl {__version__} (python {platform.python_version()}, ")
    assert all(f"{name} {metadata.version(name)}" in version for name in ("torch", "transformers", "trl"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--regime", "xgrpo", "--set", "exchange.staleness=1"], "needs the peers' rollouts within the round"),
        (["--regime", "grpo", "--set", "exchange.staleness=1"], "does not wait for peers"),
        (["--regime", "sgt", "--set", "exchange.staleness=-1"], "exchange.staleness"),
        (
            ["--regime", "sgt", "--set", "exchange.heartbeat_seconds=5"],
            "heartbeat_seconds requires an exchange in a bucket",
        ),
    ],
)
def test_invalid_staleness_is_rejected(cli_here: Cli, arguments: list[str], message: str) -> None:
    result = cli_here("train", "--pool", "tiny", "--dry-run", *arguments)
    assert result.returncode == 2
    assert message in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "--regime", "x" * 120_000),
        ("train", "--" + "x" * 120_000),
        ("train", "--regime", "sgt", "--model", "x" * 120_000, "--source", "a=recorded:b"),
        ("tasks", "show", "x" * 120_000),
    ],
)
@pytest.mark.parametrize("as_json", [True, False])
def test_an_option_that_was_pasted_is_not_echoed_whole(
    cli_here: Cli, arguments: tuple[str, ...], as_json: bool
) -> None:
    result = cli_here(*arguments, *(["--json"] if as_json else []))
    assert result.returncode != 0
    assert 0 < len(result.stdout + result.stderr) < 4000
