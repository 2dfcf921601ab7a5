from __future__ import annotations

from pathlib import Path

import pytest

from mutualrl.errors import MachineError, RecipeError
from mutualrl.machine.devices import Machine, this_machine
from mutualrl.mwra.placement import best_split, place
from mutualrl.recipes import Recipe, Request, resolve


def gpus(n: int) -> Machine:
    return Machine(tuple(map(str, range(n))), 16)


def test_two_policies_split_eight_gpus_evenly() -> None:
    placement = place(resolve(Request(pool="2qwen", regime="sgt")), gpus(8))
    assert [s.gpus for s in placement.allocations] == [("0", "1", "2", "3"), ("4", "5", "6", "7")]
    # 1024 prompts x 5 rollouts = 5120 completions = 4 steps x 4 GPUs x 10 completions x 32 micro-batches
    assert [(s.strategy, s.batch.micro_batches, s.batch.optimizer_steps) for s in placement.allocations] == [
        ("zero3", 32, 4)
    ] * 2


UNSHARDED = "{both} plain (one process: trainer.fsdp_config is not used)"


@pytest.mark.parametrize(
    ("machine", "settings", "expected", "note"),
    [
        (gpus(2), (), "ddp", "launch.strategy auto: {both} plain (one process)"),
        (gpus(8), (), "zero3", "launch.strategy auto: {both} ZeRO-3 (several processes on GPUs)"),
        (gpus(8), ("launch.strategy=fsdp2",), "fsdp2", "launch.strategy fsdp2: {both} FSDP2"),
        (gpus(2), ("launch.strategy=fsdp2",), "ddp", f"launch.strategy fsdp2: {UNSHARDED}"),
        (gpus(2), ("launch.strategy=zero3",), "zero3", None),
        (Machine((), 8), (), "ddp", None),
        (
            Machine((), 8),
            ("launch.processes=2",),
            "ddp",
            "launch.strategy auto: {both} DDP (several processes on a CPU)",
        ),
        (
            Machine((), 8),
            ("launch.processes=2", "launch.strategy=fsdp2"),
            "fsdp2",
            "launch.strategy fsdp2: {both} FSDP2",
        ),
    ],
)
def test_strategy_follows_the_number_of_processes_and_is_said(
    machine: Machine, settings: tuple[str, ...], expected: str, note: str | None
) -> None:
    recipe = resolve(Request(pool="2qwen", regime="sgt", assignments=settings))
    placement = place(recipe, machine)
    assert [each.strategy for each in placement.allocations] == [expected] * 2
    notes = [each for each in placement.notes if each.startswith("launch.strategy")]
    assert notes == (
        [] if note is None else [note.format(both=" and ".join(policy.name for policy in recipe.policies))]
    )


def test_resumed_run_keeps_the_strategy_that_it_recorded() -> None:
    recipe = resolve(Request(pool="2qwen", regime="sgt"))
    one, other = (policy.name for policy in recipe.policies)
    placement = place(recipe, gpus(2), recorded={one: "zero3", other: "ddp"})
    assert [each.strategy for each in placement.allocations] == ["zero3", "ddp"]
    assert placement.notes == (f"launch.strategy auto: {one} zero3 (as the run began), {other} plain (one process)",)
    named = resolve(Request(pool="2qwen", regime="sgt", assignments=("launch.strategy=zero2",)))
    assert place(named, gpus(2), recorded={one: "zero3"}).allocations[0].strategy == "zero2"


def test_three_policies_on_eight_gpus_are_2_2_4_with_the_largest_on_four() -> None:
    placement = place(resolve(Request(pool="3qwen", regime="sgt")), gpus(8))
    assert [len(s.gpus) for s in placement.allocations] == [2, 2, 4]
    assert placement.allocations[2].policy == "qwen3-4b-base"
    assert len({g for s in placement.allocations for g in s.gpus}) == 8


def test_four_policies_get_two_gpus_each() -> None:
    assert [len(s.gpus) for s in place(resolve(Request(pool="4qwen", regime="sgt")), gpus(8)).allocations] == [
        2,
        2,
        2,
        2,
    ]


@pytest.mark.parametrize(
    ("devices", "sizes", "expected"),
    [
        (8, [1, 1, 2], (2, 2, 4)),
        (8, [2, 1, 1], (4, 2, 2)),
        (7, [1, 1], (2, 4)),
        (3, [1, 1, 1], (1, 1, 1)),
        (2, [1, 1, 1], None),
    ],
)
def test_best_split(devices: int, sizes: list[float], expected: tuple[int, ...] | None) -> None:
    split = best_split(devices, sizes, lambda i, n: n in (1, 2, 4, 8))
    assert (sorted(split) if split else None) == (sorted(expected) if expected else None)
    if split and expected and len(set(sizes)) > 1:
        assert split == expected


def test_cores_are_split_and_sharing_them_is_reported() -> None:
    recipe = resolve(Request(pool="tiny", regime="sgt"))
    wide = place(recipe, Machine((), 8))
    assert [(s.processes, s.threads, s.strategy) for s in wide.allocations] == [(1, 4, "ddp")] * 2
    assert not wide.notes
    narrow = place(recipe, Machine((), 1))
    assert [s.threads for s in narrow.allocations] == [1, 1]
    assert "2 processes share 1 CPU cores" in narrow.notes[0]


def test_policies_share_where_there_are_fewer_gpus_unless_that_is_forbidden() -> None:
    placement = place(resolve(Request(pool="2qwen", regime="sgt")), gpus(1))
    assert [(each.gpus, each.policies_per_gpu) for each in placement.allocations] == [(("0",), 2)] * 2
    assert "fewer GPUs (1) than members (2)" in placement.notes[0]
    assert all(each.policies_per_gpu == 1 for each in place(resolve(Request(pool="2qwen")), gpus(2)).allocations)
    with pytest.raises(
        MachineError, match=r"2 policies need at least 2 GPUs, one each: found 1, 1 short.*share_gpus.*hardware.gpus=0"
    ):
        place(resolve(Request(pool="2qwen", regime="sgt", assignments=("launch.share_gpus=false",))), gpus(1))


def with_teachers(*assignments: str) -> Recipe:
    sources = ("old=frozen:tiny:cyd", "far=served:http://127.0.0.1:1/v1")
    return resolve(Request(pool="2qwen", regime="sgt", sources=sources, assignments=assignments))


def test_frozen_source_has_the_last_gpu_and_a_served_one_needs_none() -> None:
    placement = place(with_teachers("sources.far.model=m"), gpus(8))
    assert [(devices.policy, devices.gpus) for devices in placement.sources] == [("old", ("7",)), ("far", ())]
    taken = [gpu for allocation in placement.allocations for gpu in allocation.gpus]
    assert "7" not in taken
    assert len(taken) == len(set(taken)) == 6  # 2 + 4: a group has 1, 2, 4 or 8

    shared = place(with_teachers("sources.far.model=m", "launch.share_gpus=true"), gpus(2))
    assert shared.sources[0].gpus == ("1",)
    assert {gpu for allocation in shared.allocations for gpu in allocation.gpus} == {"0", "1"}

    on_cpu = place(with_teachers("sources.far.model=m", "hardware.gpus=0"), gpus(8))
    assert [devices.gpus for devices in on_cpu.sources] == [(), ()]


def test_frozen_source_without_a_gpu_of_its_own_is_refused_with_a_remedy() -> None:
    with pytest.raises(
        MachineError, match=r"2 policies and the frozen sources old need 3 GPUs, found 2.*share_gpus.*hardware.gpus=0"
    ):
        place(with_teachers("sources.far.model=m", "launch.share_gpus=false"), gpus(2))
    shared = place(with_teachers("sources.far.model=m"), gpus(2))
    assert shared.sources[0].gpus == ("1",)
    assert {gpu for allocation in shared.allocations for gpu in allocation.gpus} == {"0", "1"}


@pytest.mark.parametrize("setting", ["num_iterations: 2", "shuffle_dataset: false"])
def test_settings_that_determine_the_rounds_must_be_equal(setting: str) -> None:
    policies = f"[{{name: a, model: 'tiny:ada'}}, {{name: b, model: 'tiny:bob', trainer: {{{setting}}}}}]"
    with pytest.raises(RecipeError, match="must be the same for all policies"):
        place(resolve(Request(pool="tiny", assignments=(f"policies={policies}",))), Machine((), 2))


def test_pool_without_hardware_uses_the_gpus_of_the_machine(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("policies: [{name: a, model: x/y}, {name: b, model: x/z}]")

    def allocations(machine: Machine, *assignments: str) -> list[tuple[str, ...]]:
        recipe = resolve(Request(pool=str(tmp_path / "p.yaml"), assignments=assignments))
        return [allocation.gpus for allocation in place(recipe, machine).allocations]

    assert allocations(gpus(8)) == [("0", "1", "2", "3"), ("4", "5", "6", "7")]
    assert allocations(gpus(8), "hardware.gpus=2") == [("0",), ("1",)]
    assert allocations(gpus(8), "hardware.gpus=0") == [(), ()]
    assert allocations(Machine((), 4)) == [(), ()]


@pytest.mark.parametrize(
    ("visible", "expected"), [(None, ("0", "1")), ("1", ("1",)), ("", ()), ("-1", ()), ("0,-1,1", ("0",))]
)
def test_visible_gpus(
    visible: str | None, expected: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 0, 81559\necho 1, 40960\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    machine = this_machine()
    assert machine.gpus == expected
    assert machine.memory == tuple({"0": 81559, "1": 40960}[index] * 2**20 for index in expected)


def test_policies_that_would_not_see_the_same_rounds_are_rejected() -> None:
    recipe = resolve(
        Request(
            pool="tiny",
            assignments=(
                "round.prompts=null",
                "trainer.steps_per_generation=1",
                "policies=[{name: a, model: 'tiny:ada'}, {name: b, model: 'tiny:bob', trainer: {steps_per_generation: 2}}]",
            ),
        )
    )
    with pytest.raises(RecipeError, match="would not see the same rounds"):
        place(recipe, Machine((), 2))
