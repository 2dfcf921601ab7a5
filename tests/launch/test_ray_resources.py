"""Resources of a policy's processes on a Ray cluster, against hand calculations."""

from __future__ import annotations

from mutualrl.launch.ray_worker import ranks_on
from mutualrl.machine.devices import Machine
from mutualrl.machine.ray_cluster import first_unplaceable, machine_of


def test_ranks_of_one_node_are_consecutive_and_rank_0_has_the_first_bundle() -> None:
    ranks = ranks_on(["b", "a", "b", "a", "a"])
    assert [bundle for bundle, _ in ranks] == [0, 2, 1, 3, 4]
    assert [variables["RANK"] for _, variables in ranks] == ["0", "1", "2", "3", "4"]
    assert [variables["LOCAL_RANK"] for _, variables in ranks] == ["0", "1", "0", "1", "2"]
    assert [variables["LOCAL_WORLD_SIZE"] for _, variables in ranks] == ["2", "2", "3", "3", "3"]
    assert {variables["WORLD_SIZE"] for _, variables in ranks} == {"5"}


def test_cores_of_a_cluster_are_those_of_its_gpu_nodes() -> None:
    head, big, small = {"CPU": 32.0}, {"CPU": 96.0, "GPU": 8.0}, {"CPU": 24.0, "GPU": 4.0}
    assert machine_of([head, big]) == Machine(tuple("01234567"), 96)
    assert machine_of([head, big, small]).cores == 12 * 6  # the smaller node has six per GPU
    assert machine_of([head, {"CPU": 4.0}]) == Machine((), 36)


def test_process_that_fits_on_no_node_is_found() -> None:
    assert first_unplaceable([{"CPU": 2.0}, {"CPU": 2.0}], [{"CPU": 3.0}, {"CPU": 1.0}]) == {"CPU": 2.0}
    assert first_unplaceable([{"CPU": 1.0}] * 4, [{"CPU": 3.0}, {"CPU": 1.0}]) is None
    halves = [{"CPU": 1.0, "GPU": 0.5}] * 4
    assert first_unplaceable(halves, [{"CPU": 8.0}, {"CPU": 4.0, "GPU": 2.0}]) is None
    assert first_unplaceable([*halves, {"CPU": 1.0, "GPU": 0.1}], [{"CPU": 8.0, "GPU": 2.0}]) == {
        "CPU": 1.0,
        "GPU": 0.1,
    }
    assert first_unplaceable([{"CPU": 1.0}, {"CPU": 2.0}], [{"CPU": 2.0}, {"CPU": 1.0}]) is None  # the largest fits
