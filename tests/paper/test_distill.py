"""Sequential Peer Distillation through the command line, and its parts against hand calculations."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from conftest import Cli
from made_runs import add_model, made_run, publish
from mutualrl.errors import DataError, UsageError
from mutualrl.paper.distillation.distill import _examples, bars
from mutualrl.paper.distillation.successes import (
    DistillationExample,
    SuccessSet,
    VerifiedText,
    collect_successes,
    distillation_examples,
)
from mutualrl.records import Prompt, Rollout
from mutualrl.see import Exchange
from mutualrl.storage.files import read_checksummed
from mutualrl.study.distill_settings import DistillSettings, parse_settings
from mutualrl.trajectory import Trajectory


def test_defaults_match_the_paper() -> None:
    settings = parse_settings("trained", 0, [])
    assert (settings.start, settings.learning_rate, settings.lr_scheduler_type) == ("trained", 2e-5, "cosine")
    assert (settings.warmup, settings.epochs) == (0.03, 1.0)
    assert settings.lora is not None
    assert (settings.lora.r, settings.lora.alpha, settings.lora.dropout) == (16, 32.0, 0.05)


def test_settings_are_parsed_and_invalid_ones_rejected() -> None:
    settings = parse_settings("base", 3, ["learning_rate=1e-4", "lora.r=4", "trainer.weight_decay=0.1", "limit=5"])
    assert (settings.learning_rate, settings.limit, settings.seed) == (1e-4, 5, 3)
    assert settings.lora is not None
    assert (settings.lora.r, settings.lora.alpha) == (4, 32.0)
    assert settings.trainer == {"weight_decay": 0.1}
    assert parse_settings("base", 0, ["lora=null"]).lora is None
    rejected = {
        "learning_rate": "expected key=value",
        "learning_rate=-1": "learning_rate",
        "learning=1": "learning",
        "trainer.learning_rate=1": "set by distill",
        "lora.rank=2": "rank",
        "warmup=2": "warmup",
        "a.b=1": "a",
        "learning_rate.x=1": "learning_rate",
        "seed=3": "use --seed",
        "start=base": "--start",
        "trainer.logging_strategy=no": "set by distill",
    }
    for assignment, message in rejected.items():
        with pytest.raises(UsageError, match=message):
            parse_settings("trained", 0, [assignment])
    with pytest.raises(UsageError, match="start"):
        parse_settings("halfway", 0, [])


def publish_rounds(root: Path, policy: str, rounds: Sequence[Sequence[Rollout]]) -> None:
    exchange = Exchange(root, policy, "made")
    for number, records in enumerate(rounds):
        exchange.publish(number, records, number)


def test_success_set_has_the_distinct_finished_successes(tmp_path: Path) -> None:
    rounds = [
        [
            Rollout("p", 0, 1.0, True, trajectory=Trajectory.of_text("a")),
            Rollout("p", 1, 1.0, True, trajectory=Trajectory.of_text("b")),
            Rollout("q", 0, 0.0, True, trajectory=Trajectory.of_text("c")),
        ],
        [
            Rollout("p", 0, 1.0, True, trajectory=Trajectory.of_text("a")),
            Rollout("q", 1, 1.0, False, trajectory=Trajectory.of_text("cut")),
            Rollout("q", 2, 0.8, True, trajectory=Trajectory.of_text("d")),
        ],
        [
            Rollout("q", 0, float("nan"), True, trajectory=Trajectory.of_text("e")),
            Rollout("q", 1, 0.81, True, trajectory=Trajectory.of_text("a")),
        ],
    ]
    publish_rounds(tmp_path, "ada", rounds)
    result = collect_successes(tmp_path, "made", "ada", 0.8, 3)
    assert result == SuccessSet(8, 5, 1, (VerifiedText("p", "a"), VerifiedText("p", "b"), VerifiedText("q", "a")))
    with pytest.raises(DataError, match="3 of the run's 4 rounds"):
        collect_successes(tmp_path, "made", "ada", 0.8, 4)
    (tmp_path / "ada" / "000001.json").unlink()
    with pytest.raises(DataError, match="2 of the run's 3 rounds"):
        collect_successes(tmp_path, "made", "ada", 0.8, 3)


def test_examples_are_the_peers_texts_once_per_prompt_whatever_its_id() -> None:
    ada = SuccessSet(0, 0, 0, (VerifiedText("p", "a"), VerifiedText("p2", "a"), VerifiedText("q", "b")))
    bob = SuccessSet(0, 0, 0, (VerifiedText("r", "a"), VerifiedText("s", "z")))
    cyd = SuccessSet(0, 0, 0, (VerifiedText("s", "z"),))
    texts = {"ada": {"p": "1+1", "p2": "1+1", "q": "2+2"}, "bob": {"r": "1+1", "s": "2+2"}, "cyd": {"s": "2+2"}}
    sets = {"ada": ada, "bob": bob, "cyd": cyd}
    assert distillation_examples(sets, texts, "ada") == [
        DistillationExample("1+1", "a"),
        DistillationExample("2+2", "z"),
    ]
    assert distillation_examples(sets, texts, "bob") == [
        DistillationExample("1+1", "a"),
        DistillationExample("2+2", "b"),
        DistillationExample("2+2", "z"),
    ]
    assert distillation_examples({"ada": ada, "bob": bob}, texts, "bob") == [
        DistillationExample("1+1", "a"),
        DistillationExample("2+2", "b"),
    ]
    with pytest.raises(DataError, match="1 prompts of 'ada' are no longer in its run's training data"):
        distillation_examples(sets, {**texts, "ada": {"p": "1+1", "q": "2+2"}}, "bob")


def test_other_teachers_are_the_learners_successes_and_gold_solutions() -> None:
    sets = {
        "ada": SuccessSet(2, 2, 0, (VerifiedText("p", "by ada"),)),
        "bob": SuccessSet(2, 2, 0, (VerifiedText("p", "by bob"),)),
    }
    texts = {name: {"p": "1+1"} for name in sets}
    prompts = [Prompt("p", "1+1", "2", "+", solution="gold"), Prompt("q", "2+2", "4", "+")]

    def taught(teacher: str) -> list[tuple[str, str]]:
        settings = DistillSettings.model_validate({"teacher": teacher})
        return [tuple(each) for each in _examples(settings, sets, texts, prompts, "ada")]

    assert taught("peer") == [("1+1", "by bob")]
    assert taught("own") == [("1+1", "by ada")]
    assert taught("gold") == [("1+1", "gold")]
    with pytest.raises(DataError, match="no training prompt has one"):
        _examples(DistillSettings(teacher="gold"), sets, texts, prompts[1:], "ada")


def test_example_is_the_learners_prompt_and_the_text_with_eos(tiny: dict[str, Path]) -> None:
    from mutualrl.engines.transformers_engine import load_tokenizer
    from mutualrl.paper.distillation.sft import examples
    from mutualrl.records import Prompt

    prompts = [Prompt("x", "2*3:", "6", "*"), Prompt("y", "4+5:", "9", "+")]
    taught = [
        DistillationExample("2*3:", " 6 \\boxed{6}"),
        DistillationExample("4+5:", " 9 \\boxed{9}"),
        DistillationExample("4+5:", "\u00e9"),
    ]
    for name in ("ada", "bob"):
        tokenizer = load_tokenizer(str(tiny[name]))
        dataset = examples(taught[:2], prompts, tokenizer, {}, None)
        for row, example in zip(dataset.data, taught, strict=False):
            head = [i for i, in_loss in zip(row["input_ids"], row["completion_mask"], strict=True) if not in_loss]
            tail = [i for i, in_loss in zip(row["input_ids"], row["completion_mask"], strict=True) if in_loss]
            assert head == tokenizer(example.prompt)["input_ids"]
            assert tail[-1] == tokenizer.eos_token_id
            assert tokenizer.decode(tail[:-1]) == example.text
            assert row["input_ids"] == head + tail
        assert len(examples(taught, prompts, tokenizer, {}, 2).data) == 2
    tokenizer.chat_template = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"
    (row,) = examples(taught[:1], prompts, tokenizer, {}, None).data
    assert tokenizer.decode(row["input_ids"], skip_special_tokens=True) == "<2*3:> 6 \\boxed{6}"


def test_loss_is_sgts_mean_over_texts_of_token_means(tiny: dict[str, Path], tmp_path: Path) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    from mutualrl.engines.transformers_engine import load_tokenizer
    from mutualrl.paper.distillation.sft import StartModel, fine_tune

    tokenizer, model = load_tokenizer(str(tiny["ada"])), AutoModelForCausalLM.from_pretrained(tiny["ada"])
    rows = [([5, 6], [7, 8, 9]), ([5, 6], [10, 11, 12, 13, 14, 15, 16, 17, 18])]
    means = []
    for head, tail in rows:
        logps = model(torch.tensor([head + tail])).logits[0, :-1].log_softmax(-1)
        means.append(-sum(logps[len(head) - 1 + i, token].item() for i, token in enumerate(tail)) / len(tail))
    data = Dataset.from_dict(
        {"input_ids": [h + t for h, t in rows], "completion_mask": [[0] * len(h) + [1] * len(t) for h, t in rows]}
    )
    start = StartModel(str(tiny["ada"]), None, False, tokenizer)
    for batch, accumulate in ((2, 1), (1, 2)):
        settings = parse_settings(
            "base", 0, [f"batch_size={batch}", f"trainer.gradient_accumulation_steps={accumulate}", "lora.dropout=0"]
        )
        details = fine_tune(start, data, settings, tmp_path / str(batch))
        assert details["steps"] == 1
        assert details["loss"][0] == pytest.approx(sum(means) / 2, rel=1e-4)
    for assignment in ("trainer.assistant_only_loss=true", "trainer.loss_type=foo", "lora.target_modules=[nosuch]"):
        with pytest.raises(UsageError, match="TRL refuses these settings"):
            fine_tune(start, data, parse_settings("base", 0, [assignment]), tmp_path / "x")


def test_exchange_without_texts_or_rounds_is_rejected_with_the_flag_to_use(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--exchange full"):
        collect_successes(tmp_path, "made", "ada", 0.8, 1)
    publish_rounds(tmp_path, "ada", [[Rollout("p", 0, 1.0, True)]])
    with pytest.raises(DataError, match="has no texts; train with --exchange full"):
        collect_successes(tmp_path, "made", "ada", 0.8, 1)


def test_bars_are_relative_to_standalone_grpo() -> None:
    result = bars({"before training": {"accuracy": 0.3}, "grpo": {"accuracy": 0.4}, "sgt": {"accuracy": 0.5}})
    assert result["before training"] == {"points": pytest.approx(-0.1), "relative": pytest.approx(-0.25)}
    assert result["sgt"]["relative"] == pytest.approx(0.25)
    assert bars({"grpo": {"accuracy": 0.0}, "sgt": {"accuracy": 0.5}})["sgt"]["relative"] is None


def test_runs_that_cannot_be_distilled_are_rejected(cli_here: Cli, tmp_path: Path) -> None:
    def error_of(*arguments: str | Path) -> str:
        result = cli_here("paper", "distill", *arguments, "--out", "d")
        assert result.returncode == 2, result.stderr
        assert not (tmp_path / "d").exists()
        return str(result.stderr)

    def trained(name: str, **options: Any) -> Path:
        run = made_run(tmp_path / name, **options)
        for policy in (run / "policies").iterdir():
            add_model(run, policy.name)
        return run

    shared = trained("shared", regime="sgt")
    assert "a run of regime 'sgt'" in error_of(shared)
    assert "a run of regime 'grpo-noise'" in error_of(trained("noise", regime="grpo-noise"))
    assert "no trained model of 'ada' (did it finish?)" in error_of(made_run(tmp_path / "unfinished", finished=False))
    one = trained("one", policies=("ada",))
    assert "a learner needs a peer" in error_of(one)
    assert "policy 'ada' is in" in error_of(one, trained("same", policies=("ada",)))
    assert "is not a run directory" in error_of(tmp_path / "nothing")
    pair = trained("pair")
    assert "--exchange full" in error_of(pair)
    publish(pair, "ada", [[("p", 1.0, None)]])
    assert "1 of the run's 20 rounds" in error_of(pair)
    assert "no trained model of ada" in error_of(pair, "--beside", made_run(tmp_path / "bare"))


@pytest.mark.slow
def test_learners_are_taught_their_peers_successes_and_evaluated(
    cli: Cli, cli_here: Cli, tiny: dict[str, Path], tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    settings = (
        "--set",
        "round.prompts=16",
        "--set",
        "trainer.per_device_train_batch_size=64",
        "--set",
        "run.validate_every=0",
    )
    completed = cli("train", "--pool", "tiny", "--steps", "3", "--exchange", "full", "--run-dir", "g", *settings)
    assert completed.returncode == 0, completed.stderr
    arguments = ("paper", "distill", "g", "--set", "learning_rate=5e-4", "--set", "limit=16", "--json", "--start")
    completed = cli_here(*arguments, "trained", "--out", "d", "--beside", "g")
    assert completed.returncode == 0, completed.stderr
    result = json.loads(completed.stdout)
    assert read_checksummed(tmp_path / "d" / "distill.json") == result
    for name, peer in (("ada", "bob"), ("bob", "ada")):
        details = result["learners"][name]
        assert details["peers"] == [peer]
        assert details["examples"] == min(16, result["learners"][peer]["found"]["distinct"])
        assert details["steps"] == -(-details["examples"] // 8)
        assert details["found"]["rollouts"] == 3 * 64
        assert set(details["accuracy"]) == {"before training", "grpo", "sequential distillation", "grpo (g)"}
        assert details["accuracy"]["grpo"] == details["accuracy"]["grpo (g)"]
        assert (
            details["accuracy"]["grpo"]["accuracy"]
            == json.loads((tmp_path / "g" / "summary.json").read_text())["policies"][name]["validation"]["accuracy"]
        )
        assert details["bars"]["grpo (g)"] == {"points": 0.0, "relative": 0.0}
        before, after = (
            load_file(tmp_path / parent / "policies" / name / "model" / "model.safetensors") for parent in ("g", "d")
        )
        assert before.keys() == after.keys()
        assert any((before[key] != after[key]).any() for key in before)
    again = json.loads(cli_here(*arguments, "trained", "--out", "again", "--beside", "g").stdout)
    assert again["learners"]["ada"]["loss"] == result["learners"]["ada"]["loss"]
    assert again["learners"]["ada"]["accuracy"] == result["learners"]["ada"]["accuracy"]
    assert (
        "holds another distillation (it differs in beside, settings)"
        in cli_here(*arguments, "base", "--out", "d").stderr
    )
    page = cli_here("report", "g", "d", "--out", "page", "--figures", "drawn", "--json")
    assert page.returncode == 0, page.stderr
    assert (tmp_path / "drawn" / "distillation.png").exists()


@pytest.mark.release
def test_killed_distillation_resumes_from_its_checkpoint(cli: Cli, cli_here: Cli, tmp_path: Path) -> None:
    settings = ("--set", "round.prompts=16", "--set", "trainer.per_device_train_batch_size=64")
    completed = cli("train", "--pool", "tiny", "--steps", "3", "--exchange", "full", "--run-dir", "g", *settings)
    assert completed.returncode == 0, completed.stderr
    command = (
        "paper",
        "distill",
        "g",
        "--set",
        "learning_rate=5e-4",
        "--set",
        "epochs=6",
        "--set",
        "save_every=2",
        "--json",
    )
    undisturbed = cli_here(*command, "--out", "u")
    assert undisturbed.returncode == 0, undisturbed.stderr
    expected = json.loads(undisturbed.stdout)
    assert expected["learners"]["ada"]["steps"] > 6
    checkpoints = tmp_path / "d" / "policies" / "bob" / "checkpoints"  # the second learner's
    process = subprocess.Popen(
        [sys.executable, "-m", "mutualrl", *command, "--out", "d"], cwd=tmp_path, stdout=subprocess.DEVNULL
    )
    while process.poll() is None and not list(checkpoints.glob("step-*/complete.json")):
        time.sleep(0.02)
    assert process.poll() is None
    process.kill()
    process.wait()
    completed = cli_here(*command, "--out", "d")
    assert completed.returncode == 0, completed.stderr
    assert "ada: already fine-tuned" in completed.stderr
    result = json.loads(completed.stdout)
    for learner in ("ada", "bob"):
        weights = [(tmp_path / out / "policies" / learner / "model" / "model.safetensors") for out in ("u", "d")]
        assert weights[0].read_bytes() == weights[1].read_bytes()
        assert result["learners"][learner]["accuracy"] == expected["learners"][learner]["accuracy"]
        assert result["learners"][learner]["loss"] == expected["learners"][learner]["loss"]
    other = cli_here(*command[:3], "--set", "epochs=7", "--out", "d")
    assert (other.returncode, "it differs in settings" in other.stderr) == (2, True), other.stderr
    damaged = tmp_path / "d" / "policies" / "ada" / "model" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    completed = cli_here(*command, "--out", "d")
    assert (completed.returncode, "according to its marker" in completed.stderr) == (6, True), completed.stderr
