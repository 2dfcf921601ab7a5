"""Small real trainings in this process, on an embedded model, fully seeded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import RepeatSampler

from mutualrl.adapter.data import as_dataset
from mutualrl.engines.transformers_engine import load_tokenizer
from mutualrl.recipes import yaml_file
from mutualrl.recipes.layers import find
from mutualrl.records import Prompt, Rollout
from mutualrl.regimes import get_regime
from mutualrl.regimes.hints import FOR_TEXTS
from mutualrl.regimes.regime import publish_schema
from mutualrl.regimes.resample import Resample
from mutualrl.rollouts import SCHEMA
from mutualrl.see import Exchange, WaitTimeouts
from mutualrl.sources.script import recorded_source
from mutualrl.sources.source import Source, StoredSource
from mutualrl.storage.files import write_atomic
from mutualrl.tasks import TaskSource, get_task
from mutualrl.tasks.boxed import boxed_reward, boxed_score
from mutualrl.thl import retokenize
from mutualrl.training.peers import PeerLink
from mutualrl.training.sharing import Sharing
from mutualrl.training.source_rounds import SourceRounds
from mutualrl.training.trainer import MutualGRPOTrainer
from mutualrl.trajectory import Trajectory

STEPS = 3
PROMPTS = get_task("arithmetic").read("train", TaskSource()).prompts[:32]
BY_ID = {p.id: p for p in PROMPTS}
BY_TEXT = {p.text.strip(): p for p in PROMPTS}


class Logs(TrainerCallback):
    """Callback that keeps the trainer's logs."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.rows.append(dict(logs))


def config(output: Path, kind: type[GRPOConfig] = GRPOConfig, **keys: Any) -> GRPOConfig:
    """Return a GRPOConfig for a few steps on CPU: 8 prompts x 4 rollouts per round by default."""
    defaults: dict[str, Any] = {
        "output_dir": str(output),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "per_device_train_batch_size": 32,
        "num_generations": 4,
        "max_completion_length": 20,
        "max_steps": STEPS,
        "learning_rate": 5e-4,
        "beta": 1e-3,
        "loss_type": "grpo",
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "seed": 7,
        "dataloader_pin_memory": False,
    }
    return kind(**{**defaults, **keys})


def train(
    kind: type[GRPOTrainer],
    model: Path,
    output: Path,
    sharing: Sharing | None = None,
    reward: Any = None,
    peft_config: Any = None,
    resume: Path | None = None,
    **keys: Any,
) -> Any:
    """Train, from checkpoint `resume` if given; return the trainer with its logs in `.kept`."""
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(str(model))
    extra = {"sharing": sharing} if sharing is not None else {}
    logs = Logs()
    trainer = kind(
        model=str(model),
        reward_funcs=reward or boxed_reward,
        args=config(output, **keys),
        peft_config=peft_config,
        train_dataset=as_dataset(PROMPTS, tokenizer),
        processing_class=tokenizer,
        callbacks=[logs],
        **extra,
    )
    set_seed(11)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    trainer.kept = logs.rows
    return trainer


def trainer_keys(regime: str) -> dict[str, Any]:
    """Return the trainer's keys that a regime's recipe sets."""
    keys: dict[str, Any] = yaml_file.read(find("regimes", regime)).get("trainer", {})
    return keys


def sharing(
    root: Path,
    regime: str,
    *,
    publish: str = "regime",
    peers: Sequence[str] = ("bob",),
    tokenizers: dict[str, Any] | None = None,
    sources: Sequence[Source] = (),
    **settings: Any,
) -> Sharing:
    """Return the sharing of learner `ada` with its peers and sources, with time-outs of seconds."""
    exchange = Exchange(root, "ada", "script", timeouts=WaitTimeouts(2.0, 20.0))
    chosen = get_regime(regime)(**settings)
    schema = publish_schema([chosen], publish)
    return Sharing(
        PeerLink(exchange, peers),
        chosen,
        schema,
        max_length=40,
        tokenizers=tokenizers or {},
        sources=[SourceRounds.of(source, exchange) for source in sources],
    )


def book(directory: Path, *, verified: bool) -> StoredSource:
    """Return a source with a correct and a wrong solution of every prompt but one in four."""
    rows = [
        {"problem": prompt.text, "generations": [gold(prompt), " \\boxed{0}"], "claimed": [True, True]}
        for number, prompt in enumerate(PROMPTS)
        if number % 4
    ]
    file = directory / "book.jsonl"
    text = "".join(json.dumps(row) + "\n" for row in rows)
    write_atomic(file, text.encode())  # every rank writes it
    data = [{"prompt": p.text, "prompt_id": p.id} for p in PROMPTS]
    source = recorded_source("book", str(file), data)
    if not verified:
        return source
    texts = source.table["y_text"].to_pylist()
    rewards = [
        boxed_score(t, BY_ID[p].answer) for t, p in zip(texts, source.table["prompt_id"].to_pylist(), strict=True)
    ]
    column = source.table.column_names.index("reward")
    return StoredSource("book", source.table.set_column(column, SCHEMA.field("reward"), [rewards]))


HINT_MARKER = FOR_TEXTS.partition("{prompt}")[2].partition("{hint}")[0]


class Replay:
    """Trainer mixin whose completions depend only on the prompt and the rollout's number, so that runs on another
    number of ranks or with another accumulation have the same rows; to a prompt with a hint, on the prompt. Nothing is
    sampled."""

    def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        trainer: Any = self
        first = trainer.accelerator.process_index * len(prompt_ids)
        tokenizer = trainer._tokenizer
        rows = []
        for row, ids in enumerate(prompt_ids):
            shown, marker, _ = tokenizer.decode(ids, skip_special_tokens=True).partition(HINT_MARKER)
            prompt = BY_TEXT[shown.strip()]
            text = rollout_text(prompt, (first + row) % trainer.num_generations, "own")
            text = hinted_text(prompt) if marker else text
            rows.append(list(retokenize(text, tokenizer, ended=True).ids))
        return rows, None


class ReplayedGRPO(Replay, GRPOTrainer):
    """TRL's trainer on recorded completions."""


class ReplayedMutual(Replay, MutualGRPOTrainer):
    """MutualGRPOTrainer on recorded completions."""


class ReplayedResampled(ReplayedMutual):
    """The same with dynamic sampling."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"resample": Resample(), **kwargs})


def rollout_text(prompt: Prompt, rollout: int, policy: str) -> str:
    """Return a solution of one of three lengths, correct in a quarter of the cases."""
    draw = hashlib.sha256(f"{policy}/{prompt.id}/{rollout}".encode()).digest()[0]
    answer = prompt.answer if draw % 4 == 0 else str(draw)
    return "".join(f" {digit}+1=" for digit in range(draw % 3)) + f" \\boxed{{{answer}}}"


def hinted_text(prompt: Prompt) -> str:
    """Return an answer to a prompt with a hint, correct for one prompt in two."""
    draw = hashlib.sha256(f"hinted/{prompt.id}".encode()).digest()[0]
    return f" 1+{draw % 7}= \\boxed{{{prompt.answer if draw % 2 else draw}}}"


def sampled_rounds(prompts: int, rounds: int, repeat: int = 1) -> list[list[str]]:
    """Return the prompt ids of each round, as TRL's sampler draws them with seed 7."""
    sampler = RepeatSampler(PROMPTS, mini_repeat_count=1, batch_size=prompts, repeat_count=repeat, seed=7)
    batches: list[list[str]] = []
    while len(batches) < rounds:
        ids = [PROMPTS[i].id for i in sampler]
        batches += [ids[i : i + prompts] for i in range(0, len(ids), prompts * repeat)]
    return batches[:rounds]


def publish_rollouts(
    root: Path,
    tokenizer: Any,
    rounds: Sequence[Sequence[str]],
    *,
    name: str = "bob",
    rollouts: int = 4,
    fitting: int | None = None,
) -> None:
    """Publish rounds of a peer with texts, ids and traces: all that any regime reads. In each round, all rows after the
    first `fitting` are too long for any learner."""
    exchange = Exchange(root, name, "script")
    for number, prompt_ids in enumerate(rounds):
        records = []
        for prompt_id in dict.fromkeys(prompt_ids):
            for rollout in range(rollouts):
                text = rollout_text(BY_ID[prompt_id], rollout, name)
                if fitting is not None and len(records) >= fitting:
                    text = " 1+1=" * 40 + text
                ids = retokenize(text, tokenizer, ended=True).ids
                trace = tuple(-0.05 - 0.3 * ((i * 7 + rollout) % 5) for i in range(len(ids)))
                reward = boxed_score(text, BY_ID[prompt_id].answer)
                records.append(
                    Rollout(
                        prompt_id,
                        rollout,
                        reward,
                        True,
                        trajectory=Trajectory.of_stored(text, None),
                        token_ids=ids,
                        logprobs=trace,
                    )
                )
        exchange.publish(number, records, number)


def publish_peer(root: Path, rounds: Sequence[Sequence[str]], solved: Sequence[str] | None = None) -> None:
    """Publish rounds of `bob`: gold solutions of the prompts in `solved` (all by default), failures of the others."""
    exchange = Exchange(root, "bob", "script")
    for number, prompt_ids in enumerate(rounds):
        records = []
        for prompt_id in dict.fromkeys(prompt_ids):
            is_solved = solved is None or prompt_id in solved
            text = gold(BY_ID[prompt_id]) if is_solved else None
            records.append(Rollout(prompt_id, 0, float(is_solved), True, trajectory=Trajectory.of_stored(text, None)))
        exchange.publish(number, records, number)


def gold(prompt: Prompt) -> str:
    """Return a correct solution without intermediate steps."""
    return f" \\boxed{{{prompt.answer}}}"


def rounds_of(root: Path, model: Path, output: Path, **keys: Any) -> list[list[str]]:
    """Return the learner's prompt ids by round, from a run that publishes them."""
    train(MutualGRPOTrainer, model, output, sharing(root, "grpo", publish="full"), **keys)
    reader = Exchange(root, "eve", "script")
    rounds, number = [], 0
    while (shard := reader.read("ada", number)) is not None:
        rounds.append(shard.prompt_ids)
        number += 1
    return rounds


def same_training(a: Any, b: Any) -> None:
    """Assert that the logs and weights of two trainings are equal bit for bit."""
    assert len(a.kept) == len(b.kept) > 0
    for one, other in zip(a.kept, b.kept, strict=True):
        for key in ("loss", "grad_norm", "reward", "kl", "entropy", "completions/mean_length"):
            assert one.get(key) == other.get(key), key
    weights_a, weights_b = a.model.state_dict(), b.model.state_dict()
    assert weights_a.keys() == weights_b.keys()
    assert all(torch.equal(weights_a[k], weights_b[k]) for k in weights_a)
