"""The gated NLL inside TRL's loss: which pairs fall on which micro-batch, their forward pass, their share."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from mutualrl.regimes.base import Pair
from mutualrl.regimes.dealing import Slot, deal
from mutualrl.regimes.sgt import pair_nll, sgt_loss
from mutualrl.training.rows import as_batch, whole
from mutualrl.training.sharing import SharedRound


class PairTerm:
    """The auxiliary loss of one round, micro-batch by micro-batch.

    Ranks stay in step: a micro-batch in which no rank has a pair costs no pass anywhere; in any other,
    ranks without one run a pass over a masked row (a missing forward hangs DDP and ZeRO-3).
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.shared: SharedRound | None = None
        self._table: dict[Slot, list[int]] = {}
        self._nll_sum = 0.0

    def load(self, shared: SharedRound) -> None:
        """Deal the pairs of a new round over its optimizer steps, ranks and micro-batches."""
        args = self._trainer.args
        self.shared = shared
        self._table = deal(
            len(shared.plan.pairs),
            steps=args.steps_per_generation // args.gradient_accumulation_steps,
            micro_batches=args.gradient_accumulation_steps,
            ranks=self._trainer.accelerator.num_processes,
        )

    def loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor | None:
        """This micro-batch's share of the auxiliary loss; None when no rank has a pair in it."""
        if self.shared is None or not self.shared.plan.pairs:
            return None
        args, accelerator = self._trainer.args, self._trainer.accelerator
        index = self._trainer._step % args.steps_per_generation
        step, micro = divmod(index, args.gradient_accumulation_steps)
        slots = [self._table[Slot(step, micro, rank)] for rank in range(accelerator.num_processes)]
        loss = None
        if any(slots):
            pairs = [self.shared.plan.pairs[i] for i in slots[accelerator.process_index]]
            nll = self._nll(model, pairs, inputs)
            self._nll_sum += float(nll.detach().sum())
            plan = self.shared.plan
            loss = sgt_loss(nll, weight=plan.weight, count=self._count(step), ranks=accelerator.num_processes)
        if micro == args.gradient_accumulation_steps - 1:
            self._log(step)
        return loss

    def _pairs_of(self, step: int) -> int:
        return sum(len(indices) for slot, indices in self._table.items() if slot.step == step)

    def _count(self, step: int) -> int:
        """What the sum of NLLs is divided by: the step's pairs, or all its prompts."""
        assert self.shared is not None
        if self.shared.plan.normalize == "pairs":
            return self._pairs_of(step)
        args = self._trainer.args
        rows = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        return int(rows // self._trainer.num_generations)

    def _log(self, step: int) -> None:
        pairs = self._pairs_of(step)
        if pairs:
            total = torch.tensor(self._nll_sum, device=self._trainer.accelerator.device)
            mean = self._trainer.accelerator.reduce(total, reduction="sum").item() / pairs
            self._trainer._metrics["train"]["sgt/nll"].append(mean)
        self._nll_sum = 0.0

    def _nll(self, model: Any, pairs: list[Pair], inputs: dict[str, Any]) -> torch.Tensor:
        """Per-token mean NLL of each pair; with no pair, of one masked row (value and gradient 0)."""
        if pairs:
            assert self.shared is not None
            prompts = [torch.tensor(self.shared.prompt_tokens[pair.prompt_id]) for pair in pairs]
            answers = [torch.tensor(pair.ids) for pair in pairs]
            real = True
        else:
            prompts, answers, real = [inputs["prompt_ids"][0].cpu()], [inputs["completion_ids"][0].cpu()], False
        batch = as_batch(prompts, answers, self._trainer._tokenizer.pad_token_id, self._trainer.accelerator.device)
        logps = self._token_logps(model, *whole(batch))
        return pair_nll(logps, batch["completion_mask"].bool() & real)

    def _token_logps(self, model: Any, ids: torch.Tensor, mask: torch.Tensor, keep: int) -> torch.Tensor:
        """Log-probs of the last `keep` tokens at temperature 1.

        TRL's fused head divides by the sampling temperature; where that is 1 it is the cheaper way.
        """
        if self._trainer.temperature == 1.0:
            logps, _, _ = self._trainer._get_per_token_logps_and_entropies(model, ids, mask, keep)
            return logps
        with self._trainer.accelerator.autocast():
            logits = model(input_ids=ids, attention_mask=mask, logits_to_keep=keep + 1).logits[:, :-1].float()
        return -F.cross_entropy(logits.transpose(1, 2), ids[:, -keep:], reduction="none")
