"""MutualGRPOTrainer behaves as GRPOTrainer, with and without sharing: each case runs on all, with equal results.

The cases are the behaviours covered by TRL's own tests of GRPOTrainer: kinds of data, samplers, rewards, tools,
environments, adapters, losses, resuming, and trainers that mix in another loss. The model has 16 units and a vocabulary
of bytes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset, IterableDataset
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    set_seed,
)
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

import training_harness as harness
from mutualrl.adapter.trl_compat import evaluating, token_logps
from mutualrl.errors import RewardError, UsageError
from mutualrl.records import Rollout, row_id
from mutualrl.regimes.resample import Resample
from mutualrl.see import Exchange
from mutualrl.training import MutualGRPOTrainer
from mutualrl.training.sharing import Sharing
from training_harness import Logs

SUMS = [f"{a} + {b} =" for a in (1, 2, 3) for b in (4, 5)]
ANSWERS = [str(a + b) for a in (1, 2, 3) for b in (4, 5)]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes with Qwen3's chat template, which can call tools."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    template = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"
    tokenizer.chat_template = template.read_text("utf-8")
    return tokenizer


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a language model and a reward model, with their tokenizer."""
    tokenizer = byte_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    set_seed(0)
    paths = {}
    for name, model in (
        ("policy", Qwen2ForCausalLM(config)),
        ("reward", Qwen2ForSequenceClassification(Qwen2Config.from_dict({**config.to_dict(), "num_labels": 1}))),
    ):
        paths[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(paths[name])
        tokenizer.save_pretrained(paths[name])
    return paths


# ---- rewards


def text_of(completion: Any) -> str:
    return completion if isinstance(completion, str) else "".join(str(m.get("content") or "") for m in completion)


def evenness(completions: list[Any], **_: Any) -> list[float]:
    """Return the fraction of characters with an even code, which differs between random texts."""
    texts = [text_of(c) or "?" for c in completions]
    return [sum(ord(letter) % 2 == 0 for letter in text) / len(text) for text in texts]


def digits(completions: list[Any], answer: list[str], **_: Any) -> list[float | None]:
    """Return whether a digit of the answer occurs, or None for an empty completion. Reads a column of the data."""
    pairs = zip(completions, answer, strict=True)
    return [None if not text_of(c) else float(any(digit in text_of(c) for digit in a)) for c, a in pairs]


async def later(completions: list[Any], **_: Any) -> list[float]:
    return evenness(completions)


class Judge:
    """Async callable object with a `__name__`, as a function has."""

    __name__ = "judge"

    async def __call__(self, completions: list[Any], **_: Any) -> list[float]:
        return evenness(completions)


def logging_reward(completions: list[Any], log_extra: Any, log_metric: Any, **_: Any) -> list[float]:
    values = evenness(completions)
    log_extra("evenness", values)
    log_metric("highest", max(values))
    return values


def infinite(completions: list[Any], **_: Any) -> list[float]:
    return [math.inf if i == 0 else value for i, value in enumerate(evenness(completions))]


def scaled(completions: list[Any], factor: float = 1.0, **_: Any) -> list[float]:
    return [factor * value for value in evenness(completions)]


# ---- tools and environments


def multiply(a: int, b: int) -> int:
    """Multiply two integers.

    Args:
        a: The first factor.
        b: The second factor.

    Returns:
        The product.
    """
    return a * b


class Tally:
    """An environment with one tool."""

    def reset(self, **_: Any) -> None:
        self.count = 0

    def increment(self, step: int) -> int:
        """Count up.

        Args:
            step: How far.

        Returns:
            The count.
        """
        self.count += step
        return self.count


class Counter(Tally):
    """The same with its own reward."""

    def get_reward(self) -> float:
        return float(self.count)


class CallsTools:
    """Trainer mixin: every second completion calls a tool; the one after the tool's result ends the conversation."""

    call = '<tool_call>\n{"name": "multiply", "arguments": {"a": 3, "b": 4}}\n</tool_call><|im_end|>'

    def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        trainer: Any = self
        tokenizer, rows = trainer._tokenizer, []
        for number, ids in enumerate(prompt_ids):
            answered = "<tool_response>" in tokenizer.decode(ids)
            text = self.call if number % 2 == 0 and not answered else f"It is {number}.<|im_end|>"
            rows.append(tokenizer(text)["input_ids"])
        return rows, None


class CallsCounter(CallsTools):
    call = '<tool_call>\n{"name": "increment", "arguments": {"step": 2}}\n</tool_call><|im_end|>'


class ReversedSampler:
    """Trainer mixin with a user's sampler, which reverses the order of TRL's."""

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        order = list(super()._get_train_sampler(dataset))  # type: ignore[misc]

        class Sampler(torch.utils.data.Sampler[int]):
            def __iter__(self) -> Iterator[int]:
                return iter(order[::-1])

            def __len__(self) -> int:
                return len(order)

        return Sampler()


class OwnSampler:
    """Trainer mixin with a sampler that does not use TRL's."""

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        trainer: Any = self
        groups = [i for i in range(len(SUMS)) for _ in range(trainer.num_generations)]
        return groups * trainer.args.num_train_epochs


def rolled_out(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """Roll out without a model: every prompt's completion is its ids in reverse."""
    ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    return {"prompt_ids": ids, "completion_ids": [row[::-1] for row in ids], "logprobs": [[-1.0] * len(r) for r in ids]}


# ---- data


def rows(chat: bool = False) -> list[dict[str, Any]]:
    prompts: list[Any] = [[{"role": "user", "content": text}] for text in SUMS] if chat else list(SUMS)
    return [{"prompt": prompt, "answer": answer} for prompt, answer in zip(prompts, ANSWERS, strict=True)]


def stream() -> Iterator[dict[str, Any]]:
    """Yield each row once per rollout of a group: iterable datasets have no sampler that repeats rows."""
    while True:
        for row in rows():
            for _ in range(4):
                yield row


# ---- cases


@dataclass(frozen=True)
class Case:
    """Arguments of a training. `mixin` precedes the trainer class; `text` is whether rollouts are sampled text, which
    may be published; `base` is the TRL trainer."""

    keys: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Callable[[dict[str, Path]], Any]] = field(default_factory=dict)
    mixin: type | None = None
    text: bool = True
    base: type[GRPOTrainer] = GRPOTrainer


def reward(*functions: Any) -> dict[str, Callable[[dict[str, Path]], Any]]:
    return {"reward_funcs": lambda small: list(functions)}


def named_model(small: dict[str, Path]) -> Any:
    model = Qwen2ForSequenceClassification.from_pretrained(small["reward"], num_labels=1)
    model.__name__ = "judge"
    return model


CHAT = {"train_dataset": lambda small: Dataset.from_list(rows(chat=True))}
LORA = {"peft_config": lambda small: LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")}
PLAIN = "plain"

CASES: dict[str, Case] = {
    PLAIN: Case(),
    **{
        f"loss {kind}": Case({"loss_type": kind, "num_iterations": 2, "steps_per_generation": 2})
        for kind in ("grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo")
    },
    "sequence ratios": Case({"importance_sampling_level": "sequence", "num_iterations": 2}),
    "dual clip": Case({"delta": 1.5, "num_iterations": 2}),
    "off-policy mask": Case({"off_policy_mask_threshold": 0.5, "num_iterations": 2}),
    "top entropy": Case({"top_entropy_quantile": 0.4}),
    "entropy bonus": Case({"entropy_coef": 0.01}),
    "adaptive entropy": Case({"use_adaptive_entropy": True, "entropy_coef": 0.01}),
    "bias-corrected KL": Case({"use_bias_correction_kl": True, "num_iterations": 2}),
    "no reference": Case({"beta": 0.0}),
    "synchronised reference": Case({"sync_ref_model": True, "ref_model_sync_steps": 1}),
    "scaled by the batch": Case({"scale_rewards": "batch"}),
    "not scaled": Case({"scale_rewards": "none"}),
    "truncated masked": Case({"mask_truncated_completions": True}),
    "accumulated": Case({"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}),
    "checkpointed activations": Case({"gradient_checkpointing": True}),
    "cut sampling": Case({"temperature": 0.7, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1}),
    "generation_kwargs": Case({"generation_kwargs": {"min_p": 0.01}}),
    "conversations": Case(arguments=CHAT),
    "chat template arguments": Case({"chat_template_kwargs": {"enable_thinking": False}}, CHAT),
    "iterable data": Case(arguments={"train_dataset": lambda small: IterableDataset.from_generator(stream)}),
    "not shuffled": Case({"shuffle_dataset": False}),
    "wrapped sampler": Case(mixin=ReversedSampler),
    "custom sampler": Case({"max_steps": -1, "num_train_epochs": 2}, mixin=OwnSampler),
    "async function": Case(arguments=reward(later)),
    "async object with a name": Case(arguments=reward(Judge(), evenness)),
    "partial": Case(arguments=reward(functools.partial(scaled, factor=0.5))),
    "partial of an async object": Case(arguments=reward(functools.partial(Judge()))),
    "lambda and a weight": Case(
        {"reward_weights": [0.3, 2.0]}, reward(lambda completions, **_: evenness(completions), digits)
    ),
    "normalised rewards": Case({"multi_objective_aggregation": "normalize_then_sum"}, reward(evenness, digits)),
    "column and None": Case(arguments=reward(digits)),
    "logging reward": Case({"log_completions": True, "num_completions_to_print": 0}, reward(logging_reward)),
    "reward model by path": Case(arguments={"reward_funcs": lambda small: str(small["reward"])}),
    "reward model with a name": Case(arguments={"reward_funcs": lambda small: [named_model(small), evenness]}),
    "model object": Case(arguments={"model": lambda small: AutoModelForCausalLM.from_pretrained(small["policy"])}),
    "adapter": Case(arguments=LORA),
    "adapter without reference": Case({"beta": 0.0}, LORA),
    "tools": Case(arguments={**CHAT, "tools": lambda small: [multiply]}, mixin=CallsTools, text=False),
    "environment": Case(
        arguments={**CHAT, "environment_factory": lambda small: Counter, "reward_funcs": lambda small: None},
        mixin=CallsCounter,
        text=False,
    ),
    "rollout function": Case(arguments={"rollout_func": lambda small: rolled_out}, text=False),
    "another loss mixed in": Case({"num_iterations": 2}, base=GMPOTrainer),
}


def sharing(root: Path, text: bool, regime: str = "grpo", peers: tuple[str, ...] = ()) -> Sharing:
    """Return the sharing of learner `ada`; everything is published if rollouts are sampled text."""
    return harness.sharing(root, regime, publish="full" if text else "regime", peers=peers)


def train(kind: type[GRPOTrainer], case: Case, small: dict[str, Path], output: Path, **extra: Any) -> Any:
    """Train with a case's arguments; return the trainer with its logs in `.kept`."""
    torch.set_num_threads(1)
    set_seed(3)
    keys: dict[str, Any] = {"per_device_train_batch_size": 8, "learning_rate": 1e-2, "beta": 0.01}
    keys["max_completion_length"] = 8 if case.text else 200
    case_arguments = {name: make(small) for name, make in case.arguments.items()}
    config = GMPOConfig if issubclass(kind, GMPOTrainer) else GRPOConfig
    args = harness.config(output, config, **{**keys, **case.keys})
    resume = extra.pop("resume", None)
    logs = Logs()
    arguments = {
        "model": str(small["policy"]),
        "reward_funcs": evenness,
        "train_dataset": Dataset.from_list(rows()),
        "processing_class": byte_tokenizer(),
        **case_arguments,
    }
    cls = kind if case.mixin is None else type(kind.__name__, (case.mixin, kind), {})
    trainer = cls(args=args, callbacks=[logs], **arguments, **extra)
    set_seed(11)
    trainer.train(resume_from_checkpoint=resume)
    trainer.kept = logs.rows
    return trainer


#: measured times in a step's log
TIMES = ("step_time", "tools/call_time")


def assert_equal(plain: Any, other: Any) -> None:
    """Assert that all of TRL's logs, except times, and all weights are equal bit for bit."""
    assert len(plain.kept) == len(other.kept) > 0
    for one, two in zip(plain.kept, other.kept, strict=True):
        for key in one.keys() - set(TIMES):
            assert two[key] == one[key] or (math.isnan(one[key]) and math.isnan(two[key])), key
    before, after = plain.model.state_dict(), other.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) or before[key].isnan().any() for key in before)


def mutual(base: type[GRPOTrainer]) -> type[MutualGRPOTrainer]:
    """Return our trainer over a TRL trainer."""
    return MutualGRPOTrainer if base is GRPOTrainer else type("Mixed", (MutualGRPOTrainer, base), {})


#: cases of the default run: those where the trainer once differed, and one of each kind
DEFAULT = (
    PLAIN,
    "loss grpo",
    "iterable data",
    "wrapped sampler",
    "custom sampler",
    "async object with a name",
    "reward model with a name",
    "adapter",
    "tools",
    "another loss mixed in",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.release) for name in CASES]
)
def test_trainer_behaves_as_grpo_trainer(small: dict[str, Path], tmp_path: Path, name: str) -> None:
    case = CASES[name]
    plain = train(case.base, case, small, tmp_path / "plain")
    alone = train(mutual(case.base), case, small, tmp_path / "alone")
    assert_equal(plain, alone)
    shared = sharing(tmp_path / "exchange", case.text)
    assert_equal(plain, train(mutual(case.base), case, small, tmp_path / "shared", sharing=shared))
    if name == PLAIN:
        assert any(row["grad_norm"] > 0 for row in plain.kept)
    if case.text:
        assert list((tmp_path / "exchange" / "ada").glob("*.parquet"))
    if name in ("tools", "environment"):
        assert plain.kept[0]["tools/call_frequency"] > 0


@pytest.mark.parametrize("steps", [2, 3])
def test_trainer_resumes_at_least_as_exactly_as_grpo_trainer(
    small: dict[str, Path], tmp_path: Path, steps: int
) -> None:
    """At the end of a generation batch both resume bit for bit; inside one (step 3) only ours does."""
    keys = {"num_iterations": 2, "max_steps": 5, "save_strategy": "steps", "save_steps": steps}
    checkpoint = f"checkpoint-{steps}"
    unbroken = {
        kind: train(kind, Case(keys), small, tmp_path / kind.__name__) for kind in (GRPOTrainer, MutualGRPOTrainer)
    }
    assert_equal(unbroken[GRPOTrainer], unbroken[MutualGRPOTrainer])
    for kind, reference in unbroken.items():
        saved = str(tmp_path / kind.__name__ / checkpoint)
        resumed = train(kind, Case(keys), small, tmp_path / f"{kind.__name__}-resumed", resume=saved)
        if kind is MutualGRPOTrainer or steps == 2:
            assert [row["loss"] for row in resumed.kept] == [row["loss"] for row in reference.kept[steps:]]
            before, after = reference.model.state_dict(), resumed.model.state_dict()
            assert all(torch.allclose(before[key], after[key], rtol=0, atol=0, equal_nan=True) for key in before)


def test_trainer_evaluates_as_grpo_trainer(small: dict[str, Path], tmp_path: Path) -> None:
    case = Case(
        {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 8, "num_generations_eval": 2},
        {"eval_dataset": lambda small: Dataset.from_list(rows()[:4])},
    )
    histories = []
    for number, extra in enumerate(({}, {"sharing": sharing(tmp_path / "x", True)})):
        kind = MutualGRPOTrainer if extra else GRPOTrainer
        trainer = train(kind, case, small, tmp_path / str(number), **extra)
        histories.append([row for row in trainer.state.log_history if "eval_reward" in row])
    assert len(histories[0]) == 2
    for key in ("eval_reward", "eval_loss", "eval_completions/mean_length"):
        assert [row[key] for row in histories[0]] == [row[key] for row in histories[1]]
    published = len(list((tmp_path / "x" / "ada").glob("*.parquet")))
    assert published == 3  # the three rounds of training, none of the evaluation


# ---- rollouts that cannot be shared


def test_peer_rows_under_another_loss_are_rejected(small: dict[str, Path], tmp_path: Path) -> None:
    """With an exact twin as peer, the gradient norm was 1.5 times the correct one: GMPO takes another mean."""

    class Mixed(MutualGRPOTrainer, GMPOTrainer):
        pass

    twin = sharing(tmp_path / "x", True, "grpo")
    train(MutualGRPOTrainer, Case({"max_steps": 1}), small, tmp_path / "probe", sharing=twin)
    rounds = tmp_path / "x"
    shard = Exchange(rounds, "eve", "script").read("ada", 0)
    assert shard is not None
    publish_as(rounds, "bob", shard)
    (rounds / "ada").rename(tmp_path / "gone")
    learner = replace(sharing(rounds, False, "prp", peers=("bob",)), tokenizers={"bob": byte_tokenizer()})
    with pytest.raises(UsageError, match="Mixed overrides TRL's loss"):
        train(Mixed, Case({"max_steps": 1}), small, tmp_path / "m", sharing=learner)


def publish_as(root: Path, policy: str, shard: Any) -> None:
    """Publish a round again as another policy."""
    Exchange(root, policy, "script").publish(0, shard, 0)


REJECTED = {
    "rollout": ({"rollout_func": rolled_out}, "rollout_func: found rolled_out"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_unsampled_rollouts_are_rejected_before_a_model_is_built(tmp_path: Path, name: str) -> None:
    arguments, message = REJECTED[name]
    common: dict[str, Any] = {"model": "no/such-model", "reward_funcs": evenness, "processing_class": byte_tokenizer()}
    with pytest.raises(UsageError, match=message):
        MutualGRPOTrainer(**common, **arguments, sharing=sharing(tmp_path / "a", False, "sgt", ("bob",)))
    with pytest.raises(UsageError, match=message.replace("regime 'sgt'", "publish: full")):
        MutualGRPOTrainer(**common, **arguments, sharing=sharing(tmp_path / "b", True, "grpo"))


def test_vision_language_model_is_rejected_before_it_is_built(tmp_path: Path) -> None:
    from transformers import Qwen2VLConfig

    Qwen2VLConfig().save_pretrained(tmp_path / "vision")  # without weights
    with pytest.raises(UsageError, match=r"model: found the vision-language model .*vision, which regime 'prp'"):
        MutualGRPOTrainer(
            model=str(tmp_path / "vision"),
            reward_funcs=evenness,
            sharing=sharing(tmp_path / "x", False, "prp", ("bob",)),
        )


# ---- prompt ids


def test_row_id_covers_the_whole_row() -> None:
    from PIL import Image

    texts = ["What is this?"] * 8
    images = [Image.new("RGB", (4, 4), (i, 0, 0)) for i in range(8)]
    assert len({row_id({"prompt": text, "image": image}) for text, image in zip(texts, images, strict=True)}) == 8
    assert row_id({"prompt": "a", "image": images[0]}) == row_id({"image": images[0].copy(), "prompt": "a"})
    rows = [
        {"prompt": "a"},
        {"prompt": "a", "answer": None},
        {"prompt": "a", "answer": "None"},
        {"prompt": "a", "answer": 1},
        {"prompt": "a", "answer": True},
        {"prompt": "a", "answer": "1"},
        {"prompt": "a", "answer": ["1", "2"]},
        {"prompt": "a", "answer": ["12"]},
        {"prompt": "a", "answer": {"1": "2"}},
        {"prompt": "a", "answer": b"1"},
        {"prompt": "a", "answer": torch.tensor([1, 2])},
        {"prompt": "a", "answer": torch.tensor([[1, 2]])},
        {"prompt": "a", "answer": torch.tensor([1, 2], dtype=torch.int32)},
        {"prompt": [{"role": "user", "content": "a"}]},
        {"prompt": [{"role": "system", "content": "a"}]},
    ]
    assert len({row_id(row) for row in rows}) == len(rows)
    assert row_id({"prompt": "a", "prompt_id": 7}) == "7"
    with pytest.raises(UsageError, match="column 'made': found object, which has no bytes to recognize the data by"):
        row_id({"prompt": "a", "made": object()})


def test_same_text_with_other_columns_is_another_prompt(small: dict[str, Path], tmp_path: Path) -> None:
    data = [{"prompt": "1 + 4 =", "answer": str(number)} for number in range(4)]
    case = Case(
        {"max_steps": 1, "per_device_train_batch_size": 16}, {"train_dataset": lambda small: Dataset.from_list(data)}
    )
    train(MutualGRPOTrainer, case, small, tmp_path / "a", sharing=sharing(tmp_path / "x", True))
    shard = Exchange(tmp_path / "x", "eve", "script").read("ada", 0)
    assert shard is not None
    assert len(set(shard.prompt_ids)) == 4


@pytest.mark.parametrize("column", [{}, {"prompt_id": "same"}])
def test_two_groups_with_the_same_id_are_rejected(
    small: dict[str, Path], tmp_path: Path, column: dict[str, str]
) -> None:
    data = [{"prompt": "1 + 4 =", "answer": "5", **column}] * 4
    case = Case({"max_steps": 1}, {"train_dataset": lambda small: Dataset.from_list(data)})
    with pytest.raises(UsageError, match="two rows of a round have the prompt id"):
        train(MutualGRPOTrainer, case, small, tmp_path / "a", sharing=sharing(tmp_path / "x", True))


# ---- rewards


def broken(completions: list[Any], **_: Any) -> list[float]:
    raise KeyError("no such column")


async def broken_later(completions: list[Any], **_: Any) -> list[float]:
    raise KeyError("no such column")


class Broken:
    def __call__(self, completions: list[Any], **_: Any) -> list[float]:
        raise KeyError("no such column")


@pytest.mark.parametrize(
    "function",
    [broken, broken_later, Broken(), functools.partial(broken)],
    ids=["function", "coroutine", "object", "partial"],
)
def test_reward_exception_is_the_cause_and_the_reward_is_named(
    small: dict[str, Path], tmp_path: Path, function: Any
) -> None:
    case = Case({"max_steps": 1}, reward(evenness, function))
    with pytest.raises(RewardError, match=r"reward function [bB]roken") as raised:
        train(MutualGRPOTrainer, case, small, tmp_path / "a", sharing=sharing(tmp_path / "x", True))
    assert isinstance(raised.value.__cause__, KeyError)
    assert "evenness" not in str(raised.value)


def test_infinite_reward_is_not_published(small: dict[str, Path], tmp_path: Path) -> None:
    case = Case({"max_steps": 1}, reward(infinite))
    trainer = train(MutualGRPOTrainer, case, small, tmp_path / "a", sharing=sharing(tmp_path / "x", True))
    shard = Exchange(tmp_path / "x", "eve", "script").read("ada", 0)
    assert shard is not None
    values = shard.rewards
    assert sum(value is None or math.isnan(value) for value in values) == 1
    assert trainer.kept[0]["rewards/unscorable"] == 1


@pytest.mark.release
def test_xgrpo_shares_the_rewards_of_rollouts_with_an_environment(small: dict[str, Path], tmp_path: Path) -> None:
    """XGRPO needs no text: a peer's rewards on the same prompts change what is learnt from multi-turn rollouts."""
    case = CASES["environment"]
    alone = train(
        MutualGRPOTrainer, case, small, tmp_path / "a", sharing=sharing(tmp_path / "one", text=False, regime="xgrpo")
    )
    reader, peer = Exchange(tmp_path / "one", "eve", "script"), Exchange(tmp_path / "two", "bob", "script")
    number = 0
    while (shard := reader.read("ada", number)) is not None:
        columns = (shard.prompt_ids, shard.indices)
        records = [Rollout(prompt, rollout, float(rollout % 2), True) for prompt, rollout in zip(*columns, strict=True)]
        peer.publish(number, records, number)
        number += 1
    assert number > 0
    shared = sharing(tmp_path / "two", text=False, regime="xgrpo", peers=("bob",))
    together = train(MutualGRPOTrainer, case, small, tmp_path / "b", sharing=shared)
    assert together.kept[0]["tools/call_frequency"] == alone.kept[0]["tools/call_frequency"] > 0
    assert together.kept[0]["see/peers"] == 1
    before, after = alone.model.state_dict(), together.model.state_dict()
    assert any(not torch.equal(before[key], after[key]) for key in before)


# ---- dynamic sampling


def two_of_six(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """Return rewards that differ for two of the six prompts, and equal ones for the others."""
    return [float(each in ("5", "8") and number % 2) for number, each in enumerate(answer)]


class Checking(MutualGRPOTrainer):
    """Trainer with dynamic sampling that compares every row of a round with a pass of its own."""

    replaced = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, resample=Resample(), **kwargs)

    def on_generated(self, batch: Any, generation: Any) -> None:
        super().on_generated(batch, generation)
        if not self.model.training or not generation.dropped:
            return
        self.replaced += 1
        tokenizer, pad = self.processing_class, self.processing_class.pad_token_id
        for row, example in enumerate(generation.inputs):
            ids, shown = generation.completion_ids[row], batch["prompt_ids"][row][batch["prompt_mask"][row] == 1]
            assert batch["completion_ids"][row][: len(ids)].tolist() == ids
            assert set(batch["completion_ids"][row][len(ids) :].tolist()) <= {pad}
            text = example["prompt"] if isinstance(example["prompt"], str) else example["prompt"][-1]["content"]
            assert text in tokenizer.decode(shown)
        mask, keep = batch["completion_mask"], batch["completion_ids"].size(1)
        attended = torch.cat([batch["prompt_mask"], mask], dim=1)
        every = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        with evaluating(self.model), torch.no_grad():
            logps = {
                f"{name}_per_token_logps": token_logps(self, model, every, attended, keep)
                for name, model in (("old", self.model), ("ref", self.ref_model))
            }
        in_loss = mask * batch.get("tool_mask", 1)
        assert batch["num_items_in_batch"] == in_loss.sum()
        if "tool_mask" in batch:
            assert batch["tool_mask"].shape == mask.shape
        for key, expected in logps.items():
            torch.testing.assert_close(batch[key] * mask, expected * mask, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "truncated masked", "tools", "environment"])
def test_rows_of_a_resampled_round_belong_together(small: dict[str, Path], tmp_path: Path, name: str) -> None:
    case = CASES[name]
    arguments = {**case.arguments, "reward_funcs": lambda small: two_of_six}
    if name == "environment":
        arguments["environment_factory"] = lambda small: Tally
    keys = {**case.keys, "num_iterations": 2, "max_steps": 6}
    trainer = train(Checking, replace(case, keys=keys, arguments=arguments), small, tmp_path / "out")
    assert trainer.replaced >= 2
    assert sum(row.get("resample/dropped", 0.0) for row in trainer.kept) > 0
    if name in ("tools", "environment"):
        assert trainer.kept[0]["tools/call_frequency"] > 0
