"""The log of what a policy sampled: which rollouts, how many bytes, what a kill and a resume leave."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mutualrl.records import Rollout
from mutualrl.regimes import ExtraRow
from mutualrl.regimes.round import RowSource
from mutualrl.tasks.trajectories import cut
from mutualrl.training.sample_log import LINE_BYTES, LOG_BYTES, MOST, TEXT_BYTES, SampleLog, choose, every
from mutualrl.trajectory import Trajectory
from runs import FinishedRun


def rollout(prompt: str, index: int, reward: float, text: str = "") -> Rollout:
    ids = np.frombuffer(text.encode("utf-32-le"), dtype=np.int32)
    return Rollout(prompt, index, reward, True, prompt=f"{prompt}?", token_ids=ids)


def texts_of(rows: Sequence[Sequence[int]]) -> list[str]:
    return ["".join(map(chr, ids)) for ids in rows]


def test_best_and_worst_of_two_prompts_and_taught_ones_first() -> None:
    rollouts = [
        *(rollout("p", n, reward) for n, reward in enumerate((0.5, 1.0, 0.0, 1.0))),
        *(rollout("q", n, 0.0) for n in range(4)),
        *(rollout("r", n, reward) for n, reward in enumerate((0.25, math.nan, 1.0, 0.5))),
    ]

    def picked(taught: set[str]) -> list[tuple[str, int]]:
        return [(each.prompt_id, each.index) for each in choose(rollouts, taught)]

    assert picked(set()) == [("p", 1), ("p", 2), ("q", 0), ("q", 1)]
    assert picked({"r"}) == [("r", 2), ("r", 1), ("p", 1), ("p", 2)]
    assert picked({"r", "q"}) == [("q", 0), ("q", 1), ("r", 2), ("r", 1)]
    assert [(each.prompt_id, each.index) for each in choose([rollout("p", 0, 1.0)], ())] == [("p", 0)]


@pytest.mark.parametrize("character", ["\u6570", "\x01", '"', "\n", "\U0001f642"])
@pytest.mark.parametrize("rounds", [1, 100, 1_000, 10_000, 1_000_000])
def test_log_of_the_longest_texts_stays_within_its_bytes(tmp_path: Path, rounds: int, character: str) -> None:
    """Also of characters that JSON writes in six bytes; the line times the rounds that write one is within the
    limit."""
    log = SampleLog(tmp_path / "samples.jsonl")
    longest = character * 10_000
    rollouts = [rollout(name + longest, n, float(n), longest) for name in "pq" for n in range(4)]
    source = RowSource(longest, 0, 0)
    rows = [
        ExtraRow(name + longest, source, [1], "nll", trajectory=Trajectory.of_stored(longest, None))
        for name in "pq"
        for _ in range(3)
    ]
    log.write(0, rounds, 1, rows, rollouts, texts_of)
    size = log.path.stat().st_size
    assert size <= LINE_BYTES
    assert size * math.ceil(rounds / every(rounds)) <= LOG_BYTES
    (line,) = map(json.loads, log.path.read_text().splitlines())
    assert (len(line["rollouts"]), len(line["taught"])) == (MOST, MOST)
    kept = line["rollouts"][0]["text"].count(character)
    assert line["rollouts"][0]["text"] == character * kept + f" [... {10_000 - kept} more characters]"
    cost = len(json.dumps(character, ensure_ascii=False).encode()) - 2
    assert TEXT_BYTES - 2 * cost < kept * cost <= TEXT_BYTES


def test_rounds_between_are_skipped_and_take_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=itertools.count().__next__)
    monkeypatch.setattr("mutualrl.training.sample_log.time", clock)
    log = SampleLog(tmp_path / "samples.jsonl")
    rounds = 3 * LOG_BYTES // LINE_BYTES
    step = every(rounds)
    assert step > 1
    seconds = [log.write(n, rounds, n + 1, [], [rollout("p", 0, math.nan)], texts_of) for n in range(2 * step)]
    written = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert [line["round"] for line in written] == [0, step]
    assert [n for n, took in enumerate(seconds) if took > 0] == [0, step]
    assert sum(seconds) == 2  # one per round that was written
    assert written[0]["rollouts"][0]["reward"] is None


def test_text_that_utf8_cannot_have_is_written(tmp_path: Path) -> None:
    assert cut("a\ud800b", 200) == "a?b"
    log = SampleLog(tmp_path / "samples.jsonl")
    log.write(0, 1, 1, [], [rollout("p\u2028\ud800", 0, 1.0)], texts_of)
    assert len(log.path.read_bytes().splitlines()) == 1


def test_own_answer_after_a_hint_is_not_called_the_peers(tmp_path: Path) -> None:
    log = SampleLog(tmp_path / "samples.jsonl")
    row = ExtraRow(
        "p", RowSource("bob", 0, 0), [1], "policy_gradient", trajectory=Trajectory.of_text("own"), hint="bob's"
    )
    log.write(0, 1, 1, [row], [rollout("p", 0, 0.0)], texts_of)
    (line,) = map(json.loads, log.path.read_text().splitlines())
    assert line["taught"] == [{"prompt_id": "p", "peer": "bob", "answer": "own", "from_hint": True}]


@pytest.mark.slow
def test_run_has_samples_of_each_round_as_published_and_taught(unbroken: FinishedRun) -> None:
    from mutualrl.see.inspection import Reader

    for policy in ("ada", "bob"):
        files = unbroken.path / "policies" / policy
        lines = [json.loads(line) for line in (files / "samples.jsonl").read_text().splitlines()]
        rescues = [json.loads(line) for line in (files / "rescues.jsonl").read_text().splitlines()]
        reader = Reader(unbroken.path / "exchange", json.loads((unbroken.path / "run.json").read_text())["run_id"])
        assert [line["round"] for line in lines] == reader.rounds(policy)
        assert any(line["taught"] for line in lines)
        for line in lines:
            published = reader.read(policy, line["round"])
            assert published is not None
            rewards = {(key, reward) for key, reward in zip(published.prompt_ids, published.rewards, strict=True)}
            assert len(line["rollouts"]) == MOST
            assert all((each["prompt_id"], each["reward"]) in rewards for each in line["rollouts"])
            answers = {(r["prompt_id"], r["answer"]) for r in rescues if r["round"] == line["round"]}
            assert {(each["prompt_id"], each["answer"]) for each in line["taught"]} <= answers
            assert bool(line["taught"]) == bool(answers)
        assert all("samples/seconds" in row for row in unbroken.metrics(policy) if "see/round" in row)
