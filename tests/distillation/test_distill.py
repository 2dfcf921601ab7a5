"""Sequential Peer Distillation through the real command line, and its parts by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from conftest import Cli
from made_runs import made_run, publish
from mutualrl.distillation.harvest import Harvest, Success, harvest, of_peers
from mutualrl.distillation.run import bars
from mutualrl.distillation.settings import settings_of
from mutualrl.errors import DataError, UsageError
from mutualrl.records import Record
from mutualrl.see import Exchange


def test_the_defaults_are_the_papers() -> None:
    settings = settings_of("trained", 0, [])
    assert (settings.start, settings.learning_rate, settings.lr_scheduler_type) == ("trained", 2e-5, "cosine")
    assert (settings.warmup, settings.epochs) == (0.03, 1.0)
    assert settings.lora is not None
    assert (settings.lora.r, settings.lora.alpha, settings.lora.dropout) == (16, 32.0, 0.05)


def test_settings_are_read_and_refused() -> None:
    settings = settings_of("base", 3, ["learning_rate=1e-4", "lora.r=4", "trainer.weight_decay=0.1", "limit=5"])
    assert (settings.learning_rate, settings.limit, settings.seed) == (1e-4, 5, 3)
    assert settings.lora is not None
    assert (settings.lora.r, settings.lora.alpha) == (4, 32.0)
    assert settings.trainer == {"weight_decay": 0.1}
    assert settings_of("base", 0, ["lora=null"]).lora is None
    refused = {
        "learning_rate": "expected KEY=VALUE", "learning_rate=-1": "learning_rate", "learning=1": "learning",
        "trainer.learning_rate=1": "sets it itself", "lora.rank=2": "rank", "warmup=2": "warmup", "a.b=1": "a",
        "learning_rate.x=1": "learning_rate",
    }  # fmt: skip
    for assignment, words in refused.items():
        with pytest.raises(UsageError, match=words):
            settings_of("trained", 0, [assignment])
    with pytest.raises(UsageError, match="start"):
        settings_of("halfway", 0, [])


def published(root: Path, policy: str, rounds: Sequence[Sequence[Record]]) -> None:
    exchange = Exchange(root, policy, "made")
    for number, records in enumerate(rounds):
        exchange.publish(number, records, number)


def test_a_harvest_is_the_distinct_finished_successes(tmp_path: Path) -> None:
    rounds = [
        [Record("p", 0, 1.0, True, y_text="a"), Record("p", 1, 1.0, True, y_text="b"), Record("q", 0, 0.0, True, y_text="c")],
        [Record("p", 0, 1.0, True, y_text="a"), Record("q", 1, 1.0, False, y_text="cut"), Record("q", 2, 0.8, True, y_text="d")],
        [Record("q", 0, float("nan"), True, y_text="e"), Record("q", 1, 0.81, True, y_text="a")],
    ]  # fmt: skip
    published(tmp_path, "ada", rounds)
    found = harvest(tmp_path, "made", "ada", 0.8)
    assert found == Harvest(8, 5, 1, (Success("p", "a"), Success("p", "b"), Success("q", "a")))
    other = Harvest(0, 0, 0, (Success("p", "a"), Success("r", "z")))
    third = Harvest(0, 0, 0, (Success("r", "z"),))
    assert of_peers({"ada": found, "bob": other, "cyd": third}, "ada") == [Success("p", "a"), Success("r", "z")]
    assert list(of_peers({"ada": found, "bob": other}, "bob")) == list(found.distinct)


def test_an_exchange_without_texts_or_rounds_is_refused_with_what_to_type(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--exchange full"):
        harvest(tmp_path, "made", "ada", 0.8)
    published(tmp_path, "ada", [[Record("p", 0, 1.0, True)]])
    with pytest.raises(DataError, match="holds no texts; train with --exchange full"):
        harvest(tmp_path, "made", "ada", 0.8)


def test_bars_are_against_standalone_grpo() -> None:
    found = bars({"before training": {"accuracy": 0.3}, "grpo": {"accuracy": 0.4}, "sgt": {"accuracy": 0.5}})
    assert found["before training"] == {"points": pytest.approx(-0.1), "relative": pytest.approx(-0.25)}
    assert found["sgt"]["relative"] == pytest.approx(0.25)
    assert bars({"grpo": {"accuracy": 0.0}, "sgt": {"accuracy": 0.5}})["sgt"]["relative"] is None


def test_runs_that_cannot_be_distilled_are_refused(cli_here: Cli, tmp_path: Path) -> None:
    def refused(*arguments: str | Path) -> str:
        done = cli_here("distill", *arguments, "--out", "d")
        assert done.returncode == 2, done.stderr
        assert not (tmp_path / "d").exists()
        return str(done.stderr)

    def trained(name: str, **options: Any) -> Path:
        run = made_run(tmp_path / name, **options)
        for model in (run / "policies").iterdir():
            (model / "model").mkdir()
            (model / "model" / "config.json").write_text("{}")
        return run

    shared = trained("shared", regime="sgt")
    assert "shared what they found" in refused(shared)
    assert "no trained model of 'ada' (did it finish?)" in refused(made_run(tmp_path / "unfinished", finished=False))
    one = trained("one", policies=("ada",))
    assert "a learner needs a peer" in refused(one)
    assert "policy 'ada' is in" in refused(one, trained("same", policies=("ada",)))
    other = trained("other", policies=("bob",), fingerprint={"task": "math"})
    assert "was trained on other prompts" in refused(one, other)
    assert "is not a run directory" in refused(tmp_path / "nothing")
    pair = trained("pair")
    assert "--exchange full" in refused(pair)
    publish(pair, "ada", [[("p", 1.0, None)]])
    assert "holds no texts" in refused(pair)
    assert "no trained model of ada" in refused(pair, "--beside", made_run(tmp_path / "bare"))


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
    done = cli("train", "--pool", "tiny", "--steps", "3", "--exchange", "full", "--run-dir", "g", *settings)
    assert done.returncode == 0, done.stderr
    arguments = ("distill", "g", "--set", "learning_rate=5e-4", "--set", "limit=16", "--json", "--start")
    done = cli_here(*arguments, "trained", "--out", "d", "--beside", "g")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert json.loads((tmp_path / "d" / "distill.json").read_text()) == found
    for name, peer in (("ada", "bob"), ("bob", "ada")):
        about = found["learners"][name]
        assert about["peers"] == [peer]
        assert about["examples"] == min(16, found["learners"][peer]["found"]["distinct"])
        assert about["steps"] == -(-about["examples"] // 8)
        assert about["found"]["rollouts"] == 3 * 64
        assert set(about["accuracy"]) == {"before training", "grpo", "sequential distillation", "grpo (g)"}
        assert about["accuracy"]["grpo"] == about["accuracy"]["grpo (g)"]
        assert (
            about["accuracy"]["grpo"]["accuracy"]
            == json.loads((tmp_path / "g" / "summary.json").read_text())["policies"][name]["validation"]["accuracy"]
        )
        assert about["bars"]["grpo (g)"] == {"points": 0.0, "relative": 0.0}
        before, after = (
            load_file(tmp_path / where / "policies" / name / "model" / "model.safetensors") for where in ("g", "d")
        )
        assert before.keys() == after.keys()
        assert any((before[key] != after[key]).any() for key in before)
    again = json.loads(cli_here(*arguments, "trained", "--out", "again", "--beside", "g").stdout)
    assert again["learners"]["ada"]["loss"] == found["learners"]["ada"]["loss"]
    assert again["learners"]["ada"]["accuracy"] == found["learners"]["ada"]["accuracy"]
    assert "is taken" in cli_here(*arguments, "base", "--out", "d").stderr
    page = cli_here("report", "g", "d", "--out", "page", "--json")
    assert page.returncode == 0, page.stderr
    assert (tmp_path / "page" / "figures" / "distillation.png").exists()
