"""The memory estimate against torch's memory trackers, and against processes.

    python benchmarks/memory.py            # twenty configurations of .04 to 8 B weights, about fifteen minutes
    python benchmarks/memory.py --real     # processes on the CPU, up to .36 B weights, about ten minutes
    python benchmarks/memory.py --predict  # what was counted, against the present formula; seconds
    python benchmarks/memory.py --pools    # the paper's pools on eight GPUs of 80 GB, predicted; seconds

**Tracked**: a model is built from its configuration with fake tensors, which have sizes and no bytes, and makes two
optimizer steps as TRL's trainer does: a pass without gradients, micro-batches through TRL's output head, AdamW. What
torch's `MemTracker`, or `FSDPMemTracker` over a process group that exists in name only, counts at the peak is compared
with `mwra.memory.estimate`. Ten of the configurations were used to find the formula, ten were held back. The trackers
count CPU kernels; three things stand in for a GPU's: Triton's kernels of TRL's head work in place, so the CPU's do
nothing here, its fp32 product adds in place, and every position is scored. AdamW runs one weight at a time
(`foreach=False, fused=False`): the trackers count the other forms several times.

**Real**: TRL's trainer in one or two processes, in bf16 (under DeepSpeed fp32: accelerate refuses
bf16 there on a CPU), whose resident memory is read from the kernel at the same
instants (`VmHWM`, reset before each). **Pools**: what is left of each GPU, and the most completions per pass that fit.
Writes benchmarks/results/memory.{json,md}, memory_real.{json,md}, memory_pools.{json,md}.
"""

from __future__ import annotations

import argparse
import collections
import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import harness
from mutualrl.machine.devices import Machine
from mutualrl.mwra.fit import WARN, work_of
from mutualrl.mwra.memory import GIB, MemoryEstimate, ModelShape, Work, estimate
from mutualrl.mwra.model_shape import shape_of
from mutualrl.mwra.placement import place
from mutualrl.recipes import Request, resolve

#: architecture, hidden, layers, intermediate, heads, key heads, width of a head, vocabulary, tied
MODELS: dict[str, tuple[str, int, int, int, int, int, int, int, bool]] = {
    "42 M": ("llama", 512, 8, 1536, 8, 4, 64, 32000, True),
    "SmolLM2-135M": ("llama", 576, 30, 1536, 9, 3, 64, 49152, True),
    "SmolLM2-360M": ("llama", 960, 32, 2560, 15, 5, 64, 49152, True),
    "Qwen2.5-0.5B": ("qwen2", 896, 24, 4864, 14, 2, 64, 151936, True),
    "Qwen3-0.6B": ("qwen3", 1024, 28, 3072, 16, 8, 128, 151936, True),
    "TinyLlama-1.1B": ("llama", 2048, 22, 5632, 32, 4, 64, 32000, False),
    "Llama-3.2-1B": ("llama", 2048, 16, 8192, 32, 8, 64, 128256, True),
    "Qwen2.5-1.5B": ("qwen2", 1536, 28, 8960, 12, 2, 128, 151936, True),
    "Qwen3-1.7B": ("qwen3", 2048, 28, 6144, 16, 8, 128, 151936, True),
    "SmolLM2-1.7B": ("llama", 2048, 24, 8192, 32, 32, 64, 49152, True),
    "Llama-3.2-3B": ("llama", 3072, 28, 8192, 24, 8, 128, 128256, True),
    "Phi-4-mini": ("phi3", 3072, 32, 8192, 24, 8, 128, 200064, True),
    "Qwen3-4B": ("qwen3", 2560, 36, 9728, 32, 8, 128, 151936, True),
    "Mistral-7B": ("mistral", 4096, 32, 14336, 32, 8, 128, 32768, False),
    "Llama-3.1-8B": ("llama", 4096, 32, 14336, 32, 8, 128, 128256, False),
    "Ministral-3B": ("mistral", 4096, 14, 14336, 32, 8, 128, 32000, False),  # inferred from its number of weights
    "Qwen3-8B": ("qwen3", 4096, 36, 12288, 32, 8, 128, 151936, False),
}


@dataclass(frozen=True)
class Case:
    """One configuration. `lora`: rank of adapters on all linear layers, 0 for none."""

    model: str
    strategy: str = "ddp"
    ranks: int = 1
    rows: int = 4
    prompt: int = 256
    completion: int = 512
    micro: int = 2
    checkpointing: bool = True
    lora: int = 0
    full_logits: bool = False
    half: bool = True
    held_back: bool = False

    @property
    def label(self) -> str:
        """Return the configuration in a few words."""
        engine = "one device" if self.ranks == 1 else f"{self.strategy} x {self.ranks}"
        parts = [f"{self.rows} x ({self.prompt} + {self.completion})", f"{self.micro} micro-batches"]
        parts += [] if self.checkpointing else ["no checkpointing"]
        parts += [f"LoRA {self.lora}"] if self.lora else []
        parts += ["whole logits"] if self.full_logits else []
        parts += [] if self.half else ["fp32"]
        return f"{engine}, " + ", ".join(parts)


TRACKED = (
    Case("42 M", rows=8, completion=256),
    Case("SmolLM2-135M", rows=8, checkpointing=False),
    Case("SmolLM2-360M", rows=16, completion=256, full_logits=True),
    Case("Qwen3-0.6B", rows=8, lora=32, checkpointing=False),
    Case("Qwen3-0.6B", rows=2, prompt=512, completion=2048),
    Case("TinyLlama-1.1B", checkpointing=False, micro=1),
    Case("Qwen2.5-1.5B", "fsdp2", 2, rows=2, completion=1024),
    Case("SmolLM2-1.7B", "fsdp2", 4, checkpointing=False),
    Case("Qwen3-4B", "fsdp2", 8, rows=1, prompt=1024, completion=3072),
    Case("Mistral-7B", "fsdp2", 4, rows=8, micro=1),
    Case("42 M", rows=32, prompt=64, completion=448, checkpointing=False, micro=1, held_back=True),
    Case("SmolLM2-135M", rows=32, prompt=128, completion=128, full_logits=True, held_back=True),
    Case("SmolLM2-360M", "fsdp2", 2, rows=8, held_back=True),
    Case("SmolLM2-135M", lora=16, rows=8, held_back=True),
    Case("Llama-3.2-1B", rows=2, prompt=512, completion=1536, held_back=True),
    Case("Qwen3-1.7B", "fsdp2", 4, rows=4, checkpointing=False, held_back=True),
    Case("Llama-3.2-3B", "fsdp2", 8, rows=8, completion=1024, micro=1, held_back=True),
    Case("Phi-4-mini", "fsdp2", 4, rows=2, held_back=True),
    Case("Llama-3.1-8B", "fsdp2", 4, lora=16, rows=2, prompt=512, completion=1536, held_back=True),
    Case("Qwen3-8B", "fsdp2", 8, rows=4, completion=1024, full_logits=True, held_back=True),
)
REAL = (
    Case("42 M", rows=4, prompt=64, completion=64),
    Case("42 M", "ddp", 2, rows=4, prompt=64, completion=64),
    Case("42 M", "zero3", 2, rows=4, prompt=64, completion=64, half=False),
    Case("42 M", "fsdp2", 2, rows=4, prompt=64, completion=64),
    Case("SmolLM2-135M", rows=4, prompt=64, completion=64, checkpointing=False),
    Case("SmolLM2-135M", "zero3", 2, rows=4, prompt=64, completion=64, half=False),
    Case("SmolLM2-135M", "fsdp2", 2, rows=4, prompt=64, completion=64),
    Case("SmolLM2-360M", rows=2, prompt=64, completion=64),
)


BUCKET = 20_000_000  # DeepSpeed's buffer, so small that it is used as a whole


def model_of(name: str) -> Any:
    """Return a model with random weights; with fake ones under fake tensors and on the meta device."""
    import transformers

    arch, hidden, layers, intermediate, heads, key_heads, head, vocabulary, tied = MODELS[name]
    config = transformers.AutoConfig.for_model(
        arch,
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=head,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=8192,
        attn_implementation="sdpa",
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        sliding_window=None,
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def shape(name: str) -> ModelShape:
    """Return the shape of a model."""
    import torch

    with torch.device("meta"):
        shape = shape_of(model_of(name))
    assert shape is not None
    return shape


def predicted(case: Case, adapters: int | None, **keys: Any) -> MemoryEstimate:
    """Return the estimate of a case."""
    work = Work(
        case.rows,
        case.prompt,
        case.completion,
        micro_batches=case.micro,
        full_logits=case.full_logits,
        checkpointing=case.checkpointing,
        half=case.half,
        step="single",
        bucket=BUCKET,
        adapters=adapters,
    )
    strategy: Any = case.strategy
    return estimate(shape(case.model), replace(work, **keys), strategy=strategy, ranks=case.ranks)


# ---- tracked


def track(case: Case) -> dict[str, Any]:
    """Return the bytes that torch's tracker counts at the peak of each instant of the second step."""
    import torch
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    stand_in_for_triton()
    hooks_of_trained_weights_only()
    mesh, began = None, time.perf_counter()
    if case.strategy == "fsdp2":
        dist.init_process_group("fake", rank=0, world_size=case.ranks, store=FakeStore())
        mesh = dist.init_device_mesh("cpu", (case.ranks,))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, adapters = fake_model(case, mesh)
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-5, foreach=False, fused=False)
        length = case.prompt + case.completion
        ids = torch.randint(0, 1000, (case.rows, length))
        mask = torch.ones(case.rows, 1, length, length, dtype=torch.bool)
        tracker = tracker_of(model, optimizer, (ids, mask), sharded=mesh is not None)
        peaks = steps(tracker, model, optimizer, ids, mask, case)
    return {"adapters": adapters, "peaks": peaks, "seconds": time.perf_counter() - began}


def fake_model(case: Case, mesh: Any) -> tuple[Any, int | None]:
    """Return the model as TRL trains it, and the number of adapter weights, if only these are trained."""
    from trl.trainer.utils import add_fused_lm_head

    base = model_of(case.model)
    add_fused_lm_head(base, outputs=("log_probs", "entropy"))
    model = with_adapters(base, case.lora) if case.lora else base
    adapters = sum(weight.numel() for weight in model.parameters() if weight.requires_grad) if case.lora else None
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if case.lora:
            base.disable_input_require_grads()  # the tracker would keep every pass's embeddings
    if mesh is not None:
        shard(base, model, mesh)
    model.train()
    return model, adapters


def tracker_of(model: Any, optimizer: Any, inputs: tuple[Any, ...], *, sharded: bool) -> Any:
    """Return torch's tracker for a model, its optimizer and inputs."""
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed._tools.mem_tracker import MemTracker

    if sharded:
        tracker: Any = FSDPMemTracker(model, optimizer)
        tracker.track_inputs(inputs)
        return tracker
    tracker = MemTracker()
    tracker.track_external(model, optimizer, *inputs)
    return tracker


def steps(tracker: Any, model: Any, optimizer: Any, ids: Any, mask: Any, case: Case) -> dict[str, int]:
    """Make two optimizer steps; return the peak of each instant, of the last pass."""
    import torch

    peaks: dict[str, int] = {}

    def instant(name: str) -> None:
        """Note the peak since the last instant."""
        found = tracker.get_tracker_snapshot("peak")
        peaks[name] = sum(snap["Total"] for device, snap in found.items() if device.type != "meta")
        for device, snap in tracker._curr_mem_snap.items():
            tracker._peak_mem[device] = snap["Total"]
            tracker._peak_mem_snap[device] = copy.deepcopy(snap)

    with tracker:
        for _ in range(2):
            instant("before")
            tracker.reset_mod_stats()
            with torch.no_grad():
                scored(model, ids, mask, case)
            instant("logprobs")
            for _ in range(case.micro):
                tracker.reset_mod_stats()
                loss = scored(model, ids, mask, case).float().mean()
                instant("forward")
                loss.backward()
                del loss
                instant("backward")
            optimizer.step()
            instant("update")
            optimizer.zero_grad()
    peaks.pop("before")
    return peaks


def stand_in_for_triton() -> None:
    """Make TRL's head take what it takes with Triton's kernels."""
    import trl.kernels.chunked_logprob as head

    def nothing(*args: object, **kwargs: object) -> None:
        """Do nothing: the kernel works in place."""

    head._forward_tile = head._backward_tile = head._addmm_fp32 = nothing


def with_adapters(base: Any, rank: int) -> Any:
    """Return the model with adapters, as TRL makes them."""
    import peft
    import torch

    config = peft.LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    with patch.object(torch.nn.Module, "to", lambda module, *args, **keys: module):  # fake tensors refuse it
        return peft.get_peft_model(base, config)


def hooks_of_trained_weights_only() -> None:
    """Let the tracker register its hooks on frozen weights too: torch refuses them there, and they have nothing to
    say."""
    import torch

    for name in ("register_hook", "register_post_accumulate_grad_hook"):
        register = getattr(torch.Tensor, name)

        def registered(tensor: Any, hook: Any, register: Any = register) -> Any:
            """Register a hook where there will be a gradient."""
            nothing = torch.utils.hooks.RemovableHandle(collections.OrderedDict())
            return register(tensor, hook) if tensor.requires_grad else nothing

        setattr(torch.Tensor, name, registered)


def shard(base: Any, model: Any, mesh: Any) -> None:
    """Shard a model as accelerate does, but with the output matrix in the root's group: the tracker expects a forward
    of every group's modules, and TRL's head reads the matrix alone."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    half = torch.bfloat16
    keys: Any = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(half, half, half)}
    for layer in base.model.layers:
        fully_shard(layer, **keys)
    fully_shard(model, **keys)


def scored(model: Any, ids: Any, mask: Any, case: Case) -> Any:
    """Return the log-probs of a pass, as TRL computes them, or from whole logits."""
    import torch

    with torch.autocast("cpu", dtype=torch.bfloat16):
        if not case.full_logits:
            return model(input_ids=ids, attention_mask=mask, labels=ids, fused_lm_head=True).log_probs
        keep = case.completion
        out = model(input_ids=ids, attention_mask=mask, logits_to_keep=keep + 1, use_cache=False)
        logits = out.logits[:, :-1].float()
    return -torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, -keep:], reduction="none")


# ---- real


def measure(case: Case) -> dict[str, Any]:
    """Train two steps with TRL's trainer in bf16; return this process's peak bytes at each instant, beyond what it had
    before the model was made."""
    import torch
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    from mutualrl.engines.transformers_engine import load_tokenizer
    from mutualrl.tiny import path_of
    from mutualrl.training.config import on_cpu, strategy_keys

    torch.set_num_threads(1)
    warm_up()
    work_in_small_pieces()
    strategy: Any = case.strategy
    rows = case.rows * case.micro
    keys: dict[str, Any] = {
        "use_cpu": True,
        "bf16": case.half,
        "gradient_checkpointing": case.checkpointing,
        "per_device_train_batch_size": case.rows,
        "gradient_accumulation_steps": case.micro,
        "num_generations": rows,
        "max_completion_length": case.completion,
        "max_steps": 2,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        **strategy_keys(strategy, {}),
    }
    keys |= on_cpu(strategy)
    if strategy == "zero3":
        keys["deepspeed"]["zero_optimization"]["reduce_bucket_size"] = BUCKET
    prompts = Dataset.from_list([{"prompt": "1+2=" * (case.prompt // 4)}] * 64)
    with tempfile.TemporaryDirectory() as name:
        args = GRPOConfig(output_dir=name, **keys)
        tokenizer = load_tokenizer(str(path_of("ada")))
        meter = Meter()
        trainer: Any = GRPOTrainer(
            model_of(case.model),
            reward_funcs=[lambda completions, **_: [float(number % 2) for number in range(len(completions))]],
            args=args,
            train_dataset=prompts,
            processing_class=tokenizer,
        )
        trainer.generation_config.min_new_tokens = case.completion
        trainer.generation_config.eos_token_id = None
        trainer.remove_callback(PrinterCallback)
        trainer._generate = meter.during("generation", trainer._generate)
        trainer.compute_loss = meter.during("forward", trainer.compute_loss)
        trainer.accelerator.backward = meter.during("backward", trainer.accelerator.backward)
        made = trainer.create_optimizer

        def create(*arguments: Any, **more: Any) -> Any:
            """Create the optimizer, whose step is measured."""
            optimizer = made(*arguments, **more)
            optimizer.step = meter.during("update", optimizer.step)
            return optimizer

        trainer.create_optimizer = create
        trainer.train()
    return {"peaks": meter.peaks}


def warm_up() -> None:
    """Let the libraries take what they take once, with a model of no size."""
    import torch
    import transformers

    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 64, "num_attention_heads": 1}
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("llama", **sizes))
    ids = torch.ones(1, 8, dtype=torch.long)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(input_ids=ids, labels=ids).loss.backward()
    torch.optim.AdamW(model.parameters()).step()
    model.generate(ids, max_new_tokens=2, pad_token_id=0)


class Meter:
    """Peak resident memory of this process during calls, beyond that at the meter's creation, by name of the call."""

    def __init__(self) -> None:
        self.before = resident("VmRSS")
        self.peaks: dict[str, int] = {}

    def during(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, measured in every call."""

        def measured(*arguments: Any, **keys: Any) -> Any:
            """Call it."""
            Path("/proc/self/clear_refs").write_text("5")
            try:
                return work(*arguments, **keys)
            finally:
                self.peaks[name] = max(self.peaks.get(name, 0), resident("VmHWM") - self.before)

        return measured


def resident(key: str) -> int:
    """Return a figure of this process from the kernel, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def work_in_small_pieces() -> None:
    """Make TRL's head on a CPU take what it takes on a GPU: the same numbers, a few rows at a time."""
    import torch
    import trl.kernels.chunked_logprob as head

    def by_rows(fold: Callable[..., None]) -> Callable[..., None]:
        def folded(*arguments: Any, **keys: Any) -> None:
            for start in range(0, len(arguments[0]), 32):
                rows = slice(start, start + 32)
                fold(*(each[rows] if isinstance(each, torch.Tensor) else each for each in arguments), **keys)

        return folded

    def add(total: Any, left: Any, right: Any) -> None:
        for start in range(0, left.shape[1], 32):
            part = slice(start, start + 32)
            total.addmm_(left[:, part].float(), right[part].float())

    head._forward_tile, head._backward_tile = by_rows(head._forward_tile), by_rows(head._backward_tile)
    head._addmm_fp32 = add


# ---- the paper's pools

SHAPES = {
    "Qwen/Qwen2.5-Math-1.5B": "Qwen2.5-1.5B",
    "Qwen/Qwen2.5-1.5B-Instruct": "Qwen2.5-1.5B",
    "Qwen/Qwen2.5-Coder-1.5B": "Qwen2.5-1.5B",
    "Qwen/Qwen3-1.7B-Base": "Qwen3-1.7B",
    "Qwen/Qwen3-4B-Base": "Qwen3-4B",
    "meta-llama/Llama-3.2-3B-Instruct": "Llama-3.2-3B",
    "ministral/Ministral-3b-instruct": "Ministral-3B",
    "microsoft/Phi-4-mini-instruct": "Phi-4-mini",
}
POOLS = ("2qwen", "3qwen", "4qwen", "llama-mist", "qwen-phi4")
EIGHT = Machine(tuple(map(str, range(8))), 64, (80 * GIB,) * 8)


def pools() -> list[dict[str, Any]]:
    """Return each policy's memory under SGT, with prompts of the longest allowed."""
    rows = []
    for pool in POOLS:
        recipe = resolve(Request(pool=pool, regime="sgt"))
        for allocation in place(recipe, EIGHT).allocations:
            sizes = shape(SHAPES[recipe.policy(allocation.policy).model])
            work = work_of(recipe, allocation, recipe.task.max_prompt_tokens)

            def peak(count: int, work: Work = work, sizes: ModelShape = sizes, its: Any = allocation) -> float:
                """Return the peak with so many completions per pass."""
                return estimate(sizes, replace(work, rows=count), strategy=its.strategy, ranks=its.processes).peak

            found = estimate(sizes, work, strategy=allocation.strategy, ranks=allocation.processes)
            most = max(count for count in range(1, 200) if peak(count) <= WARN * EIGHT.memory[0])
            names = {"pool": pool, "policy": allocation.policy, "gpus": allocation.processes}
            used = {"strategy": allocation.strategy, "rows": work.rows, "most_rows": most, "peak": found.peak}
            rows.append({**names, **used, "instant": found.instant, "states": found.states})
    return rows


def pools_table(rows: list[dict[str, Any]]) -> str:
    """Return the table of docs/operations.md."""
    lines = ["| pool | policy | engine | states, GiB | peak, GiB | left of 80 | completions per pass, at most |"]
    lines.append("|---|---|---|---|---|---|---|")
    for row in rows:
        numbers = (
            f"{row['states'] / GIB:.1f} | {row['peak'] / GIB:.1f} ({row['instant']}) | {80 - row['peak'] / GIB:.1f}"
        )
        engine = f"{row['strategy']} x {row['gpus']}"
        lines.append(f"| {row['pool']} | {row['policy']} | {engine} | {numbers} | {row['most_rows']} |")
    return "\n".join(lines)


# ---- tables


def run(case: Case, number: int, kind: str) -> dict[str, Any]:
    """Return what a case took, made in a process of its own (`track`) or in its ranks (`measure`): the largest rank."""
    script = [str(Path(__file__)), "--one", str(number), *(["--real"] if kind == "real" else [])]
    with tempfile.TemporaryDirectory() as name:
        script += ["--out", name]
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.ranks)]
        command = [sys.executable, "-W", "ignore", *(launcher if kind == "real" and case.ranks > 1 else []), *script]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
        if done.returncode != 0:
            sys.exit(f"{case.label}: {done.stderr[-2000:]}")
        results = [json.loads(path.read_text()) for path in Path(name).glob("*.json")]
    peaks = [result["peaks"] for result in results]
    return {**results[0], "peaks": {key: max(each[key] for each in peaks) for key in peaks[0]}}


def environment() -> dict[str, str]:
    """Return an environment in which freed memory goes back to the kernel at once."""
    return os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}


def compared(case: Case, result: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """Return a case's row: what was counted, what was predicted, and the deviation of the peak."""
    found = predicted(case, result.get("adapters"), **keys)
    instants = {name: found.instants[name] for name in result["peaks"]}
    counted, expected = max(result["peaks"].values()), max(instants.values())
    return {
        "case": asdict(case),
        "adapters": result.get("adapters"),
        "counted": result["peaks"],
        "predicted": instants,
        "peak": counted,
        "deviation": expected / counted - 1,
    }


def percentile(values: list[float], share: float) -> float:
    """Return the smallest value that `share` of all do not exceed."""
    return sorted(values)[max(0, -(-int(len(values) * share * 100) // 100) - 1)]


def table(rows: list[dict[str, Any]]) -> str:
    """Return the table of docs/operations.md, and the deviations."""
    lines = ["| model | configuration | counted, GiB | at | predicted, GiB | deviation |", "|---|---|---|---|---|---|"]
    for row in rows:
        counted, expected = row["peak"], row["peak"] * (1 + row["deviation"])
        instant = max(row["counted"], key=lambda name: row["counted"][name])
        name = row["case"]["model"] + (" *" if row["case"]["held_back"] else "")
        ends = f"{counted / GIB:.2f} | {instant} | {expected / GIB:.2f} | {row['deviation']:+.1%}"
        lines.append(f"| {name} | {Case(**row['case']).label} | {ends} |")
    return "\n".join(lines)


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the sizes of the deviations: median, 90th percentile, largest; of those held back alone."""
    sizes = [abs(row["deviation"]) for row in rows]
    held = [abs(row["deviation"]) for row in rows if row["case"]["held_back"]]
    result = {"median": statistics.median(sizes), "p90": percentile(sizes, 0.9), "largest": max(sizes)}
    return result | ({"held back, largest": max(held)} if held else {})


def sampled(case: Case, on_processes: bool) -> dict[str, Any]:
    """Return the rows that a process samples at once; the tracked steps sample none."""
    return {"sampled": case.rows * case.micro} if on_processes else {}


def report(out: Path, name: str, command: str, rows: list[dict[str, Any]], **keys: Any) -> None:
    """Write rows with their summary and table."""
    harness.write(out, name, {"command": command, **keys, "summary": summary(rows), "rows": rows}, table(rows))


def main() -> None:
    """Run every case in a process of its own, compare, write, print."""
    parser = harness.options(__doc__)
    parser.add_argument("--real", action="store_true", help="processes instead of torch's trackers")
    parser.add_argument("--predict", action="store_true", help="compare what was counted with the present formula")
    parser.add_argument("--pools", action="store_true", help="predict the paper's pools on eight GPUs")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = harness.parse(parser)
    kind = "real" if args.real else "tracked"
    cases = REAL if args.real else TRACKED
    if args.one is not None:
        result = (measure if args.real else track)(cases[args.one])
        (args.out / f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(result))
        return
    if args.predict:
        for name, on_processes in (("memory", False), ("memory_real", True)):
            stored = json.loads((harness.RESULTS / f"{name}.json").read_text())
            counts = [(Case(**row["case"]), row["adapters"], row["counted"]) for row in stored["rows"]]
            again = [
                compared(case, {"adapters": adapters, "peaks": counted}, **sampled(case, on_processes))
                for case, adapters, counted in counts
            ]
            counted_by = stored.get("counted_by", stored["code"])
            report(args.out, name, stored["command"], again, counted_by=counted_by)
        return
    if args.pools:
        found = pools()
        listed: dict[str, Any] = {"command": "python benchmarks/memory.py --pools", "rows": found}
        harness.write(args.out, "memory_pools", listed, pools_table(found))
        return
    chosen = cases[:1] if args.smoke else cases

    def row(number: int) -> dict[str, Any]:
        """Return a case's row."""
        case = chosen[number]
        found = compared(case, run(case, number, kind), **sampled(case, args.real))
        print(f"{case.model}, {case.label}: {found['deviation']:+.1%}", file=sys.stderr)
        return found

    with ThreadPoolExecutor(1 if args.real else 2) as pool:  # a tracked case is one thread
        rows = list(pool.map(row, range(len(chosen))))
    command = "python benchmarks/memory.py" + (" --real" if args.real else "")
    report(args.out, "memory_real" if args.real else "memory", command, rows)


if __name__ == "__main__":
    main()
