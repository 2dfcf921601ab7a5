"""Extra rows in TRL's loss: their assignment to micro-batches, forward and backward passes, and loss weights.

A micro-batch's extra rows are processed in chunks of at most `per_device_train_batch_size` rows, each with a separate
backward, before TRL's loss over the own rows: no forward with gradients has more rows than GRPO's. The gradients of
chunks are not synchronised; the own rows' backward, which follows, synchronises the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from mutualrl.adapter.trl_compat import (
    Inputs,
    backward,
    has_trl_loss,
    log_value,
    mini_batch_of_round,
    no_grad_sync,
    policy_loss,
    position_in_round,
    round_in_use,
    surrogate_only,
    token_logps,
    tokenizer_of,
)
from mutualrl.errors import UsageError
from mutualrl.records import Ids
from mutualrl.regimes.advantages import Floats
from mutualrl.regimes.losses import (
    BY_ROWS,
    NormalizerFactors,
    aggregate,
    bounded_loss,
    nll_loss,
    normalizer_factors,
    row_nll,
)
from mutualrl.regimes.microbatches import MicrobatchSlot, assign_to_microbatches
from mutualrl.regimes.round import BOUNDS, PPO, Bound, ExtraRow, Mean, RowSource, RowStatistics
from mutualrl.storage.files import JsonObject
from mutualrl.training.tensors import as_batch, as_tensor, concatenated, padded
from mutualrl.trajectory import NO_TEXT, Trajectory

if TYPE_CHECKING:
    from trl import GRPOTrainer


class Term(NamedTuple):
    """Properties that all rows of one pass must share."""

    loss: str
    mean: Mean
    bound: Bound
    traced: bool
    reduce: Literal["mean", "sum"] = "mean"

    @classmethod
    def of(cls, row: ExtraRow) -> Term:
        """Return the term of a row."""
        if row.loss == "nll":
            return cls(row.loss, row.mean, PPO(), False, row.reduce)
        return cls(row.loss, row.mean, row.bound, row.logprobs is not None)


class RowChunk(NamedTuple):
    """Rows of one pass, by index in the plan; `width` is the number of rows on every rank, masked rows included."""

    rows: list[int]
    width: int


@dataclass
class TermRows:
    """Rows of a term, and their assignment to micro-batches."""

    term: Term
    rows: list[int]
    table: dict[MicrobatchSlot, list[int]]

    def of_step(self, step: int) -> list[int]:
        """Return the rows of an optimizer step, over all ranks and micro-batches."""
        return [index for slot, indices in self.table.items() if slot.step == step for index in indices]


class ExtraRows:
    """Extra rows of one round, by micro-batch.

    Ranks stay in step: all run the same chunks of the same number of rows in a micro-batch, padded with masked rows
    where a rank has fewer (a missing forward hangs DDP and ZeRO-3, and TRL gathers one number per row). A micro-batch
    in which no rank has a row runs no pass.
    """

    def __init__(
        self, trainer: GRPOTrainer, row_metrics: Callable[[RowStatistics], Mapping[str, float]] | None = None
    ) -> None:
        self._trainer = trainer
        self._row_metrics = row_metrics
        self.rows: tuple[ExtraRow, ...] = ()
        self.prompts: Mapping[str, Ids] = {}
        self.snapshot: dict[int, torch.Tensor] = {}
        self._terms: list[TermRows] = []
        self._covered: list[int] = []
        self._nll_sum = 0.0
        self._log_ratios: dict[str, list[torch.Tensor]] = {}

    def load(self, rows: Sequence[ExtraRow], prompts: Mapping[str, Ids], batch: Inputs) -> None:
        """Assign the rows of a new round; take the learner's snapshot for rows without behaviour log-probs.

        `prompts`: the learner's token ids of each row's prompt. Raises UsageError for peers' rollouts under a loss that
        is not TRL's: its normalization over own and peers' rows is unknown.
        """
        if any(row.loss == "policy_gradient" for row in rows) and not has_trl_loss(self._trainer):
            raise UsageError(
                f"{type(self._trainer).__name__} overrides TRL's loss, and the regime adds peers' rollouts to it: "
                "their weights would be wrong; use GRPOTrainer's loss, or a regime that adds none"
            )
        self.restore(rows, prompts, {})
        args = self._trainer.args
        on_policy = args.gradient_accumulation_steps % (args.steps_per_generation * self._trainer.num_iterations) == 0
        if not on_policy:  # else the current policy is the snapshot
            self._take_snapshot(batch)

    def restore(
        self,
        rows: Sequence[ExtraRow],
        prompts: Mapping[str, Ids],
        snapshot: dict[int, torch.Tensor],
    ) -> None:
        """Reassign the rows of a round whose snapshot was already taken."""
        args = self._trainer.args
        self.rows, self.prompts, self.snapshot = tuple(rows), dict(prompts), snapshot
        self._covered = [int(row.covered.sum()) for row in self.rows]
        by_term: dict[Term, list[int]] = {}
        for index, row in enumerate(self.rows):
            by_term.setdefault(Term.of(row), []).append(index)
        self._terms = []
        for term, indices in by_term.items():
            table = assign_to_microbatches(
                len(indices),
                steps=args.steps_per_generation // args.gradient_accumulation_steps,
                micro_batches=args.gradient_accumulation_steps,
                ranks=self._trainer.accelerator.num_processes,
            )
            for slot, positions in table.items():
                table[slot] = [indices[position] for position in positions]
            self._terms.append(TermRows(term, indices, table))

    def packed(self) -> JsonObject:
        """Return the rows of the round in use, for a checkpoint: plain values and tensors."""
        if not round_in_use(self._trainer):
            return {"rows": [], "prompts": {}, "snapshot": {}}
        prompts = {prompt_id: torch.from_numpy(np.asarray(ids)) for prompt_id, ids in self.prompts.items()}
        return {"rows": [pack(row) for row in self.rows], "prompts": prompts, "snapshot": self.snapshot}

    def unpack(self, packed: JsonObject) -> None:
        """Take over the rows of a checkpoint."""
        prompts = {prompt_id: np.asarray(ids, dtype=np.int32) for prompt_id, ids in packed["prompts"].items()}
        self.restore([unpack(row) for row in packed["rows"]], prompts, packed["snapshot"])

    def loss(self, model: torch.nn.Module, inputs: Inputs, own_loss: Callable[[Inputs], torch.Tensor]) -> torch.Tensor:
        """Return the loss of own and extra rows on this micro-batch: its value includes both, its gradient is of the
        own rows only; the gradients of the extra rows are already accumulated in the parameters."""
        if not self.rows:
            return own_loss(inputs)
        step, micro = position_in_round(self._trainer)
        values = []
        for term in self._terms:
            for chunk in self._chunks(term, step, micro):
                with no_grad_sync(self._trainer.accelerator, model):
                    loss = self._chunk_loss(model, term, chunk, step, micro, inputs)
                    backward(self._trainer.accelerator, loss)
                values.append(loss.detach())
        if self._pooled_terms():
            own_factor = self._pool_factors(step, micro, inputs).own
            inputs = {**inputs, "advantages": inputs["advantages"] * own_factor}
        loss = own_loss(inputs)
        if micro == self._trainer.args.gradient_accumulation_steps - 1:
            self._log(step)
        return loss + torch.stack(values).sum() if values else loss

    # ---- assignment of rows

    def _chunks(self, term: TermRows, step: int, micro: int) -> list[RowChunk]:
        """Return this rank's rows in a micro-batch, in chunks as wide as those of the rank with the most rows."""
        size = self._trainer.args.per_device_train_batch_size
        ranks = range(self._trainer.accelerator.num_processes)
        most = max(len(term.table[MicrobatchSlot(step, micro, rank)]) for rank in ranks)
        rows = term.table[MicrobatchSlot(step, micro, self._trainer.accelerator.process_index)]
        return [RowChunk(rows[start : start + size], min(size, most - start)) for start in range(0, most, size)]

    def _tokens(self, indices: Iterable[int]) -> int:
        return sum(self._covered[index] for index in indices)

    # ---- passes

    def _chunk_loss(
        self, model: torch.nn.Module, term: TermRows, chunk: RowChunk, step: int, micro: int, inputs: Inputs
    ) -> torch.Tensor:
        if term.term.loss == "nll":
            return self._nll_loss(model, term, chunk, step, inputs)
        return self._policy_gradient_loss(model, term.term, chunk, step, micro, inputs)

    def _batch(self, chunk: RowChunk, inputs: Inputs) -> Inputs:
        """Return a chunk as TRL's inputs. `tool_mask` is the loss mask, TRL's name for tokens that the model sees but
        does not train on. A masked row is a prompt's first token, as prompt and as completion."""
        device = inputs["prompt_ids"].device
        filler = inputs["prompt_ids"][inputs["prompt_mask"].bool()][:1].cpu()
        missing = chunk.width - len(chunk.rows)
        rows = [self.rows[index] for index in chunk.rows]
        prompts = [as_tensor(self.prompts[row.prompt_id]) for row in rows] + [filler] * missing
        completions = [as_tensor(row.token_ids) for row in rows] + [filler] * missing
        covered = [torch.from_numpy(row.covered.astype("int64")) for row in rows]
        covered += [torch.zeros_like(filler)] * missing
        return {
            **as_batch(prompts, completions, tokenizer_of(self._trainer).pad_token_id, device),
            "tool_mask": padded(covered, 0, "right", device),
        }

    # ---- negative log-likelihood

    def _nll_loss(
        self, model: torch.nn.Module, term: TermRows, chunk: RowChunk, step: int, inputs: Inputs
    ) -> torch.Tensor:
        batch = self._batch(chunk, inputs)
        logps = logps_at_temperature_1(self._trainer, model, *concatenated(batch))
        mask = loss_mask(batch).bool()
        per_token = row_nll(logps, mask)
        self._nll_sum += float(per_token.detach().sum())
        nll = row_nll(logps, mask, reduce="sum") if term.term.reduce == "sum" else per_token
        weights = [self.rows[index].weight for index in chunk.rows] + [0.0] * (chunk.width - len(chunk.rows))
        return nll_loss(
            nll,
            weight=torch.tensor(weights, dtype=torch.float64).to(nll.device),
            count=self._nll_count(term, step),
            ranks=self._trainer.accelerator.num_processes,
        ).to(nll.dtype)

    def _nll_count(self, term: TermRows, step: int) -> int:
        """Return the divisor of an optimizer step's sum of NLLs: its number of rows, or all prompts."""
        if term.term.mean == "rows":
            return len(term.of_step(step))
        args = self._trainer.args
        own_rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
        return int(own_rows * self._trainer.accelerator.num_processes // self._trainer.num_generations)

    # ---- policy gradient

    def _policy_gradient_loss(
        self, model: torch.nn.Module, term: Term, chunk: RowChunk, step: int, micro: int, inputs: Inputs
    ) -> torch.Tensor:
        batch = self._policy_gradient_batch(term, chunk, inputs)
        batch["advantages"] *= self._pool_factors(step, micro, inputs, chunk).extra
        items = inputs["num_items_in_batch"] + self._tokens(self._pooled_rows())
        if isinstance(term.bound, PPO):
            with surrogate_only(self._trainer, term.bound.delta):
                loss = policy_loss(self._trainer, model, {**batch, "num_items_in_batch": items})
        else:
            loss = self._bounded_loss(model, term.bound, batch, items, mini_batch_of_round(self._trainer))
        if chunk.rows:
            logps = self._trainer.last_logps.detach()
            # copied once: each read from a GPU waits until the GPU is idle
            log_ratios = (logps - batch.get("old_per_token_logps", logps)).float().cpu()
            mask = loss_mask(batch).bool().cpu()
            for row, index in enumerate(chunk.rows):
                values = self._log_ratios.setdefault(self.rows[index].source.policy, [])
                values.append(log_ratios[row][mask[row]])
        return loss

    def _policy_gradient_batch(self, term: Term, chunk: RowChunk, inputs: Inputs) -> Inputs:
        batch, device = self._batch(chunk, inputs), inputs["prompt_ids"].device
        rows, missing = [self.rows[index] for index in chunk.rows], chunk.width - len(chunk.rows)
        advantages = [row.weight * row.advantage for row in rows] + [0.0] * missing
        batch["advantages"] = torch.tensor(advantages, device=device)
        batch["importance_sampling_ratio"] = torch.ones((chunk.width, 1), device=device)
        behaviour = self._behaviour(term, chunk.rows)
        if behaviour is not None:
            batch["old_per_token_logps"] = padded([*behaviour, *[torch.zeros(1)] * missing], 0.0, "right", device)
        return batch

    def _bounded_loss(
        self, model: torch.nn.Module, bound: Bound, batch: Inputs, items: torch.Tensor, mini_batch: int
    ) -> torch.Tensor:
        trainer, args = self._trainer, self._trainer.args
        logps = token_logps(trainer, model, *concatenated(batch))
        behaviour = batch.get("old_per_token_logps", logps.detach())
        mask, advantages = loss_mask(batch).bool(), batch["advantages"][:, None]
        per_token = bounded_loss(
            bound,
            logps,
            behaviour,
            advantages,
            mask,
            low=trainer.epsilon_low,
            high=trainer.epsilon_high,
            mini_batch=mini_batch,
        )
        step_items = float(items) * args.gradient_accumulation_steps / args.steps_per_generation
        return aggregate(
            per_token,
            mask,
            trainer.loss_type,
            accumulation=args.gradient_accumulation_steps,
            max_length=trainer.max_completion_length,
            step_items=step_items / trainer.accelerator.num_processes,
        )

    def _pool_factors(self, step: int, micro: int, inputs: Inputs, chunk: RowChunk | None = None) -> NormalizerFactors:
        """Return the factors of own rows and of a chunk in the mean over own and pooled extra rows."""
        args, accelerator = self._trainer.args, self._trainer.accelerator
        loss_type, ranks = self._trainer.loss_type, accelerator.num_processes
        pooled = self._pooled_terms()
        if loss_type in BY_ROWS:
            return normalizer_factors(
                loss_type,
                own=args.per_device_train_batch_size * args.gradient_accumulation_steps * ranks,
                extra=sum(len(term.of_step(step)) for term in pooled),
                chunk=0 if chunk is None else chunk.width,
                micro_batches=args.gradient_accumulation_steps,
                ranks=ranks,
            )
        if loss_type == "bnpo":
            slot = MicrobatchSlot(step, micro, accelerator.process_index)
            extra = sum(self._tokens(term.table[slot]) for term in pooled)
            tokens = 0 if chunk is None else self._tokens(chunk.rows)
            return normalizer_factors(loss_type, own=float(loss_mask(inputs).sum()), extra=extra, chunk=tokens)
        extra = self._tokens(self._pooled_rows())
        return normalizer_factors(loss_type, own=float(inputs["num_items_in_batch"]), extra=extra)

    def _pooled_terms(self) -> list[TermRows]:
        return [term for term in self._terms if term.term.mean == "pool"]

    def _pooled_rows(self) -> list[int]:
        return [index for term in self._pooled_terms() for index in term.rows]

    def _behaviour(self, term: Term, indices: Sequence[int]) -> list[torch.Tensor] | None:
        """Return the ratios' denominators: traces or snapshot; None where the current policy is the snapshot."""
        if term.traced:
            return [torch.from_numpy(self.rows[index].logprobs) for index in indices]
        return [self.snapshot[index] for index in indices] if self.snapshot else None

    def _take_snapshot(self, batch: Inputs) -> None:
        trainer, args = self._trainer, self._trainer.args
        snapshot: dict[int, torch.Tensor] = {}
        for term in self._terms:
            if term.term.loss == "nll" or term.term.traced:
                continue
            for step in range(args.steps_per_generation // args.gradient_accumulation_steps):
                for micro in range(args.gradient_accumulation_steps):
                    for chunk in self._chunks(term, step, micro):
                        with torch.no_grad():
                            logps = token_logps(trainer, trainer.model, *concatenated(self._batch(chunk, batch)))
                        logps = logps.cpu()
                        for row, index in enumerate(chunk.rows):
                            snapshot[index] = logps[row, : len(self.rows[index].token_ids)].clone()
        self.snapshot = snapshot

    # ---- statistics

    def _log(self, step: int) -> None:
        """Log the regime's metrics of the optimizer step's extra rows, over all ranks."""
        nll_rows = [index for term in self._terms if term.term.loss == "nll" for index in term.of_step(step)]
        nll = None
        if nll_rows:
            accelerator = self._trainer.accelerator
            total = torch.tensor(self._nll_sum, device=accelerator.device)
            nll = accelerator.reduce(total, reduction="sum").item() / len(nll_rows)
        low, high = 1 - self._trainer.epsilon_low, 1 + self._trainer.epsilon_high
        by_policy, of_responses = self._gathered_ratios()
        ratios = np.concatenate([by_policy[name] for name in sorted(by_policy)]) if by_policy else np.zeros(0)
        statistics = RowStatistics(nll, ratios, low, high, by_policy, of_responses)
        self._nll_sum, self._log_ratios = 0.0, {}
        if self._row_metrics is not None:
            for name, value in self._row_metrics(statistics).items():
                log_value(self._trainer, name, value)

    def _gathered_ratios(self) -> tuple[dict[str, Floats], dict[str, Floats]]:
        """Return, by source policy, the ratios of the optimizer step's unmasked tokens, and the log-ratio of each row
        with such tokens (their sum), over all ranks."""
        of_tokens, of_responses = {}, {}
        for policy in sorted({row.source.policy for row in self.rows if row.loss == "policy_gradient"}):
            log_ratios = [values for values in self._log_ratios.get(policy, []) if values.numel()]
            of_tokens[policy] = self._gathered([values.exp() for values in log_ratios])
            of_responses[policy] = self._gathered([values.sum()[None] for values in log_ratios])
        return of_tokens, of_responses

    def _gathered(self, parts: list[torch.Tensor]) -> Floats:
        """Gather values of all ranks, which may have different lengths."""
        accelerator = self._trainer.accelerator
        own = torch.cat(parts) if parts else torch.zeros(0)
        longest = int(accelerator.gather(torch.tensor([own.numel()], device=accelerator.device)).max())
        if longest == 0:
            return np.zeros(0)
        filled = torch.full((longest,), float("nan"), device=accelerator.device)
        filled[: own.numel()] = own.to(accelerator.device)
        values = accelerator.gather(filled)
        gathered: Floats = values[~values.isnan()].cpu().double().numpy()
        return gathered


def logps_at_temperature_1(
    trainer: GRPOTrainer, model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor, keep: int
) -> torch.Tensor:
    """Return log-probs of the last `keep` tokens at temperature 1.

    TRL's fused head divides by the sampling temperature; it is used where that is 1, as it is cheaper.
    """
    if trainer.temperature == 1.0:
        return token_logps(trainer, model, ids, mask, keep)
    with trainer.accelerator.autocast():
        logits = model(input_ids=ids, attention_mask=mask, logits_to_keep=keep + 1).logits[:, :-1].float()
    return -F.cross_entropy(logits.transpose(1, 2), ids[:, -keep:], reduction="none")


def loss_mask(inputs: Inputs) -> torch.Tensor:
    """Return the mask of tokens in the loss, shape (rows, T)."""
    mask: torch.Tensor = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask


# ---- rows in a checkpoint

_BOUNDS: dict[str, type[Bound]] = {kind.__name__: kind for kind in BOUNDS}


def pack(row: ExtraRow) -> JsonObject:
    """Return a row as plain values and tensors."""
    packed = {field.name: getattr(row, field.name) for field in fields(ExtraRow)}
    packed["source"] = tuple(row.source)
    packed["text"], packed["messages"] = row.trajectory.text, packed.pop("trajectory").stored or ""
    packed["advantage"], packed["weight"] = float(row.advantage), float(row.weight)
    packed["token_ids"] = torch.from_numpy(np.asarray(row.token_ids))
    packed["mask"] = None if row.mask is None else torch.from_numpy(row.mask)
    packed["logprobs"] = None if row.logprobs is None else torch.from_numpy(row.logprobs)
    packed["bound"] = {"kind": type(row.bound).__name__, **asdict(row.bound)}
    return packed


def unpack(packed: JsonObject) -> ExtraRow:
    """Invert `pack`."""
    bound = dict(packed["bound"])
    kind = _BOUNDS[bound.pop("kind")]
    arrays = {name: None if packed[name] is None else packed[name].numpy() for name in ("mask", "logprobs")}
    values = {key: value for key, value in packed.items() if key not in ("text", "messages")}
    values |= {"token_ids": packed["token_ids"].numpy(), "source": RowSource(*packed["source"]), "bound": kind(**bound)}
    return ExtraRow(
        **{**values, **arrays}, trajectory=Trajectory.of_stored(packed["text"], packed["messages"] or None) or NO_TEXT
    )
