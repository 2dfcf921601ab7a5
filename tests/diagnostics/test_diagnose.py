"""Diagnostics through the real command line: of a pool, of a run, of files; and what bad input gets."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conftest import PATIENCE, Cli
from made_runs import set_recipe

COMMANDS = ("complementarity", "xgrpo-check", "sgt-check", "channels", "cost")
FILES_ONLY = ("complementarity", "xgrpo-check", "sgt-check", "cost")
SMALL = ("--prompts", "24", "--samples", "2")


def found(cli: Cli, *arguments: str | Path) -> dict[str, Any]:
    done = cli(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


def rows(policies: tuple[str, ...] = ("a", "b"), **more: Any) -> list[dict[str, Any]]:
    return [
        {"policy": m, "prompt_id": f"p{p}", "rollout": g, "reward": float((p + i + g) % 3 == 0), **more}
        for i, m in enumerate(policies)
        for p in range(6)
        for g in range(2)
    ]


@pytest.fixture(scope="module")
def recorded(tiny: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a short run of the tiny pool whose exchange has everything."""
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
def test_a_pool_is_sampled_once_and_looked_at_again_from_the_file(
    cli_here: Cli, tiny: dict[str, Path], tmp_path: Path
) -> None:
    first = found(cli_here, "complementarity", *SMALL, "--save", "r.parquet", "--plot", "f")
    assert first["origin"] == "pool tiny"
    assert (first["prompts"], first["samples"]) == (24, {"ada": 2, "bob": 2})
    assert 0 < first["pool"]["any"] <= 1
    assert first["pool"]["exactly_one"] > 0.3  # one is good at sums, the other at products
    assert first["recommended"] == "sgt"
    again = found(cli_here, "complementarity", "--rollouts", "r.parquet")
    assert {**again, "origin": "", "figures": []} == {**first, "origin": "", "figures": []}
    for name in ("overlap", "buckets", "gate"):
        assert (tmp_path / "f" / f"{name}.png").stat().st_size > 5000
        assert (tmp_path / "f" / f"{name}.svg").read_text().startswith("<?xml")
    shown = cli_here("complementarity", "--rollouts", "r.parquet").stdout
    assert "| ada | bob |" in shown
    assert "Recommendation: sgt: its gate would open on ada" in shown


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS[1:])
def test_every_diagnostic_of_the_tiny_pool(command: str, cli_here: Cli, tiny: dict[str, Path], tmp_path: Path) -> None:
    result = found(cli_here, command, *SMALL, "--plot", "f")
    assert result["prompts"] == 24
    assert all(Path(path).is_file() for path in result["figures"])
    assert len(result["figures"]) >= 2
    if command == "channels":
        assert sum(row["share"] for row in result["rows"]) == pytest.approx(1)
        assert result["responses"] + sum(result["left_out"].values()) == 2 * 24 * 2
        assert result["rescored"] == 0
    if command == "sgt-check":
        assert sum(row["lessons"] for row in result["nll"]["rows"]) + result["nll"]["without"] == sum(
            row["gated"] for row in result["rows"]
        )
    if command == "cost":
        ratios = {row["regime"]: row["ratio"] for row in result["rows"]}
        assert ratios["xgrpo"] == 0 < ratios["sgt"] < ratios["prp"] == 1.0
        assert result["sequences"] <= result["bound"]


def test_a_peer_that_writes_in_another_style_is_seen_beside_own_successes(cli_here: Cli) -> None:
    """Both of `tiny-countdown` can solve the problems; one writes the larger operand first."""
    rows = found(cli_here, "sgt-check", "--pool", "tiny-countdown", "--prompts", "48", "--samples", "4")["nll"]["rows"]
    for row in rows:
        assert row["own_successes"] > 0
        assert row["lessons"] > 0
        assert row["matched"] - row["own"] > 0.25


@pytest.mark.extended
@pytest.mark.slow
def test_the_diagnostics_of_a_run_agree_with_what_it_did(cli_here: Cli, recorded: Path) -> None:
    metrics = {
        name: [json.loads(line) for line in (recorded / "policies" / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("ada", "bob")
    }
    whole = found(cli_here, "sgt-check", "--run", recorded)
    rates = {row["learner"]: row["gate_rate"] for row in whole["rows"]}
    for name, lines in metrics.items():
        logged = [line["sgt/gate_rate"] for line in lines if "sgt/gate_rate" in line]
        assert rates[name] == pytest.approx(sum(logged) / len(logged))
    assert all(row["lessons"] for row in whole["nll"]["rows"])
    one = found(cli_here, "sgt-check", "--run", recorded, "--rounds", "1")
    assert one["prompts"] * 3 == whole["prompts"]
    costs = found(cli_here, "cost", "--run", recorded)
    extra = sum(line["sgt/extra_tokens"] for lines in metrics.values() for line in lines if "sgt/extra_tokens" in line)
    sgt = {row["regime"]: row["extra_tokens"] for row in costs["rows"]}["sgt"]
    assert sgt == extra  # the very teachers that the run drew
    usable = found(cli_here, "channels", "--run", recorded)
    assert usable["responses"] > 100
    assert usable["rescored"] == 0  # `--exchange full` has every trace, under a regime that reads none
    assert found(cli_here, "complementarity", "--run", recorded)["prompts"] == whole["prompts"]
    assert found(cli_here, "xgrpo-check", "--run", recorded, "--rounds", ":1")["prompts"] == one["prompts"] * 2


@pytest.mark.extended
@pytest.mark.slow
def test_a_damaged_exchange_is_refused(cli_here: Cli, recorded: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(recorded, tmp_path / "copy")
    shard = next((copy / "exchange" / "ada").glob("*.parquet"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    done = cli_here("complementarity", "--run", copy, "--json")
    assert done.returncode == 6
    assert shard.name in json.loads(done.stdout)["error"]["message"]


@pytest.mark.slow
def test_two_pretrained_models_are_compared_though_they_solve_nothing(
    cli_here: Cli, real_data: Path, tmp_path: Path
) -> None:
    pool = tmp_path / "two.yaml"
    models = {"stories": "stories260K", "baby": "babyllama-tok361"}
    pool.write_text(
        "policies:\n" + "".join(f"  - {{name: {n}, model: {real_data / 'models' / m}}}\n" for n, m in models.items())
    )
    arguments = ("--pool", pool, "--prompts", "6", "--samples", "2", "--max-new-tokens", "12")
    result = found(cli_here, "complementarity", *arguments)
    assert (result["pool"]["any"], result["pairs"][0]["jaccard"], result["recommended"]) == (0, None, "none")
    assert "NaN" in cli_here("complementarity", *arguments).stdout
    assert sum(row["share"] for row in found(cli_here, "channels", *arguments)["rows"]) == pytest.approx(1)


def test_files_of_every_form_give_the_same_figures(cli_here: Cli, tmp_path: Path) -> None:
    all_items = rows()
    write(tmp_path / "all.jsonl", *all_items)
    pq.write_table(pa.Table.from_pylist(all_items), tmp_path / "all.parquet")
    for name in ("a", "b"):
        own = [row for row in all_items if row["policy"] == name]
        write(tmp_path / f"{name}.jsonl", *({"id": r["prompt_id"], "reward": bool(r["reward"])} for r in own))
        write(
            tmp_path / f"model-{name}.jsonl",
            *({**{k: v for k, v in r.items() if k != "policy"}, "model": name} for r in own),
        )
    write(
        tmp_path / "texts.jsonl",
        *({**{k: v for k, v in r.items() if k != "prompt_id"}, "prompt": r["prompt_id"]} for r in all_items),
    )
    given: list[tuple[str | Path, ...]] = [
        ("texts.jsonl",),
        ("all.jsonl",),
        ("all.parquet",),
        ("a.jsonl", "b.jsonl"),
        ("model-a.jsonl", "model-b.jsonl"),
    ]
    results = []
    for files in given:
        flags = [part for file in files for part in ("--rollouts", file)]
        results.append({**found(cli_here, "complementarity", *flags), "origin": ""})
    assert all(result == results[0] for result in results[1:])


@pytest.mark.parametrize("command", FILES_ONLY)
def test_hostile_names_pass_through_every_view(command: str, cli_here: Cli, tmp_path: Path) -> None:
    evil = "\x1b]8;;http://x\x07[/bold]\u202e|\n$\\frac$"
    path = write(tmp_path / "r.jsonl", *rows((evil, "b"), tokens=3, task=f"{evil}t"), *rows(("c",), tokens=3, task="u"))
    done = cli_here(command, "--rollouts", path, "--plot", "f")
    assert done.returncode == 0, done.stderr
    assert not set(done.stdout) & set("\x1b\x07\u202e")
    lines = [line for line in done.stdout.splitlines() if line.startswith("|")]
    cells = [line.replace("\\|", "").count("|") for line in lines]
    assert all(count >= 3 for count in cells)


@pytest.mark.parametrize(
    ("lines", "words"),
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
        (rows(("a",)), "rollouts of one model ('a'); a pool of two or more is needed"),
        (
            [{"policy": "a", "prompt_id": "p", "reward": 1}, {"policy": "b", "prompt_id": "q", "reward": 1}],
            "no prompt was answered by all of 'a', 'b'",
        ),
        ([], "the file has no rows"),
        (["{"], "row 1: not a line of JSON"),
        ([{"policy": "a\ud800", "prompt_id": "q", "reward": 1}], "row 1, field 'policy'"),
    ],
)
def test_a_rollouts_file_that_does_not_fit_is_named(
    cli_here: Cli, lines: list[Any], words: str, tmp_path: Path
) -> None:
    done = cli_here("complementarity", "--rollouts", write(tmp_path / "bad.jsonl", *lines), "--json")
    assert done.returncode == 2, done.stderr
    message = json.loads(done.stdout)["error"]["message"]
    assert words in message
    assert "bad.jsonl" in message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("cost", "--rollouts", "r.jsonl"), "response lengths are not recorded"),
        (("channels", "--rollouts", "r.jsonl"), "needs the models of a, b: add --model a=PATH --model b=PATH"),
        (("channels", "--rollouts", "r.jsonl", "--model", "a"), "expected POLICY=PATH"),
        (("channels", "--rollouts", "r.jsonl", "--model", "z=tiny:ada"), "no such policy in the rollouts"),
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
        (("complementarity", "--rollouts", "empty"), "has no .parquet or .jsonl file"),
        (("complementarity", "--rollouts", "text.parquet"), "not readable as Parquet"),
        (("complementarity", "--rollouts", "words.parquet"), "field 'reward': found a column of string"),
        (("complementarity", "--run", "empty"), "is not a run directory"),
        (("complementarity", "--pool", "one.yaml"), "a pool of two or more is needed"),
        (("complementarity", "--pool", "tiny", "--save", "r.jsonl"), "expected a name that ends in .parquet"),
        (("complementarity", "--pool", "tiny", "--save", "text.parquet"), "the file already exists"),
        (("complementarity", "--pool", "tiny", "--temperature", "0", "--samples", "2"), "rollouts would be identical"),
    ],
)
def test_a_wrong_request_is_one_clear_error(
    cli_here: Cli, arguments: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    write(tmp_path / "r.jsonl", *rows())
    (tmp_path / "text.parquet").write_text("no")
    pq.write_table(pa.table({"prompt_id": ["p"], "reward": ["1"]}), tmp_path / "words.parquet")
    (tmp_path / "one.yaml").write_text('policies: [{name: a, model: "tiny:ada"}]')
    (tmp_path / "empty").mkdir()
    (tmp_path / "s").mkdir()
    for name in ("s/x.jsonl", "x.jsonl"):
        write(tmp_path / name, {"id": "p", "reward": 1})
    done = cli_here(*arguments, "--json")
    assert done.returncode == 2, done.stderr
    assert words in json.loads(done.stdout)["error"]["message"]
    assert "Traceback" not in done.stderr


@pytest.mark.extended
@pytest.mark.slow
def test_a_run_that_published_nothing_says_what_to_do(
    cli_here: Cli, tiny: dict[str, Path], recorded: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(recorded, tmp_path / "copy")
    shutil.rmtree(copy / "exchange")
    done = cli_here("complementarity", "--run", copy)
    assert done.returncode == 2
    assert "train with --exchange full" in done.stderr
    assert "or sample the models with --pool" in done.stderr


def test_an_export_is_read_back_with_what_could_not_be_scored(cli_here: Cli, tmp_path: Path) -> None:
    all_items = rows()
    all_items[3]["reward"] = None
    write(tmp_path / "r.jsonl", *all_items)
    pq.write_table(pa.Table.from_pylist(all_items), tmp_path / "r.parquet")
    one, two = (found(cli_here, "complementarity", "--rollouts", f"r.{kind}") for kind in ("jsonl", "parquet"))
    assert one["pairs"] == two["pairs"]


def test_lengths_ends_and_prompts_may_stand_in_some_files_only(cli_here: Cli, tmp_path: Path) -> None:
    for name, more in (("a", {"tokens": 4}), ("b", {"token_ids": [5, 6, 7], "ended": False})):
        write(tmp_path / f"{name}.jsonl", *(r | more for r in rows() if r["policy"] == name))
    result = found(cli_here, "cost", "--rollouts", "a.jsonl", "--rollouts", "b.jsonl")
    assert [row["rollout_tokens"] for row in result["learners"]] == [48, 36]


def test_figures_of_sides_without_a_prompt_are_drawn(cli_here: Cli, tmp_path: Path) -> None:
    same = [
        {"policy": m, "prompt_id": f"p{p}", "reward": r, "tokens": 0} for m in "ab" for p in range(4) for r in (1.0,)
    ]
    write(tmp_path / "same.jsonl", *same)
    for command in FILES_ONLY:
        done = cli_here(command, "--rollouts", "same.jsonl", "--plot", "f")
        assert done.returncode == 0, done.stderr
    assert "NaN" in cli_here("cost", "--rollouts", "same.jsonl").stdout


def test_a_runs_own_files_are_read_through_its_markers_only(cli_here: Cli, tmp_path: Path) -> None:
    (tmp_path / "run" / "exchange").mkdir(parents=True)
    (tmp_path / "run" / "run.json").write_text("{}")
    for path in ("run", "run/exchange"):
        done = cli_here("complementarity", "--rollouts", path)
        assert done.returncode == 2
        assert "--run DIR reads them" in done.stderr


@pytest.mark.slow
def test_prompts_that_training_would_drop_are_dropped_for_all_and_counted(
    cli_here: Cli, tiny: dict[str, Path], tmp_path: Path
) -> None:
    texts = ["2+3:", "2*3:", "2+" * 40 + "2:"]
    write(tmp_path / "d.jsonl", *({"prompt": text, "answer": "5", "prompt_id": text[:4]} for text in texts))
    (tmp_path / "pool.yaml").write_text(
        "policies: [{name: a, model: 'tiny:ada'}, {name: b, model: 'tiny:bob'}]\n"
        f"task: {{name: dataset, data: {tmp_path / 'd.jsonl'}, validation_data: {tmp_path / 'd.jsonl'}, max_prompt_tokens: 30}}\n"
    )
    result = found(cli_here, "complementarity", "--pool", "pool.yaml", "--samples", "1", "--max-new-tokens", "8")
    assert (result["prompts"], result["left_out_prompts"]) == (2, 1)


def test_the_same_question_with_two_answers_is_two_prompts(
    cli_here: Cli, tiny: dict[str, Path], tmp_path: Path
) -> None:
    write(tmp_path / "d.jsonl", *({"prompt": "2+3:", "answer": a, "prompt_id": a} for a in ("5", "6")))
    (tmp_path / "pool.yaml").write_text(
        "policies: [{name: a, model: 'tiny:ada'}, {name: b, model: 'tiny:bob'}]\n"
        "task: {name: dataset, data: d.jsonl, validation_data: d.jsonl}\n"
    )
    result = found(cli_here, "complementarity", "--pool", "pool.yaml", "--samples", "1", "--max-new-tokens", "8")
    assert result["prompts"] == 2


def test_a_run_that_lacks_a_round_is_refused_unless_the_rounds_are_named(
    cli_here: Cli, recorded: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(recorded, tmp_path / "copy")
    rounds = sorted((copy / "exchange" / "bob").glob("0*.json"))
    assert len(rounds) > 1
    rounds[-1].unlink()
    done = cli_here("complementarity", "--run", copy)
    assert (done.returncode, "policy bob: 1 published round(s) are missing" in done.stderr) == (2, True)
    assert cli_here("complementarity", "--run", copy, "--rounds", "0").returncode == 0


@pytest.mark.slow
def test_a_run_from_elsewhere_is_compared_without_the_models_that_it_began_with(
    cli_here: Cli, recorded: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(recorded, tmp_path / "copy")
    set_recipe(copy, (copy / "recipe.yaml").read_text().replace("tiny:ada", "/somewhere/else/ada"))
    shutil.rmtree(copy / "policies" / "ada" / "model")
    assert found(cli_here, "complementarity", "--run", copy)["prompts"] > 10
    done = cli_here("channels", "--run", copy)
    assert done.returncode == 2
    assert "needs the models of ada: add --model ada=PATH" in done.stderr
    assert found(cli_here, "channels", "--run", copy, "--model", "ada=tiny:ada")["responses"] > 100


def test_without_a_terminal_progress_is_a_line_per_quarter(capsys: pytest.CaptureFixture[str]) -> None:
    import io

    from rich.console import Console

    from mutualrl.diagnostics.load_rollouts import ProgressBars

    advance = ProgressBars(Console(file=io.StringIO())).track("sampling ada", 40)
    for _ in range(8):
        advance(5)
    words = capsys.readouterr().err.splitlines()
    assert [line.partition("sampling ada: ")[2] for line in words] == [
        "started, 40 to do",
        "10 of 40",
        "20 of 40",
        "30 of 40",
        "40 of 40",
    ]
