"""Data sets on the Hugging Face Hub: references, splits, and errors when the hub is unreachable."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from mutualrl.errors import DataError, DataUnavailableError
from mutualrl.references import HUB
from mutualrl.storage.hub import OFFLINE, hub_problem
from mutualrl.tasks.base import NumberedRows
from mutualrl.tasks.rows import numbered, quiet_bars


@dataclass(frozen=True, slots=True)
class HubSource:
    """Data set on the hub. `evaluated`: the split that is evaluated; `note`: why, if it is not the test split.
    `part`: name of its rows in a task with several sources."""

    id: str
    config: str | None = None
    evaluated: str = "test"
    train: str = "train"
    revision: str | None = None
    note: str = ""
    part: str = ""

    def split(self, split: str) -> str:
        """Return the hub's name for a split."""
        return self.train if split == "train" else self.evaluated

    def origin(self, split: str) -> str:
        """Return its name in results."""
        note = f" ({self.note})" if self.note and split != "train" else ""
        return f"{self.id} {self.split(split)}{note}"


def parse_reference(path: Path, *, evaluated: str = "") -> HubSource:
    """Parse a reference `hub:OWNER/NAME[:CONFIG[:SPLIT]]`. Without a split, `train` is trained on and `evaluated`
    evaluated; if that is empty, the test split, the validation split, or the first split, whichever exists first.

    Raises DataError for any other form.
    """
    name, *rest = str(path).removeprefix(HUB).split(":")
    if len(rest) > 2 or not name or name.count("/") > 1 or not all(name.split("/")):
        raise DataError(f"{path}: expected hub:OWNER/NAME, hub:OWNER/NAME:CONFIG or hub:OWNER/NAME:CONFIG:SPLIT")
    config = rest[0] if rest and rest[0] else None
    if len(rest) > 1:
        return HubSource(name, config, evaluated=rest[1], train=rest[1])
    return HubSource(name, config, evaluated=evaluated)


def _is_cached(name: str) -> bool:
    """Return whether a data set is in the cache of the hub or of `datasets`, from their directories, since importing
    `datasets` takes seconds."""
    from huggingface_hub import constants

    built = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME) / "datasets")
    fetched = Path(constants.HF_HUB_CACHE)
    return (built / name.replace("/", "___")).is_dir() or (fetched / f"datasets--{name.replace('/', '--')}").is_dir()


def hub_rows(source: HubSource, split: str) -> NumberedRows:
    """Yield (row number from 1, row) of a split. Raises DataError, with the remedy, if it cannot be loaded."""
    problem = hub_problem()
    cause: Exception | None = None
    if problem is None or (problem == OFFLINE and _is_cached(source.id)):
        from datasets import get_dataset_split_names, load_dataset

        quiet_bars()
        try:
            if not source.split(split):
                names = get_dataset_split_names(source.id, source.config, revision=source.revision)
                source = replace(source, evaluated=next((s for s in ("test", "validation") if s in names), names[0]))
            data = load_dataset(source.id, source.config, split=source.split(split), revision=source.revision)
        except Exception as error:  # noqa: BLE001  (each transport library raises its own errors)
            cause = error
            problem = problem or f"{type(error).__name__}: {str(error)[:200]}"
        else:
            yield from numbered(data)
            return
    raise DataUnavailableError(
        f"the data set {source.id!r} ({source.split(split) or 'test'}) cannot be loaded from the hub: {problem}; add "
        "--data FILE (JSON Lines in the original fields, or a directory of them)"
    ) from cause
