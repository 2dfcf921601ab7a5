from __future__ import annotations

from pathlib import Path

import pytest

from mutualrl.errors import RecipeError
from mutualrl.recipes import Recipe, Request, dump, load, resolve, shipped
from mutualrl.recipes.batch_plan import plan_batch
from mutualrl.recipes.trainer_table import TABLE
from mutualrl.regimes.sgt import SGT
from mutualrl.storage.allocation import BatchPlan

PAIR = 'policies: [{name: a, model: "tiny:ada"}, {name: b, model: "tiny:bob"}]\n'


def sets(*assignments: str, **request: object) -> Recipe:
    return resolve(Request(assignments=assignments, **request))  # type: ignore[arg-type]


def problems(*assignments: str, **request: object) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        sets(*assignments, **request)
    return caught.value.problems


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, name, _ in shipped()])
def test_every_shipped_recipe_resolves_and_survives_a_round_trip(kind: str, name: str, tmp_path: Path) -> None:
    key = {"pools": "pool", "regimes": "regime", "tasks": "task", "paper": "recipe"}[kind]
    recipe = resolve(Request(**{key: Path("paper", name) if kind == "paper" else name}))  # type: ignore[arg-type]
    (tmp_path / "recipe.yaml").write_text(dump(recipe))
    assert load(tmp_path / "recipe.yaml") == recipe


def test_paper_pools_ship() -> None:
    models = {
        name: [p.model for p in resolve(Request(pool=name, regime="hinted")).policies]
        for kind, name, _ in shipped()
        if kind == "pools"
    }
    assert models["2qwen"] == ["Qwen/Qwen2.5-Math-1.5B", "Qwen/Qwen3-1.7B-Base"]
    assert [len(models[n]) for n in ("tiny", "3qwen", "4qwen", "llama-mist", "qwen-phi4")] == [2, 3, 4, 2, 2]


def test_settings_of_a_pool_reach_the_part_of_a_combined_regime_that_has_them() -> None:
    recipe = resolve(Request(pool="tiny-tools", regime="xgrpo+hinted"))
    assert recipe.regime_of("jan").hinted.hint == "plan"  # type: ignore[attr-defined]
    assert resolve(Request(pool="tiny-tools", regime="hinted")).regime_of("jan").hint == "plan"  # type: ignore[attr-defined]
    assert resolve(Request(pool="tiny-tools", regime="xgrpo")).regime_of("jan").name == "xgrpo"


def test_more_specific_layers_take_precedence(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        PAIR + "regime: sgt\nrun: {steps: 7, seed: 5}\ntrainer: {learning_rate: 3e-4}\n"
    )
    recipe = resolve(Request(recipe=tmp_path / "mine.yaml", seed=9, assignments=("regime.weight=0.3",)))
    assert (recipe.run.steps, recipe.run.seed) == (7, 9)
    assert recipe.trainer["learning_rate"] == 3e-4  # YAML 1.2: a number, not a string
    assert recipe.trainer["loss_type"] == "grpo"
    settings = recipe.regime_of("a")
    assert isinstance(settings, SGT)
    assert settings.weight == 0.3


def test_dumped_recipe_of_a_user_pool_resolves_again(tmp_path: Path) -> None:
    """Treat the pool's name as a label: a file named like a shipped pool must not load that pool."""
    (tmp_path / "2qwen.yaml").write_text(PAIR)
    first = resolve(Request(pool=str(tmp_path / "2qwen.yaml"), regime="sgt"))
    assert first.pool == "2qwen"
    (tmp_path / "recipe.yaml").write_text(dump(first))
    assert resolve(Request(recipe=tmp_path / "recipe.yaml")) == first
    (tmp_path / "other.yaml").write_text(dump(first).replace("pool: 2qwen", "pool: my-own"))
    assert resolve(Request(recipe=tmp_path / "other.yaml")).policies == first.policies


def test_pool_label_cannot_be_a_path(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("pool: ../../up\n" + PAIR)
    (line,) = problems(recipe=tmp_path / "r.yaml")
    assert "pool: found '../../up'" in line


def test_regime_option_discards_the_files_regime_settings(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(dump(resolve(Request(regime="sgt"))))
    assert resolve(Request(recipe=tmp_path / "recipe.yaml", regime="grpo")).regime == {"name": "grpo"}
    assert resolve(Request(recipe=tmp_path / "recipe.yaml")).regime["weight"] == 0.1


def test_set_can_select_regime_and_pool() -> None:
    assert sets("regime=sgt").regime["weight"] == 0.1
    assert sets("pool=2qwen").hardware.gpus == 8


def test_a_regime_may_have_a_pool_of_its_own_where_none_is_named(tmp_path: Path) -> None:
    assert resolve(Request(regime="hinted")).pool == "tiny-hints"
    assert resolve(Request(regime="xgrpo+hinted")).pool == "tiny-hints"
    assert resolve(Request(assignments=("regime=hinted",))).pool == "tiny-hints"
    (tmp_path / "r.yaml").write_text("regime: hinted\n")
    assert resolve(Request(recipe=tmp_path / "r.yaml")).pool == "tiny-hints"
    assert resolve(Request(regime="hinted", pool="tiny")).pool == "tiny"
    (tmp_path / "r.yaml").write_text("regime: hinted\npool: tiny\n")
    assert resolve(Request(recipe=tmp_path / "r.yaml")).pool == "tiny"
    assert resolve(Request(regime="sgt")).pool == "tiny"


def test_policy_overrides_trainer_and_regime_settings(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(
        'policies:\n  - {name: a, model: "tiny:ada", trainer: {learning_rate: 1e-4}, regime: {weight: 0.5}}\n'
        '  - {name: b, model: "tiny:bob"}\n'
    )
    recipe = resolve(Request(pool=str(tmp_path / "p.yaml"), regime="sgt"))
    assert recipe.trainer_settings("a")["learning_rate"] == 1e-4
    assert "learning_rate" not in recipe.trainer_settings("b")
    assert recipe.regime_of("a").weight == 0.5  # type: ignore[attr-defined]
    assert recipe.regime_of("b").weight == 0.1  # type: ignore[attr-defined]


def test_models_next_to_the_pool_file_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pool" / "m").mkdir(parents=True)
    (tmp_path / "pool" / "m" / "config.json").write_text("{}")
    (tmp_path / "pool" / "p.yaml").write_text("policies: [{name: a, model: m}]")
    monkeypatch.chdir(tmp_path)
    assert resolve(Request(pool="pool/p.yaml")).policies[0].model == str(tmp_path / "pool" / "m")


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("trainer.learning_rat=1", "did you mean 'learning_rate'?"),
        ("trainer.learning_rate=-1e-3", "expected at least 0"),
        ("trainer.learning_rate=.nan", "expected a finite number"),
        ("trainer.learning_rate=.inf", "expected a finite number"),
        ("trainer.learning_rate=fast", "found 'fast' (str), expected float"),
        ("trainer.temperature=0.0", "expected more than 0"),
        ("trainer.num_generations=1", "expected at least 2"),
        ("trainer.use_vllm=3", "expected bool"),
        ("trainer.loss_type=grpoo", "did you mean 'grpo'?"),
        ("trainer.model_init_kwargs={trust_remote_code: true}", "use policies[].trust_remote_code"),
        ("trainer.resume_from_checkpoint=x", "mutualrl train --resume"),
        ("trainer.seed=3", "use run.seed (--seed)"),
        ("run.stepz=3", "did you mean 'steps'?"),
        ("run.steps=0", "greater than or equal to 1"),
        ("run.steps=2.5", "valid integer"),
        ("run.steps=99999999999999999999", "less than or equal to"),
        ("hardware.gpus=1000000000", "less than or equal to"),
        ("run.dir=~nosuchuser/x", "cannot be used"),
        ('run.dir="a\\0b"', "contains a NUL"),
        ("run.dir=" + "a" * 300, "File name too long"),
        ("run.steps=true", "valid integer"),
        ("run.seed=-1", "greater than or equal to 0"),
        ("run.peer_timeout=.nan", "finite number"),
        ("run.peer_timeout=0", "greater than 0"),
        ("run=3", "found 3"),
        ("trainer=3", "dictionary"),
        ("policies=3", "tuple"),
        ("policies=[]", "at least 1 item"),
        ("nonsense=1", "unknown key"),
        ("regime=sgtt", "did you mean 'sgt'?"),
        ("regime=[1]", "expected a name"),
        ("regime.name=7", "expected a name"),
        ("task=mth", "did you mean 'math'?"),
        ("regime.weight=1", "unknown key"),  # the regime is grpo, which has no weight
        ("nothing", "expected key=value"),
        ("=1", "expected key=value"),
        ("a: b", "expected key=value"),
        ("run.steps=[1", "--set run.steps=[1"),
    ],
)
def test_invalid_setting_is_rejected_with_the_expected_value(assignment: str, message: str) -> None:
    assert any(message in line for line in problems(assignment)), problems(assignment)


@pytest.mark.parametrize("value", [".nan", "-0.1", "big", "null"])
def test_invalid_regime_setting_is_rejected(value: str) -> None:
    (line,) = problems(f"regime.weight={value}", regime="sgt")
    assert line.startswith(f"--set regime.weight={value}: regime.weight: ")


def test_all_problems_are_reported_together_with_their_sources(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(PAIR + "run: {stepz: 1}\ntrainer: {betta: 1}\n")
    lines = problems("regime.weight=-1", recipe=path, regime="sgt")
    assert len(lines) == 3
    assert sum(str(path) in line for line in lines) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('policies: [{name: "A b", model: "tiny:ada"}]', "string should match pattern"),
        ('policies: [{name: "../up", model: "tiny:ada"}]', "string should match pattern"),
        ('policies: [{name: a, model: "tiny:eve"}]', "no embedded model"),
        ("policies: [{name: a, model: ./gone}]", "model not found"),
        ("policies: [{name: a, model: /gone/away}]", "model not found"),
        ("policies: [{name: a}]", "policies.0.model: field required"),
        ("policies: [a]", "policies.0"),
        ('policies: [{name: a, model: "tiny:ada"}, {name: a, model: "tiny:bob"}]', "two policies are named 'a'"),
        ("policies: {a: b", "line 1"),
        ("a: 1\na: 2", "duplicate key 'a'"),
        ("- 1", "expected a mapping of keys to values"),
        ("", "expected a mapping of keys to values"),
        ("!!bool foo", "invalid value"),
        ("policies: " + "[" * 3000, "nested too deeply"),
        ("a: &x [1]\nb: *x", "aliases (*name) are not supported"),
        ("policies: [{name: a, model: 'not a hub id!'}]", "model not found"),
        ("policies: [{name: a, model: " + "a" * 300 + "/b}]", "File name too long"),
        ("policies: [{name: a, model: ~nosuchuser/m}]", "cannot be used"),
        ('policies: [{name: a, model: "a\\0b"}]', "contains a NUL"),
        ("!!python/object/apply:os.system [ls]", "could not determine a constructor"),
        ("1: 2", "a key must be a string"),
    ],
)
def test_invalid_pool_file_is_rejected(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "p.yaml").write_text(text)
    lines = problems(pool=str(tmp_path / "p.yaml"))
    assert any(message.lower() in line.lower() for line in lines), lines


def test_pool_of_one_is_rejected_for_regimes_with_peers(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text('policies: [{name: a, model: "tiny:ada"}]')
    assert resolve(Request(pool=str(tmp_path / "p.yaml"), regime="grpo")).policies[0].name == "a"
    (line,) = problems(pool=str(tmp_path / "p.yaml"), regime="sgt")
    assert "there is one ('a'); add a policy, or a source to learn from: --source NAME=recorded:FILE" in line
    (line,) = problems(pool=str(tmp_path / "p.yaml"), regime="xgrpo")
    assert "there is one ('a'); add a policy, or use --regime grpo" in line


@pytest.mark.parametrize(
    ("assignments", "processes", "expected"),
    [
        (("round.prompts=16", "trainer.num_generations=8"), 1, BatchPlan(16, 8, 128, 1, 1)),
        (
            (
                "round.prompts=16",
                "round.optimizer_steps=2",
                "trainer.num_generations=8",
                "trainer.per_device_train_batch_size=8",
            ),
            2,
            BatchPlan(16, 8, 8, 4, 2),
        ),
        (
            (
                "round.prompts=null",
                "trainer.num_generations=8",
                "trainer.per_device_train_batch_size=8",
                "trainer.gradient_accumulation_steps=2",
                "trainer.steps_per_generation=4",
            ),
            2,
            BatchPlan(8, 8, 8, 2, 2),
        ),
        (
            (
                "round.prompts=null",
                "trainer.num_generations=8",
                "trainer.per_device_train_batch_size=8",
                "trainer.generation_batch_size=64",
            ),
            2,
            BatchPlan(8, 8, 8, 1, 4),
        ),
    ],
)
def test_batch_plan(assignments: tuple[str, ...], processes: int, expected: BatchPlan) -> None:
    assert plan_batch(sets("trainer.per_device_train_batch_size=128", *assignments), "ada", processes) == expected


@pytest.mark.parametrize("key", ["gradient_accumulation_steps", "steps_per_generation", "generation_batch_size"])
def test_two_settings_for_the_round_size_are_rejected(key: str) -> None:
    recipe = sets(f"trainer.{key}=2")
    with pytest.raises(RecipeError, match=f"trainer.{key} and round.prompts both set"):
        plan_batch(recipe, "ada", 1)


def test_indivisible_batch_is_rejected() -> None:
    recipe = sets("round.prompts=7", "trainer.per_device_train_batch_size=128")
    with pytest.raises(RecipeError, match="do not divide"):
        plan_batch(recipe, "ada", 1)


def test_shipped_table_of_trainer_keys_matches_the_installed_trl() -> None:
    import json

    from mutualrl.recipes.trainer_table import build

    assert json.loads(TABLE.read_text()) == build(), "run: python -m mutualrl.recipes.trainer_table"


def test_guarded_keys_exist_in_trl() -> None:
    from mutualrl.recipes.trainer_keys import MINIMUM, POSITIVE, RESERVED
    from mutualrl.recipes.trainer_table import fields

    assert not {*MINIMUM, *POSITIVE, *RESERVED} - set(fields())


@pytest.mark.parametrize(
    ("regime", "assignments", "message"),
    [
        ("prp", ["regime.denominator=snapshot", "regime.anchor=paper"], "regime.anchor: found 'paper'"),
        ("prp", ["regime.clip=band", "regime.delta=3.0"], "regime.delta: found 3.0, which has no effect"),
        ("prp", ["regime.delta=3.0", "trainer.loss_type=cispo"], "with which regime.delta has no effect"),
        ("sgt", ["regime.teacher=own", "regime.memory=2", "regime.margin=0.5"], "regime.margin: found 0.5"),
        ("xgrpo", ["regime.mix=0.0", "regime.pool=shuffled"], "with which regime.pool has no effect"),
    ],
)
def test_settings_without_effect_are_rejected(regime: str, assignments: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        resolve(Request(regime=regime, pool="tiny", assignments=tuple(assignments)))
    for assignment in assignments:
        if "denominator" in assignment or "clip" in assignment:
            resolve(Request(regime=regime, pool="tiny", assignments=(assignment,)))


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (
            ("launch.strategy=fsdp2", "trainer.optim=adafactor"),
            "cannot update sharded weights under launch.strategy: fsdp2; expected adamw_torch",
        ),
        (
            ("trainer.fsdp_config={reshard_after_forward: true}",),
            "is used by FSDP2 only, found launch.strategy: auto; expected",
        ),
        (
            ("launch.strategy=fsdp2", "trainer.fsdp_config={cpu_offload: true}"),
            "found cpu_offload; expected keys out of activation_checkpointing",
        ),
        (("trainer.fsdp=true",), "is set by the run; use launch.strategy (fsdp2)"),
    ],
)
def test_settings_of_fsdp_that_would_be_ignored_or_break_the_run_are_refused(
    assignments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(RecipeError) as error:
        resolve(Request(pool="tiny", regime="sgt", assignments=assignments))
    assert message in str(error.value)


def test_keys_of_fsdp2_reach_the_trainer() -> None:
    from mutualrl.training.config import strategy_keys

    recipe = resolve(
        Request(
            pool="tiny",
            regime="sgt",
            assignments=("launch.strategy=fsdp2", "trainer.fsdp_config={activation_checkpointing: true}"),
        )
    )
    keys = strategy_keys("fsdp2", recipe.trainer_settings("ada"))
    assert keys["fsdp_config"] == {"activation_checkpointing": True, "version": 2, "state_dict_type": "FULL_STATE_DICT"}
    assert keys["accelerator_config"]["gradient_accumulation_kwargs"] == {"sync_each_batch": True}
