"""Trained models of a run as directories of their own: weights, tokenizer, card, the base's licence, checksums."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mutualrl.engines.model_files import require_finite
from mutualrl.errors import UsageError
from mutualrl.reporting.card import CARD, card
from mutualrl.reporting.run_reader import read_run
from mutualrl.storage.artifacts import relative_files, sha256_of
from mutualrl.storage.rundir import RunDirectory
from mutualrl.storage.trained_model import has_trained_model, trained_model
from mutualrl.tiny import located

SUMS = "SHA256SUMS"
LICENSES = re.compile(r"(LICEN[CS]E|NOTICE|COPYING|USE_POLICY)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Exported:
    """One exported model. `licenses`: the base's files of that kind; none where the base has none at hand."""

    policy: str
    directory: Path
    files: tuple[str, ...]
    licenses: tuple[str, ...]


def export(root: Path, to: Path, policies: Sequence[str] = ()) -> list[Exported]:
    """Copy each policy's trained model to `to`/POLICY; all of them where `policies` names none.

    Every file is compared with the run's marker before, and weights must be finite. A directory appears whole or not at
    all; one that is there is left alone. Raises UsageError, FileDamagedError, DiskError.
    """
    reader = read_run(root)
    run = RunDirectory(reader.root)
    unknown = [name for name in policies if name not in reader.policies]
    if unknown:
        raise UsageError(f"--policy {unknown[0]}: the run has {', '.join(reader.policies)}")
    names = list(policies) or [name for name in reader.policies if has_trained_model(run, name)]
    if not names:
        raise UsageError(f"{root} has no trained model to export (did it finish?)")
    sources = {name: trained_model(run, name, verify=True) for name in names}
    for name, source in sources.items():
        require_finite(source)
        if (to / name).exists():
            raise UsageError(f"{to / name} already exists; name another directory, or remove it")
    to.mkdir(parents=True, exist_ok=True)
    return [
        _export(reader.policies[name].model, name, card(reader, reader.policies[name]), sources[name], to)
        for name in names
    ]


def _export(base: str, name: str, text: str, source: Path, to: Path) -> Exported:
    staging = to / f".{name}.part"
    shutil.rmtree(staging, ignore_errors=True)  # of an export that was killed
    try:
        licenses = _copy(base, text, source, staging)
        files = sorted(relative_files(staging))
        sums = "".join(f"{sha256_of(staging / file)}  {file}\n" for file in files)
        (staging / SUMS).write_text(sums, encoding="utf-8")
        staging.rename(to / name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return Exported(name, to / name, (*files, SUMS), tuple(licenses))


def _copy(base: str, text: str, source: Path, staging: Path) -> list[str]:
    """Copy a model with its card and its base's licence; returns the names of the latter."""
    staging.mkdir()
    for file in relative_files(source):
        if file != CARD:
            (staging / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / file, staging / file)
    (staging / CARD).write_text(text, encoding="utf-8")
    licenses = license_files(base)
    for path in licenses:
        shutil.copyfile(path, staging / path.name)
    return [path.name for path in licenses]


def license_files(base: str) -> list[Path]:
    """Return the files in which a base model says how it may be used: those of its directory, or of the hub's cache."""
    directory = Path(located(base))
    if not directory.is_dir():
        from huggingface_hub import try_to_load_from_cache

        config = try_to_load_from_cache(base, "config.json")
        if not isinstance(config, str):
            return []
        directory = Path(config).parent
    return sorted(path for path in directory.iterdir() if path.is_file() and LICENSES.match(path.name))
