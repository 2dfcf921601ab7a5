"""Layers of a recipe, merged from general to specific; the source of each key is recorded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from mutualrl.console.user_path import user_path
from mutualrl.errors import RecipeError, UsageError
from mutualrl.process.plugins import absolute_path
from mutualrl.recipes import yaml_file
from mutualrl.recipes.nesting import anchored
from mutualrl.references import TINY
from mutualrl.regimes import SEPARATOR, parts_of
from mutualrl.section import UserFile

#: a layer of a recipe, as parsed from YAML
Layer = dict[str, Any]

KINDS = ("pools", "regimes", "tasks", "paper")


def recipe_root() -> Path:
    """Return the directory of the shipped recipes: in an installed package, else at the top of the source tree."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "_recipes"
    return installed if installed.is_dir() else package.parents[1] / "recipes"


def shipped() -> Iterator[tuple[str, str, Path]]:
    """Yield all shipped recipes as (kind, name, path), sorted."""
    for kind in KINDS:
        for path in sorted((recipe_root() / kind).glob("*.yaml")):
            yield kind, path.stem, path


def templates() -> Iterator[tuple[str, str, Path]]:
    """Yield the shipped batch scripts and cluster jobs, in the same form."""
    for kind, pattern in (("kubernetes", "*.yaml"), ("skypilot", "*.yaml"), ("slurm", "*.sbatch")):
        for path in sorted((recipe_root() / kind).glob(pattern)):
            yield kind, path.stem, path


def recipe_file(path: Path) -> Path:
    """Return the file of `mutualrl train RECIPE`: the path itself, or the shipped file for `paper/NAME`.

    Raises RecipeError, with the shipped names, for an unknown `paper/NAME`.
    """
    text = str(path)
    if path.exists() or not text.startswith("paper/") or text.endswith((".yaml", ".yml")):
        return path
    return find("paper", text.removeprefix("paper/"))


_SINGULAR = {"pools": "pool", "regimes": "regime", "tasks": "task", "paper": "paper recipe"}


def find(kind: str, name: str) -> Path:
    """Return the path of recipe `name`: a file if it looks like a path, else a shipped recipe.

    Raises RecipeError, with the shipped names, if there is none.
    """
    if name.endswith((".yaml", ".yml")) or "/" in name:
        path = user_path(name)
        if not path.is_file():
            problem = "is a directory" if path.is_dir() else "not found"
            raise RecipeError([f"{_SINGULAR.get(kind, kind)} file {problem}: {name}"])
        return path.resolve()
    names = {n: p for k, n, p in shipped() if k == kind}
    if name not in names:
        raise RecipeError(
            [
                f"unknown {_SINGULAR.get(kind, kind)} {name!r}; expected one of: {', '.join(names)}, or the path of a "
                ".yaml file"
            ]
        )
    return names[name]


def _without_secrets(assignment: str) -> str:
    """Return an assignment for messages, with the values of token keys masked."""
    return re.sub(r"((?<![a-z_])(?:hub_|use_auth_)?token\s*[=:]\s*)[^\s,}]+", r"\1...", assignment)


@dataclass
class Layers:
    """Keys merged so far, and the source that last set each key path."""

    value: Layer = field(default_factory=dict)
    source: dict[tuple[str, ...], str] = field(default_factory=dict)

    def add(self, layer: Layer, source: str) -> None:
        """Merge `layer` over the current layers: mappings merge key by key, other values replace. `run.steps` and
        `run.epochs` exclude each other: the last one set wins."""
        run, before = layer.get("run"), self.value.get("run")
        if isinstance(run, dict) and isinstance(before, dict):
            for key, other in (("steps", "epochs"), ("epochs", "steps")):
                if key in run and other not in run:
                    before.pop(other, None)
        self._merge(self.value, layer, (), source)

    def add_file(self, path: Path) -> None:
        """Merge a YAML file. Relative model and data paths are resolved against the file's directory."""
        self.add_layer(with_name_keys(yaml_file.read(path), str(path)), path)

    def add_text(self, text: str, path: Path) -> None:
        """Merge the YAML text of a run's recipe from `path`, which need not exist."""
        self.add_layer(with_name_keys(yaml_file.parse_mapping(text, str(path)), str(path)), path)

    def add_layer(self, layer: Layer, path: Path) -> None:
        """Merge the parsed content of the file at `path`."""
        self.add(_anchored(layer, path.parent), str(path))

    def set(self, assignment: str) -> None:
        """Apply `--set a.b=c`; `policies.NAME.b=c` sets a key of one policy. Raises RecipeError for any other form, or
        if the pool has no such policy."""
        key, equals, text = assignment.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            raise RecipeError([f"--set {assignment}: expected key=value, e.g. --set run.steps=50"])
        shown = f"--set {_without_secrets(assignment)}"
        value = _value(parts, text, shown)
        if parts[0] in _LISTS and len(parts) > 1:
            self._set_of_member(parts[0], key.strip(), value, shown)
            return
        layer = with_name_keys(_nested(parts, value), shown)
        anchor_code(layer, None)
        self.add(layer, shown)

    def _set_of_member(self, section: str, key: str, value: object, shown: str) -> None:
        """Set a key of one policy or source by its name."""
        members = self.value.get(section)
        if not isinstance(members, list) and not self.value.get("policies"):
            return  # only assignments so far, no pool
        members = members if isinstance(members, list) else []
        names = [str(member.get("name")) if isinstance(member, dict) else "" for member in members]
        rest = key.removeprefix(f"{section}.")
        matches = [name for name in names if name and rest.startswith(f"{name}.")]  # a name may contain dots
        if not matches:
            known = ", ".join(names) or "none"
            raise RecipeError([f"{shown}: found {rest!r}, expected a {_LISTS[section]} and a key: {known}"])
        name = max(matches, key=len)
        index = names.index(name)
        layer = _nested(rest.removeprefix(f"{name}.").split("."), value)
        members[index] = dict(members[index])
        self._merge(members[index], layer, (section, str(index)), shown)

    def source_of(self, path: tuple[str, ...]) -> str | None:
        """Return the source that set the key at `path`, or its nearest parent key."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.source:
                return self.source[path[:length]]
        return None

    def _merge(self, into: Layer, layer: Layer, at: tuple[str, ...], source: str) -> None:
        for key, value in layer.items():
            path = (*at, key)
            self.source[path] = source
            if isinstance(value, dict) and isinstance(into.get(key), dict):
                self._merge(into[key], value, path, source)
            elif isinstance(value, dict):
                into[key] = {}
                self._merge(into[key], value, path, source)
            else:
                into[key] = value


#: lists whose items are set by name
_LISTS = {"policies": "policy", "sources": "source"}
#: last parts of keys under `task` whose value is text as typed: `{question}` would be a mapping in YAML
_TEXTS = ("template", "answer")


def _value(parts: Sequence[str], text: str, shown: str) -> object:
    """Return the value of an assignment: YAML, or the text itself for a text key, unless it is quoted or null."""
    is_text = parts[0].strip() == "task" and parts[-1] in _TEXTS
    if is_text and not text.lstrip().startswith(('"', "'")) and text.strip() not in ("null", "~", ""):
        return text
    return yaml_file.parse(text, shown)


def _nested(parts: Sequence[str], value: object) -> Layer:
    """Return `value` under nested keys: {a: {b: value}} for parts a, b."""
    layer = value
    for part in reversed(parts):
        layer = {part: layer}
    return cast(Layer, layer)


def with_name_keys(layer: Layer, source: str) -> Layer:
    """Return `layer` with `task: math` normalized to `task: {name: math}`, `regime` likewise, and a list of regimes,
    `[xgrpo, {name: sgt, weight: 0.05}]`, to `{name: xgrpo+sgt, sgt: {weight: 0.05}}`.

    Raises RecipeError if either is neither a name nor a mapping, or its name is not a string.
    """
    layer = dict(layer)
    if isinstance(layer.get("regime"), list):
        layer["regime"] = _combined_section(layer["regime"], source)
    for key in ("task", "regime"):
        if key not in layer:
            continue
        value = layer[key] = {"name": layer[key]} if isinstance(layer[key], str) else layer[key]
        if not isinstance(value, dict) or not isinstance(value.get("name", ""), str):
            raise RecipeError(
                [f"{source}: {key}: found {repr(value)[:80]}, expected a name, or a mapping with `name:`"]
            )
    return layer


def _combined_section(regimes: list[object], source: str) -> Layer:
    """Return the section of a list of regimes."""
    section: Layer = {}
    names = []
    for item in regimes:
        keys = {"name": item} if isinstance(item, str) else item
        if not isinstance(keys, dict) or not isinstance(keys.get("name"), str):
            raise RecipeError(
                [f"{source}: regime: found {repr(item)[:80]} in the list, expected a name, or a mapping with `name:`"]
            )
        name = keys["name"]
        settings = {key: value for key, value in keys.items() if key != "name"}
        names.append(name)
        if settings:  # keyed by import path for user code, which is not imported here
            section[name] = settings
    if not names:
        raise RecipeError([f"{source}: regime: found an empty list, expected one or more regimes"])
    if len(names) == 1:
        return {"name": names[0], **(next(iter(section.values())) if section else {})}
    return {"name": SEPARATOR.join(names), **section}


def anchor_code(layer: Layer, directory: Path | None) -> None:
    """Make the import paths of the user's regime and task absolute, relative to the recipe's `directory` or else to the
    working directory."""
    for key in ("regime", "task"):
        section = layer.get(key)
        if not isinstance(section, dict) or not isinstance(section.get("name"), str):
            continue
        parts = parts_of(section["name"]) if key == "regime" else [section["name"]]
        anchored = {part: _anchored_code(part, directory) for part in parts}
        settings = {anchored.get(setting, setting): value for setting, value in section.items()}
        layer[key] = {**settings, "name": SEPARATOR.join(anchored.values())}


def _anchored_code(name: str, directory: Path | None) -> str:
    return absolute_path(name if directory is None else _beside(name, directory))


def _beside(path: str, directory: Path) -> str:
    """Return an import path with its file made absolute if it is in `directory`; others unchanged."""
    file, _, name = path.rpartition(":")
    candidate = directory / file
    return f"{candidate.resolve()}:{name}" if file.endswith(".py") and candidate.is_file() else path


def _anchored(layer: Layer, directory: Path) -> Layer:
    """Return `layer` with absolute paths of models, data and code where they exist in the file's directory."""
    from mutualrl.recipes.schema import Recipe  # here: completion lists recipes without it

    def anchor(mark: UserFile, value: object) -> object:
        if not isinstance(value, str) or value in mark.words:
            return value
        if mark.code:
            return _beside(value, directory)
        if not value or value.startswith((TINY, "/", "~")):
            return value
        try:
            candidate = user_path(directory / value)
        except UsageError:
            return value  # validation of the key reports it
        return str(candidate.resolve()) if candidate.exists() else value

    result = cast(Layer, anchored(layer, (Recipe,), anchor))
    anchor_code(result, directory)
    return result
