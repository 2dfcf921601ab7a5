"""YAML subset for recipes: YAML 1.2 numbers and booleans, no duplicate keys, no objects."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NoReturn

import yaml

from mutualrl.errors import FileDamagedError, RecipeError
from mutualrl.storage.files import JsonObject, read_regular

MAX_BYTES = 250_000
MAX_DEPTH = 40


class _Loader(yaml.SafeLoader):
    """YAML 1.2 loader. PyYAML reads YAML 1.1, where `5e-4` is a string, `no` is false and a date is an object."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Reject aliases (nine lines can expand to a billion values) and deep nesting; recipes need neither."""
        self.depth += 1
        if self.check_event(yaml.AliasEvent):
            self._refuse("aliases (*name) are not supported; write out the value")
        if self.depth > MAX_DEPTH:
            self._refuse(f"nested too deeply; expected at most {MAX_DEPTH} levels")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def _refuse(self, problem: str) -> NoReturn:
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        raise yaml.composer.ComposerError(None, None, problem, mark)


class _Dumper(yaml.SafeDumper):
    """Dumper for `_Loader`: strings that YAML 1.2 would read as numbers are quoted."""


_RESOLVERS = {
    "tag:yaml.org,2002:bool": (re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), "tTfF"),
    "tag:yaml.org,2002:null": (re.compile(r"^(?:~|null|Null|NULL|)$"), "~nN\0"),
    "tag:yaml.org,2002:int": (re.compile(r"^[-+]?[0-9]+$"), "-+0123456789"),
    "tag:yaml.org,2002:float": (
        re.compile(
            r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        "-+.0123456789",
    ),
}
for _class in (_Loader, _Dumper):
    _class.yaml_implicit_resolvers = {}
    for _tag in ("bool", "null", "int", "float"):
        _regexp, _first = _RESOLVERS[f"tag:yaml.org,2002:{_tag}"]
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}", _regexp, [*_first, ""] if "\0" in _first else list(_first)
        )


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[object, object]:
    seen: set[object] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node)
        if not isinstance(key, str):
            raise yaml.constructor.ConstructorError(
                None, None, f"a key must be a string, found {key!r}", key_node.start_mark
            )
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key!r}", key_node.start_mark)
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


def _integer(loader: _Loader, node: yaml.ScalarNode) -> int:
    """Return a YAML 1.2 integer: decimal even with leading zeros (1.1 reads `010` as 8)."""
    return int(str(loader.construct_scalar(node)))


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)
_Loader.add_constructor("tag:yaml.org,2002:int", _integer)


def parse(text: str, source: str) -> Any:
    """Return the value of a YAML text. Raises RecipeError with `source`, line and column."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise RecipeError([f"{source}{where}: {getattr(error, 'problem', None) or error}"]) from None
    except RecursionError:
        raise RecipeError([f"{source}: nested too deeply"]) from None
    except (ValueError, KeyError, IndexError, AttributeError) as error:  # e.g. `!!bool foo`, or a huge number
        raise RecipeError([f"{source}: invalid value ({error!r:.200})"]) from None


def read(path: Path) -> JsonObject:
    """Return the mapping in a YAML file. Raises RecipeError if it is missing, unreadable or not a mapping."""
    try:
        text = read_regular(path, MAX_BYTES).decode("utf-8")
    except FileDamagedError as error:
        raise RecipeError([f"{error}; expected a short YAML file"]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError([f"{path}: cannot be read ({error})"]) from None
    return parse_mapping(text, str(path))


def parse_mapping(text: str, source: str) -> JsonObject:
    """Return the mapping in a YAML text. Raises RecipeError with `source`."""
    value = parse(text, source)
    if not isinstance(value, dict):
        raise RecipeError([f"{source}: found {type(value).__name__}, expected a mapping of keys to values"])
    return value


def dump(value: JsonObject) -> str:
    """Return a mapping as YAML text, keys in insertion order."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
    return text
