"""Files of a model: their list and digest, and checks of token ids and weights."""

from __future__ import annotations

import hashlib
import json
import stat
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mutualrl.console.user_path import user_path
from mutualrl.errors import FileDamagedError, ModelError
from mutualrl.references import HUB_ID, TINY
from mutualrl.storage.artifacts import MARKER, sha256_of, verify_directory
from mutualrl.storage.files import JsonObject, read_json
from mutualrl.tiny import is_embedded, names

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


def is_local(model: str, revision: str | None = None) -> bool:
    """Return whether a model is a directory of this machine or in the hub's cache."""
    return Path(model).is_dir() or cached_commit(model, revision) is not None


ADAPTER = "adapter_config.json"
_WEIGHTS = ("*.safetensors", "*.bin")


def check_model(model: str, revision: str | None = None, *, trust_remote_code: bool = False) -> None:
    """Raise if a model must not be trained or evaluated: before training, evaluation, diagnostics, and by `init` and
    `--dry-run`.

    ModelError: a file that is not regular, an invalid token id, a weight that is not finite, an adapter beside the
    weights, a weight that is missing or of another shape (as transformers' loader reports it), or a configuration that
    could not be saved. FileDamagedError: a trained model that differs from what its run wrote.

    The embedded models, which the package's tests load, and hub models that are not cached are not checked.
    """
    directory = Path(model)
    if is_embedded(model):
        return
    if directory.is_dir():
        model_files(directory)
        if (directory / MARKER).exists():
            verify_directory(directory)
        require_token_ids(directory)
        require_no_adapter(directory)
        require_finite(directory)
    elif cached_commit(model, revision) is None:
        return
    require_loadable(model, revision, trust_remote_code=trust_remote_code)


def require_no_adapter(directory: Path) -> None:
    """Raise ModelError if a directory has an adapter: transformers would add it to weights that may contain it."""
    if not (directory / ADAPTER).is_file():
        return
    if not any(path for pattern in _WEIGHTS for path in directory.glob(pattern) if "adapter" not in path.name):
        raise ModelError(adapter_message(directory))
    raise ModelError(
        f"{directory} has {ADAPTER} beside a model's weights: transformers would add the adapter to weights that may "
        f"already contain it. If they do (merge_and_unload), remove {ADAPTER} and adapter_model.*; if not, move both "
        "files to a directory of their own and merge them"
    )


def known_model(value: str) -> str:
    """Return a model's reference: an embedded one (`tiny:ada`), the absolute path of a directory, or a hub id. Raises
    ValueError for a missing path, and for a directory without a model."""
    if value.startswith(TINY):
        models = [TINY + name for name in names()]
        if value not in models:
            raise ValueError(f"no embedded model {value!r}; expected one of {', '.join(models)}")
        return value
    path = user_path(value)
    if path.is_dir():
        if (path / ADAPTER).is_file() and not (path / "config.json").is_file():
            raise ValueError(adapter_message(path))
        if not (path / "config.json").is_file():
            raise ValueError(f"model directory {value} has no config.json; expected the output of save_pretrained")
        return str(path.resolve())
    if path.exists() or HUB_ID.fullmatch(value) is None:
        raise ValueError(f"model not found: {value!r} is neither a directory nor a hub id (owner/name)")
    return value


def model_problem(value: str) -> str | None:
    """Return why a reference is no model that may be loaded (`known_model`); None if it is one."""
    try:
        known_model(value)
    except ValueError as error:
        return str(error)
    return None


def adapter_message(directory: Path) -> str:
    """Return the message for a directory that is only an adapter, with the command that merges it into its base."""
    merge = (
        "from peft import AutoPeftModelForCausalLM as M; from transformers import AutoTokenizer as T; "
        f"a = {str(directory)!r}; m = M.from_pretrained(a); "
        "T.from_pretrained(m.peft_config['default'].base_model_name_or_path).save_pretrained('merged'); "
        "m.merge_and_unload().save_pretrained('merged')"
    )
    return (
        f"{directory} is a LoRA adapter ({ADAPTER}), not a model; merge it into its base, and use the result: "
        f'python -c "{merge}"'
    )


def require_loadable(model: str, revision: str | None = None, *, trust_remote_code: bool = False) -> None:
    """Raise ModelError unless every weight of the architecture is in the model's files, in its shape, and its
    configuration can be saved. Builds the model on the meta device: no weight is read."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)  # its report is in our message
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        loaded, report = AutoModelForCausalLM.from_pretrained(
            model,
            revision=revision,
            trust_remote_code=trust_remote_code,
            device_map="meta",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except Exception as error:
        raise ModelError(f"model {model!r} cannot be loaded: {error}") from error
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
    require_all_weights(model, report)
    with tempfile.TemporaryDirectory(prefix="mutualrl-") as directory:
        try:
            loaded.config.save_pretrained(directory)
        except Exception as error:
            raise ModelError(f"model {model!r}: its config.json cannot be saved again ({error}); repair it") from error


def require_all_weights(model: str, report: JsonObject) -> None:
    """Raise ModelError for a loader's report with missing weights, weights of other shapes, or weights of an
    adapter."""
    unexpected = sorted(report["unexpected_keys"])
    adapted = [name for name in unexpected if "lora_" in name or ".base_layer." in name]
    if adapted:
        raise ModelError(
            f"model {model!r} has weights of an adapter, such as {adapted[0]!r}, which transformers ignores: save the "
            "merged model (peft's merge_and_unload)"
        )
    if missing := sorted(report["missing_keys"]):
        renamed = f"; it has {len(unexpected)} others, such as {unexpected[0]!r} (renamed?)" if unexpected else ""
        raise ModelError(
            f"model {model!r} lacks {len(missing)} of its weights, such as {missing[0]!r}{renamed}: transformers would "
            "draw them at random"
        )
    if mismatched := sorted(str(entry[0]) for entry in report["mismatched_keys"]):
        raise ModelError(
            f"model {model!r}: {len(mismatched)} of its weights, such as {mismatched[0]!r}, have another shape than "
            "its config.json requires"
        )


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
