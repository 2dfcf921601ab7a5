"""DeepSpeed ZeRO on CPU ranks: a node's recipe can be rehearsed on a laptop.

accelerate 1.15 leaves DeepSpeed out when it finds no accelerator, without a word, and trains something else.
"""

from __future__ import annotations

import os
from typing import Any

from accelerate.state import PartialState
from accelerate.utils import DistributedType


def allow_zero_on_cpu() -> None:
    """Let accelerate start DeepSpeed over gloo where there is no accelerator. Must precede GRPOConfig.

    Only a process that torch.distributed.run started and that asks for DeepSpeed is affected.
    """
    original = PartialState._prepare_backend
    if getattr(original, "zero_on_cpu", False):
        return

    def prepare(self: Any, *args: Any, **kwargs: Any) -> tuple[str | None, DistributedType]:
        backend, kind = original(self, *args, **kwargs)
        wanted = "LOCAL_RANK" in os.environ and os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"
        return ("gloo", DistributedType.MULTI_CPU) if kind == DistributedType.NO and wanted else (backend, kind)

    prepare.zero_on_cpu = True  # type: ignore[attr-defined]
    PartialState._prepare_backend = prepare
