"""What each process of a pool takes of a Ray cluster."""

from __future__ import annotations

import pytest

from mutualrl.launch.ray_launcher import bundles
from mutualrl.machine.devices import Machine
from mutualrl.mwra.placement import place
from mutualrl.recipes import Request, resolve


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (0, [{"CPU": 4.0}, {"CPU": 4.0}, {"CPU": 0.0}]),
        (3, [{"CPU": 4.0, "GPU": 1.0}, {"CPU": 4.0, "GPU": 1.0}, {"CPU": 0.0, "GPU": 1.0}]),
        (1, [{"CPU": 4.0, "GPU": 1 / 3}, {"CPU": 4.0, "GPU": 1 / 3}, {"CPU": 0.0, "GPU": 1 / 3}]),
    ],
)
def test_frozen_source_takes_its_gpu_or_an_equal_fraction_and_no_core(
    gpus: int, expected: list[dict[str, float]]
) -> None:
    recipe = resolve(
        Request(pool="tiny", regime="sgt", sources=("old=frozen:tiny:cyd",), assignments=(f"hardware.gpus={gpus}",))
    )
    placement = place(recipe, Machine(tuple(map(str, range(gpus))), 8))
    assert bundles(placement) == [pytest.approx(each) for each in expected]
