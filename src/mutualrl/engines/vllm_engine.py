"""Generation with vLLM, in this process: continuous batching for models whose head size has a kernel."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Sequence
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from mutualrl.engines.sampling import Sampling
from mutualrl.errors import ModelError
from mutualrl.process import loopback
from mutualrl.records import Completion
from mutualrl.seeds import seed_of
from mutualrl.thl import ended
from mutualrl.trajectory import Trajectory

#: GiB for the KV cache on CPU; the environment variable VLLM_CPU_KVCACHE_SPACE overrides it
CPU_CACHE = "2"


def installed() -> bool:
    """Return whether vLLM can be imported."""
    return find_spec("vllm") is not None


def installed_version() -> str | None:
    """Return the version of vLLM, of either build; None if it is not installed."""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return None


def vllm_problem(path: str, *, revision: str | None = None, trust_remote_code: bool = False) -> str | None:
    """Return why vLLM cannot run a model here (no kernel for its attention head size), None if it can.

    Only the CPU build is checked; on a GPU vLLM selects a backend when the model is loaded. Raises ModelError if the
    model's configuration cannot be read.
    """
    import torch
    from transformers import AutoConfig

    if torch.cuda.is_available():
        return None
    try:
        config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise ModelError(f"the configuration of {path!r} cannot be loaded: {error}") from error
    text = config.get_text_config()
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    _prepare()
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if size in sizes:
        return None
    return f"its attention heads have size {size}; vLLM's CPU build supports {', '.join(map(str, sorted(sizes)))}"


def _prepare() -> None:
    """Set vLLM's environment variables before its import (engine in this process, on the loopback; log level ERROR),
    and bind the store of its process group to the loopback."""
    os.environ.update(loopback.variables(os.environ))
    loopback.bind_stores()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", CPU_CACHE)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def _seed(seed: int, place: int) -> int:
    """Return the seed of one prompt: with a shared seed, every prompt would draw the same noise. (vLLM increments the
    seed for each sample of a prompt.)"""
    return seed_of(seed, place) % 2**30


class VLLMEngine:
    """Generation with a model in vLLM, in the precision that the model was saved in."""

    name = "vllm"

    def __init__(self, llm: Any, context: int, eos_token_ids: Sequence[int]) -> None:
        self._llm = llm
        self.context = context
        self.eos_token_ids = list(eos_token_ids)

    @classmethod
    def load(
        cls, path: str, *, longest: int, revision: str | None = None, trust_remote_code: bool = False
    ) -> VLLMEngine:
        """Load a model by path or hub id, with room for sequences of `longest` tokens (at most the model's context).

        Raises ModelError if vLLM rejects it.
        """
        _prepare()
        import torch
        from transformers import AutoConfig, AutoTokenizer
        from vllm import LLM

        from mutualrl.engines.generation_defaults import eos_token_ids

        try:
            config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
            tokenizer = AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
            context = int(getattr(config.get_text_config(), "max_position_embeddings", 1 << 20))
            saved = getattr(config, "dtype", None) or torch.float32
            gpu = torch.cuda.is_available()
            llm = LLM(
                model=path,
                revision=revision,
                trust_remote_code=trust_remote_code,
                dtype=str(saved).removeprefix("torch."),
                max_model_len=min(context, longest),
                enforce_eager=not gpu,
                seed=0,
                generation_config="vllm",
                disable_log_stats=True,
                **({} if gpu else {"enable_prefix_caching": False}),
            )
        except Exception as error:
            raise ModelError(f"vLLM cannot load the model {path!r}: {error}; try --engine transformers") from error
        ends = eos_token_ids(path, tokenizer, revision=revision, trust_remote_code=trust_remote_code)
        return cls(llm, context, ends)

    def generate_ids(
        self, ids: Sequence[list[int]], sampling: Sampling, on_batch: Callable[[int], None] | None = None
    ) -> list[list[Completion]]:
        """Return completions of every prompt; `on_batch` is called once, at the end: vLLM does the scheduling."""
        from vllm import SamplingParams

        params = [
            SamplingParams(
                n=sampling.samples,
                temperature=sampling.temperature,
                top_p=1.0,
                top_k=0,
                max_tokens=sampling.max_new_tokens,
                stop_token_ids=self.eos_token_ids,
                seed=_seed(sampling.seed, place) if sampling.temperature > 0 else None,
                skip_special_tokens=True,
            )
            for place in range(len(ids))
        ]
        outputs = self._llm.generate([{"prompt_token_ids": list(row)} for row in ids], params, use_tqdm=False)
        if on_batch is not None:
            on_batch(len(ids))
        return [[self._completion(sample) for sample in output.outputs] for output in outputs]

    def _completion(self, sample: Any) -> Completion:
        ids = tuple(int(token) for token in sample.token_ids)
        return Completion(ids, Trajectory.of_text(str(sample.text)), ended(list(ids), self.eos_token_ids))

    def close(self) -> None:
        """Shut down the engine, so that another model can be loaded in this process."""
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self._llm.llm_engine.engine_core.shutdown()
        self._llm = None
        gc.collect()
        cleanup_dist_env_and_memory()
