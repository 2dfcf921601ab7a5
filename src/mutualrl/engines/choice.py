"""Choice of the engine for a model: vLLM where it is installed and has kernels for it, else transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mutualrl.engines.base import Engine, ScoringEngine
from mutualrl.engines.model_files import check_model
from mutualrl.engines.vllm_engine import VLLMEngine, installed, vllm_problem
from mutualrl.errors import MachineError, UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ENGINES = ("transformers", "vllm")


def check_engine(requested: str | None) -> None:
    """Raise UsageError for an unknown engine, MachineError for vLLM where it is not installed."""
    if requested is not None and requested not in ENGINES:
        raise UsageError(f"--engine {requested}: expected one of: {', '.join(ENGINES)}")
    if requested == "vllm" and not installed():
        raise MachineError(
            "--engine vllm: vLLM is not installed; pip install 'mutualrl[node]', or --engine transformers"
        )


def chosen_engine(requested: str | None, path: str, *, revision: str | None, trust_remote_code: bool) -> str:
    """Return the name of the engine for a model. Raises UsageError, with the reason, if vLLM was requested and
    cannot run it."""
    if requested == "transformers" or not installed():
        return "transformers"
    problem = vllm_problem(path, revision=revision, trust_remote_code=trust_remote_code)
    if problem is None:
        return "vllm"
    if requested == "vllm":
        raise UsageError(f"--engine vllm: model {path!r} is not supported: {problem}; use --engine transformers")
    return "transformers"


def load_engine(
    name: str, path: str, *, longest: int, batch_size: int, revision: str | None, trust_remote_code: bool
) -> Engine:
    """Load a model into the named engine, for sequences of at most `longest` tokens. Raises ModelError, and
    FileDamagedError for a trained model that differs from what its run wrote."""
    check_model(path, revision, trust_remote_code=trust_remote_code)
    if name == "vllm":
        return VLLMEngine.load(path, longest=longest, revision=revision, trust_remote_code=trust_remote_code)
    from mutualrl.engines.transformers_engine import TransformersEngine

    return TransformersEngine.load(path, revision=revision, trust_remote_code=trust_remote_code, batch_size=batch_size)


def load_scoring_engine(path: str, *, revision: str | None, trust_remote_code: bool) -> ScoringEngine:
    """Load a model into the engine that returns log-probs. Raises the same errors as `load_engine`."""
    check_model(path, revision, trust_remote_code=trust_remote_code)
    from mutualrl.engines.transformers_engine import TransformersEngine

    return TransformersEngine.load(path, revision=revision, trust_remote_code=trust_remote_code)


def engine_from_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch_size: int) -> Engine:
    """Return an engine for a model that is already loaded, e.g. one in training."""
    from mutualrl.engines.transformers_engine import TransformersEngine

    return TransformersEngine(model, tokenizer, batch_size)
