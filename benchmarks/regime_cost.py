"""Cost of each regime relative to a GRPO step: forward tokens, time, peak memory. One process, alternating arms.

    python benchmarks/regime_cost.py             # about eight minutes on 2 cores

The learner is a Qwen3 of 0.9 M random weights with the embedded model's tokenizer; its rows are recorded (so that all
arms train on the same tokens), but it still generates as many. Peers have published in advance, so waiting is
excluded. Time is the median over steps; memory is the peak of torch's allocations in a step, by its profiler. Writes
benchmarks/results/regime_cost.{json,md}.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import harness

PROMPTS, ROLLOUTS, ROWS, LENGTH, GATED = 8, 8, 16, 64, 0.25
ARMS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "grpo": ("grpo", 0, {}),
    "xgrpo, 1 peer": ("xgrpo", 1, {}),
    "xgrpo, 3 peers": ("xgrpo", 3, {}),
    "sgt, 1 peer": ("sgt", 1, {}),
    "prp, 1 peer": ("prp", 1, {}),
    "prp, 2 peers": ("prp", 2, {}),
    "prp, 3 peers": ("prp", 3, {}),
    "prp snapshot, 3 peers": ("prp", 3, {"denominator": "snapshot"}),
    "prp trust band, 1 peer": ("prp", 1, {"trust": "band"}),
    "hacpo, 1 peer": ("hacpo", 1, {}),
    "swarm, 1 peer": ("swarm", 1, {"external": 8, "verify": False}),
    "sgt fit, 1 peer": ("sgt", 1, {"pick": "lowest_nll"}),
    "xgrpo+sgt, 1 peer": ("xgrpo+sgt", 1, {}),
}
SMOKE = ("grpo", "prp, 1 peer")
TRAINER: dict[str, dict[str, Any]] = {
    "hacpo": {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
}


def text_of(*key: object) -> str:
    """Return a text of about LENGTH tokens that depends only on its key."""
    draw = random.Random(repr(key))
    return " " + "".join(draw.choice("0123456789+*=") for _ in range(LENGTH - 2))


def cpu_peak(function: Callable[[], Any], where: Path) -> int:
    """Return the peak growth of torch's CPU allocations while `function` ran, in bytes."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    profiler.export_chrome_trace(str(where))
    events = [e for e in json.loads(where.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    level = peak = 0
    for event in sorted(events, key=lambda e: e["ts"]):
        level += event["args"]["Bytes"]
        peak = max(peak, level)
    return peak


def publish(root: Path, name: str, tokenizer: Any, rounds: list[list[Any]]) -> None:
    """Publish a peer's rounds: the correct answer on a quarter of the prompts, texts, ids and traces on all."""
    import numpy as np

    from mutualrl.records import Rollout
    from mutualrl.see import Exchange
    from mutualrl.thl import retokenize
    from mutualrl.trajectory import Trajectory

    exchange = Exchange(root, name, "script")
    for number, prompts in enumerate(rounds):
        records = []
        for index, prompt in enumerate(prompts):
            for rollout in range(ROLLOUTS):
                text = text_of(name, prompt.id, rollout)
                ids = np.array(retokenize(text, tokenizer, ended=True).ids, dtype=np.int32)
                reward = float(rollout == 0 and index < GATED * len(prompts))
                trace = np.full(len(ids), -1.0, dtype=np.float32)
                records.append(
                    Rollout(
                        prompt.id,
                        rollout,
                        reward,
                        True,
                        trajectory=Trajectory.of_text(text),
                        token_ids=ids,
                        logprobs=trace,
                    )
                )
        exchange.publish(number, records, number)


class Clock:
    """Seconds of each step, and of its generation."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.generation: list[float] = []


def make_trainer(model: Path, root: Path, arm: str, steps: int, seed: int) -> tuple[Any, Clock]:
    """Return a learner of an arm whose peers have published, and its clock."""
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig
    from trl.trainer.utils import RepeatSampler

    from mutualrl.adapter.data import as_dataset
    from mutualrl.engines.transformers_engine import load_tokenizer
    from mutualrl.regimes import get_regime
    from mutualrl.regimes.regime import publish_schema
    from mutualrl.see import Exchange, WaitTimeouts
    from mutualrl.tasks import TaskSource, get_task
    from mutualrl.thl import retokenize
    from mutualrl.tiny import path_of
    from mutualrl.training import MutualGRPOTrainer, Sharing
    from mutualrl.training.peers import PeerLink

    regime, peers, settings = ARMS[arm]
    names = ["bob", "eve", "dan"][:peers]
    tokenizer, peer_tokenizer = load_tokenizer(str(path_of("ada"))), load_tokenizer(str(path_of("bob")))
    prompts = get_task("arithmetic").read("train", TaskSource()).prompts[:64]
    sampler = RepeatSampler(prompts, mini_repeat_count=1, batch_size=PROMPTS, seed=seed)
    ids = list(sampler) * steps
    for name in names:
        rounds = [[prompts[i] for i in ids[r * PROMPTS : (r + 1) * PROMPTS]] for r in range(steps)]
        publish(root, name, peer_tokenizer, rounds)
    clock = Clock()

    class Recorded(MutualGRPOTrainer):
        """Trainer that generates, but trains on recorded rows."""

        def _generate_single_turn(self, prompt_ids: Any, *rest: Any, **more: Any) -> Any:
            began = time.perf_counter()
            super()._generate_single_turn(prompt_ids, *rest, **more)
            clock.generation.append(time.perf_counter() - began)
            texts = [text_of("own", tuple(row), i % ROLLOUTS) for i, row in enumerate(prompt_ids)]
            return [list(retokenize(text, tokenizer, ended=True).ids) for text in texts], None

    class Steps(TrainerCallback):  # type: ignore[misc]
        """Callback that times the steps."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.steps.append(time.perf_counter() - self.began)

    chosen = get_regime(regime)(**settings)
    sharing = Sharing(
        link=PeerLink(Exchange(root, "ada", "script", timeouts=WaitTimeouts(5.0, 60.0)), names),
        regime=chosen,
        schema=publish_schema([chosen]),
        tokenizers=dict.fromkeys(names, peer_tokenizer),
    )
    trainer = Recorded(
        model=str(model),
        processing_class=tokenizer,
        train_dataset=as_dataset(prompts, tokenizer),
        callbacks=[Steps()],
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        sharing=sharing,
        args=GRPOConfig(
            output_dir=str(root / "out"),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            logging_steps=1,
            max_steps=steps,
            seed=seed,
            learning_rate=0.0,
            remove_unused_columns=False,
            num_generations=ROLLOUTS,
            max_completion_length=LENGTH + 8,
            beta=0.0,
            per_device_train_batch_size=ROWS,
            gradient_accumulation_steps=PROMPTS * ROLLOUTS // ROWS,
            dataloader_pin_memory=False,
            loss_type="grpo",
            **TRAINER.get(regime, {}),
        ),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer, clock


def random_model(directory: Path) -> Path:
    """Save a Qwen3 of 128 x 4 random weights with the vocabulary of the embedded model `ada`; return its directory."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from mutualrl.engines.transformers_engine import load_tokenizer
    from mutualrl.tiny import path_of

    tokenizer = load_tokenizer(str(path_of("ada")))
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def measure(repeats: int, steps: int, arms: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return times of the arms, alternating, and the memory of one step of each."""
    import torch

    torch.set_num_threads(1)
    times: dict[str, list[tuple[float, float]]] = {arm: [] for arm in arms}
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as text:
        directory = Path(text)
        model = random_model(directory / "model")
        make_trainer(model, directory / "warm", "grpo", 3, seed=0)[0].train()
        for repeat in range(repeats):
            order = list(enumerate(arms))
            for number, arm in order[repeat % len(order) :] + order[: repeat % len(order)]:  # rotate the first arm
                trainer, clock = make_trainer(model, directory / f"{repeat}-{number}", arm, steps + 1, seed=repeat)
                trainer.train()
                times[arm] += list(zip(clock.steps, clock.generation, strict=True))[1:]
                logs = [row for row in trainer.state.log_history if "loss" in row][-1]
                extra = logs.get("plan/extra_tokens", 0.0)
                results[arm] = {"extra_tokens": extra, "scored_tokens": logs.get("plan/passage_tokens", 0.0)}
        for number, arm in enumerate(arms):
            trainer, _ = make_trainer(model, directory / f"m-{number}", arm, 1, seed=0)
            results[arm]["peak_bytes"] = cpu_peak(trainer.train, directory / "trace.json")
            results[arm]["step_s"] = statistics.median(step for step, _ in times[arm])
            results[arm]["training_s"] = statistics.median(step - generation for step, generation in times[arm])
            results[arm]["generation_s"] = statistics.median(generation for _, generation in times[arm])
    return results


def table(results: dict[str, dict[str, Any]]) -> str:
    """Return the table of design/regimes.md."""
    base = results["grpo"]
    lines = [
        "| arm | extra tokens per step | step, s | against grpo | training part, s | against grpo | peak memory, MB "
        "| against grpo |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for arm, row in results.items():
        cells = [f"{row['extra_tokens']:.0f}"]
        for key, digits, unit in (("step_s", 3, 1.0), ("training_s", 3, 1.0), ("peak_bytes", 1, 1e6)):
            cells += [f"{row[key] / unit:.{digits}f}", f"{row[key] / base[key]:.2f}"]
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and write the results."""
    parser = harness.options(__doc__)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6)
    args = harness.parse(parser)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    arms = measure(1, 1, SMOKE) if args.smoke else measure(args.repeats, args.steps, tuple(ARMS))
    result = {"command": "python benchmarks/regime_cost.py", "own_tokens": PROMPTS * ROLLOUTS * LENGTH, "arms": arms}
    harness.write(args.out, "regime_cost", result, table(arms))


if __name__ == "__main__":
    main()
