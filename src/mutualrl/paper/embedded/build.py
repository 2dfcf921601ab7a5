"""Tokenizers and models of the embedded pool, before any training."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from mutualrl.paper.embedded.spec import Countdown, TinySpec, Tools
from mutualrl.paper.embedded.tools import MARKS, chat_template, conversations, pieces, response_template
from mutualrl.regimes.hints import with_hint
from mutualrl.storage.files import JsonObject
from mutualrl.tasks.arithmetic import OPERATIONS, split_problems
from mutualrl.tasks.countdown import SIZES, STYLES, training

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PAD, EOS = "<pad>", "<eos>"
_ARCHITECTURES: dict[str, tuple[Any, Any]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM),
}


def build_tokenizer(spec: TinySpec) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer, with digits isolated or merged as in the spec."""
    tokenizer = Tokenizer(models.BPE())
    countdown, tools = isinstance(spec.warm_up, Countdown), isinstance(spec.warm_up, Tools)
    split: list[Any] = [pre_tokenizers.Digits(individual_digits=spec.isolate_digits)]
    if countdown:  # else operators merge with adjacent characters, and expressions do not generalise
        split.append(pre_tokenizers.Split(Regex(r"[-+*/=(){}]| \\\\boxed"), "isolated"))
    split.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=spec.vocabulary,
        special_tokens=[PAD, EOS, *(MARKS if tools else ())],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        min_frequency=2,
        show_progress=False,
    )
    if isinstance(spec.warm_up, Tools):
        texts = _tools_texts(spec.warm_up, spec.seed)
    else:
        texts = _countdown_texts(spec) if countdown else _arithmetic_texts()
    tokenizer.train_from_iterator(texts, trainer)
    return _fast(tokenizer, spec.warm_up if isinstance(spec.warm_up, Tools) else None)


def _fast(tokenizer: Tokenizer, tools: Tools | None) -> PreTrainedTokenizerFast:
    """Return transformers' tokenizer; with tools, also its chat template."""
    chat: JsonObject = {}
    if tools is not None:
        chat["additional_special_tokens"] = [*MARKS]
        chat["chat_template"] = chat_template(tools.calls)
        chat["response_template"] = response_template(tools.calls)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        **chat,
    )


def _tools_texts(warm_up: Tools, seed: int) -> list[str]:
    """Return what lies between the marks of some conversations."""
    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=chat_template(warm_up.calls))
    texts = []
    for messages in itertools.islice(conversations(warm_up, seed), 2000):
        whole = "".join(piece for piece, _ in pieces(messages, bare))
        texts += [text for text in re.split("|".join((*MARKS, EOS)), whole) if text]
    return texts + [str(number) for number in range(1000)] * 4


def _arithmetic_texts() -> list[str]:
    texts = [text for op in OPERATIONS for p in split_problems(op)[0] for text in (p.prompt, p.working)]
    return texts + [str(number) for number in range(100)] * 4


def _countdown_texts(spec: TinySpec) -> list[str]:
    problems = training(SIZES["countdown-three"], spec.seed)
    texts = []
    for problem in problems:
        texts += [problem.prompt, *(style(problem.solution) for style in STYLES.values())]
    if isinstance(spec.warm_up, Countdown) and spec.warm_up.hinted:
        hint = STYLES[spec.warm_up.other_style]
        texts += [with_hint(problem.prompt, hint(problem.solution)) for problem in problems[:500]]
    return texts + [str(number) for number in range(1000)] * 4


def build_model(spec: TinySpec, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return an untrained model of the spec's architecture; its weights depend only on the spec's seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1000 + spec.seed)
        sizes: JsonObject = {
            "vocab_size": len(tokenizer),
            "hidden_size": spec.hidden,
            "intermediate_size": spec.intermediate,
            "num_hidden_layers": spec.layers,
            "num_attention_heads": spec.heads,
            "num_key_value_heads": spec.heads,
            "head_dim": spec.head_dim,
            "max_position_embeddings": 256,
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "bos_token_id": None,
            "tie_word_embeddings": False,
            "attention_dropout": 0.0,
            "dtype": "float32",
        }
        config, model = _ARCHITECTURES[spec.architecture]
        return model(config(**sizes))
