"""Private members of TRL, transformers, accelerate and torch are used in three modules only, and still exist."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from pathlib import Path

import pytest
from accelerate.state import GradientState, PartialState
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from transformers import PreTrainedConfig
from trl import GRPOTrainer
from trl.generation.vllm_generation import VLLMGeneration

import mutualrl
from conftest import REPOSITORY
from mutualrl.adapter.trl_compat import ASSUMPTIONS

SOURCE = Path(mutualrl.__file__).parent
COMPAT = [SOURCE / "adapter" / name for name in ("trl_compat.py", "trl_tools.py", "fsdp2.py")]
#: documented members of named tuples
PUBLIC = {"_replace", "_fields"}
OWNERS = {
    "GRPOTrainer": GRPOTrainer,
    "FSDPModule": FSDPModule,
    "FSDPState": FSDPState,
    "GradientState": GradientState,
    "PartialState": PartialState,
    "PreTrainedConfig": PreTrainedConfig,
    "VLLMGeneration": VLLMGeneration,
}


def foreign_privates(path: Path) -> set[str]:
    """Return the private attributes used that belong neither to `self`, `cls` or `os` nor to the module itself."""
    tree = ast.parse(path.read_text())
    defined = {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    defined |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    foreign = set()
    for node in ast.walk(tree):
        private = isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr)
        if not private:
            continue
        assert isinstance(node, ast.Attribute)
        of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "os")
        if not of_self and node.attr not in defined | PUBLIC:
            foreign.add(node.attr)
    return foreign


def test_only_three_modules_use_private_members() -> None:
    used = {path: foreign_privates(path) for path in SOURCE.rglob("*.py")}
    assert {path: names for path, names in used.items() if names and path not in COMPAT} == {}
    assert all(used[path] for path in COMPAT), "the walk finds nothing"


def test_every_private_member_in_use_is_declared() -> None:
    declared = {assumption.member.split(".")[1] for assumption in ASSUMPTIONS}
    overridden = {
        node.name
        for path in COMPAT
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and re.match(r"_[a-z]", node.name)
    }
    ours = {"_sampler", "_turns_of", "_in_context", "_sample_prefixed"}
    used = set().union(*map(foreign_privates, COMPAT))
    assert (used | overridden) - ours <= declared


@functools.cache
def source_of(owner: type) -> str:
    """Return the source of a class and of its bases."""
    return "".join(inspect.getsource(base) for base in owner.__mro__ if base is not object)


@pytest.mark.parametrize("assumption", ASSUMPTIONS, ids=lambda assumption: assumption.member)
def test_assumed_member_exists_and_has_a_test(assumption: object) -> None:
    member, meaning, test = assumption  # type: ignore[misc]
    owner, name = member.split(".")
    assert hasattr(OWNERS[owner], name) or re.search(rf"self\.{name}\b", source_of(OWNERS[owner])), member
    assert meaning
    assert (REPOSITORY / test).is_file()
