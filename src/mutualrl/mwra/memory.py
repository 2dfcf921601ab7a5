"""Training memory of one device: a formula of the model's shape and of what the device computes at once.

Checked by `benchmarks/memory.py` against torch's memory trackers and against processes (docs/operations.md, "Memory").
`query` and `key` are the widths of all query and of all key heads. Bytes everywhere. Not counted: the CUDA context,
fragmentation, communication buffers of NCCL, and what vLLM keeps beside its fraction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mutualrl.storage.allocation import SHARDINGS, Sharding, Strategy

GIB = 2**30
_HALF, _FULL = 2, 4  # bytes of bf16 and fp32
_TILE_TOKENS, _TILE_VOCABULARY = 4096, 32768  # of TRL's fused head
_LIVE = 10**9  # DeepSpeed's stage3_max_live_parameters
_BUCKET = 5 * 10**8  # DeepSpeed's reduce_bucket_size, which it allocates at the start


#: how AdamW computes: in place, all weights at once, or one after the other
Step = Literal["fused", "foreach", "single"]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder model. `parameters` has all weights, `layer` those of one decoder layer."""

    parameters: int
    layer: int
    layers: int
    hidden: int
    intermediate: int
    query: int
    key: int
    vocabulary: int
    tied: bool
    head_norms: bool
    """Whether queries and keys are normalized per head (Qwen3)."""

    @property
    def matrix(self) -> int:
        """Return the weights of the output matrix."""
        return self.vocabulary * self.hidden

    @property
    def outside(self) -> int:
        """Return the weights outside the layers: embeddings, output matrix and the last norm."""
        return self.parameters - self.layers * self.layer


@dataclass(frozen=True, slots=True)
class Work:
    """What one device computes at once. `rows` completions per pass, each of `prompt` and `completion` tokens;
    `micro_batches` per optimizer step; `sampled` rows generated together (0: an engine generates).

    `full_logits`: a pass scores extra rows or requests at another temperature than the sampling's, which needs whole
    logits. `half`: mixed precision. `adapters`: number of LoRA weights, if only these are trained.
    `step`: how AdamW computes (`adamw_torch_fused`, TRL's default; all weights at once, as `adamw_torch` on a GPU; one
    after the other), and `moments` the numbers that the optimizer keeps per weight. `weight`: bytes per weight as the
    model is loaded. `squares`: attention reads a mask, a square per row, as SDPA does where rows are padded. `bucket`:
    gradients that DeepSpeed reduces together."""

    rows: int
    prompt: int
    completion: int
    micro_batches: int = 1
    sampled: int = 0
    full_logits: bool = False
    checkpointing: bool = True
    half: bool = True
    reference: bool = False
    adapters: int | None = None
    step: Step = "fused"
    moments: int = 2
    weight: int = _FULL
    squares: bool = True
    bucket: int = _BUCKET

    @property
    def tokens(self) -> int:
        """Return the tokens of a pass."""
        return self.rows * (self.prompt + self.completion)


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes on one device, at the peak of four instants of an update, and while it generates. Each includes what stays:
    weights, optimizer, reference; `forward`, `backward` and `update` also gradients."""

    weights: float
    gradients: float
    optimizer: float
    reference: float
    logprobs: float
    forward: float
    backward: float
    update: float
    generation: float
    vllm_share: float = 0.0
    """Fraction of the device that a vLLM engine reserves beside the training."""
    vllm_sleeps: bool = False
    """Whether the engine frees it while the policy trains."""

    @property
    def states(self) -> float:
        """Return weights, gradients, optimizer and reference together."""
        return self.weights + self.gradients + self.optimizer + self.reference

    @property
    def instants(self) -> dict[str, float]:
        """Return the bytes at each instant."""
        return {key: getattr(self, key) for key in ("logprobs", "forward", "backward", "update", "generation")}

    @property
    def peak(self) -> float:
        """Return the bytes at the largest instant."""
        return max(self.instants.values())

    def on_device(self, size: float) -> float:
        """Return the bytes at the largest instant on a device of `size` bytes, with vLLM's part."""
        engine = self.vllm_share * size
        if not self.vllm_sleeps:
            return self.peak + engine
        return max(self.peak, self.weights + self.optimizer + self.reference + engine)

    @property
    def instant(self) -> str:
        """Return the name of the largest instant."""
        return max(self.instants, key=lambda name: self.instants[name])


def estimate(shape: ModelShape, work: Work, *, strategy: Strategy, ranks: int) -> MemoryEstimate:
    """Return the memory of one of `ranks` devices.

    Under DDP and on one device TRL keeps fp32 weights (4 bytes per weight, 4 for the gradient, 8 for AdamW) and casts
    to bf16 per layer; DeepSpeed keeps bf16 weights and gradients beside an fp32 copy (2 + 2 + 12); FSDP2 shards fp32
    weights and gathers a layer at a time in bf16. Example: 1.5e9 weights under ZeRO-3 on four devices have states of
    16 * 1.5e9 / 4 = 6.0e9 bytes.
    """
    return _Device(shape, work, SHARDINGS[strategy], ranks).estimate()


@dataclass(frozen=True, slots=True)
class _Device:
    """The parts of an estimate, each a property."""

    shape: ModelShape
    work: Work
    sharding: Sharding
    ranks: int

    def estimate(self) -> MemoryEstimate:
        """Return the whole estimate."""
        stays = self.weights + self.optimizer + self.reference + self.buffers
        before = self._growing if self.work.micro_batches > 1 else 0.0
        return MemoryEstimate(
            self.weights,
            self.gradients,
            self.optimizer,
            self.reference,
            logprobs=stays + self.gathered + self.casts(0) + self.work.tokens * self._norms + self.scoring,
            forward=stays + before + self.gathered + self.casts(1) + self.saved + self.scoring,
            backward=stays + self.gathered + self.backward(before),
            update=stays + self._growing + self.update,
            generation=stays + self.generation if self.work.sampled else 0.0,
        )

    # ---- what stays

    @property
    def casting(self) -> bool:
        """Return whether layers cast fp32 weights to bf16 (autocast)."""
        return self.work.half and self.sharding.autocasts and self.work.weight == _FULL

    @property
    def trained(self) -> int:
        return self.shape.parameters if self.work.adapters is None else self.work.adapters

    @property
    def _weight_parts(self) -> int:
        return self.ranks if self.sharding.weights else 1

    @property
    def _state_parts(self) -> int:
        return self.ranks if self.sharding.states else 1

    @property
    def _deepspeed(self) -> bool:
        return self.sharding.stage is not None

    @property
    def weights(self) -> float:
        return self._stored_size * self.shape.parameters / self._weight_parts + (
            self._trained_size * (self.work.adapters or 0) / self._weight_parts
        )

    @property
    def _stored_size(self) -> int:
        """Return the bytes of a weight of the model: DeepSpeed keeps bf16, FSDP2 fp32 for what is trained."""
        if self._deepspeed:
            return _HALF if self.work.half else _FULL
        return _FULL if self.sharding.wraps_layers and self.work.adapters is None else self.work.weight

    @property
    def _trained_size(self) -> int:
        """Return the bytes of a trained weight: PEFT keeps adapters in fp32."""
        return self._stored_size if self.work.adapters is None or self._deepspeed else _FULL

    @property
    def gradients(self) -> float:
        copies = 1 if self.sharding.states else min(self.ranks, 2)  # DDP's buckets
        return copies * self._trained_size * self.trained / self._state_parts

    @property
    def _growing(self) -> float:
        """Return the gradients that a backward allocates; DeepSpeed's are among its buffers."""
        return 0.0 if self._deepspeed else self.gradients

    @property
    def buffers(self) -> float:
        """Return what DeepSpeed keeps from the start: its part of the gradients, and the bucket in which it reduces."""
        return self.gradients + self._unit * self.work.bucket if self._deepspeed else 0.0

    @property
    def optimizer(self) -> float:
        size = _FULL if self._deepspeed else self._trained_size
        master = _FULL if self._deepspeed and self.work.half else 0
        return (self.work.moments * size + master) * self.trained / self._state_parts

    @property
    def reference(self) -> float:
        if not self.work.reference:
            return 0.0
        size = self._stored_size if self._deepspeed else self.work.weight
        return size * self.shape.parameters / self._weight_parts

    # ---- weights in use

    @property
    def _unit(self) -> int:
        """Return the bytes of a weight that a layer computes with."""
        return _HALF if self.work.half or self.work.weight == _HALF else _FULL

    @property
    def gathered(self) -> float:
        """Return the whole weights on a device beside its part: FSDP2 keeps those outside the layers and two layers;
        ZeRO-3 up to 10^9 weights."""
        if self.ranks == 1 or not self.sharding.weights:
            return 0.0
        if self.sharding.wraps_layers:
            return self._unit * (self.shape.outside + 2 * self.shape.layer)
        return self._unit * min(self.shape.parameters, _LIVE)

    def casts(self, passes: int) -> float:
        """Return the bf16 copies of the layers' weights, which autocast keeps until the forward ends. Of frozen weights
        it keeps one layer's; without checkpointing a backward to come (1) keeps them all."""
        if not self.casting:
            return 0.0
        kept = self.work.adapters is None or (passes and not self.work.checkpointing)
        return _HALF * (self.shape.layers if kept else 1) * self.shape.layer

    # ---- activations

    @property
    def _residual(self) -> int:
        """Return the bytes of a number in the residual stream: fp32 under autocast."""
        return self._unit if not self.casting else _FULL

    @property
    def _norms(self) -> int:
        """Return the bytes per token of what one norm keeps beside the input of the matrices: its input in fp32, and
        for the gradient of its weight the normalized one."""
        normalized = 0 if self.work.adapters is not None else self._residual
        return (_FULL + normalized) * self.shape.hidden

    @property
    def layer(self) -> float:
        """Return what a layer keeps for its backward."""
        shape, unit = self.shape, self._unit
        inputs = (5 if self.casting else 2) * unit  # of q, k, v, gate and up, each cast apart
        per_token = 2 * self._norms + inputs * shape.hidden
        per_token += 5 * unit * shape.query  # q, repeated k and v, output, its copy
        per_token += 4 * unit * shape.intermediate  # gate, its activation, up, product
        if shape.head_norms:
            per_token += (_FULL + (unit if self.work.adapters is None else 0)) * (shape.query + shape.key)
        return self.work.tokens * per_token + self.mask * unit

    @property
    def mask(self) -> float:
        """Return the entries of the attention mask: a square per row."""
        return self.work.rows * (self.work.prompt + self.work.completion) ** 2 if self.work.squares else 0.0

    @property
    def saved(self) -> float:
        """Return what all layers keep from the forward, with the mask and the last norm."""
        one = self.work.tokens * self._residual * self.shape.hidden if self.work.checkpointing else self.layer
        return self.shape.layers * one + self.mask + self.tail

    @property
    def tail(self) -> float:
        """Return what the last norm and the head's input keep."""
        return self.work.tokens * (self._norms + self._residual * self.shape.hidden)

    # ---- the output matrix

    @property
    def _tile(self) -> float:
        tokens, width = min(self.work.tokens, _TILE_TOKENS), min(self.shape.vocabulary, _TILE_VOCABULARY)
        casts = self._unit * width * self.shape.hidden if self.casting else 0
        return self._unit * tokens * width + casts

    @property
    def scoring(self) -> float:
        """Return what the head takes in a forward: a tile, or whole logits and their log-probs in fp32."""
        return max(self._tile, 2 * _FULL * self._logits)

    @property
    def _logits(self) -> int:
        """Return the number of logits where they are needed whole."""
        return self.work.rows * self.work.completion * self.shape.vocabulary if self.work.full_logits else 0

    def backward(self, before: float) -> float:
        """Return the backward's peak: at the head, where all activations are there, or in a recomputed layer, or at the
        embedding, where all gradients are."""
        shape, work = self.shape, self.work
        gradient = _FULL * shape.matrix if work.adapters is None else 0.0
        head = max(self._tile + gradient + work.tokens * _FULL * shape.hidden, 3 * _FULL * self._logits)
        saved = self.saved + (0 if work.checkpointing else self.casts(1)) + self._reducing
        held = self._held
        layer = self.layer if work.checkpointing else 0.0
        passing = work.tokens * self._unit * 3 * shape.intermediate
        in_layer = saved - self.tail + layer + passing + held + self._layer_weights
        at_embedding = self._growing + self._reducing + gradient + (held if self.sharding.weights else gradient)
        return max(before + saved + head, max(before, held) + in_layer, at_embedding)

    @property
    def _reducing(self) -> float:
        """Return DeepSpeed's copy of a bucket while it is reduced."""
        return self._unit * min(self.work.bucket, self.trained) if self._deepspeed else 0.0

    @property
    def _held(self) -> float:
        """Return the output matrix's gradient, which waits for the embedding's where they are tied."""
        if self.work.adapters is not None:
            return 0.0
        if self.sharding.wraps_layers:
            return self._unit * self.shape.outside
        return _FULL * self.shape.matrix if self.shape.tied else 0.0

    @property
    def _layer_weights(self) -> float:
        """Return a layer's cast weights and whole gradients."""
        gradient = self._unit * self.shape.layer if self.work.adapters is None else 0
        return (self._layer_casts if self.work.checkpointing else 0) + gradient

    @property
    def _layer_casts(self) -> float:
        return _HALF * self.shape.layer if self.casting else 0.0

    # ---- update and generation

    @property
    def update(self) -> float:
        """Return what the optimizer takes beside its states."""
        part = self.trained / self._state_parts
        largest = self.shape.matrix / self._weight_parts if self.work.adapters is None else 0.0
        copies = {"fused": 0.0, "foreach": part, "single": 2 * largest}[self.work.step]
        if self._deepspeed:  # the whole part is one tensor, with its gradients in fp32
            copies = {"fused": 0, "foreach": 1, "single": 2}[self.work.step] * part + min(part, _LIVE)
        return _FULL * copies

    @property
    def generation(self) -> float:
        """Return the whole weights, the cache of keys and values, and logits and their probabilities."""
        shape, work = self.shape, self.work
        length = work.prompt + work.completion
        whole = self._unit * shape.parameters if self.ranks > 1 and self.sharding.weights else 0.0
        key = _FULL if self.casting else self._unit  # rotated in fp32
        cache = work.sampled * length * shape.layers * (key + self._unit) * shape.key
        repeated = work.sampled * length * 2 * self._unit * shape.query
        sampling = 4 * _FULL * work.sampled * shape.vocabulary
        prefill = work.sampled * work.prompt * (self._norms + 3 * self._unit * shape.intermediate)
        return whole + self._layer_casts + cache + max(repeated + sampling, prefill)
