"""Files of a model: their list and digest, and checks of token ids and weights."""

from __future__ import annotations

import hashlib
import json
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mutualrl.errors import FileDamagedError, ModelError
from mutualrl.storage.artifacts import MARKER, sha256_of, verify_directory
from mutualrl.storage.files import read_json

HASHERS = 4  # files read in parallel
#: do not affect the model's outputs: model cards and tool files
_IGNORED = (".md", ".gitattributes")


def model_files(directory: Path) -> list[Path]:
    """Return the files of a model's directory, sorted: all but cards and hidden ones.

    Raises ModelError for a FIFO, a device or a socket, on which a reader would block.
    """
    files = []
    for path in sorted(directory.rglob("*")):
        relative = path.relative_to(directory)
        if any(part.startswith(".") for part in relative.parts):
            continue
        try:
            kind = path.stat().st_mode
        except OSError as error:
            raise ModelError(f"{path}: cannot be read ({error.strerror or error})") from None
        if stat.S_ISDIR(kind):
            continue
        if not stat.S_ISREG(kind):
            raise ModelError(f"{path}: not a regular file; expected the output of save_pretrained")
        if not path.name.endswith(_IGNORED) and path.name != MARKER:
            files.append(path)
    return files


def model_digest(model: str, revision: str | None = None) -> str:
    """Return the identity of a model: `sha256:` and a hash of the names and bytes of its files; for a hub model
    `commit:` and its commit, if it is cached, else the empty string.

    Reads every byte, at 1 to 2 GB per second and core. Raises ModelError if a file cannot be read.
    """
    directory = Path(model)
    if not directory.is_dir():
        commit = cached_commit(model, revision)
        return f"commit:{commit}" if commit else ""
    files = model_files(directory)
    try:
        with ThreadPoolExecutor(HASHERS) as pool:
            sums = list(pool.map(sha256_of, files))
    except OSError as error:
        raise ModelError(f"{error.filename or directory}: cannot be read ({error.strerror or error})") from None
    entries = [[path.relative_to(directory).as_posix(), digest] for path, digest in zip(files, sums, strict=True)]
    return f"sha256:{hashlib.sha256(json.dumps(entries).encode()).hexdigest()}"


def cached_commit(model: str, revision: str | None = None) -> str | None:
    """Return the cached commit of a hub model; None if it is not cached."""
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(model, "config.json", revision=revision)
    return Path(path).parent.name if isinstance(path, str) else None


def check_model_files(directory: Path) -> None:
    """Raise if a model must not be loaded: ModelError for files that are not regular, invalid token ids or weights that
    are not finite, FileDamagedError if a trained model differs from what its run wrote. A hub model, which is not a
    local directory, passes."""
    if not directory.is_dir():
        return
    model_files(directory)
    if (directory / MARKER).exists():
        verify_directory(directory)
    require_token_ids(directory)
    require_finite(directory)


def require_token_ids(directory: Path) -> None:
    """Raise ModelError if a configuration's eos, bos or padding token is not an id of the model's vocabulary."""
    vocabulary: int | None = None
    for name in ("config.json", "generation_config.json"):
        try:
            config = read_json(directory / name) or {}
        except FileDamagedError as error:
            raise ModelError(str(error)) from None
        text_config = config.get("text_config")
        size = config.get("vocab_size", text_config.get("vocab_size") if isinstance(text_config, dict) else None)
        vocabulary = size if type(size) is int else vocabulary
        for key in ("eos_token_id", "bos_token_id", "pad_token_id"):
            value = config.get(key)
            ids = value if isinstance(value, list) and key == "eos_token_id" else [value]
            lowest = 0 if key == "eos_token_id" else -1  # -1: none, in older models
            for token in ids:
                if token is None or (type(token) is int and token >= lowest and token < (vocabulary or token + 1)):
                    continue
                expected = "a token id" if vocabulary is None else f"a token id below {vocabulary}"
                raise ModelError(f"{directory / name}: {key}: found {value!r:.80}, expected {expected}")


def require_finite(directory: Path) -> None:
    """Raise ModelError if a weight in a directory's safetensors is NaN or infinite: all results of such a model would
    be meaningless."""
    import torch
    from safetensors import SafetensorError, safe_open

    for path in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (not a mapping)
                    tensor = file.get_tensor(name)
                    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                        raise ModelError(f"{path}: weight {name!r} is not finite; was training unstable?")
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path}: cannot be read ({error})") from None
