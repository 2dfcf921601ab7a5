"""vLLM in a policy's trainer: settings that TRL does not make, and greedy decoding on the trainer's engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import PartialState

from mutualrl.adapter.trl_compat import load_weights_into_engine, replaced, tokenizer_of
from mutualrl.errors import MachineError
from mutualrl.process.ports import free_port
from mutualrl.process.turns import turn
from mutualrl.recipes.trainer_table import Settings
from mutualrl.records import Completion
from mutualrl.storage.files import JsonObject
from mutualrl.thl import ended
from mutualrl.trajectory import Trajectory

if TYPE_CHECKING:
    from trl import GRPOTrainer

DEFAULT_MEMORY_FRACTION = 0.3  # TRL's default
GIB = 2**30


def vllm_keys(settings: Settings, policies_per_gpu: int, memory: float | None = None) -> JsonObject:
    """Return GRPOConfig keys that depend on a policy's placement; empty without vLLM.

    `policies_per_gpu`: policies on each of its GPUs; `memory`: the policy's fraction of their memory if a device map
    sets it, else equal fractions. In colocate mode `vllm_gpu_memory_utilization` is the fraction of a GPU that all of
    them may use together. In server mode the port for weight transfer is a free one, unless it is set: TRL's default is
    the same for every run and policy on a machine."""
    if not settings.get("use_vllm"):
        return {}
    if settings.get("vllm_mode", "colocate") == "server":
        return {} if "vllm_group_port" in settings else {"vllm_group_port": free_port()}
    share = float(settings.get("vllm_gpu_memory_utilization", DEFAULT_MEMORY_FRACTION))
    return {"vllm_gpu_memory_utilization": share * memory if memory is not None else share / policies_per_gpu}


def prepare_vllm(settings: Settings, *, cpu: bool) -> None:
    """Set what vLLM reads on import. Must precede the trainer's construction."""
    if not settings.get("use_vllm") or settings.get("vllm_mode", "colocate") != "colocate":
        return
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # TRL loads weights into the engine of this process
    if cpu:
        keep_weights_loadable()


@contextmanager
def engine_turn(settings: Settings, lock: Path, *, shared: bool, say: Callable[[str], None]) -> Iterator[None]:
    """Start the engines of policies that share GPUs one after another: a vLLM engine measures the free memory of its
    GPU during start-up, and fails or allocates the wrong amount if another engine starts at the same time (vLLM issues
    55827, 56830). All ranks of a policy call this; the main rank takes the lock. Reports the memory that engine and
    trainer took on this rank's GPU, and the free memory. Does nothing without a colocated engine or shared GPUs."""
    if not shared or not settings.get("use_vllm") or settings.get("vllm_mode", "colocate") != "colocate":
        yield
        return
    state = PartialState()
    with ExitStack() as held:
        if state.is_main_process:
            held.enter_context(turn(lock, lambda: say("waiting for another policy's engine on the same GPUs to start")))
        state.wait_for_everyone()
        before = _free_memory()
        yield
        state.wait_for_everyone()
        if before is not None and (after := _free_memory()) is not None:
            say(f"engine and trainer took {(before - after) / GIB:.1f} GiB of the GPU; {after / GIB:.1f} GiB are free")


def _free_memory() -> int | None:
    """Return the free bytes of this rank's GPU; None on CPU."""
    import torch

    return int(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else None


def keep_weights_loadable() -> None:
    """Make the weights of vLLM's CPU build reloadable at run time.

    It packs the weights of linear layers once and drops the originals: a later load fails, or has no effect on the
    computation. This selects its plain fallback, which reads the weights in every call. Raises MachineError for a build
    without that fallback.
    """
    from vllm.model_executor.layers import utils

    if not hasattr(utils, "dispatch_cpu_unquantized_gemm"):
        raise MachineError("this build of vLLM cannot reload weights on CPU; expected the CPU build of vLLM 0.31")
    import torch

    def dispatch(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = dispatch


def on_engine_step(trainer: GRPOTrainer, on_step: Callable[[], None]) -> None:
    """Call `on_step` before each step of the policy's engine: a long generation is progress."""
    if not trainer.use_vllm or trainer.vllm_mode != "colocate":
        return
    engine = trainer.vllm_generation.llm.llm_engine
    step = engine.step

    def observed_step() -> Any:
        on_step()
        return step()

    engine.step = observed_step


def shut_down(trainer: GRPOTrainer) -> None:
    """Shut down a policy's engine. Must precede the destruction of its process group."""
    if trainer.use_vllm and trainer.vllm_mode == "colocate":
        trainer.vllm_generation.llm.llm_engine.engine_core.shutdown()


@contextmanager
def greedy_engine(trainer: GRPOTrainer) -> Iterator[None]:
    """Make the engine decode greedily, without the sampling settings of training: no random number is drawn."""
    plain: JsonObject = {"temperature": 0.0, "repetition_penalty": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None}
    plain |= {"generation_kwargs": {}, "structured_outputs_regex": None}
    with replaced(trainer.vllm_generation, plain):
        yield


def greedy(trainer: GRPOTrainer, prompts: Sequence[Sequence[int]]) -> list[Completion]:
    """Return greedy completions of the prompts (token ids) from the training engine, with the current weights.

    All ranks must call this with equally many prompts.
    """
    engine = trainer.vllm_generation
    load_weights_into_engine(trainer)
    with greedy_engine(trainer):
        _, completions, _, _ = engine.generate(prompts=[list(ids) for ids in prompts], images=None, num_generations=1)
    texts = tokenizer_of(trainer).batch_decode(completions, skip_special_tokens=True)
    return [
        Completion(tuple(ids), Trajectory.of_text(text), ended(list(ids), trainer.eos_token_ids))
        for ids, text in zip(completions, texts, strict=True)
    ]
