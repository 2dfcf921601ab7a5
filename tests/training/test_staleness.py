"""Peers that are behind: read when they arrive, at most `staleness` rounds late; a replay reads the same rounds."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mutualrl.engines.transformers_engine import load_tokenizer
from mutualrl.errors import UsageError
from mutualrl.regimes import regimes
from mutualrl.see import Exchange, Heartbeat, ReadLog
from mutualrl.tasks.boxed import boxed_reward
from mutualrl.training.rescues import RescueLog
from mutualrl.training.sharing import Sharing
from training_harness import (
    STEPS,
    ReplayedMutual,
    publish_rollouts,
    same_training,
    sampled_rounds,
    sharing,
    train,
    trainer_keys,
)

pytestmark = pytest.mark.slow

LATE = sorted(name for name, regime in regimes().items() if regime().needs().late)


@pytest.fixture
def ready(tiny: dict[str, Path], tmp_path: Path) -> Path:
    """Return an exchange in which `bob` has published every round."""
    publish_rollouts(tmp_path / "ready", load_tokenizer(str(tiny["bob"])), sampled_rounds(8, STEPS))
    return tmp_path / "ready"


def stale(root: Path, tiny: dict[str, Path], staleness: int, regime: str = "sgt", **settings: Any) -> Sharing:
    """Return the sharing of a learner that waits only for peers more than `staleness` rounds behind."""
    shared = sharing(root, regime, tokenizers={"bob": load_tokenizer(str(tiny["bob"]))}, **settings)
    shared.link.staleness = staleness
    shared.link.reads = ReadLog(shared.link.exchange.store, "ada")
    return shared


def arriving(ready: Path, target: Path, arrivals: Sequence[Sequence[int]]) -> Callable[..., list[float]]:
    """Return a reward function whose n-th call copies the peer's rounds `arrivals[n]` to `target`."""
    (target / "bob").mkdir(parents=True)
    calls = iter(arrivals)

    def reward(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
        for number in next(calls, ()):
            for suffix in ("parquet", "json"):
                shutil.copy(ready / "bob" / f"{number:06d}.{suffix}", target / "bob")
        return boxed_reward(completions, answer, **columns)

    return reward


@pytest.mark.parametrize("regime", LATE)
def test_staleness_changes_nothing_if_every_peer_keeps_up(
    tiny: dict[str, Path], tmp_path: Path, ready: Path, regime: str
) -> None:
    runs = []
    for staleness in (0, 2):
        root = tmp_path / f"x{staleness}"
        shutil.copytree(ready, root)
        shared = stale(root, tiny, staleness, regime)
        runs.append(train(ReplayedMutual, tiny["ada"], tmp_path / f"a{staleness}", shared, **trainer_keys(regime)))
    same_training(*runs)
    assert "see/lag" not in runs[0].kept[0]
    assert [row["see/lag"] for row in runs[1].kept] == [0.0] * STEPS


def test_late_success_is_learnt_once_and_logged_with_its_round(
    tiny: dict[str, Path], tmp_path: Path, ready: Path
) -> None:
    on_time = stale(ready, tiny, 0)
    train(ReplayedMutual, tiny["ada"], tmp_path / "a", on_time)
    root = tmp_path / "x"
    late = stale(root, tiny, 1)
    late = replace(late, rescues=RescueLog(tmp_path / "rescues.jsonl"))
    reward = arriving(ready, root, [(), (0,), (1, 2)])
    learner = train(ReplayedMutual, tiny["ada"], tmp_path / "b", late, reward=reward)
    assert [row["see/lag"] for row in learner.kept] == [1.0, 1.0, 0.0]
    assert [row["see/late_rows"] > 0 for row in learner.kept] == [False, True, True]
    assert late.memory.uses == on_time.memory.uses  # each success is used as often as if it were on time
    import json

    lines = [json.loads(line) for line in (tmp_path / "rescues.jsonl").read_text().splitlines()]
    assert {(line["step"], line["round"]) for line in lines} <= {(2, 0), (3, 1), (3, 2)}
    assert all(line["prompt"] and line["own"] for line in lines)


def test_late_rows_have_the_same_loss_as_on_time(tiny: dict[str, Path], tmp_path: Path, ready: Path) -> None:
    """At a learning rate of 0 the NLL of a round's pairs is the same one round later."""
    keys = {"learning_rate": 0.0}
    on_time = train(ReplayedMutual, tiny["ada"], tmp_path / "a", stale(ready, tiny, 0), **keys)
    root = tmp_path / "x"
    reward = arriving(ready, root, [(), (0,), (1,)])
    late = train(ReplayedMutual, tiny["ada"], tmp_path / "b", stale(root, tiny, 1), reward=reward, **keys)
    assert "sgt/nll" not in late.kept[0]
    for then, now in zip(on_time.kept, late.kept[1:], strict=False):
        assert now["sgt/nll"] == pytest.approx(then["sgt/nll"], rel=1e-5)


@pytest.mark.parametrize("regime", LATE)
def test_replayed_run_reads_the_same_rounds(tiny: dict[str, Path], tmp_path: Path, ready: Path, regime: str) -> None:
    """Every round of the peer exists from the start; only the log determines which are read when."""
    root = tmp_path / "x"
    keys = trainer_keys(regime)
    reward = arriving(ready, root, [(), (0, 1), ()])
    first = train(ReplayedMutual, tiny["ada"], tmp_path / "a", stale(root, tiny, 2, regime), reward=reward, **keys)
    shutil.rmtree(root / "bob")
    shutil.copytree(ready / "bob", root / "bob")
    again = train(ReplayedMutual, tiny["ada"], tmp_path / "b", stale(root, tiny, 2, regime), **keys)
    same_training(first, again)
    assert [row["see/lag"] for row in again.kept] == [1.0, 0.0, 1.0]


def test_checkpoint_keeps_own_rounds_that_peers_have_not_reached(
    tiny: dict[str, Path], tmp_path: Path, ready: Path
) -> None:
    root = tmp_path / "x"
    reward = arriving(ready, root, [(), (), (0, 1, 2)])
    keys: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    unbroken = train(ReplayedMutual, tiny["ada"], tmp_path / "a", stale(root, tiny, 2), reward=reward, **keys)
    assert unbroken.kept[2]["see/late_rows"] > 0
    checkpoint = tmp_path / "a" / "checkpoint-2"
    resumed = train(ReplayedMutual, tiny["ada"], tmp_path / "b", stale(root, tiny, 2), resume=checkpoint, **keys)
    assert resumed.kept[-1]["see/late_rows"] == unbroken.kept[2]["see/late_rows"]
    weights = unbroken.model.state_dict()
    assert all(torch.equal(weights[key], value) for key, value in resumed.model.state_dict().items())


def test_learner_waits_for_a_peer_further_behind(tiny: dict[str, Path], tmp_path: Path, ready: Path) -> None:
    """A thread delivers the peer's rounds once the learner reports that it is waiting for the first."""
    import threading

    root = tmp_path / "x"
    (root / "bob").mkdir(parents=True)
    shared = stale(root, tiny, 1)
    heartbeat = Heartbeat(root, "bob")
    heartbeat.start()
    waiting = threading.Event()
    shared.link.heartbeat = Heartbeat(root, "ada")
    set_phase = shared.link.heartbeat.set

    def set_and_notify(phase: str, step: int | None = None, *, at_once: bool = False) -> None:
        set_phase(phase, step, at_once=at_once)
        if "round 0" in phase:
            waiting.set()

    shared.link.heartbeat.set = set_and_notify  # type: ignore[method-assign]

    def arrive() -> None:
        assert waiting.wait(60)
        for number in range(STEPS):
            for suffix in ("parquet", "json"):
                shutil.copy(ready / "bob" / f"{number:06d}.{suffix}", root / "bob")

    thread = threading.Thread(target=arrive)
    thread.start()
    learner = train(ReplayedMutual, tiny["ada"], tmp_path / "a", shared)
    thread.join()
    heartbeat.stop("finished")
    assert learner.kept[0]["see/lag"] == 1.0  # round 0 is planned without the peer
    assert learner.kept[1]["see/lag"] <= 1.0
    assert learner.kept[1]["see/late_rows"] > 0


@pytest.mark.parametrize(
    ("regime", "message"),
    [
        ("xgrpo", "needs the peers' rollouts within the round"),
        ("hacpo", "needs the peers' rollouts within the round"),
        ("grpo", "does not wait for peers"),
        ("xgrpo+sgt", "needs the peers' rollouts within the round"),
    ],
)
def test_regime_that_cannot_use_late_rounds_is_rejected(
    tiny: dict[str, Path], tmp_path: Path, regime: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        train(ReplayedMutual, tiny["ada"], tmp_path / "a", stale(tmp_path / "x", tiny, 1, regime))


def test_late_round_with_other_prompts_is_rejected(tiny: dict[str, Path], tmp_path: Path) -> None:
    from mutualrl.errors import PlanMismatchError

    root = tmp_path / "x"
    rounds = sampled_rounds(8, STEPS)
    publish_rollouts(tmp_path / "other", load_tokenizer(str(tiny["bob"])), [rounds[1], rounds[0], rounds[2]])
    reward = arriving(tmp_path / "other", root, [(), (0,)])
    with pytest.raises(PlanMismatchError, match="round 0: 'ada' and 'bob' did not see the same prompts"):
        train(ReplayedMutual, tiny["ada"], tmp_path / "a", stale(root, tiny, 1), reward=reward)
    assert Exchange(root, "eve", "script").rounds("ada") == [0, 1]


def test_taught_prompt_counts_as_used_once(tiny: dict[str, Path], tmp_path: Path) -> None:
    """Of two peers with the same successes, one is on time and one a round late: the late one teaches nothing."""
    tokenizer = load_tokenizer(str(tiny["bob"]))
    ready, root = tmp_path / "ready", tmp_path / "x"
    for peer in ("bob", "eve"):
        publish_rollouts(ready, tokenizer, sampled_rounds(8, STEPS), name=peer)
    shutil.copytree(ready / "bob", root / "bob")
    (root / "eve").mkdir()

    def learner(name: str, staleness: int) -> Sharing:
        shared = sharing(tmp_path / name, "sgt", peers=("bob", "eve"), max_uses_per_prompt=3)
        shared.link.staleness = staleness
        shared.link.reads = ReadLog(shared.link.exchange.store, "ada")
        return shared

    calls = iter([(), (0,), (1, 2)])

    def reward(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
        for number in next(calls, ()):
            for suffix in ("parquet", "json"):
                shutil.copy(ready / "eve" / f"{number:06d}.{suffix}", root / "eve")
        return boxed_reward(completions, answer, **columns)

    late = learner("x", 1)
    train(ReplayedMutual, tiny["ada"], tmp_path / "b", late, reward=reward)
    assert late.memory.uses
    assert late.memory.state["uses"] == dict(late.memory.uses)  # the cap counts exactly the uses learnt


def test_own_teacher_with_staleness_is_rejected(tiny: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"teacher=own.*needs the peers' rollouts within the round"):
        shared = stale(tmp_path / "x", tiny, 1, "sgt", teacher="own", memory=2)
        train(ReplayedMutual, tiny["ada"], tmp_path / "a", shared)


def test_peer_that_fails_again_in_a_replayed_round_is_left_out(tiny: dict[str, Path], tmp_path: Path) -> None:
    """`on_peer_loss: continue`: the log records that the peer was read, but the peer is missing."""
    from mutualrl.see import MissingPeers, WaitTimeouts

    root = tmp_path / "x"
    shared = stale(root, tiny, 1)
    link = shared.link
    link.exchange = Exchange(root, "ada", "script", timeouts=WaitTimeouts(0.2, 20.0, "continue"))
    link.missing_peers = MissingPeers(link.exchange.store, "ada")
    (root / "ada").mkdir(parents=True)
    link.reads.write(0, {"bob": -1})
    link.reads.write(1, {"bob": 0})
    read = link.read(1)
    assert (read.current, read.late, read.lags) == ({}, {}, {})
    assert link.missing_peers.is_missing("bob", 1)
