"""`mutualrl thl-check` through the real command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conftest import PATIENCE, Cli
from thl_tokenizers import sentencepiece_like, synthetic, unigram

pytestmark = pytest.mark.slow


def result_of(completed: Any, code: int = 0) -> dict[str, Any]:
    assert completed.returncode == code, completed.stderr
    result: dict[str, Any] = json.loads(completed.stdout)
    return result


def finite(value: Any) -> bool:
    """Return whether no value of a result is null; JSON output rejects NaN."""
    if isinstance(value, dict):
        return all(map(finite, value.values()))
    if isinstance(value, list):
        return all(map(finite, value))
    return value is not None


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Save tokenizers without weights and return their directories."""
    root = tmp_path_factory.mktemp("tokenizers")
    created = {
        "pieces": sentencepiece_like(),
        "lower": sentencepiece_like("Lowercase"),
        "gaps": unigram(False),
        "ada": synthetic("ada"),
    }
    for name, tokenizer in created.items():
        tokenizer.save_pretrained(root / name)
    return {name: root / name for name in created}


@pytest.fixture(scope="module")
def tiny_check(tiny: dict[str, Path]) -> dict[str, Any]:
    """Run every suite on the tiny pool with few samples."""
    import os
    import subprocess
    import sys
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        result = subprocess.run(
            [
                sys.executable,
                "-m",
                "mutualrl",
                "thl-check",
                "--limit",
                "12",
                "--samples",
                "3",
                "--json",
                "--plot",
                "figures",
            ],
            cwd=directory,
            capture_output=True,
            text=True,
            env=dict(os.environ),
            timeout=PATIENCE,
            check=False,
        )
        results = result_of(result)
        results["sizes"] = {Path(file).name: Path(directory, file).stat().st_size for file in results["figures"]}
    return results


def test_default_is_the_tiny_pool_in_both_directions(tiny_check: dict[str, Any]) -> None:
    assert tiny_check["safe"]
    assert [(pair["source"], pair["target"]) for pair in tiny_check["pairs"]] == [("ada", "bob"), ("bob", "ada")]
    assert (tiny_check["anchor"], tiny_check["seed"], tiny_check["text"], tiny_check["prompts"]) == (
        "span",
        0,
        "the package's text",
        "task arithmetic",
    )
    assert finite(tiny_check)
    for pair in tiny_check["pairs"]:
        assert {"tokenizers", "mass", "length", "scripts", "ratio", "sequence"} < set(pair)
        assert pair["reasons"] == []


def test_mass_is_exact_between_equal_tokenizers_and_controls_are_reported(tiny_check: dict[str, Any]) -> None:
    pair = tiny_check["pairs"][0]
    rows = {(row["source"], row["target"], row["anchor"]): row for row in pair["mass"]["rows"]}
    assert set(rows) == {
        ("ada", "ada", "span"),
        ("bob", "bob", "span"),
        ("ada", "bob", "span"),
        ("ada", "bob", "paper"),
    }
    assert pair["mass"]["spans"] == 12
    for name in ("ada", "bob"):
        row = rows[name, name, "span"]
        assert {row[k] for k in row if k.endswith(("mae", "max"))} == {0.0}
    across = rows["ada", "bob", "span"]
    assert across["aligned_target_mae"] > 1
    assert across["source_aligned_mae"] < 0.2


def test_error_is_small_and_below_copying_at_every_length(tiny_check: dict[str, Any]) -> None:
    for pair in tiny_check["pairs"]:
        rows = pair["length"]["rows"]
        assert [row["target_tokens"] for row in rows] == [1024, 2048, 4096, 8192]
        for row in rows:
            assert 0.97 * row["target_tokens"] < row["mean_target_tokens"] <= row["target_tokens"]
            assert row["aligned"] < 0.01 < row["naive"]
            assert row["reduction"] == pytest.approx(1 - row["aligned"] / row["naive"])
        assert pair["length"]["window"] == 255


def test_auto_uses_characters_for_cjk(tiny_check: dict[str, Any]) -> None:
    rows = {row["family"]: row for row in tiny_check["pairs"][0]["scripts"]["rows"]}
    assert {"Western", "CJK"} <= set(rows)
    assert rows["CJK"]["auto"] == rows["CJK"]["char"] < rows["CJK"]["word"]
    assert rows["Western"]["auto"] == rows["Western"]["word"] < 0.01


def test_ratios_are_tightest_with_the_right_prompt(tiny_check: dict[str, Any]) -> None:
    for pair in tiny_check["pairs"]:
        rows = {row["denominator"]: row for row in pair["ratio"]["rows"]}
        maps = {"paper's map", "paper's map with its fallback"}
        assert set(rows) == {"aligned", "shuffled prompt", "broken alignment", *maps}
        residual = pair["ratio"]["residual"]
        assert residual == pair["sequence"]["residual"]
        assert 0 <= residual["delta_thl"] <= residual["delta_thl_p99"] <= residual["delta_thl_max"]
        assert residual["delta_thl_max"] <= 50 * 64  # B times the tokens of a response
        assert (residual["uncovered"] == 0) == (residual["mismatched"] == 0)
        assert rows["aligned"]["p99"] < rows["shuffled prompt"]["p99"]
        assert rows["aligned"]["clip_rate"] < min(row["clip_rate"] for name, row in rows.items() if name != "aligned")
        assert rows["aligned"]["responses"] == pair["ratio"]["responses"] == 12 * 3
        assert all(sum(row["histogram"]) == row["tokens"] for row in rows.values())
        assert len({rows[name]["tokens"] for name in ("aligned", "shuffled prompt", "broken alignment")}) == 1
        sequences = {row["denominator"]: row for row in pair["sequence"]["rows"]}
        # a word's mass moves by one word and none is lost, so the sum is the same
        assert sequences["broken alignment"]["log_sum_median"] == pytest.approx(
            sequences["aligned"]["log_sum_median"], abs=0.5
        )


def test_figures_are_drawn(tiny_check: dict[str, Any]) -> None:
    names = {"tokenizers", "mass", "length", "scripts", "ratio", "sequence"}
    assert set(tiny_check["sizes"]) == {f"{name}.{suffix}" for name in names for suffix in ("png", "svg")}
    assert min(tiny_check["sizes"].values()) > 5000


@pytest.mark.extended
def test_same_command_gives_the_same_result(cli: Cli, cli_here: Cli, tiny: dict[str, Path]) -> None:
    command = (
        "thl-check",
        "--source",
        "tiny:ada",
        "--target",
        "tiny:bob",
        "--suite",
        "ratio",
        "--limit",
        "4",
        "--json",
    )
    first, second = cli(*command), cli_here(*command)  # in another process, and in this one
    assert result_of(first) == result_of(second)
    assert result_of(first)["prompts"] == "openings of 8 words"


def test_tokenizers_are_checked_without_models(cli_here: Cli, tokenizers: dict[str, Path]) -> None:
    completed = cli_here("thl-check", "--source", tokenizers["ada"], "--target", tokenizers["pieces"], "--json")
    (pair,) = result_of(completed)["pairs"]
    assert set(pair) == {"source", "target", "safe", "reasons", "tokenizers"}
    result = pair["tokenizers"]
    assert result["end_to_end"] == 1.0
    assert result["source"]["round_trip"] == result["target"]["round_trip"] == 1.0
    assert result["source"]["word_drift"] == result["target"]["word_drift"] == 0.0
    assert 0 < result["one_to_one"] < 1
    assert sum(result["group_sizes"].values()) == result["groups"]


@pytest.mark.parametrize(
    ("target", "reason"), [("lower", "changes 1 of these 1 texts"), ("gaps", "changes 1 of these 1 texts")]
)
def test_pair_that_loses_text_is_unsafe_with_a_reason(
    cli_here: Cli, tokenizers: dict[str, Path], tmp_path: Path, target: str, reason: str
) -> None:
    (tmp_path / "text.txt").write_text("Once Upon A Time THERE was 日本")
    command = ("thl-check", "--source", tokenizers["ada"], "--target", tokenizers[target], "--text", "text.txt")
    completed = cli_here(*command)
    assert completed.returncode == 3
    assert completed.stdout.startswith(f"**Unsafe: ada → {target}** (reasons at the end).")
    assert "**no**" in completed.stdout
    assert f"unsafe: ada -> {target}: " in completed.stderr
    assert reason in completed.stderr
    result = result_of(cli_here(*command, "--json"), code=3)
    assert not result["safe"]
    assert reason in result["pairs"][0]["reasons"][0]


def test_unsupported_tokenizer_is_unsafe(cli_here: Cli, tokenizers: dict[str, Path], tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    odd = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    odd.decoder = decoders.WordPiece()
    PreTrainedTokenizerFast(tokenizer_object=odd, eos_token="b").save_pretrained(tmp_path / "odd")
    result = cli_here("thl-check", "--source", tokenizers["ada"], "--target", "odd", "--json")
    (pair,) = result_of(result, code=3)["pairs"]
    assert "target: tokenizer" in pair["reasons"][0] and "expected byte-level BPE" in pair["reasons"][0]
    assert pair["tokenizers"] == {}
    assert cli_here("thl-check", "--source", tokenizers["ada"], "--target", "odd").returncode == 3


def test_first_line_is_the_verdict(cli_here: Cli, tokenizers: dict[str, Path]) -> None:
    result = cli_here("thl-check", "--source", tokenizers["ada"], "--target", tokenizers["pieces"])
    assert result.stdout.startswith("Safe: texts and traces can be exchanged in every direction")


def test_tokenizer_without_eos_is_unsafe(cli_here: Cli, tokenizers: dict[str, Path], tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(tokenizer_object=synthetic("bob").backend_tokenizer).save_pretrained(tmp_path / "endless")
    result = cli_here("thl-check", "--source", "endless", "--target", tokenizers["ada"], "--json")
    (pair,) = result_of(result, code=3)["pairs"]
    assert pair["reasons"] == ["source: the tokenizer has no end-of-sequence token, so a response could never end"]


def test_custom_text_as_json_lines_and_as_plain_text(
    cli_here: Cli, tokenizers: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "one two"}\n{"text": "   "}\n{"text": "three"}\n')
    (tmp_path / "plain.txt").write_text("one two\r\n\r\nthree\n")
    for name in ("rows.jsonl", "plain.txt"):
        completed = cli_here(
            "thl-check", "--source", tokenizers["ada"], "--target", tokenizers["pieces"], "--text", name, "--json"
        )
        result = result_of(completed)
        assert result["text"] == name
        assert result["pairs"][0]["tokenizers"]["texts"] == 2


def test_hostile_name_is_escaped(cli_here: Cli, tokenizers: dict[str, Path], tmp_path: Path) -> None:
    hostile = tmp_path / "[red]x\u202e\x1b[31m|y"
    synthetic("ada").save_pretrained(hostile)
    result = cli_here("thl-check", "--source", hostile, "--target", tokenizers["lower"])
    assert "\x1b[31m" not in result.stdout + result.stderr
    assert "\u202e" not in result.stdout + result.stderr
    assert "[red]x" in result.stdout
    assert "\\|y" in result.stdout


BAD: list[tuple[tuple[str, ...], int, str]] = [
    (("--source", "tiny:ada"), 2, "--source alone is not a pair; add --target MODEL"),
    (("--target", "tiny:ada"), 2, "--target alone is not a pair; add --source MODEL"),
    (("--pool", "tiny", "--source", "tiny:ada", "--target", "tiny:bob"), 2, "not both"),
    (("--source", "tiny:eve", "--target", "tiny:bob"), 2, "no embedded model 'tiny:eve'"),
    (("--source", "./nothing/here", "--target", "tiny:bob"), 2, "neither a directory with a tokenizer, nor a hub id"),
    (("--source", "empty", "--target", "tiny:bob"), 2, "no tokenizer found; expected one of tokenizer.json"),
    (("--suite", "everything"), 2, "expected one of: tokenizers, mass, length, scripts, ratio, sequence, example, all"),
    (("--anchor", "sentence"), 2, "expected one of: paper, paper-fallback, word, span, char"),
    (("--pool", "nopool"), 2, "unknown pool 'nopool'"),
    (("--text", "missing.jsonl"), 2, "text file not found"),
    (("--text", "missing.txt"), 2, "text file not found"),
    (("--text", "empty"), 2, "text file is a directory"),
    (("--text", "blank.txt"), 2, "the file has no text"),
    (("--text", "blank.jsonl"), 2, "the file has no rows with text"),
    (("--text", "wrong.jsonl"), 2, "no field 'text'"),
    (("--text", "latin.txt"), 2, "not UTF-8 at byte 1"),
    (("--task", "physics"), 2, "unknown task 'physics'"),
    (("--source", "tiny:ada", "--target", "tiny:bob", "--data", "rows.jsonl"), 2, "add --task"),
    (("--pool", "2qwen"), 2, "cannot be loaded from the hub"),
    (("--suite", "tokenizers", "--task", "math"), 2, "--task: no effect with suite tokenizers; only ratio and"),
    (("--suite", "mass", "--samples", "3", "--data", "x"), 2, "--data, --samples: no effect with suite mass"),
    (("--suite", "mass", "--plot", "blank.txt"), 2, "blank.txt is a file, expected a directory"),
    (("--suite", "mass", "--plot", "/proc/nope"), 2, "--plot /proc/nope cannot be created"),
]


@pytest.mark.parametrize(("arguments", "code", "message"), BAD, ids=lambda value: str(value)[:60])
def test_invalid_flags_are_rejected_with_the_expected_values(
    cli_here: Cli, tmp_path: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank.txt").write_text(" \n\n \n")
    (tmp_path / "blank.jsonl").write_text('{"text": " "}\n')
    (tmp_path / "wrong.jsonl").write_text('{"body": "x"}\n')
    (tmp_path / "latin.txt").write_bytes(b"a\xe9b")
    completed = cli_here("thl-check", *arguments, "--json")
    result = result_of(completed, code)
    assert message in result["error"]["message"]
    assert "Traceback" not in completed.stderr


def test_suite_that_needs_models_is_rejected_for_tokenizers(cli_here: Cli, tokenizers: dict[str, Path]) -> None:
    result = cli_here("thl-check", "--source", tokenizers["ada"], "--target", "tiny:bob", "--suite", "mass", "--json")
    assert "'ada' has no weights (only a tokenizer); use --suite tokenizers" in result_of(result, 2)["error"]["message"]


def test_help_states_the_defaults(cli_here: Cli) -> None:
    shown = " ".join(cli_here("thl-check", "--help", COLUMNS="250").stdout.split())
    for message in (
        "Maximum number of prompts (256).",
        "Responses per prompt (5).",
        "span (default), word, char, paper, paper-fallback.",
        "all (default, of models: these); example: one text, word by word; turns:",
    ):
        assert message in shown


def test_errors_are_reported_before_importing_torch(cli: Cli) -> None:
    result = cli("thl-check", "--anchor", "x", PYTHONPROFILEIMPORTTIME="1")
    assert result.returncode == 2
    assert "torch" not in result.stderr and "transformers" not in result.stderr


def test_prompts_that_do_not_fit_are_rejected(cli_here: Cli, tiny: dict[str, Path]) -> None:
    result = cli_here("thl-check", "--suite", "ratio", "--max-new-tokens", "300", "--prompts", "9", "--json")
    message = result_of(result, 2)["error"]["message"]
    assert "0 of 9 different prompts leave room for 300 new tokens in contexts of 256 and 256" in message


def test_one_prompt_cannot_be_shuffled(cli_here: Cli, tiny: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("word")
    pair = ("--source", "tiny:ada", "--target", "tiny:bob")
    result = cli_here("thl-check", *pair, "--text", "one.txt", "--suite", "ratio", "--limit", "4", "--json")
    assert "1 of 1 different prompts leave room" in result_of(result, 2)["error"]["message"]


def test_repeated_text_is_reported(cli_here: Cli, tiny: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("a few words and no more")
    pair = ("--source", "tiny:ada", "--target", "tiny:bob")
    result = cli_here("thl-check", *pair, "--text", "short.txt", "--suite", "length", "--limit", "2")
    assert result.returncode == 0, result.stderr
    assert "The text is shorter than 1024 tokens: stretches of that length repeat it." in result.stdout


@pytest.mark.extended
def test_real_models_in_both_directions(cli_here: Cli, real_data: Path) -> None:
    """SentencePiece models with contexts of 512 and 256; the second one's tokenizer collapses whitespace."""
    a, b = (real_data / "models" / name for name in ("stories260K", "babyllama-tok361"))
    text = real_data / "text" / "wikitext-2-raw.validation.jsonl"
    for source, target in ((a, b), (b, a)):
        result = cli_here(
            "thl-check",
            "--source",
            source,
            "--target",
            target,
            "--text",
            text,
            "--suite",
            "mass",
            "--limit",
            "8",
            "--json",
        )
        rows = result_of(result)["pairs"][0]["mass"]["rows"]
        assert rows[2]["source_aligned_mae"] < 0.01 < rows[3]["source_aligned_mae"]
    result = cli_here("thl-check", "--source", a, "--target", b, "--suite", "tokenizers", "--json")
    assert "the target's tokenizer changes" in result_of(result, 3)["pairs"][0]["reasons"][0]


@pytest.mark.extended
def test_papers_map_drifts_on_real_solutions(cli_here: Cli, real_data: Path, tmp_path: Path) -> None:
    lines = (real_data / "math" / "math500.jsonl").read_text().splitlines()[:40]
    (tmp_path / "math.jsonl").write_text(
        "".join(json.dumps({"text": json.loads(line)["solution"]}) + "\n" for line in lines)
    )
    names = (real_data / "tokenizers" / name for name in ("qwen3", "llama3"))
    source, target = names
    result = result_of(cli_here("thl-check", "--source", source, "--target", target, "--text", "math.jsonl", "--json"))
    tokenizers = result["pairs"][0]["tokenizers"]
    assert tokenizers["source"]["paper_drift"] > 0.1
    assert tokenizers["source"]["word_drift"] == tokenizers["target"]["word_drift"] == 0.0


def test_example_shows_the_mass_of_every_word_on_both_sides(cli_here: Cli, tokenizers: dict[str, Path]) -> None:
    pair = ("--source", "tiny:ada", "--target", "tiny:bob", "--suite", "example", "--anchor", "word")
    result = result_of(cli_here("thl-check", *pair, "--json"))["pairs"][0]["example"]
    assert result["text"] == "Thinking small is a self-fulfilling prophecy"
    assert [word["word"] for word in result["rows"]] == result["text"].split()
    for word in result["rows"]:
        assert word["source_mass"] == pytest.approx(sum(value for _, value in word["source"]))
        assert word["target_mass"] == pytest.approx(word["source_mass"])
        shares = {round(value, 9) for _, value in word["target"]}
        assert shares == {round(word["source_mass"] / len(word["target"]), 9)}
    shown = cli_here("thl-check", *pair).stdout
    assert "**example: tiny:ada → tiny:bob, nats**" in shown
    Path("own.txt").write_text("two words\n")
    own = result_of(cli_here("thl-check", *pair, "--text", "own.txt", "--json"))["pairs"][0]["example"]
    assert [word["word"] for word in own["rows"]] == ["two", "words"]
