from __future__ import annotations

from pathlib import Path

import pytest

from mutualrl.errors import MachineError, RecipeError
from mutualrl.machine.devices import Machine
from mutualrl.mwra.device_map import DevicePin, read_device_map
from mutualrl.mwra.fit import estimate_allocation
from mutualrl.mwra.model_shape import parameter_count
from mutualrl.mwra.placement import best_split, place
from mutualrl.recipes import Recipe, Request, resolve

FOUR = Machine(("0", "1", "2", "3"), 8)


def recipe(*assignments: str) -> Recipe:
    return resolve(
        Request(
            pool="tiny",
            regime="sgt",
            assignments=("hardware.gpus=4", "trainer.per_device_train_batch_size=8", *assignments),
        )
    )


def write_map(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "map.yaml"
    path.write_text(text)
    return path


def test_device_map_pins_policies_to_gpus(tmp_path: Path) -> None:
    pins = read_device_map(write_map(tmp_path, "policies:\n  ada: {gpus: [3]}\n  bob: {gpus: [0, 1]}\n"))
    placement = place(recipe(), FOUR, pins=pins)
    assert [(s.gpus, s.processes, s.threads) for s in placement.allocations] == [(("3",), 1, 2), (("0", "1"), 2, 2)]
    assert placement.notes == (
        "GPU 2 idle: not in the device map",
        "launch.strategy auto: ada plain (one process), bob ZeRO-3 (several processes on GPUs)",
    )
    assert [s.strategy for s in placement.allocations] == ["ddp", "zero3"]


def test_policies_share_a_gpu_by_fractions_of_its_memory(tmp_path: Path) -> None:
    text = "policies:\n  ada: {gpus: [0], memory: 0.25}\n  bob: {gpus: [0, 1], memory: 0.75}\n"
    ada, bob = place(recipe(), FOUR, pins=read_device_map(write_map(tmp_path, text))).allocations
    assert (ada.memory, ada.policies_per_gpu, bob.memory, bob.policies_per_gpu) == (0.25, 2, 0.75, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("policies: {ada: {gpus: [0]}, bob: {gpus: [0]}}", "GPU 0 is used by ada, bob; each policy that shares"),
        ("policies: {ada: {gpus: [0], memory: 0.7}, bob: {gpus: [0], memory: 0.5}}", "0.7 + 0.5 = 1.2, more than 1"),
        ("policies: {ada: {gpus: [9]}, bob: {gpus: [0]}}", "no GPU 9 here (GPUs of this machine: 0, 1, 2, 3)"),
        ("policies: {ada: {gpus: [1, 1]}, bob: {gpus: [0]}}", "'ada' names GPU 1 twice"),
        ("policies: {ada: {gpus: [1]}}", "no entry for policy 'bob'"),
        ("policies: {ada: {gpus: [1]}, bob: {gpus: [0]}, eve: {gpus: [2]}}", "'eve' is not a policy of the pool"),
        ("policies: {ada: {gpus: [1], node: 1}, bob: {gpus: [0]}}", "policies.ada.node"),
        ("policies: {ada: {gpus: [1], processes: 2}, bob: {gpus: [0]}}", "processes are for the CPU"),
        ("policies: {ada: {processes: 2}, bob: {gpus: [0]}}", "'ada' names no GPU"),
        ("policies: {ada: {gpu: [1]}, bob: {gpus: [0]}}", "policies.ada.gpu"),
        ("policies: {ada: {gpus: [-1]}, bob: {gpus: [0]}}", "policies.ada.gpus.0"),
        ("policies: {ada: {gpus: [1], memory: 2.0}, bob: {gpus: [0]}}", "policies.ada.memory"),
        ("policies: {}", "policies"),
        ("gpus: [0]", "gpus"),
        ("- a", "expected a mapping of keys to values"),
        ("policies: [", "line 1"),
    ],
)
def test_invalid_map_is_rejected_with_the_expected_value(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        place(recipe(), FOUR, pins=read_device_map(write_map(tmp_path, text)))
    assert message in str(caught.value)


def test_device_map_on_cpu_sets_processes(tmp_path: Path) -> None:
    pins = read_device_map(write_map(tmp_path, "policies:\n  ada: {processes: 2}\n  bob: {}\n"))
    assert pins == {"ada": DevicePin(processes=2), "bob": DevicePin()}
    ada, bob = place(recipe(), Machine((), 8), pins).allocations
    assert (ada.processes, bob.processes) == (2, 1)


def test_weights_split_gpus_as_closely_as_the_batch_allows() -> None:
    assert best_split(8, [1, 1], lambda i, n: True, weights=[1, 3]) == (2, 6)
    assert best_split(8, [1, 1], lambda i, n: n in (1, 2, 4), weights=[1, 3]) == (4, 4)  # no device may stay idle
    placement = place(recipe("launch.weights={bob: 3}"), FOUR)
    assert [len(s.gpus) for s in placement.allocations] == [1, 3] or [s.processes for s in placement.allocations] == [
        2,
        2,
    ]
    with pytest.raises(RecipeError, match=r"launch\.weights names 'eve'"):
        recipe("launch.weights={eve: 1}")


def test_more_policies_than_gpus_are_rejected_with_the_numbers_and_allowed_on_cpu() -> None:
    with pytest.raises(
        MachineError, match=r"2 policies need at least 2 GPUs, one each: found 1, 1 short.*--device-map"
    ):
        place(recipe("launch.share_gpus=false"), Machine(("0",), 4))
    assert "4 processes share 1 CPU cores" in place(recipe("launch.processes=2"), Machine((), 1)).notes[0]


def test_parameters_are_counted_from_the_configuration_and_unknown_without_it(
    tiny: dict[str, Path],
) -> None:
    from safetensors import safe_open

    resolved = recipe()
    with safe_open(tiny["ada"] / "model.safetensors", "pt") as file:
        stored = sum(file.get_tensor(key).numel() for key in file.keys())  # noqa: SIM118
    assert parameter_count(resolved.policy("ada")) == stored
    allocation = place(resolved, FOUR).allocations[0]
    memory = estimate_allocation(resolved, allocation, 20)
    assert memory is not None
    assert memory.weights == 2 * stored / 2
    remote = resolve(Request(pool="2qwen", regime="sgt"))
    assert estimate_allocation(remote, place(remote, Machine(tuple(map(str, range(8))), 8)).allocations[0], 20) is None
