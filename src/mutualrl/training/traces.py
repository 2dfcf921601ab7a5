"""Log-probs of a policy's own rollouts, as published."""

from __future__ import annotations

import torch

from mutualrl.adapter.trl_compat import GenerationBatch, HookedGRPOTrainer, Inputs, evaluating, token_logps


def behaviour_trace(trainer: HookedGRPOTrainer, batch: Inputs, generation: GenerationBatch) -> torch.Tensor:
    """Return the sampling policy's log-probs, shape (rows, T), in nats: the sampling engine's, else TRL's from before
    the update, else those of a forward pass, which draws no random number."""
    # TRL masks truncated rows before its passes: its log-probs of them are unusable as a trace.
    usable = () if trainer.mask_truncated_completions else ("old_per_token_logps",)
    for key in ("sampling_per_token_logps", *usable):
        if key in batch:
            trace: torch.Tensor = batch[key].cpu()
            return trace
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    lengths = torch.tensor([len(row) for row in generation.completion_ids], device=ids.device)
    sampled = torch.arange(batch["completion_ids"].size(1), device=ids.device) < lengths[:, None]
    mask = torch.cat([batch["prompt_mask"], sampled.to(batch["prompt_mask"].dtype)], dim=1)
    keep, size = batch["completion_ids"].size(1), trainer.args.per_device_train_batch_size
    with evaluating(trainer.model), torch.no_grad():
        logps = token_logps(trainer, trainer.model, ids, mask, keep, batch_size=size)
    return logps.cpu()
