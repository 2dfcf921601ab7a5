"""Public names of a package, imported from its modules on first use: what imports one of them loads no other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module


def on_first_use(package: str, modules: Mapping[str, tuple[str, ...]]) -> Callable[[str], object]:
    """Return the `__getattr__` of a package. `modules`: by module of it, the names that it has."""
    homes = {name: module for module, names in modules.items() for name in names}

    def attribute(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value: object = getattr(import_module(f"{package}.{homes[name]}"), name)
        return value

    return attribute
