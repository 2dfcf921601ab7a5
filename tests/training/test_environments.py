"""Tools and environments from a recipe: policies that call a tool train, are validated, and share their rewards."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    set_seed,
)

from conftest import PATIENCE, Cli, make_once
from mutualrl.errors import UsageError
from mutualrl.tasks.boxed import boxed_reward
from mutualrl.tasks.turns import load_environment, load_tools
from runs import Run, stop_at, stopped

CODE = '''
class Counter:
    """An environment whose reward is what was counted, up to ten."""

    def reset(self, start: str = "0", **row) -> None:
        self.count = int(start)

    def increment(self, step: int) -> str:
        """Count up.

        Args:
            step: How far.

        Returns:
            The count.
        """
        self.count += step
        return str(self.count)

    def get_reward(self) -> float:
        return min(self.count, 10) / 10


class Remembers(Counter):
    """Environment that ignores the row at its reset: it counts its resets."""

    times = 0

    def reset(self, **row) -> None:
        self.times += 1
        self.count = self.times % 3


class Breaks(Counter):
    def reset(self, **row) -> None:
        raise KeyError("no such board")


class Silent:
    def reset(self, **row) -> None:
        """Nothing."""


class Timeless:
    """Cannot be reset."""


def double(number: int) -> int:
    """Double a number.

    Args:
        number: What to double.
    """
    return 2 * number


def untyped(number):
    """Return it."""


def undocumented(number: int) -> int:
    return number


def talks(completions, **kwargs):
    """One for a conversation of several turns, in which a tool answered."""
    return [float(any(message["role"] == "tool" for message in messages)) for messages in completions]


unusable = 3
'''
INCREMENT = {
    "type": "function",
    "function": {
        "name": "increment",
        "description": "Count up.",
        "parameters": {
            "type": "object",
            "properties": {"step": {"type": "integer", "description": "How far."}},
            "required": ["step"],
        },
        "return": {"type": "string", "description": "The count."},
    },
}


def conversation(prompt: str, step: int) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "increment", "arguments": {"step": step}}}
    return [
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "increment", "content": str(step)},
        {"role": "assistant", "content": "Done."},
    ]


PROMPTS = [f"Count from {number}." for number in range(16)]


def tool_caller(directory: Path, seed: int, steps: int) -> None:
    """Train a small model to call the tool with a step from 1 to 9 and then answer "Done."."""
    templates = Path(trl.__file__).parent / "chat_templates"
    conversations = [conversation(prompt, step) for prompt in PROMPTS for step in range(1, 10)]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=(templates / "qwen3.jinja").read_text("utf-8"),
    )
    training_template = (templates / "qwen3_training.jinja").read_text("utf-8")  # used by TRL in its place
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    texts = [
        tokenizer.apply_chat_template(messages, tools=[INCREMENT], chat_template=training_template, tokenize=False)
        for messages in conversations
    ]
    # constant pieces are one token each: short rows, which a small model learns in seconds
    fixed = {piece for text in texts for piece in re.split(r"<\|\w+\|>|\d|assistant\n", text)}
    tokenizer.add_tokens([*sorted(piece for piece in fixed if len(piece) > 3), "assistant\n"])
    set_seed(seed)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            tie_word_embeddings=True,
        )
    )
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    sampled = torch.stack(
        [(row == tokenizer.convert_tokens_to_ids("<|im_start|>")).cumsum(0) >= 2 for row in batch["input_ids"]]
    )
    labels = batch["input_ids"].masked_fill(~(sampled & batch["attention_mask"].bool()), -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(steps):
        rows = torch.randint(len(texts), (12,))
        loss = model(
            input_ids=batch["input_ids"][rows], attention_mask=batch["attention_mask"][rows], labels=labels[rows]
        ).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


@pytest.fixture(scope="session")
def callers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with two policies that call tools, a pool of them, data and code."""
    return make_callers(tmp_path_factory, "callers", steps=400)


@pytest.fixture(scope="session")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the same with random weights, for refusals and dry runs."""
    return make_callers(tmp_path_factory, "untrained", steps=0)


def make_callers(factory: pytest.TempPathFactory, shared_name: str, steps: int) -> Path:
    """Make the policies once for all workers; return their directory."""

    def make(directory: Path) -> None:
        for seed, name in enumerate(("cara", "carl")):
            tool_caller(directory / name, seed, steps)
        policies = [{"name": name, "model": str(directory / name)} for name in ("cara", "carl")]
        (directory / "pool.yaml").write_text(yaml.safe_dump({"policies": policies}))
        (directory / "only-cara.yaml").write_text(yaml.safe_dump({"policies": policies[:1]}))
        rows = [{"prompt": prompt, "answer": "10", "start": str(start % 4)} for start, prompt in enumerate(PROMPTS)]
        (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (directory / "board.py").write_text(CODE)

    return make_once(factory, shared_name, make)


def recipe(callers: Path, directory: Path, regime: str = "xgrpo", **task: Any) -> Path:
    """Write a recipe for the pool (for GRPO: its first policy), with an environment unless `task` has tools."""
    data = str(callers / "rows.jsonl")
    section = {"name": "dataset", "data": data, "validation_data": data, **task}
    if "tools" not in section:  # the default environment
        section.setdefault("environment", f"{callers / 'board.py'}:Counter")
    path = directory / "recipe.yaml"
    trainer = {"max_completion_length": 64, "learning_rate": 0.002, "num_generations": 8, "beta": 0.0}
    path.write_text(
        yaml.safe_dump(
            {
                "pool": str(callers / ("only-cara.yaml" if regime == "grpo" else "pool.yaml")),
                "regime": {"name": regime},
                "task": section,
                "trainer": trainer,
                "round": {"prompts": 4},
                "run": {"steps": 6, "validate_every": 3},
            }
        )
    )
    return path


def metrics(run: Path, policy: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "policies" / policy / "metrics.jsonl").read_text().splitlines()]


def greedy_reward(model_path: Path) -> float:
    """Return the mean reward of greedy rollouts without TRL: the row's start plus the step of the one call."""
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path)
    rewards = []
    for start, prompt in enumerate(PROMPTS):
        question = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            tools=[INCREMENT],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        ids = model.generate(**question, do_sample=False, max_new_tokens=64)[0][question["input_ids"].shape[1] :]
        call = re.search(r'{"step": (\d+)}', tokenizer.decode(ids))
        step = 0 if call is None else int(call[1])
        rewards.append(min(start % 4 + step, 10) / 10)
    return sum(rewards) / len(rewards)


@pytest.mark.release
def test_policies_train_in_an_environment_and_share_its_rewards(callers: Path, tmp_path: Path, cli: Cli) -> None:
    path = recipe(callers, tmp_path)
    result = cli("train", path, "--run-dir", tmp_path / "run", "--no-report")
    assert result.returncode == 0, result.stderr
    for policy in ("cara", "carl"):
        steps = metrics(tmp_path / "run", policy)
        rewards = [line["reward"] for line in steps if "reward" in line]
        calls = [line["tools/call_frequency"] for line in steps if "tools/call_frequency" in line]
        assert len(rewards) == 6
        # the policies call the tool in TRL's format; how often after a step depends on the kind of CPU
        assert min(rewards) > 0.15
        assert sum(calls) / len(calls) > 0.5
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    validations = {name: entry["validation"] for name, entry in summary["policies"].items()}
    for name, validation in validations.items():
        assert (validation["n"], validation["no_box"]) == (16, None)
        assert summary["policies"][name]["initial_validation"]["accuracy"] == pytest.approx(
            greedy_reward(callers / name)
        )
    assert metrics(tmp_path / "run", "cara")[0]["rewards/Counter/mean"] > 0.15
    again = json.loads(cli("eval", "--run", tmp_path / "run", "--json").stdout)
    for name, validation in validations.items():
        assert again["models"][name]["accuracy"] == pytest.approx(validation["accuracy"])


@pytest.mark.release
def test_validation_in_an_environment_does_not_affect_training(callers: Path, tmp_path: Path, cli: Cli) -> None:
    path = recipe(callers, tmp_path, "grpo", environment=f"{callers / 'board.py'}:Remembers")
    for name, validate_every in (("often", "1"), ("seldom", "0")):
        result = cli(
            "train", path, "--run-dir", tmp_path / name, "--no-report", "--set", f"run.validate_every={validate_every}"
        )
        assert result.returncode == 0, result.stderr
    logged = {}
    for name in ("often", "seldom"):
        lines = [line for line in metrics(tmp_path / name, "cara") if "loss" in line]
        logged[name] = [
            [line[key] for key in ("reward", "loss", "tools/call_frequency", "num_tokens")] for line in lines
        ]
    assert len(logged["often"]) == 6
    assert logged["often"] == logged["seldom"]


@pytest.mark.release
def test_killed_policy_resumes_within_a_multi_turn_round(callers: Path, tmp_path: Path) -> None:
    path = str(recipe(callers, tmp_path))
    options = ("--no-report", "--set", "round.optimizer_steps=2", "--set", "run.save_every=1")
    roots = [tmp_path / name for name in ("unbroken", "killed")]
    for root in roots:
        root.mkdir()
    unbroken = Run(roots[0], *options, of=[path])
    assert unbroken.process.wait(PATIENCE) == 0, unbroken.errors.read_text()
    environment = stop_at("in-the-loss:carl:4", mark=tmp_path / "mark")
    run = Run(roots[1], *options, of=[path], **environment)
    try:
        stopped(tmp_path / "mark", run).kill()
        assert run.process.wait(PATIENCE) == 0, run.errors.read_text()
        assert run.weights() == unbroken.weights()
        assert len(run.weights()) == 2
        assert "Restarting in" in run.errors.read_text()
    finally:
        run.end()


@pytest.mark.release
def test_tools_are_called_and_a_reward_function_reads_the_turns(callers: Path, tmp_path: Path, cli: Cli) -> None:
    board = callers / "board.py"
    tool = tmp_path / "tool.py"
    tool.write_text(
        'def increment(step: int) -> str:\n    """Count up.\n\n    Args:\n        step: How far.\n\n    Returns:\n'
        '        The count.\n    """\n    return str(step)\n'
    )
    path = recipe(callers, tmp_path, "grpo", tools=[f"{tool}:increment"], reward=f"{board}:talks")
    result = cli("train", path, "--steps", "2", "--run-dir", tmp_path / "run", "--no-report")
    assert result.returncode == 0, result.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert {entry["initial_validation"]["accuracy"] for entry in summary["policies"].values()} == {1.0}


@pytest.mark.extended
@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ("Breaks", "environment Breaks: KeyError: 'no such board' (board.py, line"),
        ("Silent", "has no method get_reward, and the recipe no task.reward"),
    ],
)
def test_failing_environment_is_named(callers: Path, tmp_path: Path, cli: Cli, environment: str, message: str) -> None:
    path = recipe(callers, tmp_path, "grpo", environment=f"{callers / 'board.py'}:{environment}")
    result = cli("train", path, "--run-dir", tmp_path / "run", "--no-report")
    assert result.returncode in (1, 2)
    assert message in result.stderr


@pytest.mark.extended
def test_missing_chat_template_is_named(callers: Path, tmp_path: Path, cli: Cli) -> None:
    path = recipe(callers, tmp_path, "grpo")
    (tmp_path / "pool.yaml").write_text(yaml.safe_dump({"policies": [{"name": "ada", "model": "tiny:ada"}]}))
    path.write_text(path.read_text().replace(str(callers / "only-cara.yaml"), str(tmp_path / "pool.yaml")))
    result = cli("train", path, "--run-dir", tmp_path / "run", "--no-report")
    assert result.returncode == 4
    assert "has no chat template, which task.tools and task.environment require" in result.stderr


@pytest.mark.release
def test_tool_descriptions_count_towards_the_prompt_length(callers: Path, tmp_path: Path, cli: Cli) -> None:
    model = yaml.safe_load((callers / "pool.yaml").read_text())["policies"][0]["model"]
    conversations = [conversation(prompt, 1)[:1] for prompt in PROMPTS]
    template = AutoTokenizer.from_pretrained(model).apply_chat_template
    without_tools = [len(ids) for ids in template(conversations, add_generation_prompt=True)["input_ids"]]
    with_tools = [
        len(ids) for ids in template(conversations, add_generation_prompt=True, tools=[INCREMENT])["input_ids"]
    ]
    assert max(without_tools) < min(with_tools)
    for limit, code in ((min(with_tools) - 1, 2), (max(with_tools), 0)):
        arguments = ("--set", f"task.max_prompt_tokens={limit}", "--set", "run.steps=1", "--no-report")
        result = cli("train", recipe(callers, tmp_path, "grpo"), *arguments, "--run-dir", tmp_path / str(limit))
        assert result.returncode == code, result.stderr
        assert (f"train prompts is within task.max_prompt_tokens ({limit})" in result.stderr) == (code == 2)


@pytest.mark.parametrize("regime", ["prp", "hacpo", "swarm"])
def test_regime_that_learns_texts_rejects_multi_turn_tasks(
    untrained: Path, tmp_path: Path, cli_here: Cli, regime: str
) -> None:
    result = cli_here("train", recipe(untrained, tmp_path, regime), "--dry-run")
    assert result.returncode == 2
    assert f"task.environment: regime '{regime}' learns texts, not trajectories with tools" in result.stderr
    assert "expected hinted, which shows a peer's run as a hint, sgt, which learns it" in result.stderr


@pytest.mark.parametrize(
    ("regime", "setting", "message"),
    [
        ("hinted", "hint=plan", "regime.hint: found 'plan', calls of tools, of which the task has none"),
        ("sgt", "turns=1", "regime.turns: found 1, of a run with tools, of which the task has none"),
        ("guided", "turns=2", "regime.turns: found 2, of a run with tools, of which the task has none"),
    ],
)
def test_settings_that_need_tools_are_rejected_without(cli_here: Cli, regime: str, setting: str, message: str) -> None:
    plain = cli_here("train", "--regime", regime, "--set", f"regime.{setting}", "--dry-run")
    assert plain.returncode == 2
    assert message in plain.stderr


def test_the_setting_of_sgt_that_scores_texts_is_rejected_with_tools(
    untrained: Path, tmp_path: Path, cli_here: Cli
) -> None:
    path = recipe(untrained, tmp_path, "sgt")
    result = cli_here("train", path, "--set", "regime.pick=lowest_nll", "--dry-run")
    assert result.returncode == 2
    assert "regime.pick: found 'lowest_nll', which scores texts, not runs with tools" in result.stderr


@pytest.mark.parametrize("options", [("--set", "regime.hint=plan"), ("--set", "regime.hint=none"), ()])
def test_hinted_and_full_publishing_accept_multi_turn_tasks(
    untrained: Path, tmp_path: Path, cli_here: Cli, options: tuple[str, ...]
) -> None:
    path = recipe(untrained, tmp_path, "hinted")
    result = cli_here("train", path, *options, "--set", "run.publish=full", "--dry-run")
    assert result.returncode == 0, result.stderr


def test_dry_run_reports_that_the_reward_was_not_tried(untrained: Path, tmp_path: Path, cli_here: Cli) -> None:
    result = cli_here("train", recipe(untrained, tmp_path), "--dry-run")
    assert result.returncode == 0, result.stderr
    assert "multi-turn rollouts" in result.stdout
    assert "reward: []" in result.stdout


def test_code_paths_are_relative_to_the_recipe(untrained: Path, tmp_path: Path, cli_here: Cli) -> None:
    recipe_dir = tmp_path / "beside"
    recipe_dir.mkdir()
    (recipe_dir / "board.py").write_text(CODE)
    recipe(untrained, recipe_dir, environment="board.py:Counter", tools="board.py:double")
    result = cli_here("train", recipe_dir / "recipe.yaml", "--dry-run")
    assert result.returncode == 0, result.stderr
    assert f"environment: {recipe_dir / 'board.py'}:Counter" in result.stdout
    assert f"- {recipe_dir / 'board.py'}:double" in result.stdout
    recipe(untrained, recipe_dir, environment="absent.py:Counter")
    assert "absent.py" in cli_here("train", recipe_dir / "recipe.yaml", "--run-dir", tmp_path / "run").stderr


def test_diagnostics_of_texts_reject_multi_turn_tasks(untrained: Path, tmp_path: Path, cli_here: Cli) -> None:
    pool = yaml.safe_load((untrained / "pool.yaml").read_text())
    pool["task"] = {
        "name": "dataset",
        "data": str(untrained / "rows.jsonl"),
        "tools": [f"{untrained / 'board.py'}:double"],
    }
    (tmp_path / "pool.yaml").write_text(yaml.safe_dump(pool))
    result = cli_here("sgt-check", "--pool", tmp_path / "pool.yaml")
    assert result.returncode == 2
    assert (
        "task 'dataset' has tools, and this diagnostic is of texts; expected mutualrl complementarity" in result.stderr
    )
    hints = cli_here("complementarity", "--hints", "--pool", tmp_path / "pool.yaml")
    assert hints.returncode == 2
    assert "--hints: found task 'dataset' with tools, whose hints are runs" in hints.stderr


def test_reward_is_required_without_an_environment(untrained: Path, tmp_path: Path, cli_here: Cli) -> None:
    result = cli_here("train", "--set", "task.reward=[]", "--dry-run")
    assert result.returncode == 2
    assert "task: reward: found none" in result.stderr or "task.reward: found none" in result.stderr


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Timeless", "has no method reset"),
        ("unusable", "found int, expected a class"),
        ("absent", "has no class 'absent'"),
    ],
)
def test_invalid_environment_is_rejected(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "board.py").write_text(CODE)
    with pytest.raises(UsageError, match=re.escape(message)):
        load_environment(f"{tmp_path / 'board.py'}:{name}", owns_reward=True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("untyped", "has no type for number"),
        ("undocumented", "has no docstring"),
        ("unusable", "found int, expected a function"),
    ],
)
def test_tool_that_cannot_be_described_to_a_model_is_rejected(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "board.py").write_text(CODE)
    with pytest.raises(UsageError, match=re.escape(message)):
        load_tools([f"{tmp_path / 'board.py'}:{name}"])


def test_tool_output_does_not_count_as_the_models_answer() -> None:
    turns = [
        {"role": "assistant", "tool_calls": [{"type": "function"}]},
        {"role": "tool", "name": "solve", "content": "\\boxed{7}"},
        {"role": "assistant", "content": "I do not know."},
    ]
    assert boxed_reward([turns], ["7"]) == [0.0]
    assert boxed_reward([[*turns, {"role": "assistant", "content": "\\boxed{7}"}]], ["7"]) == [1.0]
