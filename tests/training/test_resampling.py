"""Dynamic sampling in TRL (`round.resample`): a round by hand, ranks, accumulation, several passes, what is counted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset, IterableDataset

from conftest import Cli
from mutualrl.adapter.trl_compat import Inputs
from mutualrl.engines.transformers_engine import load_tokenizer
from mutualrl.errors import UsageError
from mutualrl.regimes.resample import Resample, order_of
from mutualrl.see import Exchange
from mutualrl.tasks.boxed import boxed_score
from mutualrl.thl import retokenize
from mutualrl.training import MutualGRPOTrainer
from training_harness import (
    BY_ID,
    PROMPTS,
    ReplayedResampled,
    config,
    rollout_text,
    same_training,
    sampled_rounds,
    sharing,
    train,
)

GROUP, PLACES = 4, 8


def rewards_of(prompt_id: str) -> list[float]:
    """Return the rewards of a prompt's recorded rollouts."""
    prompt = BY_ID[prompt_id]
    return [boxed_score(rollout_text(prompt, number, "own"), prompt.answer) for number in range(GROUP)]


def mixed(prompt_id: str) -> bool:
    return len(set(rewards_of(prompt_id))) > 1


def expected_round(
    number: int, attempts: int, mixed: Callable[[str], bool] = mixed
) -> tuple[list[str], list[list[str]]]:
    """Return the prompts that a round trains on, by place, and those of each batch that it samples. Written apart from
    the code: recorded rollouts make every outcome known."""
    batches = [sampled_rounds(PLACES, number + 1)[number]]
    places = list(batches[0])
    for attempt in range(1, attempts + 1):
        waiting = [place for place, prompt_id in enumerate(places) if not mixed(prompt_id)]
        if not waiting:
            break
        seen = {prompt_id for batch in batches for prompt_id in batch}
        order = [PROMPTS[row].id for row in order_of(len(PROMPTS), 7, number, attempt)]
        new = [prompt_id for prompt_id in order if prompt_id not in seen]
        old = [prompt_id for prompt_id in order if prompt_id in seen and not (prompt_id in places and mixed(prompt_id))]
        batches.append([(new + old)[place % len(new + old)] for place in range(PLACES)])
        for prompt_id in batches[-1]:
            if waiting and mixed(prompt_id) and prompt_id not in places:
                places[waiting.pop(0)] = prompt_id
    return places, batches


class Kept(ReplayedResampled):
    """Trainer on recorded completions that keeps every round as it is trained on, and what was sampled."""

    kept_rounds: list[Inputs]
    sampled: list[list[str]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.kept_rounds, self.sampled = [], []
        super().__init__(*args, **kwargs)

    def on_generate(self, inputs: list[Inputs]) -> None:
        super().on_generate(inputs)
        if self.model.training:
            self.sampled.append([row["prompt_id"] for row in inputs][::GROUP])

    def on_generated(self, batch: Inputs, generation: Any) -> None:
        super().on_generated(batch, generation)
        ids = [row["prompt_id"] for row in generation.inputs]
        self.kept_rounds.append({**batch, "ids": ids, "completions": generation.completion_ids})


class Patient(Kept):
    """The same with five attempts, which are more than the data have prompts for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, resample=Resample(max_attempts=5), **kwargs)


class Once(Kept):
    """The same with one attempt."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, resample=Resample(max_attempts=1), **kwargs)


def is_rare(prompt_id: str) -> bool:
    return hashlib.sha256(prompt_id.encode()).digest()[0] % 6 == 0


def rare(completions: list[str], prompt_id: list[str], **_: Any) -> list[float]:
    """Return rewards that differ on one prompt in six."""
    return [float(is_rare(key) and number % 2) for number, key in enumerate(prompt_id)]


@pytest.fixture(scope="module")
def trained(tiny: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    return train(Kept, tiny["ada"], tmp_path_factory.mktemp("resampled"))


def test_round_samples_and_trains_what_was_worked_out_by_hand(trained: Any) -> None:
    sampled = list(trained.sampled)
    replaced = 0
    for number, batch in enumerate(trained.kept_rounds):
        places, batches = expected_round(number, 3)
        assert sampled[: len(batches)] == batches
        sampled = sampled[len(batches) :]
        assert batch["ids"][::GROUP] == places
        replaced += sum(old != new for old, new in zip(batches[0], places, strict=True))
    assert sampled == []
    assert replaced > 0
    assert len(trained.kept_rounds) == 3


def test_rows_are_padded_anew_and_their_advantages_are_those_of_their_groups(trained: Any) -> None:
    tokenizer = trained.processing_class
    for batch in trained.kept_rounds:
        longest = max(map(len, batch["completions"]))
        assert batch["completion_ids"].shape == batch["completion_mask"].shape == (32, longest)
        assert batch["num_items_in_batch"].item() == sum(map(len, batch["completions"]))
        assert (batch["prompt_mask"].sum(dim=0) > 0).all()  # no column of padding only
        for row, prompt_id in enumerate(batch["ids"]):
            prompt, number = BY_ID[prompt_id], row % GROUP
            ids = list(retokenize(rollout_text(prompt, number, "own"), tokenizer, ended=True).ids)[:20]
            assert batch["completion_ids"][row][: len(ids)].tolist() == ids == batch["completions"][row]
            assert batch["completion_mask"][row].sum() == len(ids)
            shown = batch["prompt_ids"][row][batch["prompt_mask"][row] == 1]
            assert tokenizer.decode(shown, skip_special_tokens=True).strip() == prompt.text.strip()
            rewards = torch.tensor(rewards_of(prompt_id))
            advantage = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
            torch.testing.assert_close(batch["advantages"][row].double(), advantage[number].double(), atol=1e-5, rtol=0)


def test_metrics_count_what_was_sampled(trained: Any) -> None:
    tokenizer = trained.processing_class

    def tokens(prompt_ids: Sequence[str]) -> int:
        texts = [rollout_text(BY_ID[each], number, "own") for each in prompt_ids for number in range(GROUP)]
        return sum(min(20, len(retokenize(text, tokenizer, ended=True).ids)) for text in texts)

    for number, row in enumerate(trained.kept):
        places, batches = expected_round(number, 3)
        every = [prompt_id for batch in batches for prompt_id in batch]
        equal = sum(not mixed(prompt_id) for prompt_id in every)
        left = sum(not mixed(prompt_id) for prompt_id in places)
        assert row["resample/attempts"] == len(batches) - 1
        assert row["resample/missing"] == left
        assert row["resample/dropped"] == equal - left
        assert row["resample/tokens"] == tokens([prompt_id for batch in batches[1:] for prompt_id in batch])
        rewards = [reward for prompt_id in every for reward in rewards_of(prompt_id)]
        assert row["reward"] == pytest.approx(sum(rewards) / len(rewards), abs=1e-6)
        assert row["frac_reward_zero_std"] == pytest.approx(equal / len(every))


def test_what_is_missing_after_the_attempts_stays_in_its_place(tiny: dict[str, Path], tmp_path: Path) -> None:
    """The data have 32 prompts and the first four batches all of them: the fifth has those that were dropped."""
    few = train(Patient, tiny["ada"], tmp_path / "out", reward=rare, max_steps=2)
    sampled = list(few.sampled)
    for number, (batch, row) in enumerate(zip(few.kept_rounds, few.kept, strict=True)):
        places, batches = expected_round(number, 5, is_rare)
        assert len(batches) == 6
        assert sampled[:6] == batches
        sampled = sampled[6:]
        assert not any(is_rare(prompt_id) for prompt_id in batches[4])
        assert batch["ids"][::GROUP] == places
        assert row["resample/attempts"] == 5
        assert row["resample/missing"] == sum(not is_rare(prompt_id) for prompt_id in places) > 0
        assert sum(map(is_rare, places)) == sum(map(is_rare, {prompt.id for prompt in PROMPTS}))


def test_table_of_completions_has_what_is_trained_on(trained: Any) -> None:
    logged, batch = trained._logs, trained.kept_rounds[-1]
    assert list(logged["advantages"]) == pytest.approx(batch["advantages"].tolist())
    assert [prompt.strip() for prompt in logged["prompt"]] == [BY_ID[each].text.strip() for each in batch["ids"]]


class Mixed(MutualGRPOTrainer):
    """Trainer whose every group has rewards that differ."""


def alternating(completions: list[str], **_: Any) -> list[float]:
    return [float(number % 2) for number in range(len(completions))]


class MixedResampled(MutualGRPOTrainer):
    """The same with `resample`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, resample=Resample(), **kwargs)


@pytest.mark.slow
def test_where_nothing_is_dropped_the_training_is_bit_for_bit_that_without(
    tiny: dict[str, Path], tmp_path: Path
) -> None:
    without = train(Mixed, tiny["ada"], tmp_path / "without", reward=alternating)
    on = train(MixedResampled, tiny["ada"], tmp_path / "on", reward=alternating)
    same_training(without, on)
    assert all(row["resample/attempts"] == 0 for row in on.kept)


@pytest.mark.slow
def test_accumulation_changes_only_the_order_of_sums(trained: Any, tiny: dict[str, Path], tmp_path: Path) -> None:
    keys = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "max_steps": 3}
    accumulated = train(Kept, tiny["ada"], tmp_path / "out", **keys)
    for one, other in zip(trained.kept_rounds, accumulated.kept_rounds, strict=True):
        assert one["ids"] == other["ids"]
        torch.testing.assert_close(one["advantages"], other["advantages"])
    for name, tensor in trained.model.named_parameters():
        torch.testing.assert_close(tensor, dict(accumulated.model.named_parameters())[name], rtol=1e-3, atol=5e-5)


@pytest.mark.slow
def test_batch_that_is_used_twice_is_resampled_once(tiny: dict[str, Path], tmp_path: Path) -> None:
    keys = {"per_device_train_batch_size": 16, "steps_per_generation": 2, "num_iterations": 2, "max_steps": 4}
    used_twice = train(Kept, tiny["ada"], tmp_path / "out", **keys)
    assert len(used_twice.kept_rounds) == 1
    places, batches = expected_round(0, 3)
    assert used_twice.kept_rounds[0]["ids"][::GROUP] == places
    assert used_twice.sampled == batches
    assert used_twice.kept_rounds[0]["old_per_token_logps"].shape == used_twice.kept_rounds[0]["completion_ids"].shape
    assert ["resample/attempts" in row for row in used_twice.kept] == [True, False, False, False]


@pytest.mark.slow
def test_batch_scaling_is_computed_over_the_groups_that_are_trained_on(tiny: dict[str, Path], tmp_path: Path) -> None:
    scaled = train(Kept, tiny["ada"], tmp_path / "out", max_steps=1, scale_rewards="batch")
    batch = scaled.kept_rounds[0]
    rewards = torch.tensor([rewards_of(prompt_id) for prompt_id in batch["ids"][::GROUP]])
    expected = (rewards - rewards.mean(dim=1, keepdim=True)) / (rewards.flatten().std() + 1e-4)
    torch.testing.assert_close(batch["advantages"], expected.flatten(), atol=1e-5, rtol=0)


@pytest.mark.slow
def test_published_round_has_every_rollout_that_was_sampled(tiny: dict[str, Path], tmp_path: Path) -> None:
    own = sharing(tmp_path / "x", "grpo", publish="full", peers=())
    shared = train(Kept, tiny["ada"], tmp_path / "out", own, max_steps=2)
    for number, row in enumerate(shared.kept):
        places, batches = expected_round(number, 3)
        shard = Exchange(tmp_path / "x", "eve", "script").read("ada", number)
        assert shard is not None
        every = sorted(prompt_id for batch in batches for prompt_id in batch)
        assert sorted(shard.prompt_ids) == sorted(prompt_id for prompt_id in every for _ in range(GROUP))
        assert len(set(zip(shard.prompt_ids, shard.indices, strict=True))) == len(shard)
        for rollout in shard:
            trained_on = rollout.prompt_id in places and rollout.index < GROUP
            assert trained_on or rollout.advantage == 0.0
            assert rollout.logprobs is not None
            assert len(rollout.logprobs) == len(rollout.token_ids)
            assert rollout.reward == rewards_of(rollout.prompt_id)[rollout.index % GROUP]
        dead = {prompt_id for prompt_id in every if max(rewards_of(prompt_id)) == 0}
        assert number or row["prompts/dead"] == len(dead)


@pytest.mark.slow
def test_whitening_and_dead_prompts_follow_what_was_sampled(tiny: dict[str, Path], tmp_path: Path) -> None:
    own = replace(sharing(tmp_path / "x", "grpo", peers=()), whiten=True)
    white = train(Kept, tiny["ada"], tmp_path / "out", own, max_steps=1, scale_rewards="none")
    batch = white.kept_rounds[0]
    rewards = torch.tensor([rewards_of(prompt_id) for prompt_id in batch["ids"][::GROUP]])
    plain = (rewards - rewards.mean(dim=1, keepdim=True)).flatten()
    torch.testing.assert_close(batch["advantages"], (plain - plain.mean()) / (plain.std() + 1e-4), atol=1e-5, rtol=0)
    assert list(white._logs["advantages"]) == pytest.approx(batch["advantages"].tolist())
    _, batches = expected_round(0, 3)
    dead = {prompt_id for ids in batches for prompt_id in ids if max(rewards_of(prompt_id)) == 0}
    assert white.kept[0]["prompts/dead"] == len(dead)


class OwnLoss(MutualGRPOTrainer):
    """Trainer with a loss of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, resample=Resample(), **kwargs)

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        return super()._compute_loss(model, inputs)


def test_own_loss_and_streamed_data_are_refused_by_name(tiny: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"resample: OwnLoss overrides TRL's loss"):
        train(OwnLoss, tiny["ada"], tmp_path / "own")
    with pytest.raises(
        UsageError, match=r"resample: train_dataset: found IterableDataset, expected a datasets.Dataset"
    ):
        MutualGRPOTrainer(
            model=str(tiny["ada"]),
            reward_funcs=alternating,
            args=config(tmp_path / "streamed"),
            train_dataset=IterableDataset.from_generator(lambda: iter([{"prompt": "1 + 1 ="}])),
            processing_class=load_tokenizer(str(tiny["ada"])),
            resample=Resample(),
        )


def test_data_with_images_is_refused_before_the_first_step(tiny: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"resample: train_dataset: found a column 'image', expected prompts of text"):
        MutualGRPOTrainer(
            model=str(tiny["ada"]),
            reward_funcs=alternating,
            args=config(tmp_path / "out"),
            train_dataset=Dataset.from_list([{"prompt": "1 + 1 =", "image": None}] * 32),
            processing_class=load_tokenizer(str(tiny["ada"])),
            resample=Resample(),
        )


def test_settings_of_a_trainer_without_a_sharing_are_checked_too(tiny: dict[str, Path], tmp_path: Path) -> None:
    for number, (keys, message) in enumerate(
        (
            ({"multi_objective_aggregation": "normalize_then_sum"}, "expected 'sum_then_normalize'"),
            ({"remove_unused_columns": True}, "remove_unused_columns: found True, expected False"),
        )
    ):
        with pytest.raises(UsageError, match=message):
            train(ReplayedResampled, tiny["ada"], tmp_path / str(number), **keys)


class Sometimes:
    """Reward that logs a column in some of its calls only."""

    __name__ = "sometimes"

    def __init__(self, calls: set[int]) -> None:
        self.calls, self.number = calls, -1

    def __call__(self, completions: list[str], prompt_id: list[str], log_extra: Any, **_: Any) -> list[float]:
        self.number += 1
        if self.number in self.calls:
            log_extra("seen", [self.number] * len(completions))
        return rare(completions, prompt_id)


@pytest.mark.parametrize("calls", [{0}, {1, 2}, {4}, set()])
def test_column_that_a_reward_logs_in_some_batches_only_is_kept_for_these(
    tiny: dict[str, Path], tmp_path: Path, calls: set[int]
) -> None:
    """Two rounds of one further batch each: calls 0 and 1, then 2 and 3."""
    keys = {"log_completions": True, "num_completions_to_print": 0, "max_steps": 2}
    trainer = train(Once, tiny["ada"], tmp_path / "out", reward=Sometimes(calls), **keys)
    for step, file in enumerate(sorted((tmp_path / "out" / "completions").glob("*.parquet"))):
        table = pq.read_table(file)
        batch = trainer.kept_rounds[step]
        first = sampled_rounds(PLACES, step + 1)[step]
        expected = [
            next(
                (call for call in (2 * step, 2 * step + 1) if call in calls and (key in first) == (call % 2 == 0)), None
            )
            for key in batch["ids"]
        ]
        assert table.num_rows == 32
        found = table["seen"].to_pylist() if "seen" in table.column_names else [None] * 32
        assert found == expected


class OneRatioPerSequence(ReplayedResampled):
    """Trainer whose rows have one ratio each, as those of vLLM have by default: here the sum of the row's token ids."""

    checked = 0

    def sample_batch(self, inputs: list[Inputs]) -> Any:
        part = super().sample_batch(inputs)
        if self.model.training:
            part.batch["importance_sampling_ratio"] = sums(part.generation.completion_ids)
        return part

    def on_generated(self, batch: Inputs, generation: Any) -> None:
        super().on_generated(batch, generation)
        if self.model.training and generation.dropped:
            assert torch.equal(batch["importance_sampling_ratio"], sums(generation.completion_ids))
            self.checked += 1


def sums(completion_ids: list[list[int]]) -> torch.Tensor:
    return torch.tensor([[float(sum(ids))] for ids in completion_ids])


def test_ratio_of_a_sequence_is_not_padded(tiny: dict[str, Path], tmp_path: Path) -> None:
    trainer = train(OneRatioPerSequence, tiny["ada"], tmp_path / "out", pad_to_multiple_of=8)
    assert trainer.checked > 0


def test_recipe_takes_true_or_a_section_and_refuses_regimes_that_read_peers(cli_here: Cli) -> None:
    plain = ("train", "--regime", "grpo", "--pool", "tiny", "--dry-run", "--json", "--set")
    for assignment, attempts in (("round.resample=true", 3), ("round.resample.max_attempts=5", 5)):
        result = cli_here(*plain, assignment)
        assert result.returncode == 0, result.stderr
        planned = json.loads(result.stdout)
        assert planned["recipe"]["round"]["resample"] == {"max_attempts": attempts}
        note = f"a round samples 128 to {128 * (1 + attempts)} rollouts, and trains on 128"
        assert note in " ".join(planned["notes"])
    result = cli_here(*plain, "round.resample=false")
    assert json.loads(result.stdout)["recipe"]["round"]["resample"] is None
    result = cli_here(*plain, "round.resample.max_attempts=0")
    assert result.returncode == 2
    assert "round.resample.max_attempts" in result.stderr
    refused = cli_here("train", "--regime", "sgt", "--pool", "tiny", "--dry-run", "--set", "round.resample=true")
    assert refused.returncode == 2
    assert "round.resample: found true, but regime 'sgt' reads rollouts on the same prompts" in refused.stderr
