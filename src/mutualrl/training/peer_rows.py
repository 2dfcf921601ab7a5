"""Peers' rollouts inside TRL's loss (PRP): which rows fall on which micro-batch, their passes, their share.

A micro-batch's peer rows go through in chunks of at most `per_device_train_batch_size` rows, each with a backward of
its own, before TRL's loss over the own rows: no forward with gradients holds more rows than GRPO's. The chunks'
gradients are not synchronised; the own rows' backward, which follows, synchronises the sum.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from accelerate.utils import DistributedType

from mutualrl.regimes.base import PeerRow, RoundPlan
from mutualrl.regimes.dealing import Slot, deal
from mutualrl.regimes.prp import BY_ROWS, Shares, aggregate, band_loss, shares
from mutualrl.training.rows import as_batch, padded, whole
from mutualrl.training.sharing import SharedRound

Inputs = dict[str, Any]


class Chunk(NamedTuple):
    """Peer rows of one pass, by their place in the plan; and its number of rows on all ranks, masked ones included."""

    rows: list[int]
    width: int


class PeerRows:
    """The peer rows of one round, micro-batch by micro-batch.

    Ranks stay in step: all run the same chunks of the same number of rows in a micro-batch, masked rows standing in
    where a rank has fewer (a missing forward hangs DDP and ZeRO-3, and TRL gathers a number a row).
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._plan = RoundPlan()
        self._prompts: dict[str, tuple[int, ...]] = {}
        self._table: dict[Slot, list[int]] = {}
        self._covered: list[int] = []
        self.snapshot: dict[int, torch.Tensor] = {}
        self._ratios: list[torch.Tensor] = []

    @property
    def active(self) -> bool:
        """Whether peer rows joined this round."""
        return bool(self._plan.rows)

    def load(self, shared: SharedRound, batch: Inputs) -> None:
        """Deal the rows of a new round; take the learner's snapshot of them where it is their denominator."""
        args = self._trainer.args
        self.resume(shared, {})
        aligned = args.gradient_accumulation_steps % (args.steps_per_generation * self._trainer.num_iterations) == 0
        if self._plan.rows and self._plan.rows[0].logprobs is None and not aligned:
            self._take_snapshot(batch)

    def resume(self, shared: SharedRound, snapshot: dict[int, torch.Tensor]) -> None:
        """Deal the rows of a round again, whose snapshot was taken before."""
        args = self._trainer.args
        self._plan, self._prompts, self.snapshot = shared.plan, shared.prompt_tokens, snapshot
        self._covered = [int(row.covered.sum()) for row in self._plan.rows]
        self._table = deal(
            len(self._plan.rows),
            steps=args.steps_per_generation // args.gradient_accumulation_steps,
            micro_batches=args.gradient_accumulation_steps,
            ranks=self._trainer.accelerator.num_processes,
        )

    def loss(self, model: Any, inputs: Inputs, own_loss: Callable[[Inputs], torch.Tensor]) -> torch.Tensor:
        """The pool's loss on this micro-batch: its value is whole, its gradient that of the own rows alone; the
        gradients of the peer rows are in the parameters already."""
        args = self._trainer.args
        index = self._trainer._step % args.steps_per_generation
        step, micro = divmod(index, args.gradient_accumulation_steps)
        chunks = self._chunks(step, micro)
        own_share = self._shares(step, micro, inputs, 0).own
        values = []
        for chunk in chunks:
            with self._apart(model):
                loss = self._chunk_loss(model, chunk, step, micro, inputs)
                self._backward(loss)
                values.append(loss.detach())
        loss = own_loss({**inputs, "advantages": inputs["advantages"] * own_share})
        if micro == args.gradient_accumulation_steps - 1:
            self._log()
        return loss + torch.stack(values).sum() if values else loss

    # ---- which rows

    def _chunks(self, step: int, micro: int) -> list[Chunk]:
        """This rank's rows in a micro-batch, in chunks as large as those of the rank with the most rows."""
        size = self._trainer.args.per_device_train_batch_size
        ranks = range(self._trainer.accelerator.num_processes)
        most = max(len(self._table[Slot(step, micro, rank)]) for rank in ranks)
        mine = self._table[Slot(step, micro, self._trainer.accelerator.process_index)]
        return [Chunk(mine[at : at + size], min(size, most - at)) for at in range(0, most, size)]

    def _tokens(self, indices: Sequence[int]) -> int:
        return sum(self._covered[i] for i in indices)

    def _shares(self, step: int, micro: int, inputs: Inputs, chunk_rows: int, chunk: Sequence[int] = ()) -> Shares:
        args, accelerator = self._trainer.args, self._trainer.accelerator
        loss_type, ranks = self._trainer.loss_type, accelerator.num_processes
        if loss_type in BY_ROWS:
            return shares(
                loss_type,
                own=args.per_device_train_batch_size * args.gradient_accumulation_steps * ranks,
                peers=sum(len(rows) for slot, rows in self._table.items() if slot.step == step),
                chunk=chunk_rows,
                micro_batches=args.gradient_accumulation_steps,
                ranks=ranks,
            )
        if loss_type == "bnpo":
            mine = self._table[Slot(step, micro, accelerator.process_index)]
            own = float(_loss_mask(inputs).sum())
            return shares(loss_type, own=own, peers=self._tokens(mine), chunk=self._tokens(chunk))
        return shares(loss_type, own=float(inputs["num_items_in_batch"]), peers=sum(self._covered))

    # ---- their passes

    def _chunk_loss(self, model: Any, chunk: Chunk, step: int, micro: int, inputs: Inputs) -> torch.Tensor:
        rows = self._rows(chunk, inputs)
        share = self._shares(step, micro, inputs, chunk.width, chunk.rows).peer
        rows["advantages"] *= share
        items = inputs["num_items_in_batch"] + sum(self._covered)
        if self._plan.clip == "band":
            loss = self._band(model, rows, items)
        else:
            with self._peer_terms():
                loss = self._trainer._compute_loss(model, {**rows, "num_items_in_batch": items})
        if chunk.rows:
            logps, mask = self._trainer.last_logps, _loss_mask(rows).bool()
            behaviour = rows.get("old_per_token_logps", logps)
            self._ratios.append((logps - behaviour)[mask].exp().float().cpu())
        return loss

    def _band(self, model: Any, rows: Inputs, items: torch.Tensor) -> torch.Tensor:
        trainer, args = self._trainer, self._trainer.args
        logps, _, _ = trainer._get_per_token_logps_and_entropies(model, *whole(rows))
        behaviour = rows.get("old_per_token_logps", logps.detach())
        per_token = band_loss(logps, behaviour, rows["advantages"][:, None], trainer.epsilon_low, trainer.epsilon_high)
        return aggregate(
            per_token,
            _loss_mask(rows).bool(),
            trainer.loss_type,
            accumulation=args.gradient_accumulation_steps,
            max_length=trainer.max_completion_length,
            step_items=float(items)
            * args.gradient_accumulation_steps
            / args.steps_per_generation
            / trainer.accelerator.num_processes,
        )

    def _rows(self, chunk: Chunk, inputs: Inputs) -> Inputs:
        """A chunk as TRL's inputs. `tool_mask` is the loss mask: TRL's own name for tokens that are seen and not
        trained on. The masked rows are a prompt's first token twice."""
        device = inputs["prompt_ids"].device
        rows, missing = [self._plan.rows[i] for i in chunk.rows], chunk.width - len(chunk.rows)
        filler = inputs["prompt_ids"][inputs["prompt_mask"].bool()][:1].cpu()
        prompts = [torch.tensor(self._prompts[row.prompt_id]) for row in rows] + [filler] * missing
        answers = [torch.tensor(row.ids) for row in rows] + [filler] * missing
        covered = [torch.from_numpy(row.covered.astype("int64")) for row in rows] + [torch.zeros_like(filler)] * missing

        found = {
            **as_batch(prompts, answers, self._trainer._tokenizer.pad_token_id, device),
            "tool_mask": padded(covered, 0, "right", device),
            "advantages": torch.tensor([row.advantage for row in rows] + [0.0] * missing, device=device),
            "importance_sampling_ratio": torch.ones((len(answers), 1), device=device),
        }
        behaviour = self._behaviour(chunk.rows, rows)
        if behaviour is not None:
            found["old_per_token_logps"] = padded([*behaviour, *[torch.zeros(1)] * missing], 0.0, "right", device)
        return found

    def _behaviour(self, indices: list[int], rows: Sequence[PeerRow]) -> list[torch.Tensor] | None:
        """Denominators: the aligned traces, or the snapshot; None where the current policy is the snapshot."""
        if self._plan.rows[0].logprobs is not None:
            return [torch.from_numpy(row.logprobs) for row in rows]
        return [self.snapshot[i] for i in indices] if self.snapshot else None

    def _take_snapshot(self, batch: Inputs) -> None:
        trainer, args = self._trainer, self._trainer.args
        found: dict[int, torch.Tensor] = {}
        for step in range(args.steps_per_generation // args.gradient_accumulation_steps):
            for micro in range(args.gradient_accumulation_steps):
                for chunk in self._chunks(step, micro):
                    rows = self._rows(chunk, batch)
                    with torch.no_grad():
                        logps, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, *whole(rows))
                    for at, index in enumerate(chunk.rows):
                        found[index] = logps[at, : len(self._plan.rows[index].ids)].cpu()
        self.snapshot = found

    # ---- their backward

    @contextmanager
    def _apart(self, model: Any) -> Iterator[None]:
        """Forward and backward without synchronising gradients, as in a micro-batch that is not the step's last."""
        accelerator = self._trainer.accelerator
        state, before = accelerator.gradient_state, accelerator.sync_gradients
        state._set_sync_gradients(False)
        try:
            with accelerator.no_sync(model):
                yield
        finally:
            state._set_sync_gradients(before)

    def _backward(self, loss: torch.Tensor) -> None:
        accelerator = self._trainer.accelerator
        deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
        accelerator.backward(loss, **({"scale_wrt_gas": False} if deepspeed else {}))

    @contextmanager
    def _peer_terms(self) -> Iterator[None]:
        """TRL's loss as it is on peer rows: two-sided; no KL, entropy or router term; its metrics are own rows'."""
        trainer = self._trainer
        kept = (trainer.beta, trainer.args.delta, trainer._entropy_bonus_enabled, trainer.aux_loss_enabled)
        metrics = trainer._metrics["train"]
        trainer.beta, trainer.args.delta = 0.0, self._plan.delta
        trainer._entropy_bonus_enabled = trainer.aux_loss_enabled = False
        trainer._metrics["train"] = defaultdict(list)
        try:
            yield
        finally:
            trainer.beta, trainer.args.delta, trainer._entropy_bonus_enabled, trainer.aux_loss_enabled = kept
            trainer._metrics["train"] = metrics

    # ---- what is seen

    def _log(self) -> None:
        """`prp/ratio_p99` and `prp/clip_rate` of the optimizer step's covered peer tokens, over all ranks."""
        trainer = self._trainer
        own = torch.cat(self._ratios) if self._ratios else torch.zeros(0)
        self._ratios = []
        device = trainer.accelerator.device
        longest = int(trainer.accelerator.gather(torch.tensor([own.numel()], device=device)).max())
        if longest == 0:
            return
        filled = torch.full((longest,), float("nan"), device=device)
        filled[: own.numel()] = own.to(device)
        ratios = trainer.accelerator.gather(filled)
        ratios = ratios[~ratios.isnan()].cpu().double()
        outside = (ratios < 1 - trainer.epsilon_low) | (ratios > 1 + trainer.epsilon_high)
        trainer._metrics["train"]["prp/ratio_p99"].append(_p99(ratios))
        trainer._metrics["train"]["prp/clip_rate"].append(float(outside.double().mean()))


def _p99(values: torch.Tensor) -> float:
    """The 99th percentile; sorted, since torch.quantile has a limit on its input's size."""
    ordered = values.sort().values
    return float(ordered[min(int(0.99 * len(ordered)), len(ordered) - 1)])


def _loss_mask(inputs: Inputs) -> torch.Tensor:
    mask: torch.Tensor = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask
