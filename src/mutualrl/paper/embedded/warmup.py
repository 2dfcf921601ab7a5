"""Short supervised warm-up that gives each embedded policy its skill."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from mutualrl.paper.embedded.build import EOS, build_model, build_tokenizer
from mutualrl.paper.embedded.spec import POLICIES, Countdown, TinySpec, Tools
from mutualrl.paper.embedded.tools import conversations, pieces
from mutualrl.regimes.hints import with_hint
from mutualrl.tasks.arithmetic import Operation, split_problems
from mutualrl.tasks.countdown import SIZES, STYLES, distinct, held_out, training

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Example = list[tuple[str, bool]]  # pieces of text, each with whether it is learnt
WARM_STEPS = 50  # of linear learning-rate warm-up


def make(name: str, directory: Path) -> None:
    """Build, warm up and save an embedded policy."""
    spec = POLICIES[name]
    tokenizer = build_tokenizer(spec)
    model = build_model(spec, tokenizer)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the order of summation, and so the weights, must not depend on the machine
    try:
        warm_up(model, tokenizer, spec)
    finally:
        torch.set_num_threads(threads)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def warm_up(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, spec: TinySpec) -> None:
    """Train on next tokens of correct solutions, with loss on the completion only; AdamW, cosine to 5 % of the rate."""
    rng = random.Random(spec.seed)
    draw = _sampler(spec, rng, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=spec.learning_rate, weight_decay=spec.weight_decay)
    model.train()
    for step in range(spec.steps):
        cosine = 0.5 * (1 + math.cos(math.pi * step / spec.steps))
        rate = spec.learning_rate * min(1.0, (step + 1) / WARM_STEPS) * (0.05 + 0.95 * cosine)
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids, labels = (each.to(model.device) for each in batch([draw() for _ in range(spec.batch_size)], tokenizer))
        logits = model(input_ids=ids).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def _sampler(spec: TinySpec, rng: random.Random, tokenizer: PreTrainedTokenizerBase) -> Callable[[], Example]:
    """Return a sampler of warm-up examples."""
    warm_up = spec.warm_up
    if isinstance(warm_up, Tools):
        drawn = conversations(warm_up, spec.seed)
        return lambda: list(pieces(next(drawn), tokenizer))
    if isinstance(warm_up, Countdown):
        plain, hinted = _countdown_examples(warm_up, spec.seed)
        return lambda: rng.choice(hinted if warm_up.hinted and rng.random() < warm_up.hinted else plain)
    weak: Operation = "*" if warm_up.strong == "+" else "+"
    strong = split_problems(warm_up.strong)[0]
    scarce = random.Random(2).sample(split_problems(weak)[0], warm_up.scarce_problems) if warm_up.scarce else []

    def draw() -> Example:
        problem = rng.choice(scarce if scarce and rng.random() < warm_up.scarce else strong)
        return _example(problem.prompt, problem.working)

    return draw


def _countdown_examples(warm_up: Countdown, seed: int) -> tuple[list[Example], list[Example]]:
    """Return problems with solutions in one style, excluding held-out problems and training problems of seed 0; and the
    same with a hint in the other style."""
    sizes = SIZES["countdown-three"]
    taken = {problem.key for problem in (*held_out(sizes), *training(sizes, 0))}
    problems = distinct(3, warm_up.problems, random.Random(f"{seed} countdown warm-up"), taken)
    own, other = STYLES[warm_up.style], STYLES[warm_up.other_style]
    plain = [_example(problem.prompt, own(problem.solution)) for problem in problems]
    hinted = [
        _example(with_hint(problem.prompt, other(problem.solution)), own(problem.solution)) for problem in problems
    ]
    return plain, hinted


def _example(prompt: str, solution: str) -> Example:
    return [(prompt, False), (solution + EOS, True)]


def batch(examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and labels, padded on the right; what is not learnt, and the padding, have label -100."""
    rows: list[list[int]] = []
    labels: list[list[int]] = []
    for example in examples:
        encoded = [(tokenizer.encode(text, add_special_tokens=False), learnt) for text, learnt in example]
        rows.append([token for ids, _ in encoded for token in ids])
        labels.append([token if learnt else -100 for ids, learnt in encoded for token in ids])
    width = max(map(len, rows))
    pad = tokenizer.pad_token_id
    return (
        torch.tensor([row + [pad] * (width - len(row)) for row in rows]),
        torch.tensor([label + [-100] * (width - len(label)) for label in labels]),
    )
