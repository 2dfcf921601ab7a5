"""vLLM compared with transformers: equal greedy completions, and models for which its build has no kernel."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from conftest import PATIENCE, Cli

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")


def margin(model: Path, row: dict[str, Any], other: list[int]) -> float:
    """Return the log-prob margin between the two best tokens where two greedy completions diverge, under
    transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    shared = next(i for i, (a, b) in enumerate(zip([*row["token_ids"], -1], [*other, -1], strict=False)) if a != b)
    ids = AutoTokenizer.from_pretrained(model)(row["x_text"])["input_ids"] + row["token_ids"][:shared]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model)(torch.tensor([ids])).logits[0, -1].float()
    best = logits.log_softmax(-1).topk(2).values
    return float(best[0] - best[1])


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_both_engines_give_the_same_greedy_completions(cli: Cli, tiny: dict[str, Path], tmp_path: Path) -> None:
    rows = [
        {"prompt": f"{a}{op}{b}:", "answer": str(a + b if op == "+" else a * b)}
        for op in "+*"
        for a in range(2, 10)
        for b in range(2, 10)
    ]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for engine in ("vllm", "transformers"):
        result = cli(
            "eval",
            "--pool",
            "tiny",
            "--suite",
            "dataset",
            "--data",
            "d.jsonl",
            "--max-new-tokens",
            "64",
            "--engine",
            engine,
            "--out",
            engine,
            "--json",
            timeout=PATIENCE,
        )
        assert result.returncode == 0, result.stderr[-3000:]
        assert json.loads(result.stdout)["engine"] == engine
        answers[engine] = {
            name: pq.read_table(tmp_path / engine / "completions" / name).to_pylist() for name in ("ada", "bob")
        }
    differences = []
    for name, path in tiny.items():
        results = {row["prompt_id"]: row for row in answers["vllm"][name]}
        for row in answers["transformers"][name]:
            other = results[row["prompt_id"]]["token_ids"]
            if other != row["token_ids"]:
                differences.append((name, row["x_text"], margin(path, row, other)))
    print("differences, with the margin of the two best tokens:", differences)
    assert len(differences) <= 0.01 * 2 * len(rows)
    assert all(gap < 1e-3 for *_, gap in differences)


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_vllm_is_rejected_for_heads_without_a_kernel_and_the_default_falls_back(
    cli: Cli, tiny: dict[str, Path], real_data: Path
) -> None:
    stories = real_data / "models" / "stories260K"
    completed = cli("eval", "--model", stories, "--engine", "vllm")
    assert completed.returncode == 2
    assert "its attention heads have size 8; vLLM's CPU build supports 32, 64" in completed.stderr
    completed = cli(
        "eval",
        "--model",
        stories,
        "--model",
        "tiny:ada",
        "--limit",
        "4",
        "--max-new-tokens",
        "4",
        "--json",
        timeout=PATIENCE,
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
    result = json.loads(completed.stdout)
    assert [m["engine"] for m in result["models"].values()] == ["transformers", "vllm"]


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_vllm_samples_equal_prompts_differently(cli: Cli, tiny: dict[str, Path], tmp_path: Path) -> None:
    rows = [{"prompt": "4*5*3:", "answer": "60", "prompt_id": f"p{i}"} for i in range(24)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = cli(
        "eval",
        "--model",
        "tiny:ada",
        "--suite",
        "dataset",
        "--data",
        "d.jsonl",
        "--max-new-tokens",
        "24",
        "--samples",
        "2",
        "--engine",
        "vllm",
        "--out",
        "one",
        timeout=PATIENCE,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    texts = [row["y_text"] for row in pq.read_table(tmp_path / "one" / "completions").to_pylist()]
    assert len({*texts[::2]}) > 3
