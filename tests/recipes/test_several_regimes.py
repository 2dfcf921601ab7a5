"""Several regimes in a recipe: a list, or names joined by `+`; settings are nested under the names."""

from __future__ import annotations

from pathlib import Path

import pytest

from mutualrl.errors import RecipeError, RegimeError
from mutualrl.recipes import Request, resolve
from mutualrl.recipes.agreement import fingerprint
from mutualrl.recipes.batch_plan import plan_batch
from mutualrl.recipes.layers import Layers
from mutualrl.recipes.stored import dump, load
from mutualrl.recipes.validation import validate


def recipe(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"pool: tiny\n{text}")
    return path


def test_list_and_plus_joined_names_are_equivalent(tmp_path: Path) -> None:
    listed = resolve(Request(recipe=recipe(tmp_path, "regime: [xgrpo, {name: sgt, weight: 0.05}]\n")))
    joined = resolve(Request(pool="tiny", regime="xgrpo+sgt", assignments=("regime.sgt.weight=0.05",)))
    assert listed.regime == joined.regime
    assert listed.regime_name == "xgrpo+sgt"
    settings = listed.regime_of("ada").model_dump()
    assert (settings["sgt"]["weight"], settings["xgrpo"]["mix"]) == (0.05, 0.2)


def test_list_of_one_is_that_regime(tmp_path: Path) -> None:
    listed = resolve(Request(recipe=recipe(tmp_path, "regime: [{name: sgt, weight: 0.3}]\n")))
    single = resolve(Request(recipe=recipe(tmp_path, "regime: {name: sgt, weight: 0.3}\n")))
    assert listed == single


def test_resolved_recipe_survives_a_round_trip(tmp_path: Path) -> None:
    resolved = resolve(Request(pool="tiny", regime="sgt+guided", assignments=("regime.guided.share=0.25",)))
    path = tmp_path / "resolved.yaml"
    path.write_text(dump(resolved))
    assert load(path) == resolved


def test_shipped_trainer_settings_of_each_part_apply() -> None:
    resolved = resolve(Request(pool="tiny", regime="hacpo+sgt"))
    assert resolved.trainer["importance_sampling_level"] == "sequence"
    assert resolved.trainer["epsilon_high"] == 4e-4
    alone = resolve(Request(pool="tiny", regime="hacpo"))
    assert alone.trainer == resolved.trainer


def test_policy_settings_override_key_by_key(tmp_path: Path) -> None:
    text = """policies:
  - {name: ada, model: "tiny:ada", regime: {sgt: {weight: 0.4}}}
  - {name: bob, model: "tiny:bob"}
regime: [xgrpo, {name: sgt, weight: 0.05, failure_below: 0.1}]
"""
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    resolved = resolve(Request(recipe=path))
    ada, bob = (resolved.regime_of(name).model_dump()["sgt"] for name in ("ada", "bob"))
    assert (ada["weight"], ada["failure_below"]) == (0.4, 0.1)
    assert (bob["weight"], bob["failure_below"]) == (0.05, 0.1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("regime: [xgrpo, {name: sgt, weigt: 1}]", "regime.sgt.weigt: unknown key; expected one of: weight, "),
        ("regime: [xgrpo, {weight: 1}]", "regime: found {'weight': 1} in the list, expected a name"),
        ("regime: []", "regime: found an empty list, expected one or more regimes"),
        ("regime: [xgrpo, {name: sgt, margin: 0.5}]", "regime.sgt.margin: found 0.5, which has no effect with"),
        ("regime: {name: xgrpo+sgt, mix: 0.5}", "regime.mix: unknown key; expected one of: name, xgrpo, sgt"),
        ("regime: hacpo\ntrainer: {importance_sampling_level: token}", "regime hacpo expects 'sequence'"),
    ],
)
def test_invalid_setting_is_reported_by_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(RecipeError) as error:
        resolve(Request(recipe=recipe(tmp_path, f"{text}\n")))
    assert message in str(error.value)


def test_invalid_combination_is_rejected_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(RegimeError, match="'prp' would discard the advantages of 'xgrpo'; put it first"):
        resolve(Request(recipe=recipe(tmp_path, "regime: [xgrpo, prp]\n")))
    with pytest.raises(RecipeError, match="and there is one"):
        path = tmp_path / "one.yaml"
        path.write_text('policies: [{name: ada, model: "tiny:ada"}]\nregime: swarm\n')
        resolve(Request(recipe=path))


@pytest.mark.parametrize(
    "text", ["[xgrpo, {name: 'mine.py:Shortest', weight: 0.3}]", "[{name: 'mine.py:Shortest', weight: 0.3}, xgrpo]"]
)
def test_user_regime_file_can_be_a_part(tmp_path: Path, text: str) -> None:
    source = Path(__file__).parents[2] / "examples" / "own_regime.py"
    (tmp_path / "mine.py").write_text(source.read_text())
    resolved = resolve(Request(recipe=recipe(tmp_path, f"regime: {text}\n")))
    assert sorted(resolved.regime_name.split("+")) == [f"{tmp_path / 'mine.py'}:Shortest", "xgrpo"]
    name = next(part for part in resolved.regime_class.name.split("+") if part != "xgrpo")
    assert resolved.regime_of("ada").model_dump()[name]["weight"] == 0.3
    batch = plan_batch(resolved, "ada", 1)
    before = fingerprint(resolved, batch, [], [])
    (tmp_path / "mine.py").write_text(source.read_text() + "\n")
    changed = {key for key, value in fingerprint(resolved, batch, [], []).items() if before[key] != value}
    assert len(changed) == 1
    assert changed.pop().startswith("regime ")


def test_validation_without_running_code_imports_nothing(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nSPEC = None\n")
    for text in (
        f"[{{name: '{tmp_path}/evil.py:SPEC', weight: 1}}]",
        f"[xgrpo, {{name: '{tmp_path}/evil.py:SPEC', w: 1}}]",
    ):
        layers = Layers()
        layers.add_text(
            f"pool: tiny\npolicies: [{{name: ada, model: 'tiny:ada'}}]\nregime: {text}\n", tmp_path / "r.yaml"
        )
        validate(layers, run_code=False)
        assert not (tmp_path / "ran").exists()


def test_idle_setting_of_one_policy_is_reported_with_its_path(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        """policies:
  - {name: ada, model: "tiny:ada", regime: {sgt: {margin: 0.4}}}
  - {name: bob, model: "tiny:bob"}
regime: [xgrpo, sgt]
"""
    )
    with pytest.raises(RecipeError, match=r"policies\.0\.regime\.sgt\.margin: found 0.4, which has no effect"):
        resolve(Request(recipe=path))
