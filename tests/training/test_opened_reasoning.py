"""Learners whose prompts open a block of reasoning: a text does not open it twice, and one without its end is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mutualrl.engines.transformers_engine import load_tokenizer
from mutualrl.sources.layouts import RecordedText
from mutualrl.sources.prepare import Learner, _learnable
from mutualrl.thl import decode_completion
from mutualrl.training.transfer import TokenTransfer
from mutualrl.trajectory import Trajectory

TEXT = "<think>\ntwo and two\n</think>\n\n4"
OPENS = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<think>\n{% endif %}"


def test_texts_continue_the_block_that_the_prompt_opened(tiny: dict[str, Path]) -> None:
    tokenizer = load_tokenizer(str(tiny["ada"]))
    transfer = TokenTransfer(tokenizer, 64, opened=True)
    taught, plain = transfer.encode([(TEXT, True), ("4", True)])
    assert taught is not None
    assert decode_completion(taught.tolist(), tokenizer) == "two and two\n</think>\n\n4"
    assert plain is None
    assert transfer.refused == {"reasoning": 1}
    aligned = TokenTransfer(tokenizer, 64, {"bob": tokenizer}, opened=True, traced=True)
    assert aligned.encode([(TEXT, False)]) == [None]  # its trace is of the whole text
    whole = replace(transfer, opened=False, encoded={}).to_learner_ids(TEXT, False)
    assert whole is not None and decode_completion(whole.tolist(), tokenizer) == TEXT


def test_a_source_says_before_training_what_such_a_learner_cannot_learn(tiny: dict[str, Path]) -> None:
    tokenizer = load_tokenizer(str(tiny["ada"]))
    tokenizer.chat_template = OPENS
    learner = Learner("ada", tokenizer, 64, None, {})
    found = _learnable(
        [("p", RecordedText(Trajectory.of_stored(TEXT, None))), ("q", RecordedText(Trajectory.of_text("4")))], learner
    )
    assert (found.counts["encodable"], found.counts["reasoning"], found.prompts) == (1, 1, {"p"})
