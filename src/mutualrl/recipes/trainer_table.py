"""Table of GRPOConfig's fields, shipped with mutualrl so that `trainer:` is validated without importing TRL.

`python -m mutualrl.recipes.trainer_table` regenerates it from the installed TRL; a test compares the two.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import types
import typing
from functools import cache
from pathlib import Path
from typing import Any

#: fields of TRL's GRPOConfig with their values
Settings = dict[str, Any]
TABLE = Path(__file__).with_name("grpo_config.json")


@cache
def fields() -> dict[str, list[str]]:
    """Return the allowed types of each GRPOConfig field, from: int, float, bool, str, list, dict, null, any."""
    table: dict[str, list[str]] = json.loads(TABLE.read_text("utf-8"))["fields"]
    return table


@cache
def defaults() -> Settings:
    """Return the default of each GRPOConfig field whose default is a number, string, boolean or null."""
    table: Settings = json.loads(TABLE.read_text("utf-8"))["defaults"]
    return table


def _kinds(hint: Any) -> set[str]:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return set().union(*(_kinds(arg) for arg in typing.get_args(hint)))
    if origin is typing.Literal:
        return {type(arg).__name__ for arg in typing.get_args(hint)}
    base = origin or hint
    if base is type(None):
        return {"null"}
    if base is Any:
        return {"any"}
    if isinstance(base, type):
        if issubclass(base, enum.Enum):
            return {"str"}
        for kind in (bool, int, float, str, list, dict):
            if issubclass(base, kind):
                return {kind.__name__}
    return {"any"}


def build() -> dict[str, object]:
    """Return the table of the installed TRL (importing it takes seconds)."""
    import trl

    hints = typing.get_type_hints(trl.GRPOConfig)
    table = {f.name: sorted(_kinds(hints[f.name])) for f in dataclasses.fields(trl.GRPOConfig) if f.init}
    plain_defaults = {}
    for field in dataclasses.fields(trl.GRPOConfig):
        if field.init and (field.default is None or type(field.default) in (bool, int, float, str)):
            plain_defaults[field.name] = field.default
    return {
        "trl": trl.__version__,
        "fields": dict(sorted(table.items())),
        "defaults": dict(sorted(plain_defaults.items())),
    }


if __name__ == "__main__":
    TABLE.write_text(json.dumps(build(), indent=1) + "\n", "utf-8")
