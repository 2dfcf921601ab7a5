"""Every private member of TRL, transformers and accelerate stands in one module, and is still there."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest
from accelerate.state import GradientState, PartialState
from transformers import PreTrainedConfig
from trl import GRPOTrainer

import mutualrl
from conftest import REPOSITORY
from mutualrl.training.trl_compat import ASSUMPTIONS

SOURCE = Path(mutualrl.__file__).parent
COMPAT = SOURCE / "training" / "trl_compat.py"
OWNERS = {
    "GRPOTrainer": GRPOTrainer,
    "GradientState": GradientState,
    "PartialState": PartialState,
    "PreTrainedConfig": PreTrainedConfig,
}


def foreign_privates(path: Path) -> set[str]:
    """Return private attributes that are taken of something else than `self`, `cls` or a name of the module's own."""
    tree = ast.parse(path.read_text())
    own = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    own |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    results = set()
    for node in ast.walk(tree):
        private = isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr)
        if not private:
            continue
        assert isinstance(node, ast.Attribute)
        of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "os")
        if not of_self and node.attr not in own:
            results.add(node.attr)
    return results


def test_only_the_compat_module_touches_private_members() -> None:
    touched = {path.relative_to(SOURCE).as_posix(): foreign_privates(path) for path in SOURCE.rglob("*.py")}
    assert {path: names for path, names in touched.items() if names and path != "training/trl_compat.py"} == {}
    assert foreign_privates(COMPAT), "the walk sees nothing"


def test_every_private_member_that_is_touched_is_declared() -> None:
    declared = {assumption.member.split(".")[1] for assumption in ASSUMPTIONS}
    overridden = {
        node.name
        for node in ast.walk(ast.parse(COMPAT.read_text()))
        if isinstance(node, ast.FunctionDef) and re.match(r"_[a-z]", node.name)
    }
    ours = {"_sampler"}
    assert (foreign_privates(COMPAT) | overridden) - ours <= declared


@pytest.mark.parametrize("assumption", ASSUMPTIONS, ids=lambda assumption: assumption.member)
def test_a_member_that_is_assumed_is_there_and_has_its_test(assumption: object) -> None:
    member, meaning, test = assumption  # type: ignore[misc]
    owner, name = member.split(".")
    source = "".join(inspect.getsource(base) for base in OWNERS[owner].__mro__ if base is not object)
    assert hasattr(OWNERS[owner], name) or re.search(rf"self\.{name}\b", source), member
    assert meaning
    assert (REPOSITORY / test).is_file()
