"""Scheduler of pytest-xdist for these tests: a module stays on one worker, unless its tests mostly wait."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

REPOSITORY = Path(__file__).resolve().parents[1]


@cache
def spread(module: str) -> bool:
    """Return whether the tests of a module run on any worker: those of long runs, which share no fixture of it."""
    text = (REPOSITORY / module).read_text(encoding="utf-8")
    return "mark.extended" in text and 'scope="module"' not in text


class ByModule(LoadScopeScheduling):
    """Send each module to one worker, as `--dist loadfile` does, and the tests of long runs singly."""

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.partition("::")[0]
        return nodeid if spread(module) else module
