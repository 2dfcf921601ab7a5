"""Sweep files: their pieces and commands, and the errors of invalid ones."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

import word_problems
from conftest import REPOSITORY
from mutualrl.errors import RecipeError, UsageError
from mutualrl.recipes.agreement import load_recipe_prompts
from mutualrl.study.sweep_file import Piece, read_sweep
from mutualrl.study.sweep_plan import planned, require_capacity
from mutualrl.tasks.countdown import reached
from mutualrl.tiny import path_of

GOOD = """
seeds: [3, 1]
pools: [tiny, tiny-near]
set: {run.steps: 4}
arms:
  distilled: {distill: grpo, beside: [sgt gold], set: {learning_rate: 5.0e-4}}
  grpo: {regime: grpo, set: {run.publish: full}}
  sgt gold: {regime: sgt, set: {regime.teacher: source, sources: [{name: gold, recorded: task}]}}
reference: grpo
"""


def write_sweep(tmp_path: Path, text: str) -> Path:
    (tmp_path / "s.yaml").write_text(text)
    return tmp_path / "s.yaml"


def test_pieces_are_ordered_by_seed_with_distillations_after_their_sources(tmp_path: Path) -> None:
    sweep = read_sweep(write_sweep(tmp_path, GOOD))
    assert [piece.seed for piece in sweep.pieces] == [3] * 6 + [1] * 6
    assert [piece.arm for piece in sweep.pieces[:3]] == ["grpo", "sgt gold", "distilled"]
    assert str(sweep.pieces[1].place) == "pieces/tiny/sgt-gold-3"
    assert sweep.command(sweep.pieces[1], Path("/out")) == [
        *("train", "--regime", "sgt", "--pool", "tiny", "--seed", "3", "--set", "run.steps=4"),
        *("--set", 'regime.teacher="source"', "--set", 'sources=[{"name": "gold", "recorded": "task"}]'),
        *("--run-dir", "/out/pieces/tiny/sgt-gold-3", "--no-report"),
    ]
    assert sweep.command(sweep.pieces[2], Path("/out")) == [
        *("paper", "distill", "/out/pieces/tiny/grpo-3", "--beside", "/out/pieces/tiny/sgt-gold-3", "--seed", "3"),
        *("--set", "learning_rate=0.0005", "--out", "/out/pieces/tiny/distilled-3"),
    ]
    assert sweep.recipe(sweep.pieces[2]).regime_class.name == "grpo"
    plan = planned(sweep, tmp_path / "out", None)
    assert (len(plan.missing), plan.seconds, plan.minutes) == (12, {}, None)
    assert plan.bytes is not None
    assert plan.bytes > 12 * 1_000_000


def test_an_arm_is_run_on_its_pools_only(tmp_path: Path) -> None:
    text = "pools: [tiny, tiny-near]\nseeds: 1\narms: {a: {regime: grpo}, b: {regime: sgt, pools: [tiny-near]}}"
    sweep = read_sweep(write_sweep(tmp_path, text))
    expected = [Piece("tiny", "a", 0), Piece("tiny-near", "a", 0), Piece("tiny-near", "b", 0)]
    assert list(sweep.pieces) == sweep.grid.pieces == expected
    assert set(sweep.recipes) == {("tiny", "a"), ("tiny-near", "a"), ("tiny-near", "b")}


def test_seed_count_means_seeds_from_zero(tmp_path: Path) -> None:
    assert read_sweep(write_sweep(tmp_path, "seeds: 2\narms: {a: {regime: grpo}}")).pieces == (
        Piece("tiny", "a", 0),
        Piece("tiny", "a", 1),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("arms: {a: {regime: grpo}}\nbudgets: 3", "budgets: Extra inputs are not permitted"),
        ("arms: {}", "at least 1 item"),
        ("arms: {a: {regime: grpo, steps: 3}}", "arms.a.steps: Extra inputs"),
        ("arms: {a: {set: {run.steps: 3}}}", "expected either regime or distill"),
        ("arms: {a: {regime: grpo, distill: b}}", "expected either regime or distill"),
        ("arms: {a: {regime: grpo, beside: [a]}}", "beside is for arms with distill"),
        ("arms: {a: {regime: grpo}, b: {distill: c}}", "arm 'b': found 'c', expected an arm with a regime"),
        ("arms: {a: {regime: grpo}, b: {distill: b}}", "arm 'b': found 'b', expected an arm with a regime"),
        ("arms: {a/b: {regime: grpo}}", "arm 'a/b': expected letters, digits"),
        ("arms: {a: {regime: grpo}}\nreference: b", "reference: found 'b', expected one of a"),
        ("arms: {a: {regime: grpo}}\nseeds: [1, 1]", "seeds: expected a count, or different integers"),
        ("arms: {a: {regime: grpo}}\nseeds: 0", "seeds: expected a count"),
        ("arms: {a: {regime: grpo}}\nseeds: 1000000000", "found 1000000000, expected at most 1000"),
        ("arms: {a: {regime: grpo, set: {run.seed: 5}}}", r"arm 'a': run.seed: set by the sweep \(seeds\)"),
        ("arms: {a: {regime: grpo}}\nset: {run.dir: x}", r"set: run.dir: set by the sweep \(--out\)"),
        ("arms: {a: {regime: sgt}, b: {distill: a}}", "arm 'b' distills 'a', which must have regime grpo"),
        ("arms: {a: {regime: grpo}, b: {distill: a}}", "publish everything: a: .*run.publish: full"),
        ("arms: {a: {regime: grpo}}\nclaims: pool.yaml", "claims: 'x': no pool 'tinny', expected one of tiny"),
        ("arms: {a: {regime: grpo}}\nclaims: who.yaml", "no policy 'cyd', expected one of mean, .*ada, bob"),
        ("arms: {a: {regime: grpo}}\nclaims: steps.yaml", "no arm 'zz'"),
        (
            "arms: {a: {regime: grpo, set: {run.publish: full}}, c: {distill: a}, "
            "b: {regime: sgt, set: {trainer.learning_rate: 1}}}\nreference: c",
            "arm 'b' differs from 'c' in more than its regime",
        ),
        ("arms: {a: {regime: grpo}, b: {regime: sgt, pools: [x]}}", "arm 'b': pools: found 'x', expected some of tiny"),
        (
            "pools: [tiny, tiny-near]\narms: {a: {regime: grpo, pools: [tiny]}, b: {regime: sgt}}",
            "arm 'b': is on the pool 'tiny-near', where 'a' is not run",
        ),
        ("arms: {a: {regime: grp}}", "arm 'a': .*grp"),
        ("arms: {a: {regime: sgt, set: {regime.wieght: 1}}}", "arm 'a': .*wieght"),
        ("arms: {a: {regime: grpo}, b: {distill: a, set: {rate: 1}}}", "arm 'b': .*rate"),
        ("arms: {a b: {regime: grpo}, a-b: {regime: sgt}}", "two arms or pools have the directory"),
        (
            "arms: {a: {regime: grpo}, b: {regime: sgt, set: {trainer.learning_rate: 1}}}",
            r"arm 'b' differs from 'a' in more than its regime: trainer.learning_rate; .*differs: \[trainer.learning_rate\]",
        ),
        ("arms: {a: {regime: grpo}}\nclaims: c.yaml", "claims: 'x': no arm 'b', expected one of a"),
        ("arms: {a: {regime: grpo}}\nclaims: d.yaml", "d.yaml"),
        ("arms: {a: {regime: grpo}}\npools: [no-such]", "no-such"),
        ("arms: {a: {regime: grpo}}\nbudget: {minutes: 0}", "budget.minutes: Input should be greater than 0"),
    ],
)
def test_invalid_sweep_file_is_rejected_with_the_key(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "c.yaml").write_text("claims: [{text: x, one: a, other: b}]")
    (tmp_path / "pool.yaml").write_text("claims: [{text: x, one: a, pools: [tinny]}]")
    (tmp_path / "who.yaml").write_text("claims: [{text: x, one: a, who: cyd}]")
    (tmp_path / "steps.yaml").write_text("claims: [{text: x, one: a, measure: steps_to/zz}]")
    with pytest.raises(RecipeError, match=message):
        read_sweep(write_sweep(tmp_path, text))


def test_declared_difference_is_accepted(tmp_path: Path) -> None:
    text = "arms: {a: {regime: grpo}, b: {regime: sgt, set: {trainer.learning_rate: 1}, differs: [trainer]}}"
    assert len(read_sweep(write_sweep(tmp_path, text)).pieces) == 6


def test_grid_beyond_the_budget_is_rejected_with_bytes(tmp_path: Path) -> None:
    sweep = read_sweep(write_sweep(tmp_path, f"{GOOD}\nbudget: {{gigabytes: 0.01}}"))
    plan = planned(sweep, tmp_path / "out", None)
    with pytest.raises(UsageError, match=r"needs about [0-9,]+ bytes for 12 pieces, 10,000,000 are left of the budget"):
        require_capacity(plan, tmp_path / "out", sweep.file.budget.gigabytes)
    require_capacity(plan, tmp_path / "out", None)


def test_example_sweep_is_valid() -> None:
    if not (REPOSITORY / "examples" / "sweep.yaml").is_file():
        pytest.skip("not in a source tree")
    sweep = read_sweep(REPOSITORY / "examples" / "sweep.yaml")
    assert sweep.claims is not None
    assert sweep.file.seed_list[: sweep.claims.file.seeds] == tuple(range(sweep.claims.file.seeds))


def test_shipped_sweeps_are_valid(tmp_path: Path) -> None:
    """Read `benchmarks/sweeps` with small versions of the files that `benchmarks/text_source.py` writes there."""
    script = REPOSITORY / "benchmarks" / "text_source.py"
    if not script.is_file():
        pytest.skip("not in a source tree")
    spec = importlib.util.spec_from_file_location("text_source", script)
    assert spec is not None
    assert spec.loader is not None
    text_source = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(text_source)
    sweeps, text_source_dir = tmp_path / "sweeps", tmp_path / "sweeps" / "text-source"
    made = ("text-source", "smol", "smol-pair", "smol-file", "minimind-keep", "one-model")
    shutil.copytree(REPOSITORY / "benchmarks" / "sweeps", sweeps, ignore=shutil.ignore_patterns(*made))
    text_source_dir.mkdir()
    rows = text_source.rows_of("train")[:40]
    for name in ("train.jsonl", "held_out.jsonl"):
        text_source.write_rows(text_source_dir / name, [{**row, "own_fay": "", "own_gus": row["bare"]} for row in rows])
    for learner in text_source.LEARNERS:
        shutil.copytree(path_of(learner), text_source_dir / "sft" / learner)
    for name in ("word_problems.py", "paced_rewards.py"):
        shutil.copy(REPOSITORY / "benchmarks" / name, tmp_path)
    (sweeps / "smol").mkdir()
    for name in ("train.jsonl", "held_out.jsonl"):
        problems = [problem for skill in word_problems.SKILLS for problem in word_problems.problems(skill, 20, seed=0)]
        text_source.write_rows(sweeps / "smol" / name, problems)
        assert word_problems.last_number([p["solution"] for p in problems], [p["answer"] for p in problems])
    for kind in ("confirmed", "all"):
        shutil.copytree(path_of("ada"), sweeps / "one-model" / kind)
    for skill, model in zip(word_problems.SKILLS, ("ada", "bob"), strict=True):
        shutil.copytree(path_of(model), sweeps / "smol" / "sft" / skill)
    shutil.copytree(sweeps / "smol", sweeps / "smol-pair")
    for skill, name in zip(word_problems.SKILLS, ("smollm2", "minimind2"), strict=True):
        (sweeps / "smol-pair" / "sft" / skill).rename(sweeps / "smol-pair" / "sft" / name)
    for directory, other in (("smol-file", "file"), ("minimind-keep", "gold")):
        shutil.copytree(sweeps / "smol", sweeps / directory)
        shutil.copytree(path_of("ada"), sweeps / directory / "sft" / other)
    recorded = [{"problem": row["prompt"], "generations": [row["solution"]]} for row in problems]
    text_source.write_rows(sweeps / "smol-file" / "recorded.jsonl", recorded)
    by_name = {path.stem: read_sweep(path) for path in sweeps.glob("*.yaml") if "arms:" in path.read_text()}
    assert sorted(by_name) == [
        "agents",
        "agents-seeds",
        "agents-trajectories",
        "hints",
        "hints-countdown",
        "hints-countdown-controls",
        "hints-seeds",
        "minimind-keep",
        "noise-whitened",
        "one-model",
        "one-model-chord",
        "one-model-seeds",
        "paper",
        "paper-countdown",
        "resample",
        "rivals",
        "rivals-recorded",
        "rivals-tiny",
        "served",
        "smol",
        "smol-file",
        "smol-pair",
        "staleness",
        "study",
        "text-source",
    ]
    for name, sweep in by_name.items():
        if name == "staleness":  # descriptive, without claims
            continue
        assert sweep.claims is not None
        assert sweep.claims.file.seeds == len(sweep.file.seed_list)
    recipe = by_name["text-source"].recipes["text-source-pool.yaml", "sgt own best of 64"]
    prompts = load_recipe_prompts(recipe, "train")
    assert len(prompts) == 40
    (source,) = recipe.sources_of("gus")
    assert (source.recorded, source.columns.text) == ("task", ("own_gus",))
    assert all(prompt.columns["own_gus"] for prompt in prompts)
    assert all(reached(text, row["numbers"], row["target"]) for row in rows for text in (row["bare"], row["mirrored"]))
