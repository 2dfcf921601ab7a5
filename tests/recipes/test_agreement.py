"""Agreement between the policies of a run, and checks before the first step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mutualrl.errors import DataError, PlanMismatchError
from mutualrl.launch.joining import decisive
from mutualrl.recipes import Recipe, Request, resolve
from mutualrl.recipes.agreement import (
    compare,
    compare_models,
    fingerprint,
    load_recipe_prompts,
    require_enough,
)
from mutualrl.records import Prompt
from mutualrl.storage.allocation import BatchPlan

PLAN = BatchPlan(prompts=4, rollouts=8, per_device=8, micro_batches=4, optimizer_steps=1)


def recipe(*assignments: str) -> Recipe:
    return resolve(Request(pool="tiny", regime="sgt", assignments=assignments))


def prompts(n: int, answer: str = "7", solution: str | None = r"so \boxed{7}") -> list[Prompt]:
    return [Prompt(f"p{i}", f"q{i}", answer, "g", solution=solution) for i in range(n)]


def test_fingerprint_depends_on_the_prompts_their_order_and_the_seed() -> None:
    base = fingerprint(recipe(), PLAN, prompts(5), prompts(2))
    assert base == fingerprint(recipe(), PLAN, prompts(5), prompts(2))
    assert base["prompts"] == 5
    assert base["prompts_per_round"] == 4
    other_order = fingerprint(recipe(), PLAN, prompts(5)[::-1], prompts(2))
    assert {key for key in base if base[key] != other_order[key]} == {"data_sha256"}
    other_answers = fingerprint(recipe(), PLAN, prompts(5, answer="0"), prompts(2))  # the ids are the same
    assert {key for key in base if base[key] != other_answers[key]} == {"data_sha256"}
    other_solutions = fingerprint(recipe(), PLAN, prompts(5, solution="no"), prompts(2))
    assert {key for key in base if base[key] != other_solutions[key]} == {"data_sha256"}
    columns = [replace(prompt, columns={"level": 3}) for prompt in prompts(5)]
    assert fingerprint(recipe(), PLAN, columns, prompts(2))["data_sha256"] != base["data_sha256"]
    other_validation = fingerprint(recipe(), PLAN, prompts(5), prompts(2, answer="0"))
    assert {key for key in base if base[key] != other_validation[key]} == {"validation_sha256"}
    other_texts = fingerprint(recipe(), PLAN, prompts(5), prompts(2), {"book": "abc"})
    assert {key for key in other_texts if base.get(key) != other_texts[key]} == {"source book"}
    other_seed = fingerprint(recipe("run.seed=1"), PLAN, prompts(5), prompts(2))
    assert {key for key in base if base[key] != other_seed[key]} == {"seed"}


def test_fingerprint_includes_the_code_of_a_user_regime(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    source = (Path(__file__).parents[2] / "examples" / "own_regime.py").read_text()
    file.write_text(source)
    user_recipe = resolve(Request(pool="tiny", regime=f"{file}:Shortest"))
    before = fingerprint(user_recipe, PLAN, prompts(5), prompts(2))
    file.write_text(source + "# changed\n")
    after = fingerprint(user_recipe, PLAN, prompts(5), prompts(2))
    assert {key for key in before if before[key] != after[key]} == {"regime_sha256"}


def test_fingerprint_includes_the_source_of_a_reward(tmp_path: Path) -> None:
    file = tmp_path / "judge.py"
    file.write_text("def score(completions, **kwargs):\n    return [1.0 for _ in completions]\n")
    user_recipe = recipe(f"task.reward={file}:score")
    before = fingerprint(user_recipe, PLAN, prompts(5), prompts(2))
    file.write_text(file.read_text().replace("1.0", "0.0"))
    after = fingerprint(user_recipe, PLAN, prompts(5), prompts(2))
    assert {key for key in before if before[key] != after[key]} == {f"reward {file.name}:score"}


def test_fingerprint_ignores_the_directory_of_user_code(tmp_path: Path) -> None:
    """Policies of a run may train on several machines, each with its own copy of the user's code."""
    results = []
    for name in ("here", "there"):
        judge = tmp_path / name / "judge.py"
        judge.parent.mkdir()
        judge.write_text("def score(completions, **kwargs):\n    return [1.0 for _ in completions]\n")
        user_recipe = recipe(f"task.reward=[{judge}:score, boxed]")
        results.append((fingerprint(user_recipe, PLAN, prompts(5), prompts(2)), decisive(user_recipe)))
    assert results[0] == results[1]
    other = recipe("task.reward=[boxed]")
    assert decisive(other) != results[0][1]


def test_changed_base_model_is_rejected_and_unknown_ones_are_not_compared() -> None:
    compare_models({"ada": "sha256:aa", "bob": ""}, {"ada": "sha256:aa", "bob": "commit:1"})
    with pytest.raises(PlanMismatchError, match="policy 'bob': the files of its base model have changed"):
        compare_models({"ada": "sha256:aa", "bob": "commit:2"}, {"ada": "sha256:aa", "bob": "commit:1"})


def test_differences_are_reported_with_both_values_and_rollouts_may_differ() -> None:
    base = fingerprint(recipe(), PLAN, prompts(5), prompts(2))
    compare("bob", {**base, "rollouts_per_prompt": 99}, base)
    with pytest.raises(PlanMismatchError) as caught:
        compare("bob", {**base, "seed": 3, "prompts": 4}, base)
    assert "policy 'bob'" in str(caught.value)
    assert "prompts: 4, the run has 5; seed: 3, the run has 0" in str(caught.value)


def test_too_few_prompts_for_a_round_are_rejected() -> None:
    require_enough(prompts(4), PLAN.prompts)
    with pytest.raises(DataError, match=r"3 training prompts remain, a round needs 4.*lower round.prompts"):
        require_enough(prompts(3), PLAN.prompts)


def test_validation_limit_samples_groups_evenly() -> None:
    cut = load_recipe_prompts(recipe("run.validation_limit=8"), "validation")
    uncut = load_recipe_prompts(recipe("run.validation_limit=1000"), "validation")
    assert len(cut) == 8
    assert {p.group for p in cut} == {p.group for p in uncut} == {"+", "*"}
    assert [p.id for p in uncut if p.id in {c.id for c in cut}] == [c.id for c in cut]
