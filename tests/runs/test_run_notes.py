"""Notes on runs in which there is little to learn."""

from __future__ import annotations

from typing import Any

import pytest

from mutualrl.regimes import get_regime
from mutualrl.runs.notes import LearningNotes, live_after


def notes(regime: str, *rows: dict[str, Any]) -> list[str]:
    learning = LearningNotes(get_regime(regime).metrics)
    for row in rows:
        learning.add(row)
    return learning.notes()


FLAT, VARIED = {"reward": 0.0, "reward_std": 0.0}, {"reward": 0.5, "reward_std": 0.5}


def test_equal_rewards_are_said_with_advice() -> None:
    (note,) = notes("grpo", FLAT, FLAT)
    assert note.startswith("every reward is 0 in all 2 steps: there is nothing to learn from. Try the reward on known")
    (note,) = notes("grpo", {"reward": 1.0, "reward_std": 0.0})
    assert note.startswith("every reward is 1 in its one step: there")
    assert note.endswith("Use harder prompts, or a reward that tells rollouts apart")
    assert notes("grpo", FLAT, VARIED) == []
    assert notes("grpo", FLAT, {"reward": 1.0, "reward_std": 0.0}) == []
    assert notes("grpo") == []


def test_equal_rewards_beside_texts_that_were_taught_are_no_standstill() -> None:
    (note,) = notes("sgt", {**FLAT, "sgt/pairs": 3.0}, FLAT)
    assert note.startswith(
        "every reward is 0 in all 2 steps: the texts that it was taught are all it learned from. Try"
    )


def test_tools_that_always_fail_are_the_reason() -> None:
    row = {**FLAT, "tools/call_frequency": 1.0, "tools/failure_frequency": 1.0}
    (note,) = notes("sgt", {**row, "sgt/pairs": 3.0}, row)
    assert note.endswith("Every call of a tool failed: policies/NAME/logs says how")
    (note,) = notes("grpo", row, {**row, "tools/failure_frequency": 0.5})
    assert "Every call" not in note


def test_open_gate_that_taught_nothing_names_the_reason_and_the_setting() -> None:
    row = {**VARIED, "sgt/gate_rate": 0.875, "sgt/pairs": 0.0, "thl/too_long": 4.0, "thl/changed": 1.0}
    (note,) = notes("sgt", row, row)
    assert note == (
        "the regime never acted in all 2 steps, although its gate opened for 88% of the prompts: 8 texts of peers "
        "longer than trainer.max_completion_length in this policy's tokens; raise it for this policy (policies: "
        "trainer.max_completion_length)"
    )
    (note,) = notes("sgt", {**row, "thl/too_long": 0.0})
    assert (
        "in its one step, although its gate opened for 88% of the prompts: this policy's tokenizer changes 1 text of"
        in note
    )
    of_source = {**row, "thl/too_long": 1.0, "see/peers": 0.0, "source/book/texts": 2.0, "source/book/confirmed": 2.0}
    (note,) = notes("sgt", of_source)
    assert "1 text of sources longer than trainer.max_completion_length" in note
    (note,) = notes("sgt", {**of_source, "see/peers": 1.0})
    assert "1 text of peers and sources longer than" in note
    (note,) = notes("sgt", {**of_source, "thl/too_long": 0.0, "thl/changed": 0.0})
    assert note.endswith("no source published a row that it can use")
    assert notes("sgt", row, {**row, "sgt/pairs": 1.0}) == []
    (note,) = notes("sgt", {**row, "sgt/unrenderable": 9.0})
    assert "9 runs of peers that this policy's chat template cannot keep" in note
    (note,) = notes("sgt", {**row, "sgt/unrenderable": 4.0})  # all of them are too long
    assert "raise it for this policy" in note


def test_samples_of_which_none_was_confirmed_are_said() -> None:
    """With `hint: none` nothing of a peer is wanted; with a hint, its row was used."""
    row = {**VARIED, "hinted/gate_rate": 0.25, "hinted/confirmed": 0.0, "plan/samples": 4.0}
    (note,) = notes("hinted", row, row)
    assert "peer" not in note
    assert note.endswith(
        "of 8 answers that it asked this policy for, none was confirmed by the rewards and kept by its filters"
    )
    (note,) = notes("hinted", {**row, "plan/samples": 0.0})
    assert note.endswith("no peer published a row that it can use")


def test_gate_that_never_opened_is_said() -> None:
    (note,) = notes("sgt", {**VARIED, "sgt/gate_rate": 0.0, "sgt/pairs": 0.0})
    assert "on no prompt did every own rollout fail and a peer's succeed" in note


@pytest.mark.parametrize(("regime", "metric"), [("prp", "prp/rows"), ("xgrpo", "xgrpo/advantage_change")])
def test_other_regimes_act_by_their_own_metric(regime: str, metric: str) -> None:
    assert len(notes(regime, {**VARIED, metric: 0.0})) == 1
    assert notes(regime, {**VARIED, metric: 0.1}) == []


def test_live_notes_come_after_ten_steps_or_half_a_short_run() -> None:
    assert [live_after(steps) for steps in (1, 4, 12, 500)] == [1, 2, 6, 10]


def test_run_of_scripts_is_not_advised_what_needs_a_recipe() -> None:
    row = {**VARIED, "sgt/gate_rate": 0.0, "sgt/pairs": 0.0, "see/peers": 1.0}
    (note,) = LearningNotes.of(get_regime("sgt").metrics, [row]).notes()
    assert "complementarity --run" in note
    (note,) = LearningNotes.of(get_regime("sgt").metrics, [row], recipe=False).notes()
    assert "complementarity" not in note
