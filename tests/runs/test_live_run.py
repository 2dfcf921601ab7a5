"""A live run: growing files, restarts, damaged lines, bounded memory."""

from __future__ import annotations

import json
import math
import os
from itertools import pairwise
from pathlib import Path

import pytest

from made_runs import made_run, validation
from mutualrl.regimes import get_regime
from mutualrl.runs import live as reader
from mutualrl.runs.lines import NewLines
from mutualrl.runs.live import MOST_LINES, MOST_POINTS, MOST_RESCUES, Curve, LiveRun
from mutualrl.storage.rundir import RunDirectory


def test_a_process_that_stopped_beating_is_said_to_be_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made_run(tmp_path / "r", "sgt")
    beats = RunDirectory(run).exchange / "ada" / "heartbeat.json"
    beats.parent.mkdir(parents=True, exist_ok=True)
    now = 1000.0
    monkeypatch.setattr(reader.time, "monotonic", lambda: now)
    beats.write_text(json.dumps({"phase": "generating", "counter": 3, "progress": 1}))
    (live,) = (policy for policy in LiveRun(RunDirectory(run), ["ada"]).policies.values())
    live.update()
    now += 44
    live.update()
    assert (live.doing, math.isnan(live.seconds_left(10**6))) == ("generating", False)
    now += 20
    live.update()
    assert live.doing == "no heartbeat for 64 s, last seen: generating"
    assert math.isnan(live.seconds_left(10**6))  # the mean of earlier steps says nothing about this one
    beats.write_text(json.dumps({"phase": "finished", "counter": 4, "progress": 2}))
    live.update()
    now += 100
    assert live.doing == "finished"


def test_new_lines_are_read_once_and_complete(tmp_path: Path) -> None:
    path = tmp_path / "grows"
    lines = NewLines(path)
    assert lines.read() == []
    path.write_bytes(b"one\ntwo\nthr")
    assert lines.read() == [b"one", b"two"]
    assert lines.restarted
    with path.open("ab") as file:
        file.write(b"ee\n")
    assert lines.read() == [b"three"]
    assert not lines.restarted
    path.write_bytes(b"four\n")  # shorter: truncated by a restart
    assert lines.read() == [b"four"]
    assert lines.restarted
    path.with_suffix(".new").write_bytes(b"four\nfive\n")
    path.with_suffix(".new").rename(path)  # another file of the same name
    assert lines.read() == [b"four", b"five"]


def test_end_of_a_long_log_is_read_and_an_overlong_line_does_not_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "long"
    path.write_bytes(b"".join(b"%04d\n" % number for number in range(1000)))
    assert NewLines(path, last_bytes=10).read() == [b"0998", b"0999"]
    monkeypatch.setattr(reader, "LOOK_BYTES", 16)
    path.write_bytes(b"x" * 40 + b"\nend\n")
    lines, seen = NewLines(path), []
    for _ in range(6):
        seen += lines.read()
    assert seen[-1] == b"end"


def test_curve_keeps_ends_and_shape_in_bounded_memory() -> None:
    curve = Curve()
    for step in range(1, 10_001):
        curve.add(step, step / 10_000)
        assert curve.points[-1] == (step, step / 10_000)
    assert len(curve.points) <= MOST_POINTS
    assert curve.points[0][0] == 1
    steps = [step for step, _ in curve.points]
    assert max(later - earlier for earlier, later in pairwise(steps)) <= 4 * 10_000 / MOST_POINTS
    assert all(value == step / 10_000 for step, value in curve.points)
    curve.add(5_000, 0.0)  # a policy that resumes from a checkpoint
    assert curve.points[-1] == (5_000, 0.0)
    assert curve.points[-2][0] < 5_000


def append(path: Path, *rows: object) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def test_policies_are_followed_across_damaged_lines_and_a_restart(tmp_path: Path) -> None:
    run = RunDirectory(made_run(tmp_path / "r", "sgt", finished=False, steps=4))
    live = LiveRun(run, ["ada", "bob"], get_regime("sgt").metrics)
    assert math.isnan(live.seconds_left(10))
    ada, files = live.policies["ada"], run.policy("ada")
    content = files.before.read_bytes()
    files.before.write_bytes(b"{")
    files.metrics.write_text("")
    live.update()
    assert ada.accuracy.points == []
    files.before.write_bytes(content)  # written late
    append(files.metrics, {"step": 1, "reward": 0.5, "sgt/gate_rate": 0.75, "step_time": 4.0, "see/wait_seconds": 1})
    with files.metrics.open("a") as file:
        file.write("not JSON\n[1]\n" + '{"step": "2", "reward": 9}\n')
    row = {"step": 2, "reward": None, "step_time": 2.0, "validation": {**validation(0.5), "by_group": {"+": 0.5}}}
    append(files.metrics, row)
    live.update()
    assert (ada.step, ada.reward.last, ada.gate_rate.last) == (2, 0.5, 0.75)
    assert ada.accuracy.points == [(0, 0.3), (2, 0.5)]
    assert ada.waiting == pytest.approx(1 / 6)
    assert ada.seconds_left(12) == pytest.approx(10 * 3.0)
    append(files.metrics, {"step": 3, "reward": 0.25, "validation": {"accuracy": "high", "by_group": [1]}})
    live.update()
    assert (ada.step, ada.reward.last, ada.accuracy.last) == (3, 0.25, 0.5)
    files.metrics.write_text(json.dumps({"step": 1, "reward": 0.5}) + "\n")  # resumed from step 1
    live.update()
    assert (ada.step, ada.waiting, ada.accuracy.points) == (1, None, [(0, 0.3)])


def test_newest_rescues_and_log_lines_are_kept_and_cleaned(tmp_path: Path) -> None:
    run = RunDirectory(made_run(tmp_path / "r", "sgt", finished=False, steps=4))
    files = run.policy("ada")
    files.rescues.write_text("")
    append(files.rescues, *({"step": step, "prompt": f"p{step}"} for step in range(100)), "no row")
    files.logs.mkdir(exist_ok=True)
    (files.logs / "attempt-0.log").write_text("old\n")
    newest = files.logs / "attempt-10.log"
    (files.logs / "attempt-9.log").write_text("older than 10\n")
    newest.write_text("\x1b[2Jcleared\n\n10 %\r50 %\r100 %\n" + "".join(f"line {n}\n" for n in range(1000)))
    live = LiveRun(run, ["ada"])
    live.update(logs=True)
    ada = live.policies["ada"]
    assert [row["prompt"] for row in ada.rescues] == [f"p{n}" for n in range(101 - MOST_RESCUES, 100)]
    assert len(ada.log) == MOST_LINES
    assert ada.log[-1] == "line 999"
    newest.write_text("\x1b[2Jcleared\r\n10 %\r50 %\r100 %\n")
    live.update(logs=True)
    assert list(ada.log)[-2:] == ["�[2Jcleared", "100 %"]


def test_hostile_files_do_not_stop_updates(tmp_path: Path) -> None:
    run = RunDirectory(made_run(tmp_path / "r", "sgt", finished=False, steps=4))
    files = run.policy("ada")
    steps = [-1, 10**400, -(10**400), True, 3]
    files.metrics.write_text("".join(f'{{"step": {json.dumps(step)}, "reward": 1.0}}\n' for step in steps))
    files.rescues.unlink(missing_ok=True)
    os.mkfifo(files.rescues)
    files.before.write_text('{"accuracy": 0.5, "by_group": {"\\ud800": 1.0}, "sha256": "0"}\n')
    live = LiveRun(run, ["ada"])
    live.update(logs=True)
    assert live.policies["ada"].reward.points == [(3, 1.0)]
    assert math.isnan(live.seconds_left(10))


def test_long_files_are_read_to_the_end_and_newest_rescues_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "LOOK_BYTES", 500)
    run = RunDirectory(made_run(tmp_path / "r", "sgt", finished=False, steps=4))
    files = run.policy("ada")
    files.metrics.write_text("".join(json.dumps({"step": step, "reward": 0.5}) + "\n" for step in range(1, 400)))
    files.rescues.write_text("".join(json.dumps({"step": step, "prompt": f"p{step}"}) + "\n" for step in range(400)))
    live = LiveRun(run, ["ada"])
    live.update()
    assert live.policies["ada"].step == 399
    assert live.policies["ada"].rescues[-1]["prompt"] == "p399"
    files.metrics.write_text("")  # a policy that restarts from the beginning
    live.update()
    assert (live.policies["ada"].step, live.policies["ada"].reward.points) == (0, [])


def test_a_tool_that_makes_no_progress_is_shown_with_its_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the reader's clock, since the last new progress; other phases have no seconds."""
    run = RunDirectory(made_run(tmp_path / "run", "sgt", finished=False, steps=1))
    (run.exchange / "ada").mkdir(parents=True, exist_ok=True)
    policy = reader.LivePolicy(run, "ada")
    now = [100.0]
    monkeypatch.setattr(reader.time, "monotonic", lambda: now[0])

    def beat(phase: str, progress: int) -> str:
        state = {"policy": "ada", "counter": progress, "phase": phase, "step": 1, "progress": progress}
        (run.exchange / "ada" / "heartbeat.json").write_text(json.dumps(state))
        policy.update()
        return policy.doing

    assert beat("calling tool search", 1) == "calling tool search"
    now[0] += 42
    assert beat("calling tool search", 1) == "calling tool search, for 42 s"
    assert beat("calling tool search", 2) == "calling tool search"
    now[0] += 42
    assert beat("waiting for bob", 2) == "waiting for bob"
