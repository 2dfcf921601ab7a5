"""Where keys of a recipe may differ: one declaration per key, four questions."""

from __future__ import annotations

import pytest

from mutualrl.recipes.free import may_differ
from mutualrl.recipes.schema import Recipe
from mutualrl.section import QUESTIONS, Free
from mutualrl.sources.section import KEYS, KINDS

EVERYWHERE = ("resume", "machines", "comparison", "arms")


@pytest.mark.parametrize(
    ("key", "yes"),
    [
        ("run.save_every", EVERYWHERE),
        ("run.step_timeout", EVERYWHERE),
        ("exchange.checkpoints", EVERYWHERE),
        ("hardware.gpus", EVERYWHERE),
        ("policies.ada.parameters", EVERYWHERE),
        ("run.validate_every", ("resume", "machines")),  # the curves that are compared have its points
        ("run.validation_limit", ()),
        ("run.seed", ("comparison",)),
        ("run.steps", ()),
        ("run.publish", ("comparison", "arms")),
        ("launch.processes", ("machines", "comparison", "arms")),
        ("exchange.staleness", ()),
        ("policies.ada.model", ("machines",)),
        ("policies.ada.regime.weight", ("comparison", "arms")),
        ("regime.sgt.weight", ("comparison", "arms")),
        ("sources.book.columns.text", ("comparison", "arms")),
        ("sources.book.recorded", ("machines", "comparison", "arms")),
        ("task.members.math.data", ("machines",)),
        ("task.members.math.weight", ()),
        ("trainer.per_device_train_batch_size", ("machines",)),
        ("policies.ada.trainer.gradient_accumulation_steps", ("machines",)),
        ("trainer.learning_rate", ()),
        ("policies.ada.trainer.beta", ()),
        ("lora.r", ()),
        ("run.unknown", ()),
        ("unknown", ()),
    ],
)
def test_key_says_where_it_may_differ(key: str, yes: tuple[str, ...]) -> None:
    assert {question for question in QUESTIONS if may_differ(Recipe, key, question)} == set(yes)


@pytest.mark.parametrize("key", KEYS)
def test_key_of_a_source_may_differ_as_any_kind_that_has_it_says(key: str) -> None:
    said = {"comparison", "arms"}  # of `sources` itself
    for kind in KINDS.values():
        for note in kind.model_fields[key].metadata if key in kind.model_fields else ():
            said |= note.questions if isinstance(note, Free) else set()
    assert {question for question in QUESTIONS if may_differ(Recipe, f"sources.book.{key}", question)} == said
