"""Preparation of sources: verification by the run's rewards, what is said before the start, and storage."""

from __future__ import annotations

import json
import math
import os
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from recorded_files import LAYOUTS, write_jsonl

from mutualrl.engines.transformers_engine import load_tokenizer
from mutualrl.errors import DataError, FileDamagedError, RewardError
from mutualrl.paper.embedded.book import rows as book_rows
from mutualrl.records import Prompt
from mutualrl.sources.prepare import Criterion, Learner, Prepared, prepare_sources, read_stored
from mutualrl.sources.recorded import read_recorded
from mutualrl.sources.section import Columns, RecordedSource
from mutualrl.tiny import path_of

PROMPTS = [Prompt(f"id{n}", f"{n}+{n}:", str(2 * n), "+") for n in range(2, 8)]
VALIDATION = [Prompt(f"v{n}", f"{n}*{n}:", str(n * n), "*") for n in range(2, 8)]
RIGHT = {prompt.text: [f" {prompt.answer} \\boxed{{{prompt.answer}}}"] for prompt in PROMPTS}
MIXED = {key: [*texts, " 99 \\boxed{99}"] for key, texts in RIGHT.items()}


def learner(name: str = "ada", limit: int | None = 20, weights: tuple[float, ...] | None = None) -> Learner:
    return Learner(name, load_tokenizer(str(path_of(name))), limit, weights, {}, success_above=0.8)


def prepare(path: Path | str, *learners: Learner, rewards: tuple[str, ...] = ("boxed",), **spec: Any) -> Prepared:
    source = RecordedSource(name="book", recorded=str(path), **spec)
    members = learners or (learner(),)
    return prepare_sources([source], Criterion(PROMPTS, rewards, members, 60.0, VALIDATION))["book"]


def rewards_by_text(prepared: Prepared) -> dict[str, float]:
    table = prepared.source.table
    return dict(zip(table["y_text"].to_pylist(), table["reward"].to_pylist(), strict=True))


@pytest.mark.parametrize("name", LAYOUTS)
def test_rewards_are_the_verifiers_whatever_the_file_claims(name: str, tmp_path: Path) -> None:
    prepared = prepare(LAYOUTS[name](tmp_path / "f", MIXED))
    assert set(rewards_by_text(prepared).values()) == {0.0, 1.0}
    assert (prepared.summary["texts"], prepared.summary["confirmed"]) == (12, 6)
    assert prepared.digest == prepare(LAYOUTS["deep_math"](tmp_path / "g", MIXED)).digest
    assert prepared.digest != prepare(LAYOUTS["deep_math"](tmp_path / "h", RIGHT)).digest


def test_what_is_found_is_said_before_training(tmp_path: Path) -> None:
    texts = {**MIXED, "2*2:": [" 4 \\boxed{4}"]}
    texts["7+7:"] = [" 14" * 30 + " \\boxed{14}"]
    prepared = prepare(LAYOUTS["open_r1"](tmp_path / "f", texts), learner(), learner("bob"))
    note = prepared.note
    assert "source book: 7 rows (texts from 'generations'; prompts from 'uuid' and 'problem'" in note
    assert "6 of 6 training prompts (rows) have a text" in note
    assert "11 texts, distinct in each (left out: 6 cut off)" in note
    assert "6 confirmed by the reward, on 6 prompts" in note
    assert "ada can learn 5 of them (1 too long: max_completion_length 95 would do for one on each prompt)" in note
    assert "bob can learn 5 of them (1 too long: max_completion_length 64 would do for one on each prompt)" in note
    assert "texts of 1 validation prompts are left out" in note
    assert prepared.summary["learners"]["ada"] == {"encodable": 5, "too_long": 1, "changed": 0, "needed_length": 95}


def test_file_of_the_validation_set_is_refused_unless_allowed(tmp_path: Path) -> None:
    texts = {prompt.text: ["x"] for prompt in VALIDATION} | {"2+2:": [" 4 \\boxed{4}"]}
    file = LAYOUTS["trl"](tmp_path / "f", texts)
    with pytest.raises(
        DataError, match=r"6 validation prompts and 1 training.*--set sources.book.allow_validation=true"
    ):
        prepare(file)
    prepared = prepare(file, allow_validation=True)
    assert prepared.source.table["prompt_id"].to_pylist() == ["id2"]
    only = LAYOUTS["trl"](tmp_path / "g", {prompt.text: ["x"] for prompt in VALIDATION})
    with pytest.raises(DataError, match="no usable text for any training prompt"):
        prepare(only, allow_validation=True)


def test_file_without_a_confirmed_text_is_refused_with_an_example(tmp_path: Path) -> None:
    wrong = {prompt.text: [" 99 \\boxed{99}"] for prompt in PROMPTS}
    with pytest.raises(
        DataError, match=r"none of its 6 texts earns a reward above 0.8 from boxed.*boxed\{99\}.*answer is '4'"
    ):
        prepare(LAYOUTS["trl"](tmp_path / "f", wrong))


JUDGE = """
calls = []

def score(prompts, completions, completion_ids, answer, **kwargs):
    calls.append(len(completions))
    assert all(ids and isinstance(ids[0], int) for ids in completion_ids)
    return [None if "99" in text else 0.5 * (label in text) for text, label in zip(completions, answer)]

def stateful(completions, trainer_state, **kwargs):
    return [float(trainer_state.global_step)] * len(completions)

def state_by_name(completions, **kwargs):
    return [float(kwargs["trainer_state"].global_step)] * len(completions)

def broken(completions, **kwargs):
    raise KeyError("nothing")
"""


def test_own_reward_functions_score_the_texts_as_in_training(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(JUDGE)
    file = LAYOUTS["trl"](tmp_path / "f", MIXED)
    rewards = rewards_by_text(prepare(file, learner(weights=(2.0,)), rewards=(f"{tmp_path}/judge.py:score",)))
    assert rewards[" 4 \\boxed{4}"] == 1.0
    assert math.isnan(rewards[" 99 \\boxed{99}"])
    with pytest.raises(RewardError, match="source 'book': reward function broken"):
        prepare(file, rewards=(f"{tmp_path}/judge.py:broken",))


def test_rewards_that_depend_on_training_or_the_learner_are_left_to_the_learners(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(JUDGE)
    file = LAYOUTS["trl"](tmp_path / "f", MIXED)
    for name in ("stateful", "state_by_name"):
        stateful = prepare(file, rewards=(f"{tmp_path}/judge.py:{name}",))
        assert not stateful.source.verified
    assert all(map(math.isnan, rewards_by_text(stateful).values()))
    assert "each learner computes them in the round" in stateful.note
    weighted = learner(weights=(2.0,)), learner("bob")
    assert not prepare(file, *weighted, rewards=(f"{tmp_path}/judge.py:score",)).source.verified
    same = learner(weights=(2.0,)), learner("bob", weights=(2.0,))
    assert prepare(file, *same, rewards=(f"{tmp_path}/judge.py:score",)).source.verified


def test_rounds_have_the_texts_of_their_prompts_in_a_fixed_order(tmp_path: Path) -> None:
    source = prepare(LAYOUTS["open_thoughts"](tmp_path / "f", MIXED)).source
    rollouts = source.rollouts(3, ["id5", "id2", "id5", "unknown"])
    assert [(r.prompt_id, r.index, r.round, r.policy) for r in rollouts] == [
        *(("id2", n, 3, "book") for n in (0, 1)),
        *(("id5", n, 3, "book") for n in (0, 1)),
    ]
    assert all(r.ended and r.token_ids is None and r.logprobs is None for r in rollouts)
    assert len(source.rollouts(0, ["unknown"])) == 0


def test_stored_rollouts_are_read_back_and_changes_are_refused(tmp_path: Path) -> None:
    prepared = prepare(LAYOUTS["trl"](tmp_path / "f", MIXED))

    def read(data: bytes, digest: str = prepared.digest) -> pa.Table:
        return read_stored(data, "book", digest, verified=True, learners=None, where="book.parquet").table

    assert read(prepared.data).equals(prepared.source.table)
    assert prepared.data == prepare(LAYOUTS["deep_math"](tmp_path / "g", MIXED)).data
    with pytest.raises(FileDamagedError, match=r"book.parquet: changed since the run wrote it"):
        read(prepare(LAYOUTS["trl"](tmp_path / "h", RIGHT)).data)
    for data in (b"", prepared.data[:-20], b"PAR1" + bytes(100)):
        with pytest.raises(FileDamagedError, match=r"book.parquet: not readable as rollouts"):
            read(data)
    other = pa.BufferOutputStream()
    pq.write_table(pa.table({"x": [1]}), other)
    with pytest.raises(FileDamagedError, match="not readable as rollouts"):
        read(other.getvalue().to_pybytes())


def test_reading_keeps_only_texts_of_the_tasks_prompts(tmp_path: Path) -> None:
    """The memory of a read does not grow with the rows of the file."""
    peaks: dict[str, list[int]] = {}
    for count in (2_000, 20_000):
        rows = [{"prompt": f"other {n}", "completion": "x" * 200} for n in range(count)]
        rows[count // 2] = {"prompt": "2+2:", "completion": " 4 \\boxed{4}"}
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{count}.parquet", row_group_size=1000)
        write_jsonl(tmp_path / f"{count}.jsonl", rows)
        del rows
        for suffix in ("parquet", "jsonl"):
            tracemalloc.start()
            found = read_recorded(str(tmp_path / f"{count}.{suffix}"), Columns(), "keep", PROMPTS, VALIDATION)
            peaks.setdefault(suffix, []).append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
            assert found.counts["rows"] == count
            assert len(found.texts) == 1
    assert all(large < 2 * small for small, large in peaks.values())


def test_rows_that_decode_to_more_than_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that many rows refer to is small in the file and large when each has its own."""
    monkeypatch.setattr("mutualrl.storage.parquet.LARGEST_ROWS", 2**22)
    texts = ["x" * 900_000] * 20
    pq.write_table(pa.table({"prompt": ["2+2:"] * 4, "generations": [texts] * 4}), tmp_path / "f.parquet")
    assert (tmp_path / "f.parquet").stat().st_size < 100_000
    with pytest.raises(DataError, match=r"f.parquet, row 1 and the next 3: 72,000,0\d\d bytes when decoded"):
        prepare(tmp_path / "f.parquet")
    os.mkfifo(tmp_path / "pipe.parquet")
    with pytest.raises(DataError, match="a FIFO, a device or a socket"):
        prepare(tmp_path / "pipe.parquet")


def test_texts_per_prompt_may_be_limited(tmp_path: Path) -> None:
    prepared = prepare(LAYOUTS["trl"](tmp_path / "f", {"2+2:": [f"{n} \\boxed{{4}}" for n in range(9)]}), max_texts=3)
    assert prepared.source.table["rollout"].to_pylist() == [0, 1, 2]
    assert "3 texts, distinct in each (left out: 6 over max_texts per prompt)" in prepared.note


def test_hostile_text_is_shown_without_its_control_characters(tmp_path: Path) -> None:
    hostile = "\x1b[2J[bold red]\u202e\\boxed{99}"
    with pytest.raises(DataError) as caught:
        prepare(LAYOUTS["trl"](tmp_path / "f", {"2+2:": [hostile]}))
    assert "\x1b" not in str(caught.value)
    assert "\u202e" not in str(caught.value)
    assert "[bold red]" in str(caught.value)


def test_parquet_with_invalid_utf8_is_refused_by_file_and_row(tmp_path: Path) -> None:
    texts = pa.array([b"fine", b"\xff\xfe"], pa.binary()).view(pa.utf8())
    pq.write_table(pa.table({"prompt": ["2+2:", "3+3:"], "completion": texts}), tmp_path / "f.parquet")
    with pytest.raises(DataError, match=r"f.parquet, row 1 or later: not UTF-8"):
        prepare(tmp_path / "f.parquet")


def test_embedded_book_is_what_its_script_writes_and_partly_wrong() -> None:
    path = Path(read_recorded.__code__.co_filename).parent / "embedded" / "book.jsonl"
    stored: list[Mapping[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    assert stored == list(book_rows())
    texts = [text for row in stored for text in row["generations"]]
    problems = [row["problem"].rstrip(":") for row in stored for _ in row["generations"]]
    wrong = [f"\\boxed{{{eval(p)}}}" not in t for p, t in zip(problems, texts, strict=True)]
    assert 0.3 < sum(wrong) / len(wrong) < 0.5
    assert all(all(row["correct"]) for row in stored)
