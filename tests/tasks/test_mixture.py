"""Mixtures of tasks, and data sets with a user template."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import Cli
from mutualrl.errors import DataError, RecipeError, UsageError
from mutualrl.recipes import Request, dump, resolve
from mutualrl.recipes.agreement import load_recipe_prompts
from mutualrl.records import Prompt
from mutualrl.tasks import TaskSource, get_task
from mutualrl.tasks.base import sample_evenly
from mutualrl.tasks.mixture import PAPER, mix
from mutualrl.tasks.template import fields_of, fill
from mutualrl.tiny import path_of

FIXTURES = Path(__file__).parent / "fixtures"


def prompts(name: str, count: int) -> list[Prompt]:
    return [Prompt(f"{name}/{i}", f"{name} {i}", "1", name) for i in range(count)]


def write(path: Path, *values: object) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def test_without_weights_every_prompt_occurs_once() -> None:
    members = {"a": prompts("a", 30), "b": prompts("b", 7)}
    mixed = mix(members, {}, random.Random(0))
    assert sorted(p.id for p in mixed) == sorted(p.id for group in members.values() for p in group)
    assert [p.group for p in mixed] != ["a"] * 30 + ["b"] * 7
    assert mixed == mix(members, {}, random.Random(0))


def test_weights_are_fractions_of_all_prompts_and_repeats_have_distinct_ids() -> None:
    members = {"a": prompts("a", 30), "b": prompts("b", 10)}
    mixed = mix(members, {"a": 1.0, "b": 3.0}, random.Random(0))
    assert Counter(p.group for p in mixed) == {"a": 10, "b": 30}
    assert len({p.id for p in mixed}) == 40
    assert Counter(p.id.partition("~")[0] for p in mixed if p.group == "b") == {f"b/{i}": 3 for i in range(10)}
    assert {p.id.partition("~")[2] for p in mixed if p.group == "b"} == {"", "2", "3"}


@given(st.lists(st.tuples(st.integers(1, 40), st.floats(0, 5) | st.none()), min_size=1, max_size=5), st.integers(0, 9))
def test_mixture_has_as_many_prompts_as_its_members_in_the_requested_fractions(
    sizes: list[tuple[int, float | None]], seed: int
) -> None:
    members = {f"m{i}": prompts(f"m{i}", size) for i, (size, _) in enumerate(sizes)}
    weights = {f"m{i}": weight for i, (_, weight) in enumerate(sizes)}
    total = sum(size for size, _ in sizes)
    shares = {name: len(members[name]) / total if w is None else w for name, w in weights.items()}
    if sum(shares.values()) == 0:
        with pytest.raises(UsageError, match="every weight is 0"):
            mix(members, weights, random.Random(seed))
        return
    mixed = mix(members, weights, random.Random(seed))
    assert len(mixed) == total
    assert len({p.id for p in mixed}) == total
    counts = Counter(p.group for p in mixed)
    for name, share in shares.items():
        assert abs(counts[name] - total * share / sum(shares.values())) <= 1 + 1e-6


def write_members(directory: Path, *splits: str) -> None:
    """Write a few rows of each of the paper's tasks, under the names of its data sets."""
    for name in PAPER:
        for split in splits:
            lines = (FIXTURES / f"{name}.jsonl").read_text()
            if name == "arc":
                for part in ("ARC-Easy", "ARC-Challenge"):
                    (directory / f"{part}.{split}.jsonl").write_text(lines.replace('"id": "', f'"id": "{part}'))
            else:
                (directory / f"{name}.{split}.jsonl").write_text(lines)


@pytest.mark.release
@pytest.mark.slow
def test_papers_question_answering_recipe_trains_and_is_evaluated_before_and_after(cli: Cli, tmp_path: Path) -> None:
    """The shipped recipe with two models of random weights, which have room for the prompts."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    (tmp_path / "data").mkdir()
    write_members(tmp_path / "data", "train", "test", "validation")
    for name in ("ada", "bob"):
        tokenizer = AutoTokenizer.from_pretrained(path_of(name))
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        special = {key: getattr(tokenizer, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=2, **sizes, **special))
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    pool = "policies: [{name: ada, model: ./ada}, {name: bob, model: ./bob}]\n"
    (tmp_path / "pool.yaml").write_text(pool)
    settings = ("trainer.use_vllm=false", "hardware.gpus=0", "round.prompts=4", "trainer.max_completion_length=8")
    settings += ("trainer.per_device_train_batch_size=5", "run.validation_limit=1", "run.save_every=0")
    flags = [part for setting in settings for part in ("--set", setting)]
    recipe = ("train", "paper/qa-3qwen-sgt", "--pool", "pool.yaml", "--data", "data", "--steps", "2", "--run-dir", "r")
    result = cli(*recipe, *flags, "--json")
    assert result.returncode == 0, result.stderr
    for policy in json.loads(result.stdout)["policies"].values():
        assert set(policy["validation"]["by_group"]) == set(PAPER)
    for stage in ((), ("--initial",)):
        evaluation = ("eval", "--run", "r", "--suite", "paper", "--data-dir", "data", "--max-new-tokens", "4")
        result = cli(*evaluation, *stage, "--engine", "transformers", "--json")
        assert result.returncode == 0, result.stderr
        assert set(json.loads(result.stdout)["models"]["bob"]["tasks"]) == set(PAPER)
    assert {path.name for path in (tmp_path / "r" / "evaluations").iterdir()} == {"paper.json", "paper.initial.json"}


def test_default_members_match_the_paper_and_are_read_from_one_directory(tmp_path: Path) -> None:
    write_members(tmp_path, "train", "test")
    mixture, source = get_task("mixture"), TaskSource(data=tmp_path)
    data = mixture.read("train", source)
    by_member = Counter(p.group for p in data.prompts)
    assert set(by_member) == set(PAPER)
    assert by_member["piqa"] == 5
    assert by_member["arc"] == 14
    assert all(p.id.startswith(f"{p.group}/") for p in data.prompts)
    validation = mixture.read("validation", source).prompts
    assert list(dict.fromkeys(p.group for p in validation)) == list(PAPER)


def test_recipe_sets_members_and_weights_and_validates_each_member(tmp_path: Path) -> None:
    data_file = write(tmp_path / "own.jsonl", *({"q": f"{i}?", "a": i, "prompt": None} for i in range(200)))
    recipe = resolve(
        Request(
            task="mixture",
            assignments=(
                f"task.members={{arithmetic: {{weight: 1}}, dataset: {{data: {data_file}, template: 'Q {{q}}', answer: a, weight: 1}}}}",
                "run.validation_limit=6",
            ),
        )
    )
    dumped = tmp_path / "recipe.yaml"
    dumped.write_text(dump(recipe))
    assert resolve(Request(recipe=dumped)).task == recipe.task
    train = load_recipe_prompts(recipe, "train")
    counts = Counter(p.group for p in train)
    assert abs(counts["arithmetic"] - counts["dataset"]) <= 1
    assert any(p.text.startswith("Q ") for p in train)
    validation = load_recipe_prompts(recipe, "validation")
    assert Counter(p.group for p in validation) == {"arithmetic": 6, "dataset": 6}


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (("task.members={physics: {}}",), "members: found 'physics', expected one of"),
        (("task.members={mixture: {}}",), "members: found 'mixture'"),
        (("task.members={arc: {weight: -1}}",), "weight"),
        (("task.members={arc: {template: x}}",), "members.arc: only task 'dataset' has template"),
        (("task.name=arithmetic", "task.members={arc: {}}"), "only task 'mixture' has members"),
        (("task.name=arithmetic", "task.template=x"), "only task 'dataset' has these keys"),
        (("task.members={arc: {colour: 1}}",), "colour"),
    ],
)
def test_invalid_members_are_rejected(assignments: tuple[str, ...], message: str) -> None:
    first = () if any(a.startswith("task.name=") for a in assignments) else ("task.name=mixture",)
    with pytest.raises(RecipeError, match=message):
        resolve(Request(assignments=first + assignments))


def test_template_fills_fields_once_and_keeps_other_braces(tmp_path: Path) -> None:
    template = "{question}\n{options}\nAnswer in \\boxed{}."
    assert fields_of(template) == ["question", "options"]
    assert fill("{a}{b}", {"a": "{b}", "b": "x"}) == "{b}x"
    path = write(tmp_path / "d.jsonl", {"question": "2+{options}?", "options": ["x", "y"], "gold": 4})
    source = TaskSource(validation_data=path, template=template, answer="gold")
    (prompt,) = get_task("dataset").read("validation", source).prompts
    assert prompt.text == "2+{options}?\nA. x\nB. y\nAnswer in \\boxed{}."
    assert prompt.answer == "4"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "x"}, "row 1: no field 'options' \\(found: .*question"),
        ({"question": "x", "options": ["a", 1], "answer": "b"}, "row 1, field 'options'"),
        ({"question": {"a": 1}, "options": ["a", "b"], "answer": "b"}, "row 1, field 'question'"),
        ({"question": "x", "options": ["a", "b"]}, "row 1: no field 'answer'"),
    ],
)
def test_row_that_does_not_match_the_template_is_reported(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    source = TaskSource(validation_data=write(tmp_path / "d.jsonl", row), template="{question}{options}")
    with pytest.raises(DataError, match=message):
        get_task("dataset").read("validation", source)


@pytest.mark.parametrize("reference", ["hub:", "hub:a/b/c", "hub:a/b:c:d:e", "hub:/b"])
def test_malformed_hub_reference_is_rejected(reference: str) -> None:
    with pytest.raises(DataError, match="expected hub:OWNER/NAME"):
        get_task("dataset").read("validation", TaskSource(validation_data=Path(reference)))


def test_hub_data_set_is_loaded_by_config_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[tuple[object, ...]] = []

    def load(path: str, config: str | None = None, *, split: str, revision: str | None = None) -> list[dict[str, Any]]:
        requested.append((path, config, split))
        return [{"question": "1+1", "answer": "2"}]

    monkeypatch.setattr("datasets.load_dataset", load)
    monkeypatch.setattr("mutualrl.tasks.hub_data.hub_problem", lambda: None)
    source = TaskSource(validation_data=Path("hub:openai/gsm8k:main:test"), template="{question}=")
    data = get_task("dataset").read("validation", source)
    assert requested == [("openai/gsm8k", "main", "test")]
    assert (data.prompts[0].text, data.prompts[0].answer, data.origin) == ("1+1=", "2", "hub:openai/gsm8k:main:test")


@given(st.lists(st.integers(0, 3), min_size=1, max_size=200), st.integers(1, 100))
def test_limit_keeps_the_fraction_of_every_group_in_any_order(groups: list[int], limit: int) -> None:
    all_prompts = [Prompt(f"p{i}", "x", "1", f"g{g}") for i, g in enumerate(groups)]
    selected = sample_evenly(all_prompts, limit)
    assert len(selected) == min(limit, len(all_prompts))
    assert [p.id for p in selected] == [p.id for p in all_prompts if p in selected]
    shares, counts = Counter(p.group for p in all_prompts), Counter(p.group for p in selected)
    for name, size in shares.items():
        assert abs(counts[name] - len(selected) * size / len(all_prompts)) < 1


def test_half_of_the_arithmetic_prompts_is_half_of_each_operation() -> None:
    all_prompts = get_task("arithmetic").read("validation", TaskSource()).prompts
    assert Counter(p.group for p in sample_evenly(all_prompts, 32)) == {"+": 16, "*": 16}


def test_member_without_training_prompts_is_reported() -> None:
    with pytest.raises(UsageError, match=r"task\.members\.b: no training prompts are left"):
        mix({"a": prompts("a", 2), "b": []}, {}, random.Random(0))
