"""Rejected run directories and their messages. Nothing is written when a directory is rejected."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from conftest import Cli
from mutualrl.cli.app import app
from mutualrl.recipes import shipped, templates
from mutualrl.storage.files import write_checksummed


def tree(root: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(root)): p.read_bytes() if p.is_file() else None for p in root.rglob("*")}


def write_run(path: Path, **info: object) -> Path:
    path.mkdir()
    recipe = "policies: [{name: a, model: 'tiny:ada'}]\n"
    (path / "recipe.yaml").write_text(recipe)
    defaults = {"format": 1, "run_id": "x", "versions": {"mutualrl": "9.9"}, "recipe": recipe}
    write_checksummed(path / "run.json", {**defaults, **info}, root=path)
    return path


@pytest.mark.parametrize(
    ("name", "extra", "message"),
    [
        ("link", (), "is a symbolic link"),
        ("link", ("--resume",), "is a symbolic link"),
        ("link", ("--clean",), "is not a run directory; nothing was removed"),
        ("foreign", (), "is not a mutualrl run"),
        ("foreign", ("--resume",), "is not a run directory: it has no run.json"),
        ("foreign", ("--clean",), "is not a run directory; nothing was removed"),
        ("used", (), "already holds a run (not finished); resume it with --resume, delete it with --clean"),
        ("mixed", ("--clean",), "holds files that are not the run's (thesis.tex); nothing was removed"),
        ("other", ("--resume",), "format 7, this version reads 1; use the mutualrl that wrote it"),
        ("other", ("--clean",), "format 7, this version reads 1"),
        ("bare", ("--resume",), "run.json lacks fingerprint, placement, versions"),
        ("nothing", ("--resume",), "nothing to resume, there is no directory"),
        ("file", (), "already exists"),
        ("a" * 300, (), "File name too long"),
        ("used", ("--resume", "--clean"), "give only one"),
    ],
)
def test_unusable_run_directory_is_rejected_with_advice(
    cli_here: Cli, tmp_path: Path, name: str, extra: tuple[str, ...], message: str
) -> None:
    (tmp_path / "link").symlink_to(write_run(tmp_path / "used"))
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "holiday.jpg").write_bytes(b"sea")
    (write_run(tmp_path / "mixed") / "thesis.tex").write_text("mine")
    write_run(tmp_path / "other", format=7)
    (tmp_path / "file").write_text("")
    bare = write_run(tmp_path / "bare")
    write_checksummed(bare / "run.json", {"format": 1, "run_id": "x"}, root=bare)
    before = tree(tmp_path)
    result = cli_here("train", "--run-dir", tmp_path / name, *extra, "--json")
    assert result.returncode == 2, result.stderr
    assert message in result.stderr, result.stderr
    assert json.loads(result.stdout)["error"]["exit_code"] == 2
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    "text", ['{"format": 1, "ru', '{"format": 1, "run_id": "x"}', "[1]", '{"a": 1e999}', "{" * 9999]
)
def test_damaged_run_json_is_named_with_the_way_to_delete_the_run(cli_here: Cli, tmp_path: Path, text: str) -> None:
    run = write_run(tmp_path / "torn")
    (run / "run.json").write_text(text)
    result = cli_here("train", "--run-dir", run, "--resume", "--json")
    assert result.returncode == 6, result.stderr
    assert "run.json" in result.stderr
    assert "delete the run with --clean" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--resume",), "--resume: give the run with --run-dir"),
        (("--clean",), "--clean: give the run to delete"),
        (("--address", "auto"), "--address requires --launcher ray"),
        (("--launcher", "slurm"), "--launcher: found 'slurm', expected local or ray"),
        (("--launcher", "ray", "--device-map", "map.yaml"), "--device-map is for this machine"),
        (("--device-map", "none.yaml"), "cannot be read"),
        (("--exchange", "all"), "run.publish"),
        (("--set", "policies=[{name: ../up, model: 'tiny:ada'}]"), "policies.0.name"),
        (("--set", f"policies=[{{name: {'a' * 300}, model: 'tiny:ada'}}]"), "policies.0.name"),
        (("--set", "policies=[{name: a b, model: 'tiny:ada'}]"), "policies.0.name"),
        (("--set", "run.on_peer_loss=panic"), "run.on_peer_loss"),
        (("--set", "trainer.save_steps=5"), "run.save_every"),
    ],
)
def test_invalid_flags_and_names_are_rejected(
    cli_here: Cli, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = cli_here("train", *arguments)
    assert result.returncode == 2, result.stderr
    assert message in result.stderr
    assert not any(tmp_path.iterdir())


def test_invalid_recipes_are_rejected(cli_here: Cli, tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(bytes(range(256)))
    (tmp_path / "bomb.yaml").write_text(
        "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(f"b{i}: &b{i} [*a,*a]\n" for i in range(9))
    )
    (tmp_path / "large.yaml").write_text("#" * 250_001)
    for name, message in (("binary", "cannot be read"), ("bomb", "aliases"), ("large", "over 250,000 bytes")):
        result = cli_here("train", tmp_path / f"{name}.yaml")
        assert result.returncode == 2
        assert message in result.stderr
    result = cli_here("train", "paper/none")
    assert result.returncode == 2
    assert "unknown paper recipe 'none'; expected one of: 2qwen-" in result.stderr


def test_port_in_use_is_named(cli: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        alone = "policies=[{name: a, model: 'tiny:ada'}]"
        result = cli("train", "--set", alone, "--set", f"trainer.vllm_group_port={port}")
    assert result.returncode == 4, result.stderr
    assert f"port {port} (trainer.vllm_group_port) is in use" in result.stderr


@pytest.mark.extended
def test_clean_deletes_a_run_and_starts_another(cli: Cli, tmp_path: Path, tiny: dict[str, Path]) -> None:
    run = write_run(tmp_path / "r")
    (run / "exchange" / "a").mkdir(parents=True)
    (run / "policies").mkdir()
    result = cli("train", "--steps", "1", "--set", "run.validation_limit=4", "--run-dir", run, "--clean", "--json")
    assert result.returncode == 0, result.stderr
    assert not (run / "exchange" / "a").exists()
    assert json.loads((run / "run.json").read_text())["run_id"] != "x"


def test_files_of_a_killed_start_do_not_block_the_next(cli: Cli, tmp_path: Path) -> None:
    """An empty run.json with a temporary file, or only locks, is accepted: the error is that of a wrong flag."""
    cut = write_run(tmp_path / "cut")
    (cut / "run.json").write_text("")
    (cut / ".recipe.yaml.12.34.tmp").write_text("half")
    (tmp_path / "locks").mkdir()
    (tmp_path / "locks" / ".node-0.lock").touch()
    for name, extra in (("cut", ("--clean",)), ("locks", ()), ("locks", ("--clean",))):
        result = cli(
            "train",
            "--steps",
            "1",
            "--set",
            "run.validation_limit=1",
            "--set",
            "round.prompts=10000000",
            "--run-dir",
            tmp_path / name,
            *extra,
        )
        assert "training prompts remain, a round needs" in result.stderr
    assert not list(tmp_path.glob("*/recipe.yaml")) or (cut / "recipe.yaml").exists()


@pytest.mark.parametrize("name", [n for k, n, _ in shipped() if k == "paper"])
def test_paper_recipe_is_planned_for_its_hardware_and_reports_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    rows = tmp_path / "rows.jsonl"
    row = {"problem": "1+1?", "answer": "2", "solution": "\\boxed{2}", "level": "Level 1", "subject": "Algebra"}
    rows.write_text("".join(json.dumps({**row, "problem": f"{n}+1?"}) + "\n" for n in range(2048)))
    arguments = ["train", f"paper/{name}", "--data", str(rows), "--set", f"task.validation_data={rows}"]
    if mixed := name.startswith("qa-"):
        arguments[2:] = ["--set", f"task.members={{math: {{data: {rows}, validation_data: {rows}}}}}"]
    result = CliRunner().invoke(app, [*arguments, "--dry-run", "--json"])
    assert result.exit_code == 0, result.stderr
    plan = json.loads(result.stdout)
    recipe = plan["recipe"]
    assert recipe["run"]["steps"] == (50 * 4 if mixed else 15 * 2 * 4)
    assert recipe["task"]["name"] == ("mixture" if mixed else "math")
    hardware, placement = next(iter(plan["placement"].items()))
    assert hardware == "the recipe's hardware: 8 GPUs"
    counts = [allocation["processes"] for allocation in placement["allocations"]]
    assert counts == {"3qwen": [2, 2, 4], "4qwen": [2, 2, 2, 2]}.get(recipe["pool"], [4, 4])
    assert all(
        allocation["batch"]["prompts"] == 1024 and allocation["batch"]["optimizer_steps"] == 4
        for allocation in placement["allocations"]
    )
    assert set(plan["memory"][hardware].values()) == {None}
    assert any("8 of the 8 GPUs" in line for line in plan["missing_requirements"])
    trainer = recipe["trainer"]
    assert (trainer["learning_rate"], trainer["weight_decay"], trainer["beta"], trainer["epsilon"]) == (
        1e-6,
        0.01,
        1e-3,
        0.2,
    )
    assert (trainer["num_generations"], trainer["max_completion_length"], recipe["task"]["max_prompt_tokens"]) == (
        5,
        3072,
        1024,
    )
    assert (trainer["vllm_gpu_memory_utilization"], trainer["full_determinism"], trainer["warmup_steps"]) == (
        0.9,
        True,
        0,
    )
    assert (recipe["run"]["validate_every"], recipe["run"]["save_every"]) == (20, 80)
    text = next(path for kind, n, path in shipped() if (kind, n) == ("paper", name)).read_text()
    assert f"mutualrl train paper/{name}" in text
    assert "# Reproduces: " in text


def test_every_trained_figure_of_the_paper_has_its_recipes() -> None:
    lines = {n: path.read_text().split("# Reproduces: ")[1].splitlines()[0] for k, n, path in shipped() if k == "paper"}
    expected = {
        "probe comparison": {"2qwen-sgt", "2qwen-xgrpo", "2qwen-prp"},
        "the baseline of every figure on 2Qwen": {"2qwen-grpo"},
        "THL-aligned importance correction is required": {"2qwen-prp", "2qwen-prp-naive"},
        "XGRPO gains come from structured": {
            *("2qwen-xgrpo", "2qwen-grpo-noise"),
            *("2qwen-grpo-whitened", "2qwen-xgrpo-whitened", "2qwen-noise-whitened"),
        },
        "Value-level sharing preserves": {
            f"{p}-{r}" for p in ("3qwen", "4qwen", "qwen-phi4") for r in ("grpo", "xgrpo")
        },
        "Outcome-level transfer extends": {
            f"qa-{p}-{r}" for p in ("3qwen", "4qwen", "llama-mist", "qwen-phi4") for r in ("grpo", "sgt")
        },
        "Pooled normalization carries": {"2qwen-xgrpo-shuffled"},
    }
    for figure, recipes in expected.items():
        assert {name for name, line in lines.items() if figure in line} == recipes, figure


def test_solutions_of_the_data_are_a_source(cli_here: Cli, tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+1?", "answer": str(n + 1)} for n in range(64)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ("train", "--regime", "sgt", "--task", "dataset", "--data", "rows.jsonl", "--set")
    result = cli_here(*command, "regime.teacher=source", "--source", "gold=recorded:task", "--steps", "1")
    assert result.returncode == 2
    assert "none of the" in result.stderr
    assert "has a text in the column 'solution'" in result.stderr
    assert not (tmp_path / "runs").exists()
    result = cli_here(*command, "regime.teacher=source", "--steps", "1")
    assert "learns a source's texts, and there is none for policy 'ada'" in result.stderr
    result = cli_here(*command, "regime.teacher=silver", "--steps", "1")
    assert "'peer', 'source' or 'own'" in result.stderr


@pytest.mark.parametrize(("kind", "name"), [(k, n) for k, n, _ in shipped() if k != "paper"])
def test_other_shipped_recipe_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, name: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = CliRunner().invoke(app, ["train", f"--{kind.removesuffix('s')}", name, "--dry-run", "--json"])
    assert result.exit_code == 0, result.stderr
    plan = json.loads(result.stdout)
    assert all("allocations" in placement for placement in plan["placement"].values())


def test_dry_run_estimates_the_memory_of_available_models(
    tiny: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = CliRunner().invoke(
        app,
        ["train", "--set", "hardware.gpus=4", "--set", "trainer.per_device_train_batch_size=8", "--dry-run", "--json"],
    )
    assert result.exit_code == 0, result.stderr
    memory = json.loads(result.stdout)["memory"]["the recipe's hardware: 4 GPUs"]
    for estimate in memory.values():
        # ZeRO-3: an fp32 copy and two moments, 12 bytes, against 2 for weights and 2 for gradients, all sharded
        assert estimate["optimizer"] == 6 * estimate["weights"] == 6 * estimate["gradients"] > 0
        assert estimate["peak"] == estimate[estimate["instant"]] > estimate["optimizer"]


def test_recipes_and_batch_scripts_are_copied(cli_here: Cli, tmp_path: Path) -> None:
    for kind, name, source in (*shipped(), *templates()):
        result = cli_here("recipes", "cp", f"{kind}/{name}", tmp_path / f"{kind}-{name}{source.suffix}")
        assert result.returncode == 0, result.stderr
        assert (tmp_path / f"{kind}-{name}{source.suffix}").read_bytes() == source.read_bytes()
        if len(list(tmp_path.iterdir())) > 3:
            break
    for kind, name, source in templates():
        assert cli_here("recipes", "cp", f"{kind}/{name}").returncode == 0
        assert (tmp_path / source.name).read_bytes() == source.read_bytes()
    again = cli_here("recipes", "cp", "slurm/one-node")
    assert again.returncode == 2
    assert "already exists" in again.stderr
    unknown = cli_here("recipes", "cp", "nothing")
    assert unknown.returncode == 2
    assert "slurm/ray" in unknown.stderr


def test_doctor_reports_every_check(cli: Cli, tmp_path: Path) -> None:
    result = cli("doctor", "--run-dir", tmp_path / "runs" / "new", "--json")
    assert result.returncode == 0, result.stdout
    checks = {row["check"]: row for row in json.loads(result.stdout)["checks"]}
    for check in (
        "torch",
        "trl",
        "GPUs",
        "NCCL",
        "vLLM engine",
        "model hub",
        "shared memory",
        "free ports",
        "disk space",
        "rename",
        "fsync",
        "O_EXCL",
        "file locks",
        "visibility",
    ):
        assert checks[check]["status"] in ("ok", "warn")
        assert checks[check]["status"] == "ok" or checks[check]["advice"]
    assert list(tmp_path.iterdir()) == []
    table = cli("doctor")
    assert table.returncode == 0
    assert "visibility" in table.stdout
    (tmp_path / "file").write_text("")
    assert cli("doctor", "--run-dir", tmp_path / "file" / "x").returncode == 2


def test_doctor_fails_where_a_run_would_fail(cli: Cli, tmp_path: Path) -> None:
    """With an untested package version, and with a directory that accepts no files."""
    fake = tmp_path / "site" / "trl-9.9.0.dist-info"
    fake.mkdir(parents=True)
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: trl\nVersion: 9.9.0\n")
    result = cli("doctor", "--json", PYTHONPATH=str(tmp_path / "site"))
    assert result.returncode == 4
    row = next(r for r in json.loads(result.stdout)["checks"] if r["check"] == "trl")
    assert row["status"] == "fail"
    assert "9.9.0, expected " in row["found"]
    assert "pip install 'trl" in row["advice"]
    result = cli("doctor", "--run-dir", "/proc/1", "--json")
    assert result.returncode == 4
    assert [r["check"] for r in json.loads(result.stdout)["checks"] if r["status"] == "fail"] == ["file system"]


@pytest.mark.parametrize("command", ["ls", "gc"])
def test_exchange_commands_reject_paths_without_a_run(cli_here: Cli, tmp_path: Path, command: str) -> None:
    (tmp_path / "file").write_text("")
    for name, message in (("nothing", "it does not exist"), ("file", "a file"), (".", "it has no run.json")):
        result = cli_here("exchange", command, tmp_path / name)
        assert result.returncode == 2
        assert message in result.stderr
