"""Generation with transformers: any causal language model, on CPU or GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging

from mutualrl.engines.generation_defaults import union_of
from mutualrl.engines.model_files import model_files, require_all_weights
from mutualrl.engines.sampling import Sampling
from mutualrl.engines.scoring import Floats, check_vocabulary, completion_logprobs, context_length, text_logprobs
from mutualrl.errors import ModelError
from mutualrl.records import Completion
from mutualrl.tasks.prompting import Content, Template, prompt_ids
from mutualrl.thl import ended
from mutualrl.trajectory import Trajectory

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


class TransformersEngine:
    """Generation with a loaded transformers model. Prompts are batched by length."""

    name = "transformers"

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        batch_size: int = 64,
        template: Template | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.template = template
        self.eos_token_ids = union_of(tokenizer.eos_token_id, model.generation_config.eos_token_id)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        candidates = (tokenizer.pad_token_id, *self.eos_token_ids, 0)  # padding is masked: any id would do
        self.pad_token_id = next(token for token in candidates if token is not None)

    @classmethod
    def load(
        cls, path: str, *, revision: str | None = None, trust_remote_code: bool = False, batch_size: int = 64
    ) -> TransformersEngine:
        """Load a model and its tokenizer by path or hub id.

        Raises ModelError if that fails or weights are missing (transformers would initialize them at random).
        """
        tokenizer = load_tokenizer(path, revision=revision, trust_remote_code=trust_remote_code)
        if not sys.stderr.isatty():
            logging.disable_progress_bar()
        try:
            model, loading = AutoModelForCausalLM.from_pretrained(
                path, revision=revision, trust_remote_code=trust_remote_code, output_loading_info=True
            )
        except Exception as error:
            raise ModelError(f"model {path!r} cannot be loaded: {error}") from error
        require_all_weights(path, loading)
        return cls(model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer, batch_size)

    def generate(
        self, prompts: Sequence[Content], sampling: Sampling, on_batch: Callable[[int], None] | None = None
    ) -> list[list[Completion]]:
        """Return completions of every prompt; `on_batch` receives the number of prompts done."""
        return self.generate_ids(prompt_ids(prompts, self.tokenizer, self.template), sampling, on_batch)

    def generate_ids(
        self, ids: Sequence[list[int]], sampling: Sampling, on_batch: Callable[[int], None] | None = None
    ) -> list[list[Completion]]:
        """Return completions of prompts given as token ids."""
        check_vocabulary(self.model, max((token for row in ids for token in row), default=0))
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        results: list[list[Completion]] = [[] for _ in ids]
        if sampling.temperature > 0:
            torch.manual_seed(sampling.seed)
        for start in range(0, len(order), self.batch_size):
            rows = order[start : start + self.batch_size]
            completions = self._generate_batch([ids[i] for i in rows], sampling)
            for place, row in enumerate(rows):
                results[row] = completions[place * sampling.samples : (place + 1) * sampling.samples]
            if on_batch is not None:
                on_batch(len(rows))
        return results

    def _config(self, sampling: Sampling) -> GenerationConfig:
        decode: dict[str, Any] = {"do_sample": False}
        if sampling.temperature > 0:
            decode = {"do_sample": True, "temperature": sampling.temperature, "top_k": 0, "top_p": 1.0}
        return GenerationConfig(
            max_new_tokens=sampling.max_new_tokens,
            num_return_sequences=sampling.samples,
            pad_token_id=self.pad_token_id,
            bos_token_id=self.tokenizer.bos_token_id,
            eos_token_id=self.eos_token_ids or None,
            disable_compile=True,
            **decode,
        )

    @property
    def context(self) -> int:
        """Return the context length of the model."""
        return context_length(self.model)

    def logprobs(
        self,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        on_batch: Callable[[int], None] | None = None,
    ) -> list[Floats]:
        """Return log p of every completion token. See `completion_logprobs`."""
        return completion_logprobs(self.model, prompts, completions, on_batch)

    def text_logprobs(
        self, start_id: int, texts: Sequence[Sequence[int]], on_batch: Callable[[int], None] | None = None
    ) -> list[Floats]:
        """Return log p of every token of texts after a start token. See `text_logprobs`."""
        return text_logprobs(self.model, start_id, texts, on_batch)

    def close(self) -> None:
        """Free the model's memory."""
        self.model = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @torch.no_grad()  # type: ignore[untyped-decorator]  # torch is followed as Any
    def _generate_batch(self, ids: list[list[int]], sampling: Sampling) -> list[Completion]:
        width = max(len(row) for row in ids)
        pad = self.pad_token_id
        device = self.model.device
        tokens = torch.tensor([[pad] * (width - len(row)) + row for row in ids], device=device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids], device=device)
        with _no_defaults(self.model):
            output = self.model.generate(
                input_ids=tokens, attention_mask=mask, generation_config=self._config(sampling)
            )
        completions = [self._through_eos(row) for row in output[:, width:].tolist()]
        texts = self.tokenizer.batch_decode(completions, skip_special_tokens=True)
        return [
            Completion(tuple(row), Trajectory.of_text(text), ended(row, self.eos_token_ids))
            for row, text in zip(completions, texts, strict=True)
        ]

    def _through_eos(self, row: list[int]) -> list[int]:
        """Return the ids up to and including the first end token."""
        ends = [i for i, token in enumerate(row) if token in self.eos_token_ids]
        return row[: ends[0] + 1] if ends else row


@contextmanager
def _no_defaults(model: PreTrainedModel) -> Iterator[None]:
    """Keep the model's own generation defaults (e.g. a repetition penalty) out of plain decoding.

    transformers fills the unset fields of a generation config from the model's.
    """
    saved, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = saved


def _config_of(path: str, revision: str | None, trust_remote_code: bool) -> PretrainedConfig:
    try:
        return AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise ModelError(f"model {path!r} cannot be loaded: {error}") from error


def context_of(path: str, *, revision: str | None = None, trust_remote_code: bool = False) -> int:
    """Return a model's context length from its configuration alone. Raises ModelError if that cannot be loaded."""
    config = _config_of(path, revision, trust_remote_code).get_text_config()
    return int(getattr(config, "max_position_embeddings", 1 << 20))


def commit_of(path: str, *, revision: str | None = None, trust_remote_code: bool = False) -> str:
    """Return the commit of a hub model. Raises ModelError if its configuration cannot be loaded."""
    return str(getattr(_config_of(path, revision, trust_remote_code), "_commit_hash", None) or revision or "main")


def load_tokenizer(
    path: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Return a tokenizer by path or hub id, set up as TRL does (padding and truncation on the left).

    Raises ModelError if it cannot be loaded.
    """
    if Path(path).is_dir():
        model_files(Path(path))
    try:
        return AutoTokenizer.from_pretrained(
            path, revision=revision, trust_remote_code=trust_remote_code, padding_side="left", truncation_side="left"
        )
    except Exception as error:
        raise ModelError(f"the tokenizer of {path!r} cannot be loaded: {error}") from error
