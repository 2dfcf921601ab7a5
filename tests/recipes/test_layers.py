"""Merging of layers, YAML 1.2, settings that bias an importance ratio, and batch plans."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mutualrl.errors import RecipeError
from mutualrl.recipes import Request, resolve, yaml_file
from mutualrl.recipes.batch_plan import plan_batch
from mutualrl.recipes.layers import Layers, find, recipe_file, recipe_root
from mutualrl.recipes.servers import server_problems
from mutualrl.regimes.ratios import aggregation_problem, non_default_sampling, ratio_problems


def test_mappings_are_merged_and_other_values_replaced() -> None:
    layers = Layers()
    layers.add({"a": {"x": 1, "y": [1, 2]}, "b": 1}, "first")
    layers.add({"a": {"y": [3]}, "b": {"c": 2}}, "second")
    assert layers.value == {"a": {"x": 1, "y": [3]}, "b": {"c": 2}}
    assert layers.source_of(("a", "x")) == "first"
    assert layers.source_of(("a", "y", "0")) == "second"  # the nearest parent key
    assert layers.source_of(("zzz",)) is None


@pytest.mark.parametrize(("first", "second"), [("steps", "epochs"), ("epochs", "steps")])
def test_later_of_steps_and_epochs_wins(first: str, second: str) -> None:
    layers = Layers()
    layers.add({"run": {first: 3}}, "file")
    layers.add({"run": {second: 2}}, "--set")
    assert layers.value["run"] == {second: 2}


def test_set_expands_names_and_keeps_other_keys() -> None:
    layers = Layers()
    layers.set("regime=sgt")
    layers.set("regime.weight=0.5")
    layers.set("a.b.c=[1, x]")
    assert layers.value == {"regime": {"name": "sgt", "weight": 0.5}, "a": {"b": {"c": [1, "x"]}}}
    assert layers.source_of(("regime", "weight")) == "--set regime.weight=0.5"


def test_paths_next_to_a_file_are_resolved_and_others_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "rows.jsonl").write_text("")
    (tmp_path / "there" / "model").mkdir()
    file = tmp_path / "there" / "p.yaml"
    file.write_text(
        'policies: [{name: a, model: model}, {name: b, model: "Qwen/Qwen3"}, {name: c, model: "tiny:ada"}]\n'
        "task: {name: dataset, data: rows.jsonl, validation_data: elsewhere.jsonl}\n"
    )
    monkeypatch.chdir(tmp_path)
    layers = Layers()
    layers.add_file(file)
    models = [policy["model"] for policy in layers.value["policies"]]
    assert models == [str(tmp_path / "there" / "model"), "Qwen/Qwen3", "tiny:ada"]
    assert layers.value["task"]["data"] == str(tmp_path / "there" / "rows.jsonl")
    assert layers.value["task"]["validation_data"] == "elsewhere.jsonl"


def test_shipped_recipe_is_used_unless_a_file_of_that_name_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = recipe_file(Path("paper/2qwen-sgt"))
    assert shipped == recipe_root() / "paper" / "2qwen-sgt.yaml"
    (tmp_path / "paper").mkdir()
    (tmp_path / "paper" / "2qwen-sgt").write_text("")
    assert recipe_file(Path("paper/2qwen-sgt")) == Path("paper/2qwen-sgt")
    with pytest.raises(RecipeError, match=r"unknown paper recipe 'nonsense'; expected one of: .*2qwen-sgt"):
        recipe_file(Path("paper/nonsense"))
    with pytest.raises(RecipeError, match=r"pool file not found: ./gone.yaml"):
        find("pools", "./gone.yaml")
    with pytest.raises(RecipeError, match="pool file is a directory"):
        find("pools", str(tmp_path) + "/")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5e-4", 5e-4),
        ("1_000", "1_000"),
        ("no", "no"),
        ("on", "on"),
        ("0x10", "0x10"),
        ("010", 10),
        ("12:30", "12:30"),
        ("2026-01-01", "2026-01-01"),
        (".5", 0.5),
        ("+1", 1),
        ("True", True),
        ("~", None),
        ("1.", 1.0),
        ("'1'", "1"),
        ("1e400", float("inf")),
    ],
)
def test_yaml_is_version_1_2(text: str, value: object) -> None:
    read = yaml_file.parse(text, "here")
    assert read == value
    assert type(read) is type(value)


texts = st.text(st.characters(exclude_categories=("C", "Z")) | st.just(" "), max_size=12)
yaml_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(texts, yaml_values, max_size=4))
def test_dumped_yaml_is_read_back(value: dict[str, object]) -> None:
    assert yaml_file.parse(yaml_file.dump(value), "dumped") == value


def test_oversized_and_undecodable_recipes_are_rejected(tmp_path: Path) -> None:
    file = tmp_path / "big.yaml"
    file.write_text("a: " + "x" * yaml_file.MAX_BYTES)
    with pytest.raises(RecipeError, match="over 250,000 bytes"):
        yaml_file.read(file)
    file.write_bytes(b"a: \xff")
    with pytest.raises(RecipeError, match="cannot be read"):
        yaml_file.read(file)


@pytest.mark.parametrize(
    ("settings", "reported"),
    [
        ({}, {}),
        ({"top_p": 1.0, "top_k": 0, "min_p": None}, {}),
        ({"top_p": 0.9}, {"top_p": 0.9}),
        ({"top_p": 0.9, "generation_kwargs": {"top_p": 1.0}}, {}),  # generation_kwargs win, as in TRL
        ({"generation_kwargs": {"typical_p": 0.5, "stop": ["x"]}}, {"typical_p": 0.5}),
        ({"top_k": -1, "repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
    ],
)
def test_settings_that_change_the_sampling_distribution_are_reported(
    settings: dict[str, object], reported: dict[str, object]
) -> None:
    assert non_default_sampling(settings) == reported
    paths = [f"generation_kwargs.{key}" if key == "typical_p" else key for key in reported]
    assert [key for key, _ in ratio_problems(settings, traced=True)] == paths
    assert ratio_problems(settings, traced=False) == []
    with_vllm = ratio_problems({**settings, "use_vllm": True}, traced=False)
    assert [key for key, _ in with_vllm] == paths
    assert all("vllm_importance_sampling_correction: false" in message for _, message in with_vllm)
    off = {**settings, "use_vllm": True, "vllm_importance_sampling_correction": False}
    assert ratio_problems(off, traced=False) == []


def test_normalize_then_sum_is_rejected_if_a_regime_shares_rewards() -> None:
    settings = {"multi_objective_aggregation": "normalize_then_sum"}
    assert aggregation_problem(settings, moves_advantages=False) == []
    ((key, message),) = aggregation_problem(settings, moves_advantages=True)
    assert key == "multi_objective_aggregation"
    assert "expected 'sum_then_normalize'" in message


def test_policies_on_the_same_vllm_server_are_reported() -> None:
    server = {"use_vllm": True, "vllm_mode": "server"}
    assert server_problems({"a": server, "b": {**server, "vllm_server_port": 8001}}) == []
    assert server_problems({"a": server, "b": {"use_vllm": True, "vllm_mode": "colocate"}}) == []
    (line,) = server_problems({"a": server, "b": {**server, "vllm_server_port": 8000}})
    assert line.startswith("policies 'a' and 'b' both use the vLLM server http://0.0.0.0:8000")


@given(
    prompts=st.integers(1, 64),
    rollouts=st.integers(2, 8),
    per_device=st.integers(1, 16),
    steps=st.integers(1, 4),
    processes=st.sampled_from([1, 2, 4]),
)
def test_batch_plan_divides_evenly_or_is_an_error(
    prompts: int, rollouts: int, per_device: int, steps: int, processes: int
) -> None:
    """rows = prompts * rollouts = per_device * processes * micro_batches * optimizer_steps, in whole numbers."""
    recipe = resolve(
        Request(
            assignments=(
                f"round.prompts={prompts}",
                f"round.optimizer_steps={steps}",
                f"trainer.num_generations={rollouts}",
                f"trainer.per_device_train_batch_size={per_device}",
            )
        )
    )
    rows = prompts * rollouts
    if rows % (per_device * processes * steps):
        with pytest.raises(RecipeError, match="do not divide"):
            plan_batch(recipe, "ada", processes)
        return
    plan = plan_batch(recipe, "ada", processes)
    assert rows == plan.per_device * processes * plan.micro_batches * plan.optimizer_steps
    assert plan.trainer_keys()["steps_per_generation"] == plan.micro_batches * plan.optimizer_steps
    own_keys = resolve(
        Request(
            assignments=(
                "round.prompts=null",
                *(f"trainer.{key}={value}" for key, value in plan.trainer_keys().items()),
            )
        )
    )
    assert plan_batch(own_keys, "ada", processes) == plan


def test_set_targets_one_policy_by_name(tmp_path: Path) -> None:
    pool = tmp_path / "p.yaml"
    pool.write_text(
        'policies: [{name: q2.5-3b, model: "tiny:ada"}, {name: q2, model: "tiny:bob", regime: {weight: 0.2}}]'
    )
    settings = (
        "policies.q2.5-3b.regime.weight=0.4",
        "policies.q2.trainer.learning_rate=1e-4",
        "policies.q2.model=tiny:cyd",
    )
    recipe = resolve(Request(regime="sgt", pool=str(pool), assignments=settings))
    weights = [recipe.regime_of(name).model_dump()["weight"] for name in ("q2.5-3b", "q2")]
    assert weights == [0.4, 0.2]
    rates = [recipe.trainer_settings(name).get("learning_rate") for name in ("q2.5-3b", "q2")]
    assert rates == [None, 1e-4]
    assert [policy.model for policy in recipe.policies] == ["tiny:ada", "tiny:cyd"]
    assert resolve(Request(regime="sgt", pool=str(pool))).regime_of("q2.5-3b").model_dump()["weight"] == 0.1


@pytest.mark.parametrize("key", ["policies.zoe.regime.weight", "policies.ada", "policies.ad.regime.weight"])
def test_unknown_policy_is_rejected_listing_the_known_ones(key: str) -> None:
    with pytest.raises(RecipeError, match="expected a policy and a key: ada, bob"):
        resolve(Request(regime="sgt", pool="tiny", assignments=(f"{key}=1",)))


def test_reward_files_next_to_a_pool_file_are_resolved(tmp_path: Path) -> None:
    """Resolve rewards like data and models; missing files are left to the working directory."""
    directory = tmp_path / "there"
    directory.mkdir()
    (directory / "judge.py").write_text("def score(completions, **columns):\n    return [0.0 for _ in completions]\n")
    (directory / "pool.yaml").write_text(
        "policies: [{name: a, model: 'tiny:ada'}, {name: b, model: 'tiny:bob'}]\n"
        "task: {name: arithmetic, reward: [judge.py:score, elsewhere.py:score, boxed, package.module:score]}\n"
    )
    layers = Layers()
    layers.add_file(directory / "pool.yaml")
    rewards = [f"{directory / 'judge.py'}:score", "elsewhere.py:score", "boxed", "package.module:score"]
    assert layers.value["task"]["reward"] == rewards


def test_pool_with_settings_of_a_regime_serves_every_regime(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pool = tmp_path / "pool.yaml"
    policies = "policies:\n  - {name: a, model: 'tiny:ada', regime: {weight: 0.2}}\n  - {name: b, model: 'tiny:bob'}\n"
    pool.write_text(policies + "regime: {weight: 0.3, success_above: 0.7}\n")
    chosen = resolve(Request(pool=str(pool), regime="sgt"))
    first, second = (chosen.regime_of(name).model_dump() for name in ("a", "b"))
    assert (first["weight"], second["weight"]) == (0.2, 0.3)  # not replaced by what is shipped with sgt
    assert (second["success_above"], second["failure_below"]) == (0.7, 0.2)
    assert not caplog.messages
    for regime in ("grpo", "xgrpo"):
        assert resolve(Request(pool=str(pool), regime=regime)).regime_name == regime
    assert caplog.messages[0] == "the pool sets regime.weight, regime.success_above, which grpo does not have: left out"
    caplog.clear()
    assert resolve(Request(pool=str(pool))).regime_name == "grpo"  # as the diagnostics, to which no regime matters
    assert not caplog.messages
    given = resolve(Request(pool=str(pool), regime="sgt", assignments=("regime.weight=0.9",)))
    assert given.regime_of("b").model_dump()["weight"] == 0.9


def test_setting_of_no_regime_in_a_pool_is_refused(tmp_path: Path) -> None:
    pool = tmp_path / "pool.yaml"
    pool.write_text("policies: [{name: a, model: 'tiny:ada', regime: {wieght: 0.2}}, {name: b, model: 'tiny:bob'}]\n")
    with pytest.raises(RecipeError, match=r"regime\.wieght: unknown key"):
        resolve(Request(pool=str(pool), regime="grpo"))
