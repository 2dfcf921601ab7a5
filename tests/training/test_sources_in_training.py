"""Sources in real trainings: only verified texts enter the loss, under every rule that can use them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import Cli
from mutualrl.errors import PlanMismatchError, UsageError
from mutualrl.records import PublishSchema, Rollout
from mutualrl.see import Exchange
from mutualrl.training import MutualGRPOTrainer, Sharing
from mutualrl.training.source_rounds import SourceRounds
from mutualrl.trajectory import Trajectory
from training_harness import STEPS, book, same_training, sampled_rounds, sharing, train, trainer_keys

pytestmark = pytest.mark.slow


def published(root: Path) -> list[Rollout]:
    reader, rollouts = Exchange(root, "eve", "script"), []
    for number in range(STEPS):
        shard = reader.read("book", number)
        assert shard is not None
        rollouts += list(shard)
    return rollouts


@pytest.mark.parametrize("regime", ["sgt", "guided", "xgrpo+sgt"])
def test_one_policy_learns_the_confirmed_texts_of_a_source(tiny: dict[str, Path], tmp_path: Path, regime: str) -> None:
    """Whether the rewards are known before training or computed in the round makes no difference."""
    runs, sharings = [], []
    for verified in (True, False):
        directory = tmp_path / f"{verified}"
        directory.mkdir()
        peers = ("bob",) if regime == "xgrpo+sgt" else ()
        if peers:
            publish_nothing(directory / "x")
        shared = sharing(directory / "x", regime, peers=peers, sources=[book(directory, verified=verified)])
        keys = {key: value for part in regime.split("+") for key, value in trainer_keys(part).items()}
        runs.append(train(MutualGRPOTrainer, tiny["ada"], directory / "out", shared, **keys))
        sharings.append(shared)
    same_training(*runs)
    rows = runs[0].kept
    assert all(row["source/book/texts"] > 0 for row in rows)
    assert [row["source/book/confirmed"] for row in rows] == [row["source/book/confirmed"] for row in runs[1].kept]
    rollouts = published(tmp_path / "True" / "x")
    by_key = {(r.prompt_id, r.index): r for r in rollouts}
    used = sharings[0].memory.texts
    if regime == "guided":
        assert sum(row["guided/hints"] for row in rows) > 0
    else:
        assert sum(used.values()) == sum(row["sgt/pairs"] for row in rows) > 0
        assert sharings[0].memory.texts == sharings[1].memory.texts
    for (name, prompt_id, index), _ in used.items():
        assert name == "book"
        assert by_key[prompt_id, index].reward == 1.0
    assert {r.reward for r in rollouts} == {0.0, 1.0}
    assert not any(r.text for r in rollouts if not r.reward)  # as of policies, only texts of successes are published
    assert all(row["see/peers"] == len(shared.link.peers) for row in rows)
    assert not any(key.startswith("capability/book") for key in rows[0])


def publish_nothing(root: Path) -> None:
    """Publish rounds of a peer without a success."""
    exchange = Exchange(root, "bob", "script")
    for number, prompt_ids in enumerate(sampled_rounds(8, STEPS)):
        exchange.publish(
            number, [Rollout(p, g, 0.0, True) for p in dict.fromkeys(prompt_ids) for g in range(4)], number
        )


def test_swarm_trains_on_groups_of_a_source(tiny: dict[str, Path], tmp_path: Path) -> None:
    runs = []
    for verified in (True, False):
        directory = tmp_path / f"{verified}"
        directory.mkdir()
        shared = sharing(directory / "x", "swarm", peers=(), sources=[book(directory, verified=verified)], external=2)
        runs.append(train(MutualGRPOTrainer, tiny["ada"], directory / "out", shared, **trainer_keys("swarm")))
    same_training(*runs)
    assert sum(row["swarm/external"] for row in runs[0].kept) > 0
    assert sum(row["swarm/denied"] for row in runs[0].kept) == 0


def test_script_has_sources_and_resumes(tiny: dict[str, Path], tmp_path: Path) -> None:
    keys: dict[str, Any] = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    source = book(tmp_path, verified=False)

    def shared(resume: bool) -> Sharing:
        return Sharing.over(tmp_path / "x", "ada", [], "sgt", sources=[source], resume=resume, memory=2)

    unbroken = train(MutualGRPOTrainer, tiny["ada"], tmp_path / "out", shared(False), **keys)
    checkpoint = tmp_path / "out" / "checkpoint-2"
    again = shared(True)
    resumed = train(MutualGRPOTrainer, tiny["ada"], tmp_path / "again", again, resume=checkpoint, **keys)
    for one, other in zip(unbroken.model.state_dict().values(), resumed.model.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    assert again.memory.texts
    assert unbroken.kept[-1]["source/book/uses_per_text"] == resumed.kept[-1]["source/book/uses_per_text"]


def test_a_source_with_other_texts_for_a_published_round_is_refused(tiny: dict[str, Path], tmp_path: Path) -> None:
    exchange = Exchange(tmp_path / "x", "book", "script")
    exchange.publish(0, [Rollout("other", 0, 1.0, True, trajectory=Trajectory.of_text("other"))], 0)
    shared = sharing(tmp_path / "x", "sgt", peers=(), sources=[book(tmp_path, verified=True)])
    with pytest.raises(PlanMismatchError, match="round 0 of source 'book' is in the exchange with other prompts"):
        train(MutualGRPOTrainer, tiny["ada"], tmp_path / "out", shared)


def test_lost_and_damaged_rounds_of_a_source_are_written_again(tmp_path: Path) -> None:
    source = book(tmp_path, verified=True)
    rounds = SourceRounds.of(source, Exchange(tmp_path / "x", "ada", "script"))
    prompts = source.table["prompt_id"].to_pylist()[:4]
    schema = PublishSchema.of("text", text_above=0.8)
    first = rounds.read(0, prompts, schema, 0)
    (part,) = (tmp_path / "x" / "book").glob("*.parquet")
    content = part.read_bytes()
    for damaged in (None, b"damaged"):
        part.unlink()
        if damaged is not None:
            part.write_bytes(damaged)
        assert rounds.read(0, prompts, schema, 0).table().equals(first.table())
        assert part.read_bytes() == content
    with pytest.raises(PlanMismatchError):
        rounds.read(0, source.table["prompt_id"].to_pylist()[8:], schema, 0)
    assert part.read_bytes() == content


def test_late_rounds_have_their_sources_and_metrics_count_every_row(tiny: dict[str, Path], tmp_path: Path) -> None:
    shared = sharing(tmp_path / "x", "sgt", peers=("bob",), sources=[book(tmp_path, verified=True)], teacher="source")
    shared.link.staleness = 2
    exchange = Exchange(tmp_path / "x", "bob", "script")
    rounds = sampled_rounds(8, STEPS)

    def publish(number: int) -> None:
        rows = [
            Rollout(p, g, 1.0, True, trajectory=Trajectory.of_text("x"))
            for p in dict.fromkeys(rounds[number])
            for g in range(4)
        ]
        exchange.publish(number, rows, number)

    reads = shared.link.read

    def late(number: int, *rest: Any) -> Any:
        if number == STEPS - 1:  # bob publishes its rounds only now
            for earlier in range(STEPS):
                publish(earlier)
        return reads(number, *rest)

    shared.link.read = late  # type: ignore[method-assign]
    trainer = train(MutualGRPOTrainer, tiny["ada"], tmp_path / "out", shared, reward=failing)
    logged = [row["source/book/rescues"] for row in trainer.kept]
    assert logged[:-1] == [0.0] * (STEPS - 1)  # the gate is the policies'
    assert logged[-1] == sum(shared.memory.texts.values()) == trainer.kept[-1]["sgt/pairs"]
    assert trainer.kept[-1]["sgt/pairs"] > trainer.kept[-1]["see/late_rows"] > 0


def failing(completions: list[str], **_: object) -> list[float]:
    return [0.0] * len(completions)


def test_scripts_are_refused_sources_that_their_regime_cannot_use(tmp_path: Path) -> None:
    source = book(tmp_path, verified=True)
    with pytest.raises(UsageError, match="'xgrpo' pools statistics of what policies sample"):
        Sharing.over(tmp_path / "x", "ada", ["bob"], "xgrpo", sources=[source])
    with pytest.raises(UsageError, match="'prp' needs the log-probs"):
        Sharing.over(tmp_path / "x", "ada", ["bob"], "prp", sources=[source])
    with pytest.raises(UsageError, match=r"sources=\['book'\] names 'book' twice"):
        Sharing.over(tmp_path / "x", "ada", ["book"], "sgt", sources=[source])
    with pytest.raises(UsageError, match=r"learns a source's texts, and there is none; expected .* sources="):
        Sharing.over(tmp_path / "x", "ada", ["bob"], "sgt", teacher="source")
    with pytest.raises(UsageError, match="expected at least one name in peers, or sources"):
        Sharing.over(tmp_path / "x", "ada", [], "sgt")


@pytest.mark.parametrize(
    ("regime", "settings", "message"),
    [
        ("xgrpo", (), "sources: 'book': regime 'xgrpo' pools statistics of what policies sample"),
        ("prp", (), "sources: 'book': regime 'prp' needs the log-probs of every rollout"),
        ("hacpo", (), "sources: 'book': regime 'hacpo' needs the log-probs"),
        ("swarm", ("--set", "regime.denominator=peer"), "sources: 'book': regime 'swarm' needs the log-probs"),
    ],
)
def test_rules_that_cannot_use_a_source_refuse_it_by_name(
    cli_here: Cli, regime: str, settings: tuple[str, ...], message: str
) -> None:
    result = cli_here("train", "--regime", regime, "--pool", "tiny", "--source", "book=recorded:tiny:book", *settings)
    assert result.returncode == 2
    assert message in result.stderr
    assert ", or a regime that can: chord, guided, hinted, sgt, swarm" in result.stderr


def test_dry_run_says_what_a_source_has_and_grpo_leaves_it_out(cli_here: Cli) -> None:
    result = cli_here("train", "--regime", "sgt", "--pool", "tiny-recorded", "--dry-run", "--json")
    assert result.returncode == 0, result.stderr
    plan = json.loads(result.stdout)
    assert [source["name"] for source in plan["recipe"]["sources"]] == ["book"]
    (note,) = [note for note in plan["notes"] if note.startswith("source book")]
    assert "234 of 234 training prompts (rows) have a text" in note
    assert "194 confirmed by the reward" in note
    result = cli_here("train", "--pool", "tiny-recorded", "--dry-run", "--json")
    assert "source book is not read: regime 'grpo' learns no texts" in json.loads(result.stdout)["notes"]


def test_models_make_a_pool_and_sources_join_it(cli_here: Cli) -> None:
    command = ("train", "--regime", "sgt", "--model", "tiny:ada", "--model", "tiny:ada", "--dry-run", "--json")
    result = cli_here(*command, "--source", "book=recorded:tiny:book", "--set", "sources.book.reasoning=drop")
    assert result.returncode == 0, result.stderr
    recipe = json.loads(result.stdout)["recipe"]
    assert [(p["name"], p["model"]) for p in recipe["policies"]] == [("ada", "tiny:ada"), ("ada-2", "tiny:ada")]
    assert recipe["sources"][0]["reasoning"] == "drop"
    for arguments, message in (
        (("--pool", "tiny"), "--model: --pool has policies, too"),
        (("--source", "book"), "--source book: expected NAME=recorded:REFERENCE"),
        (("--source", "b=served:x"), "expected the URL of an OpenAI-compatible endpoint"),
        (("--source", "ada=recorded:tiny:book"), "two members are named 'ada'"),
        (("--source", "b=recorded:none.jsonl"), "recorded texts not found"),
        (("--set", "sources.b.reasoning=drop"), "found 'b.reasoning', expected a source and a key: none"),
        (("--source", "b=recorded:tiny:book", "--set", "sources.b.reason=drop"), "(did you mean 'reasoning'?)"),
        (("--source", "b=recorded:tiny:book", "--set", "sources.b.learners=eve"), "learners names 'eve'"),
    ):
        result = cli_here(*command, *arguments)
        assert result.returncode == 2, arguments
        assert message in result.stderr + result.stdout, (arguments, result.stderr)
