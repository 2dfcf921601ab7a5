"""Layers of a recipe, merged from general to particular, each key remembering where it came from."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from mutualrl.errors import RecipeError, UsageError
from mutualrl.plugins import absolute_path
from mutualrl.recipes import yaml_file
from mutualrl.regimes import SEPARATOR, parts_of
from mutualrl.storage.files import user_path

#: a layer of a recipe, as YAML gives it
Layer = dict[str, Any]

KINDS = ("pools", "regimes", "tasks", "paper")


def recipe_root() -> Path:
    """Return where the shipped recipes lie: inside an installed package, else at the top of the source tree."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "_recipes"
    return installed if installed.is_dir() else package.parents[1] / "recipes"


def shipped() -> Iterator[tuple[str, str, Path]]:
    """Yield all shipped recipes as (kind, name, path), sorted."""
    for kind in KINDS:
        for path in sorted((recipe_root() / kind).glob("*.yaml")):
            yield kind, path.stem, path


def templates() -> Iterator[tuple[str, str, Path]]:
    """Yield what ships beside the recipes, in the same form: batch scripts and jobs of cluster schedulers."""
    for kind, pattern in (("kubernetes", "*.yaml"), ("skypilot", "*.yaml"), ("slurm", "*.sbatch")):
        for path in sorted((recipe_root() / kind).glob(pattern)):
            yield kind, path.stem, path


def recipe_file(path: Path) -> Path:
    """Return the file that `mutualrl train RECIPE` means: a path as it is, or `paper/NAME` for a shipped one.

    Raises RecipeError naming those there are when it is neither.
    """
    text = str(path)
    if path.exists() or not text.startswith("paper/") or text.endswith((".yaml", ".yml")):
        return path
    return find("paper", text.removeprefix("paper/"))


#: what one of a kind is called
_ONE = {"pools": "pool", "regimes": "regime", "tasks": "task", "paper": "recipe of the paper"}


def find(kind: str, name: str) -> Path:
    """Return the recipe called `name`: a file when it looks like one, else a shipped one.

    Raises RecipeError naming those there are.
    """
    if name.endswith((".yaml", ".yml")) or "/" in name:
        path = user_path(name)
        if not path.is_file():
            what = "is a directory" if path.is_dir() else "not found"
            raise RecipeError([f"{_ONE.get(kind, kind)} file {what}: {name}"])
        return path.resolve()
    names = {n: p for k, n, p in shipped() if k == kind}
    if name not in names:
        raise RecipeError(
            [
                f"unknown {_ONE.get(kind, kind)} {name!r}; expected one of: {', '.join(names)}, or the path of a "
                ".yaml file"
            ]
        )
    return names[name]


def _without_secrets(assignment: str) -> str:
    """Return an assignment as messages show it: what may be a token is not repeated."""
    return re.sub(r"((?<![a-z_])(?:hub_|use_auth_)?token\s*[=:]\s*)[^\s,}]+", r"\1...", assignment)


@dataclass
class Layers:
    """Merged keys so far, and for every key path the source that set it last."""

    value: Layer = field(default_factory=dict)
    source: dict[tuple[str, ...], str] = field(default_factory=dict)

    def add(self, layer: Layer, source: str) -> None:
        """Lay `layer` over what is there: mappings merge key by key, anything else replaces. A run's length is given in
        steps or in epochs: whichever comes last counts."""
        run, before = layer.get("run"), self.value.get("run")
        if isinstance(run, dict) and isinstance(before, dict):
            for given, other in (("steps", "epochs"), ("epochs", "steps")):
                if given in run and other not in run:
                    before.pop(other, None)
        self._merge(self.value, layer, (), source)

    def add_file(self, path: Path) -> None:
        """Lay a YAML file over what is there. Relative model and data paths are the file's own."""
        self.add_layer(with_name_keys(yaml_file.read(path), str(path)), path)

    def add_text(self, text: str, path: Path) -> None:
        """Add the YAML text of a run's recipe from `path`, which need not exist."""
        self.add_layer(with_name_keys(yaml_file.parse_mapping(text, str(path)), str(path)), path)

    def add_layer(self, layer: Layer, path: Path) -> None:
        """Lay the content of the file at `path` over what is there."""
        self.add(_anchored(layer, path.parent), str(path))

    def set(self, assignment: str) -> None:
        """Carry out `--set a.b=c`; `policies.NAME.b=c` is of one policy. Raises RecipeError when it is not of that
        form, or the pool has no such policy."""
        key, sign, text = assignment.partition("=")
        parts = key.strip().split(".")
        if not sign or not all(parts):
            raise RecipeError([f"--set {assignment}: expected key=value, such as --set run.steps=50"])
        shown = f"--set {_without_secrets(assignment)}"
        if parts[0] == "policies" and len(parts) > 1:
            self._set_of_policy(key.strip(), yaml_file.parse(text, shown), shown)
            return
        layer = with_name_keys(_nested(parts, yaml_file.parse(text, shown)), shown)
        anchor_code(layer, None)
        self.add(layer, shown)

    def _set_of_policy(self, key: str, value: Any, shown: str) -> None:
        policies = self.value.get("policies")
        if not isinstance(policies, list):
            return  # a layer of wishes, before any pool
        names = [str(policy.get("name")) if isinstance(policy, dict) else "" for policy in policies]
        rest = key.removeprefix("policies.")
        named = [name for name in names if name and rest.startswith(f"{name}.")]  # a name may have dots in it
        if not named:
            raise RecipeError([f"{shown}: found {rest!r}, expected a policy and a key: {', '.join(names)}"])
        name = max(named, key=len)
        index = names.index(name)
        layer = _nested(rest.removeprefix(f"{name}.").split("."), value)
        policies[index] = dict(policies[index])
        self._merge(policies[index], layer, ("policies", str(index)), shown)

    def source_of(self, path: tuple[str, ...]) -> str | None:
        """Return who set the key at `path`, or the nearest key above it."""
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


def _nested(parts: Sequence[str], value: Any) -> Layer:
    """Return `value` under a key within a key: {a: {b: value}} for parts a, b."""
    layer: Any = value
    for part in reversed(parts):
        layer = {part: layer}
    return cast(Layer, layer)


def with_name_keys(layer: Layer, source: str) -> Layer:
    """Return `layer` with `task: math` written out as `task: {name: math}`, and `regime` likewise; a list of regimes,
    `[xgrpo, {name: sgt, weight: 0.05}]`, as `{name: xgrpo+sgt, sgt: {weight: 0.05}}`.

    Raises RecipeError when either is neither a name nor a mapping, or its name is not text.
    """
    layer = dict(layer)
    if isinstance(layer.get("regime"), list):
        layer["regime"] = _listed(layer["regime"], source)
    for key in ("task", "regime"):
        if key not in layer:
            continue
        value = layer[key] = {"name": layer[key]} if isinstance(layer[key], str) else layer[key]
        if not isinstance(value, dict) or not isinstance(value.get("name", ""), str):
            raise RecipeError(
                [f"{source}: {key}: found {repr(value)[:80]}, expected a name, or keys with `name:` among them"]
            )
    return layer


def _listed(regimes: list[Any], source: str) -> Layer:
    """Return several regimes as one section."""
    section: Layer = {}
    names = []
    for item in regimes:
        keys = {"name": item} if isinstance(item, str) else item
        if not isinstance(keys, dict) or not isinstance(keys.get("name"), str):
            raise RecipeError(
                [f"{source}: regime: found {repr(item)[:80]} in the list, expected a name, or keys with `name:`"]
            )
        name = keys["name"]
        settings = {key: value for key, value in keys.items() if key != "name"}
        names.append(name)
        if settings:  # of the user's own code under its import path: nothing is imported here
            section[name] = settings
    if not names:
        raise RecipeError([f"{source}: regime: found an empty list, expected one or more regimes"])
    if len(names) == 1:
        return {"name": names[0], **(next(iter(section.values())) if section else {})}
    return {"name": SEPARATOR.join(names), **section}


def _with_data(section: Layer, anchor: Callable[[Any], Any]) -> Layer:
    return {k: anchor(v) if k in ("data", "validation_data") else v for k, v in section.items()}


def _with_code(section: Layer, directory: Path) -> Layer:
    """Return a task's section with the files of its code (rewards, environment, tools) that lie beside the recipe made
    absolute."""
    anchored = dict(section)
    for key in ("reward", "environment", "tools"):
        value = section.get(key)
        if isinstance(value, str):
            anchored[key] = _beside(value, directory)
        elif isinstance(value, list):
            anchored[key] = [_beside(each, directory) if isinstance(each, str) else each for each in value]
    return anchored


def _anchored_member(member: Any, anchor: Callable[[Any], Any]) -> Any:
    if isinstance(member, dict):
        return _with_data(member, anchor)
    return {} if member is None else member


def anchor_code(layer: Layer, directory: Path | None) -> None:
    """Make the import paths of the user's regime and task absolute: beside the recipe in `directory`, else from the
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
    """Return an import path with its file absolute, if that lies in `directory`; any other as it is."""
    file, _, name = path.rpartition(":")
    there = directory / file
    return f"{there.resolve()}:{name}" if file.endswith(".py") and there.is_file() else path


def _anchored(layer: Layer, directory: Path) -> Layer:
    """Return `layer` with relative model and data paths that exist beside its file made absolute."""

    def anchor(value: Any) -> Any:
        if not isinstance(value, str) or not value or value.startswith(("tiny:", "/", "~")):
            return value
        try:
            beside = user_path(directory / value)
        except UsageError:
            return value  # refused where the key is checked, with its name
        return str(beside.resolve()) if beside.exists() else value

    policies = layer.get("policies")
    if isinstance(policies, list):
        layer["policies"] = [
            {**p, "model": anchor(p["model"])} if isinstance(p, dict) and "model" in p else p for p in policies
        ]
    anchor_code(layer, directory)
    task = layer.get("task")
    if isinstance(task, dict):
        layer["task"] = _with_code(_with_data(task, anchor), directory)
        if isinstance(members := layer["task"].get("members"), dict):
            layer["task"]["members"] = {name: _anchored_member(member, anchor) for name, member in members.items()}
    return layer
