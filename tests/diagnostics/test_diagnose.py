"""Diagnostics through the real command line: on a pool, a run and files, and with bad input."""

from __future__ import annotations

import datetime
import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conftest import PATIENCE, Cli
from made_runs import set_recipe

COMMANDS = ("complementarity", "paper xgrpo-check", "sgt-check", "paper channels", "paper cost")
FILES_ONLY = ("complementarity", "paper xgrpo-check", "sgt-check", "paper cost")
SMALL = ("--prompts", "24", "--samples", "2")


def diagnose(cli: Cli, *arguments: str | Path) -> dict[str, Any]:
    result = cli(*arguments, "--json")
    assert result.returncode == 0, result.stderr
    values: dict[str, Any] = json.loads(result.stdout)
    return values


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


def rows(policies: tuple[str, ...] = ("a", "b"), **fields: Any) -> list[dict[str, Any]]:
    return [
        {"policy": m, "prompt_id": f"p{p}", "rollout": g, "reward": float((p + i + g) % 3 == 0), **fields}
        for i, m in enumerate(policies)
        for p in range(6)
        for g in range(2)
    ]


@pytest.fixture(scope="module")
def recorded_run(tiny: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train the tiny pool for three steps with a full exchange and return the run directory."""
    import subprocess
    import sys

    path = tmp_path_factory.mktemp("recorded") / "run"
    subprocess.run(
        [
            sys.executable,
            "-m",
            "mutualrl",
            "train",
            "--regime",
            "sgt",
            "--pool",
            "tiny",
            "--steps",
            "3",
            "--run-dir",
            str(path),
            "--exchange",
            "full",
            "--set",
            "run.validate_every=0",
            "--set",
            "run.validation_limit=2",
            "--json",
        ],
        check=True,
        capture_output=True,
        timeout=PATIENCE,
    )
    return path


@pytest.mark.slow
def test_saved_rollouts_of_a_pool_give_the_same_result(cli_here: Cli, tiny: dict[str, Path], tmp_path: Path) -> None:
    first = diagnose(cli_here, "complementarity", *SMALL, "--save", "r.parquet", "--plot", "f")
    assert first["origin"] == "pool tiny"
    assert (first["prompts"], first["samples"]) == (24, {"ada": 2, "bob": 2})
    assert 0 < first["pool"]["any"] <= 1
    assert first["pool"]["exactly_one"] > 0.3  # one model is good at sums, the other at products
    assert first["recommended"] == "sgt"
    again = diagnose(cli_here, "complementarity", "--rollouts", "r.parquet")
    assert [row["prompts"] for row in again.pop("dead_prompts")] == [24, 24]  # of files only
    assert {**again, "origin": "", "figures": []} == {**first, "origin": "", "figures": []}
    for name in ("overlap", "buckets", "gate"):
        assert (tmp_path / "f" / f"{name}.png").stat().st_size > 5000
        assert (tmp_path / "f" / f"{name}.svg").read_text().startswith("<?xml")
    shown = cli_here("complementarity", "--rollouts", "r.parquet").stdout
    assert "| ada | bob |" in shown
    assert "Recommendation: sgt: its gate would open on ada" in shown


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS[1:])
def test_every_diagnostic_on_the_tiny_pool(command: str, cli_here: Cli, tiny: dict[str, Path], tmp_path: Path) -> None:
    result = diagnose(cli_here, *command.split(), *SMALL, "--plot", "f")
    assert result["prompts"] == 24
    assert all(Path(path).is_file() for path in result["figures"])
    assert len(result["figures"]) >= 2
    if command == "paper channels":
        assert sum(row["share"] for row in result["rows"]) == pytest.approx(1)
        assert result["responses"] + sum(result["left_out"].values()) == 2 * 24 * 2
        assert result["rescored"] == 0
    if command == "sgt-check":
        assert sum(row["lessons"] for row in result["nll"]["rows"]) + result["nll"]["without"] == sum(
            row["gated"] for row in result["rows"]
        )
    if command == "paper cost":
        ratios = {row["regime"]: row["ratio"] for row in result["rows"]}
        assert ratios["xgrpo"] == 0 < ratios["sgt"] < ratios["prp"] == 1.0
        assert result["sequences"] <= result["bound"]


def test_nll_of_a_peer_with_another_style_exceeds_that_of_own_successes(cli_here: Cli) -> None:
    """Both models of `tiny-countdown` solve the problems; one writes the larger operand first."""
    rows = diagnose(cli_here, "sgt-check", "--pool", "tiny-countdown", "--prompts", "48", "--samples", "4")["nll"][
        "rows"
    ]
    for row in rows:
        assert row["own_successes"] > 0
        assert row["lessons"] > 0
        assert row["matched"] - row["own"] > 0.25


@pytest.mark.extended
@pytest.mark.slow
def test_diagnostics_of_a_run_agree_with_its_metrics(cli_here: Cli, recorded_run: Path) -> None:
    metrics = {
        name: [
            json.loads(line) for line in (recorded_run / "policies" / name / "metrics.jsonl").read_text().splitlines()
        ]
        for name in ("ada", "bob")
    }
    full = diagnose(cli_here, "sgt-check", "--run", recorded_run)
    rates = {row["learner"]: row["gate_rate"] for row in full["rows"]}
    for name, lines in metrics.items():
        logged = [line["sgt/gate_rate"] for line in lines if "sgt/gate_rate" in line]
        assert rates[name] == pytest.approx(sum(logged) / len(logged))
    assert all(row["lessons"] for row in full["nll"]["rows"])
    one_round = diagnose(cli_here, "sgt-check", "--run", recorded_run, "--rounds", "1")
    assert one_round["prompts"] * 3 == full["prompts"]
    costs = diagnose(cli_here, "paper", "cost", "--run", recorded_run)
    extra = sum(
        line["plan/extra_tokens"] for lines in metrics.values() for line in lines if "plan/extra_tokens" in line
    )
    sgt = {row["regime"]: row["extra_tokens"] for row in costs["rows"]}["sgt"]
    assert sgt == extra  # the teachers that the run drew
    usable = diagnose(cli_here, "paper", "channels", "--run", recorded_run)
    assert usable["responses"] > 100
    assert usable["rescored"] == 0  # `--exchange full` stores every trace, although the regime reads none
    assert diagnose(cli_here, "complementarity", "--run", recorded_run)["prompts"] == full["prompts"]
    assert (
        diagnose(cli_here, "paper", "xgrpo-check", "--run", recorded_run, "--rounds", ":1")["prompts"]
        == one_round["prompts"] * 2
    )


@pytest.mark.extended
@pytest.mark.slow
def test_damaged_exchange_is_rejected(cli_here: Cli, recorded_run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(recorded_run, tmp_path / "copy")
    shard = next((copy / "exchange" / "ada").glob("*.parquet"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    result = cli_here("complementarity", "--run", copy, "--json")
    assert result.returncode == 6
    assert shard.name in json.loads(result.stdout)["error"]["message"]


@pytest.mark.slow
def test_pretrained_models_that_solve_nothing_are_compared(cli_here: Cli, real_data: Path, tmp_path: Path) -> None:
    pool = tmp_path / "two.yaml"
    models = {"stories": "stories260K", "baby": "babyllama-tok361"}
    pool.write_text(
        "policies:\n" + "".join(f"  - {{name: {n}, model: {real_data / 'models' / m}}}\n" for n, m in models.items())
    )
    arguments = ("--pool", pool, "--prompts", "6", "--samples", "2", "--max-new-tokens", "12")
    result = diagnose(cli_here, "complementarity", *arguments)
    assert (result["pool"]["any"], result["pairs"][0]["jaccard"], result["recommended"]) == (0, None, "none")
    assert "NaN" in cli_here("complementarity", *arguments).stdout
    assert sum(row["share"] for row in diagnose(cli_here, "paper", "channels", *arguments)["rows"]) == pytest.approx(1)


def test_rollouts_files_of_every_format_give_the_same_result(cli_here: Cli, tmp_path: Path) -> None:
    all_rows = rows()
    write(tmp_path / "all.jsonl", *all_rows)
    pq.write_table(pa.Table.from_pylist(all_rows), tmp_path / "all.parquet")
    for name in ("a", "b"):
        policy_rows = [row for row in all_rows if row["policy"] == name]
        write(tmp_path / f"{name}.jsonl", *({"id": r["prompt_id"], "reward": bool(r["reward"])} for r in policy_rows))
        write(
            tmp_path / f"model-{name}.jsonl",
            *({**{k: v for k, v in r.items() if k != "policy"}, "model": name} for r in policy_rows),
        )
    write(
        tmp_path / "texts.jsonl",
        *({**{k: v for k, v in r.items() if k != "prompt_id"}, "prompt": r["prompt_id"]} for r in all_rows),
    )
    sources: list[tuple[str | Path, ...]] = [
        ("texts.jsonl",),
        ("all.jsonl",),
        ("all.parquet",),
        ("a.jsonl", "b.jsonl"),
        ("model-a.jsonl", "model-b.jsonl"),
    ]
    results = []
    for files in sources:
        flags = [part for file in files for part in ("--rollouts", file)]
        results.append({**diagnose(cli_here, "complementarity", *flags), "origin": ""})
    assert all(result == results[0] for result in results[1:])


@pytest.mark.parametrize("command", FILES_ONLY)
def test_hostile_names_are_escaped_in_every_table(command: str, cli_here: Cli, tmp_path: Path) -> None:
    evil = "\x1b]8;;http://x\x07[/bold]\u202e|\n$\\frac$"
    path = write(tmp_path / "r.jsonl", *rows((evil, "b"), tokens=3, task=f"{evil}t"), *rows(("c",), tokens=3, task="u"))
    result = cli_here(*command.split(), "--rollouts", path, "--plot", "f")
    assert result.returncode == 0, result.stderr
    assert not set(result.stdout) & set("\x1b\x07\u202e")
    lines = [line for line in result.stdout.splitlines() if line.startswith("|")]
    cells = [line.replace("\\|", "").count("|") for line in lines]
    assert all(count >= 3 for count in cells)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"policy": "a", "prompt_id": "p"}], "row 1: no field 'reward' (found: policy, prompt_id)"),
        ([{"policy": "a", "reward": 1}], "row 1: no field 'prompt_id' (or 'id')"),
        (
            [*rows(), {"policy": "a", "prompt_id": "q", "reward": "1"}],
            "row 25, field 'reward': found '1', expected a number",
        ),
        (
            [*rows(), {"policy": "a", "prompt_id": "q", "reward": 1e999}],
            "row 25, field 'reward': found inf, expected a finite",
        ),
        ([*rows(), {"policy": "a", "prompt_id": "q", "reward": 10**400}], "row 25, field 'reward'"),
        ([*rows(), {"prompt_id": "q", "reward": 1}], "row 25: no field 'policy' (or 'model'), which other rows have"),
        (
            [*rows(), {"policy": "a", "prompt_id": "q", "reward": 1}],
            "row 25: no field 'rollout', which other rows have",
        ),
        ([*rows(tokens=1), {**rows()[0], "rollout": 9, "tokens": -1}], "row 25, field 'tokens': found -1"),
        ([*rows(), {**rows()[0], "rollout": 9, "token_ids": [3, -1]}], "row 25, field 'token_ids'"),
        ([{"policy": 3, "prompt_id": "q", "reward": 1}], "row 1, field 'policy': found 3, expected a string"),
        ([*rows(), rows()[0]], "row 25: policy 'a' has rollout 0 of prompt 'p0' twice"),
        ([], "the file has no rows"),
        (["{"], "row 1: not a line of JSON"),
        ([{"policy": "a\ud800", "prompt_id": "q", "reward": 1}], "row 1, field 'policy'"),
    ],
)
def test_invalid_rollouts_file_is_rejected_by_name(
    cli_here: Cli, lines: list[Any], message: str, tmp_path: Path
) -> None:
    result = cli_here("complementarity", "--rollouts", write(tmp_path / "bad.jsonl", *lines), "--json")
    assert result.returncode == 2, result.stderr
    error = json.loads(result.stdout)["error"]["message"]
    assert message in error
    assert "bad.jsonl" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("paper", "cost", "--rollouts", "r.jsonl"), "response lengths are not recorded"),
        (("paper", "channels", "--rollouts", "r.jsonl"), "needs the models of a, b: add --model a=PATH --model b=PATH"),
        (("paper", "channels", "--rollouts", "r.jsonl", "--model", "a"), "expected POLICY=PATH"),
        (("paper", "channels", "--rollouts", "r.jsonl", "--model", "z=tiny:ada"), "no such policy in the rollouts"),
        (("complementarity", "--rollouts", "r.jsonl", "--pool", "tiny"), "name one source of rollouts"),
        (("complementarity", "--rollouts", "r.jsonl", "--prompts", "3"), "--prompts: no effect with --rollouts"),
        (("complementarity", "--rollouts", "r.jsonl", "--rounds", "1"), "only a run has rounds"),
        (("complementarity", "--rollouts", "r.jsonl", "--rollouts", "./r.jsonl"), "the file is given twice"),
        (("complementarity", "--rollouts", "s/x.jsonl", "--rollouts", "x.jsonl"), "would both be 'x'"),
        (("complementarity", "--rollouts", "r.jsonl", "--success-above", "inf"), "expected a finite number"),
        (("complementarity", "--rollouts", "r.jsonl", "--k", "9" * 50), "expected numbers of rollouts"),
        (("complementarity", "--pool", "tiny", "--temperature", "0.001"), "expected 0 (greedy), or 0.01 to 10"),
        (("complementarity", "--prompts", "0"), "greater than or equal to 1"),
        (("complementarity", "--rollouts", "r.jsonl", "--k", "0"), "--k 0: expected numbers of rollouts"),
        (("complementarity", "--rollouts", "r.jsonl", "--success", "best"), "expected first or any"),
        (("complementarity", "--rollouts", "r.jsonl", "--success-above", "0.1"), "must not exceed"),
        (("complementarity", "--rollouts", "r.jsonl", "--plot", "r.jsonl"), "is a file, expected a directory"),
        (("complementarity", "--rollouts", "nowhere.jsonl"), "rollouts file not found"),
        (("complementarity", "--rollouts", "empty"), "has no file of rollouts (.jsonl, .json, .parquet, .csv, .tsv)"),
        (("complementarity", "--rollouts", "text.parquet"), "not readable as Parquet"),
        (("complementarity", "--rollouts", "words.parquet"), "row 1, field 'reward': found '1', expected a number"),
        (("complementarity", "--run", "empty"), "is not a run directory"),
        (("complementarity", "--pool", "one.yaml"), "a pool of two or more is needed"),
        (("complementarity", "--pool", "tiny", "--save", "r.jsonl"), "expected a name that ends in .parquet"),
        (("complementarity", "--pool", "tiny", "--save", "text.parquet"), "the file already exists"),
        (("complementarity", "--pool", "tiny", "--temperature", "0", "--samples", "2"), "2 identical responses"),
    ],
)
def test_invalid_request_gives_one_clear_error(
    cli_here: Cli, arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    write(tmp_path / "r.jsonl", *rows())
    (tmp_path / "text.parquet").write_text("no")
    pq.write_table(pa.table({"prompt_id": ["p"], "reward": ["1"]}), tmp_path / "words.parquet")
    (tmp_path / "one.yaml").write_text('policies: [{name: a, model: "tiny:ada"}]')
    (tmp_path / "empty").mkdir()
    (tmp_path / "s").mkdir()
    for name in ("s/x.jsonl", "x.jsonl"):
        write(tmp_path / name, {"id": "p", "reward": 1})
    result = cli_here(*arguments, "--json")
    assert result.returncode == 2, result.stderr
    assert message in json.loads(result.stdout)["error"]["message"]
    assert "Traceback" not in result.stderr


@pytest.mark.extended
@pytest.mark.slow
def test_error_for_a_run_without_an_exchange_suggests_a_fix(
    cli_here: Cli, tiny: dict[str, Path], recorded_run: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(recorded_run, tmp_path / "copy")
    shutil.rmtree(copy / "exchange")
    result = cli_here("complementarity", "--run", copy)
    assert result.returncode == 2
    assert "train with --exchange full" in result.stderr
    assert "or sample the models with --pool" in result.stderr


def test_unscored_rollouts_are_read_from_every_format(cli_here: Cli, tmp_path: Path) -> None:
    all_rows = rows()
    all_rows[3]["reward"] = None
    all_rows[4]["prompt_id"] = all_rows[5]["prompt_id"] = "0"  # an id that is no number
    write(tmp_path / "r.jsonl", *all_rows)
    table = pa.Table.from_pylist(all_rows)
    pq.write_table(table, tmp_path / "r.parquet")
    csv = table.to_pandas().to_csv(index=False)
    (tmp_path / "r.csv").write_text(csv)
    (tmp_path / "r.tsv.gz").write_bytes(gzip.compress(csv.replace(",", "\t").encode()))
    names = [f"r.{kind}" for kind in ("jsonl", "parquet", "csv", "tsv.gz")]
    first, *others = [diagnose(cli_here, "complementarity", "--rollouts", name) for name in names]
    for other in others:
        assert {**other, "origin": first["origin"]} == first


def test_optional_fields_may_be_in_some_files_only(cli_here: Cli, tmp_path: Path) -> None:
    for name, more in (("a", {"tokens": 4}), ("b", {"token_ids": [5, 6, 7], "ended": False})):
        write(tmp_path / f"{name}.jsonl", *(r | more for r in rows() if r["policy"] == name))
    result = diagnose(cli_here, "paper", "cost", "--rollouts", "a.jsonl", "--rollouts", "b.jsonl")
    assert [row["rollout_tokens"] for row in result["learners"]] == [48, 36]


def test_figures_are_drawn_when_a_group_has_no_prompts(cli_here: Cli, tmp_path: Path) -> None:
    same = [
        {"policy": m, "prompt_id": f"p{p}", "reward": r, "tokens": 0} for m in "ab" for p in range(4) for r in (1.0,)
    ]
    write(tmp_path / "same.jsonl", *same)
    for command in FILES_ONLY:
        result = cli_here(*command.split(), "--rollouts", "same.jsonl", "--plot", "f")
        assert result.returncode == 0, result.stderr
    assert "NaN" in cli_here("paper", "cost", "--rollouts", "same.jsonl").stdout


def test_rollouts_flag_rejects_the_files_of_a_run(cli_here: Cli, tmp_path: Path) -> None:
    (tmp_path / "run" / "exchange").mkdir(parents=True)
    (tmp_path / "run" / "run.json").write_text("{}")
    for path in ("run", "run/exchange"):
        result = cli_here("complementarity", "--rollouts", path)
        assert result.returncode == 2
        assert "--run DIR reads them" in result.stderr


@pytest.mark.slow
def test_prompts_that_training_would_drop_are_dropped_for_all_models_and_counted(
    cli_here: Cli, tiny: dict[str, Path], tmp_path: Path
) -> None:
    texts = ["2+3:", "2*3:", "2+" * 40 + "2:"]
    write(tmp_path / "d.jsonl", *({"prompt": text, "answer": "5", "prompt_id": text[:4]} for text in texts))
    (tmp_path / "pool.yaml").write_text(
        "policies: [{name: a, model: 'tiny:ada'}, {name: b, model: 'tiny:bob'}]\n"
        f"task: {{name: dataset, data: {tmp_path / 'd.jsonl'}, validation_data: {tmp_path / 'd.jsonl'}, max_prompt_tokens: 30}}\n"
    )
    result = diagnose(cli_here, "complementarity", "--pool", "pool.yaml", "--samples", "1", "--max-new-tokens", "8")
    assert (result["prompts"], result["left_out_prompts"]) == (2, 1)


def test_same_question_with_two_answers_is_two_prompts(cli_here: Cli, tiny: dict[str, Path], tmp_path: Path) -> None:
    write(tmp_path / "d.jsonl", *({"prompt": "2+3:", "answer": a, "prompt_id": a} for a in ("5", "6")))
    (tmp_path / "pool.yaml").write_text(
        "policies: [{name: a, model: 'tiny:ada'}, {name: b, model: 'tiny:bob'}]\n"
        "task: {name: dataset, data: d.jsonl, validation_data: d.jsonl}\n"
    )
    result = diagnose(cli_here, "complementarity", "--pool", "pool.yaml", "--samples", "1", "--max-new-tokens", "8")
    assert result["prompts"] == 2


def test_run_with_a_missing_round_is_rejected_unless_rounds_are_given(
    cli_here: Cli, recorded_run: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(recorded_run, tmp_path / "copy")
    rounds = sorted((copy / "exchange" / "bob").glob("0*.json"))
    assert len(rounds) > 1
    rounds[-1].unlink()
    result = cli_here("complementarity", "--run", copy)
    assert (result.returncode, "policy bob: 1 published round(s) are missing" in result.stderr) == (2, True)
    assert cli_here("complementarity", "--run", copy, "--rounds", "0").returncode == 0


@pytest.mark.slow
def test_run_from_elsewhere_is_compared_without_its_initial_models(
    cli_here: Cli, recorded_run: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(recorded_run, tmp_path / "copy")
    set_recipe(copy, (copy / "recipe.yaml").read_text().replace("tiny:ada", "/somewhere/else/ada"))
    shutil.rmtree(copy / "policies" / "ada" / "model")
    assert diagnose(cli_here, "complementarity", "--run", copy)["prompts"] > 10
    result = cli_here("paper", "channels", "--run", copy)
    assert result.returncode == 2
    assert "needs the models of ada: add --model ada=PATH" in result.stderr
    assert diagnose(cli_here, "paper", "channels", "--run", copy, "--model", "ada=tiny:ada")["responses"] > 100


def test_progress_without_a_terminal_is_a_line_per_quarter(capsys: pytest.CaptureFixture[str]) -> None:
    import io

    from rich.console import Console

    from mutualrl.diagnostics.load_rollouts import ProgressBars

    advance = ProgressBars(Console(file=io.StringIO())).track("sampling ada", 40)
    for _ in range(8):
        advance(5)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("sampling ada: ")[2] for line in lines] == [
        "started, 40 to do",
        "10 of 40",
        "20 of 40",
        "30 of 40",
        "40 of 40",
    ]


def test_first_rounds_that_a_policy_lost_are_named(recorded_run: Path, tmp_path: Path, cli_here: Cli) -> None:
    """A policy's exchange without its first round: pruned rounds and lost ones look the same."""
    copy = shutil.copytree(recorded_run, tmp_path / "run")
    assert "notes" not in diagnose(cli_here, "complementarity", "--run", copy)
    (copy / "exchange" / "ada" / "000000.json").unlink()
    result = cli_here("complementarity", "--run", copy, "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["notes"] == ["policy ada: rounds before 1 are missing (pruned, or lost)"]
    assert "policy ada: rounds before 1 are missing" in result.stderr


def test_runs_with_arguments_that_json_lacks_are_read(tmp_path: Path) -> None:
    """Parquet has dates; a call may have one."""
    from mutualrl.diagnostics.rollout_reader import _rows

    call = {"function": {"name": "f", "arguments": {"day": datetime.date(2026, 1, 2)}}}
    said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "let me", "tool_calls": [call]}]
    row = {"messages": [*said, {"role": "tool", "content": "3"}, {"role": "assistant", "content": "it is 3"}]}
    pq.write_table(pa.Table.from_pylist([{**row, "reward": 1.0}]), tmp_path / "runs.parquet")
    assert [row["completion"] for _, row in _rows(tmp_path / "runs.parquet")] == ["let me\nit is 3"]
