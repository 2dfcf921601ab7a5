"""What a machine lacks for a recipe."""

from __future__ import annotations

import pytest

from mutualrl.errors import MachineError, RecipeError
from mutualrl.machine import requirements
from mutualrl.machine.devices import Machine
from mutualrl.mwra.placement import place
from mutualrl.recipes import Request, resolve
from mutualrl.storage.allocation import SHARDINGS


@pytest.mark.parametrize("gpus", [0, 1, 2, 3, 4, 8])
@pytest.mark.parametrize("share", ["null", "true", "false"])
@pytest.mark.parametrize("strategy", ["auto", "fsdp2", "zero3", "ddp"])
def test_deepspeed_is_asked_for_where_a_policy_would_train_under_zero(
    monkeypatch: pytest.MonkeyPatch, gpus: int, share: str, strategy: str
) -> None:
    """Without DeepSpeed, against the placement itself."""
    monkeypatch.setattr(requirements, "find_spec", lambda name: None if name == "deepspeed" else object())
    assignments = (f"launch.share_gpus={share}", f"launch.strategy={strategy}", "round.prompts=960")
    recipe = resolve(Request(pool="2qwen", regime="sgt", assignments=assignments))
    machine = Machine(tuple(map(str, range(gpus))), 16)
    try:
        placement = place(recipe, machine)
    except (MachineError, RecipeError):
        pytest.skip("no placement on this machine")
    lacks = any("deepspeed, for ZeRO" in line for line in requirements.missing_requirements(recipe, machine))
    assert lacks == (
        (strategy != "auto" and SHARDINGS[strategy].stage is not None)
        or any(each.sharding.stage is not None for each in placement.allocations)
    )
