"""Several machines that meet in one directory, each scripted: joining, silence, last words."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from fake_clock import Clock
from mutualrl.errors import MachineError, PeerLostError, RunInterruptedError, UsageError
from mutualrl.machine.devices import Machine
from mutualrl.mwra.nodes import Node
from mutualrl.mwra.placement import place
from mutualrl.mwra.session import Launch
from mutualrl.process.status import StatusWriter
from mutualrl.recipes import Recipe, Request, resolve
from mutualrl.storage.rundir import RunDirectory


class Quiet:
    """Nobody asks to stop."""

    def raise_if_any(self) -> None:
        return


class Stops:
    def raise_if_any(self) -> None:
        raise RunInterruptedError("stopped by SIGINT")


class Supervisor:
    """What `Node.check` asks of the policies here."""

    def __init__(self) -> None:
        self.stopping = False
        self.given_up: list[int] = []

    def mark_node_lost(self, node: int) -> None:
        self.given_up.append(node)

    def lost(self) -> dict[str, str]:
        return {}


SILENT = Console(file=io.StringIO())


def recipe(*assignments: str) -> Recipe:
    return resolve(Request(pool="tiny", regime="grpo", assignments=("run.peer_timeout=20", *assignments)))


def begun(root: Path, nodes: int = 2) -> RunDirectory:
    """Write the directory as node 0 would."""
    from contextlib import ExitStack

    from mutualrl.mwra.session import start_run

    resolved = resolve(Request(pool="tiny", regime="grpo", run_dir=root))
    with ExitStack() as held:
        return start_run(resolved, place(resolved, Machine((), 2), nodes), {"seed": 0}, {}, Launch(nodes=nodes), held)


def met(root: Path, clock: Clock, *assignments: str) -> tuple[Node, RunDirectory, Recipe, StatusWriter]:
    """Return node 0 after it has met node 1, and node 1's writer."""
    run, resolved = begun(root), recipe(*assignments)
    other = StatusWriter(root, 1, session=0)
    clock.every(0.5, other.beat)
    node = Node(Launch(nodes=2, node=0), resolved)
    node.meet(run, SILENT, Quiet(), node.status_writer(run, 0))
    return node, run, resolved, other


def test_a_node_joins_when_node_0s_counter_moves_and_takes_its_placement(tmp_path: Path, clock: Clock) -> None:
    begun(tmp_path / "r")
    writer = StatusWriter(tmp_path / "r", 0, session=0)
    clock.at(30, writer.beat)
    clock.at(31, writer.beat)
    run, placement, notes = Node(Launch(nodes=2, node=1), recipe()).join(tmp_path / "r", SILENT, Quiet())
    assert run.root == tmp_path / "r"
    assert [(a.policy, a.nodes) for a in placement.allocations] == [("ada", (0,)), ("bob", (1,))]
    assert notes == []


def test_a_node_that_nobody_waits_for_says_what_to_look_at(tmp_path: Path, clock: Clock) -> None:
    node = Node(Launch(nodes=2, node=1), recipe())
    with pytest.raises(MachineError, match=r"node 0 has not begun the run .* within 600 s.*a file system that all"):
        node.join(tmp_path, SILENT, Quiet())
    with pytest.raises(UsageError, match="--node-rank: name the run's directory"):
        node.join(None, SILENT, Quiet())
    with pytest.raises(RunInterruptedError):
        node.join(tmp_path, SILENT, Stops())


def test_another_number_of_nodes_is_refused(tmp_path: Path, clock: Clock) -> None:
    begun(tmp_path / "r")
    writer = StatusWriter(tmp_path / "r", 0, session=0)
    clock.every(1, writer.beat)
    with pytest.raises(UsageError, match=r"--nnodes 3: the run in .* has 2 nodes"):
        Node(Launch(nodes=3, node=1), recipe()).join(tmp_path / "r", SILENT, Quiet())


def test_a_node_that_does_not_come_is_named_with_its_command(tmp_path: Path, clock: Clock) -> None:
    run = begun(tmp_path / "r")
    node = Node(Launch(nodes=2, node=0), recipe())
    with pytest.raises(MachineError, match=r"node 1 has not joined.*--nnodes 2 --node-rank 1 --run-dir"):
        node.meet(run, SILENT, Quiet(), node.status_writer(run, 0))


def test_a_silent_node_ends_the_run_by_name(tmp_path: Path, clock: Clock) -> None:
    node, run, resolved, _ = met(tmp_path / "r", clock)
    here = Supervisor()
    node.check(run, resolved, here)  # type: ignore[arg-type]
    clock.stop()  # it dies
    clock.sleep(10)
    node.check(run, resolved, here)  # type: ignore[arg-type]
    clock.sleep(20)
    with pytest.raises(PeerLostError, match=r"node 1 is lost: its supervisor has been silent for \d+ s"):
        node.check(run, resolved, here)  # type: ignore[arg-type]


def test_under_continue_a_silent_node_is_given_up_once_and_the_run_is_over_without_it(
    tmp_path: Path, clock: Clock
) -> None:
    node, run, resolved, _ = met(tmp_path / "r", clock, "run.on_peer_loss=continue")
    here = Supervisor()
    node.check(run, resolved, here)  # type: ignore[arg-type]
    clock.stop()
    clock.sleep(30)
    for _ in range(2):
        node.check(run, resolved, here)  # type: ignore[arg-type]
    assert here.given_up == [1]
    assert not node.settled(run, resolved, here)  # type: ignore[arg-type]
    result = run.policy("ada").result
    result.parent.mkdir(parents=True, exist_ok=True)
    result.write_text("{}")
    assert node.settled(run, resolved, here)  # type: ignore[arg-type]


def test_under_wait_a_silent_node_has_the_round_timeout(tmp_path: Path, clock: Clock) -> None:
    node, run, resolved, _ = met(tmp_path / "r", clock, "run.on_peer_loss=wait", "run.round_timeout=100")
    here = Supervisor()
    node.check(run, resolved, here)  # type: ignore[arg-type]
    clock.stop()
    clock.sleep(90)
    node.check(run, resolved, here)  # type: ignore[arg-type]
    clock.sleep(30)
    with pytest.raises(PeerLostError):
        node.check(run, resolved, here)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("outcome", "code"), [("exchange-damaged: a byte is wrong", 6), ("peer-lost: gone", 5), ("unheard: of", 1)]
)
def test_an_error_of_another_node_is_this_ones_with_its_exit_code(
    tmp_path: Path, clock: Clock, outcome: str, code: int
) -> None:
    from mutualrl.errors import MutualRLError

    node, run, resolved, other = met(tmp_path / "r", clock)
    other.close(outcome)
    with pytest.raises(MutualRLError, match=f"node 1 ended the run: {outcome.partition(': ')[2]}") as caught:
        node.check(run, resolved, Supervisor())  # type: ignore[arg-type]
    assert caught.value.exit_code == code


def test_a_stop_on_another_node_stops_this_one_and_an_end_is_an_end(tmp_path: Path, clock: Clock) -> None:
    node, run, resolved, other = met(tmp_path / "r", clock)
    here = Supervisor()
    other.close("interrupted: stopped by SIGTERM")
    node.check(run, resolved, here)  # type: ignore[arg-type]
    assert here.stopping
    assert node.settled(run, resolved, here)  # type: ignore[arg-type]
