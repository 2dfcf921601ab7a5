"""One attempt of a policy as a Ray task, with one task per further rank.

Each rank is a subprocess of its task, because a rank handles signals and exits without interpreter shutdown. Its output
goes to the Ray worker's. A task raises PolicyDiedError if its attempt ended without a result; the launcher decides
whether another one begins.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mutualrl.console.lines import notify
from mutualrl.launch.death import describe_death, failure_of
from mutualrl.launch.group import ProcessTag, clear_attempt, environment, next_attempt
from mutualrl.launch.watch import WatchedRun
from mutualrl.machine.ray_cluster import Resources
from mutualrl.process import loopback
from mutualrl.process.parent_watch import become_subreaper, end_children
from mutualrl.process.ports import free_port
from mutualrl.recipes import load_run
from mutualrl.storage.rundir import RunDirectory

if TYPE_CHECKING:
    import ray
    from ray.util.placement_group import PlacementGroup

POLL_SECONDS = 0.5
SIBLING_SECONDS = 10.0  # after another rank of the policy failed: this one may wait for it in a collective


class PolicyDiedError(RuntimeError):
    """Attempt of a policy that ended before its result was written. `code`: exit code of its rank 0, if it ended."""

    def __init__(self, reason: str, code: int | None = None) -> None:
        super().__init__(reason, code)  # both are arguments, so that the error can be unpickled
        self.reason = reason
        self.code = code

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True, slots=True)
class PolicyTask:
    """Policy of a run on a cluster, or a source: run directory, name, threads per rank, the node of the command, and
    the environment variables with keys, of a served source alone."""

    run: RunDirectory
    policy: str
    threads: int
    command_host: str
    keys: Mapping[str, str] = field(default_factory=dict, repr=False)


def ranks_on(nodes: Sequence[str]) -> list[tuple[int, dict[str, str]]]:
    """Return the bundle and the torch.distributed variables of each rank of a policy whose bundles are on `nodes`.

    The ranks of a node are consecutive; rank 0 has the first bundle.
    """
    bundles = sorted(range(len(nodes)), key=lambda bundle: (nodes.index(nodes[bundle]), bundle))
    ranks = []
    for rank, bundle in enumerate(bundles):
        local_bundles = [other for other in bundles if nodes[other] == nodes[bundle]]
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(nodes)),
            "LOCAL_RANK": str(local_bundles.index(bundle)),
            "LOCAL_WORLD_SIZE": str(len(local_bundles)),
        }
        ranks.append((bundle, variables))
    return ranks


def train_policy(task: PolicyTask, group: PlacementGroup, resources: Resources) -> None:
    """Train a policy: rank 0 in this task (the first bundle of its placement group), each further rank in its own task.

    Raises PolicyDiedError if it ended without a result, or if the run directory is not on this node.
    """
    import ray

    become_subreaper()
    _require_shared(task.run)
    if task.run.policy(task.policy).result.exists():
        return
    try:
        attempt = next_attempt(task.run, task.policy)
        clear_attempt(task.run, task.policy)
        _train_ranks(task, attempt, group, resources)
    except (OSError, ray.exceptions.RayError) as error:
        raise PolicyDiedError(f"policy {task.policy!r} could not be trained: {error}") from error


def answer_source(task: PolicyTask) -> None:
    """Answer the rounds of a run as a source, in one process. Raises PolicyDiedError if it ended before the run did, or
    if the run directory is not on this node."""
    become_subreaper()
    _require_shared(task.run)
    attempt = next_attempt(task.run, task.policy)
    clear_attempt(task.run, task.policy)
    try:
        _wait_for(_start_rank(task, attempt, {}), task, [])
    except OSError as error:
        raise PolicyDiedError(f"source {task.policy!r} could not be started: {error}") from error
    finally:
        end_children()


def _train_ranks(task: PolicyTask, attempt: int, group: PlacementGroup, resources: Resources) -> None:
    """Train the ranks of an attempt until rank 0 ends. Raises PolicyDiedError if it ends without a result."""
    import ray
    from ray.util import placement_group_table

    node_of_bundle = placement_group_table(group)["bundles_to_node_id"]
    one_node = len(set(node_of_bundle.values())) == 1
    host = loopback.ADDRESS if one_node else ray.util.get_node_ip_address()
    rendezvous = {"MASTER_ADDR": host, "MASTER_PORT": str(free_port(host))}
    rendezvous |= loopback.variables(os.environ) if one_node else {}
    (_, first), *others = ranks_on([node_of_bundle[bundle] for bundle in range(len(node_of_bundle))])
    siblings: list[ray.ObjectRef[None]] = []
    try:
        for bundle, variables in others:
            rank = in_bundle(train_rank, group, bundle, resources)
            siblings.append(rank.remote(task, attempt, variables | rendezvous))
        _wait_for(_start_rank(task, attempt, first | rendezvous), task, siblings)
    finally:
        end_children()
        end_ranks(siblings)


def train_rank(task: PolicyTask, attempt: int, variables: dict[str, str]) -> None:
    """Train a further rank of a policy. Raises PolicyDiedError if it died."""
    become_subreaper()
    _require_shared(task.run)
    process = _start_rank(task, attempt, variables)
    try:
        code = process.wait()
    finally:
        end_children()
    if code != 0:
        raise PolicyDiedError(f"policy {task.policy!r}: rank {variables['RANK']} ended with exit code {code}")


def in_bundle(
    function: Callable[..., None], group: PlacementGroup, bundle: int, resources: Resources, **options: Any
) -> Any:
    """Return a Ray task that runs a function in a bundle of a placement group, with the bundle's resources."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    cpus, gpus = resources["CPU"], resources.get("GPU", 0)
    options = {"max_retries": 0} | options
    return ray.remote(function).options(num_cpus=cpus, num_gpus=gpus, scheduling_strategy=strategy, **options)


def end_ranks(ranks: list[ray.ObjectRef[None]]) -> None:
    """Cancel the tasks of ranks that still run `SIBLING_SECONDS` after rank 0."""
    import ray

    if not ranks:
        return
    # ray.cancel of a task that completes at this moment ends this process (ray-project/ray#54798)
    _, running = ray.wait(ranks, num_returns=len(ranks), timeout=SIBLING_SECONDS)
    for rank in running:
        ray.cancel(rank, force=True)


def _require_shared(run: RunDirectory) -> None:
    import ray

    if not run.run_json.is_file():
        host = ray.util.get_node_ip_address()
        raise PolicyDiedError(f"{run.root} is not on the node {host}: expected a file system that all nodes share")


def _start_rank(task: PolicyTask, attempt: int, variables: dict[str, str]) -> subprocess.Popen[bytes]:
    import ray

    gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])  # not the GPUs in the node's environment
    # A rank sees only its own GPU, as device 0.
    local = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} if gpus else {}
    tag = ProcessTag(str(task.run.root), task.policy).variables()
    command = [sys.executable, "-m", "mutualrl.training.worker", f"--run-dir={task.run.root}"]
    command += [f"--policy={task.policy}", f"--attempt={attempt}", f"--parent={os.getpid()}"]
    if ray.util.get_node_ip_address() != task.command_host:
        command.append("--elsewhere")
    inherited = environment(task.threads, gpus)
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, env=inherited | tag | variables | local | dict(task.keys)
    )


def _wait_for(process: subprocess.Popen[bytes], task: PolicyTask, siblings: list[ray.ObjectRef[None]]) -> None:
    """Wait until the policy's rank 0 ends. Raises PolicyDiedError if it ended without a result and without a stop
    request, is frozen, makes no progress, or waits for a failed rank."""
    import ray

    watch = WatchedRun(task.run.exchange, task.policy, load_run(task.run, without_models=True).run, notify)
    subject = f"policy {task.policy!r}"
    failed_at, running = None, siblings
    while (code := process.poll()) is None:
        time.sleep(POLL_SECONDS)
        ended, running = ray.wait(running, num_returns=len(running), timeout=0) if running else ([], [])
        if failed_at is None and (failure_of(task.run, task.policy) is not None or _failed(ended)):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() > failed_at + SIBLING_SECONDS:
            cause = "waited for another rank, which failed" if siblings else "wrote its error and did not end"
            raise PolicyDiedError(f"{subject} {cause}")
        if (silent := watch.frozen_for()) is not None:
            raise PolicyDiedError(f"{subject} is frozen: no heartbeat for {silent}")
        if (stalled := watch.stalled_for()) is not None:
            raise PolicyDiedError(f"{subject} is alive but hangs: {stalled}")
    if code != 0 or not (task.run.policy(task.policy).result.exists() or task.run.stop_file.exists()):
        raise PolicyDiedError(f"{subject} {describe_death(task.run, task.policy, code)}", code)


def _failed(ended: list[ray.ObjectRef[None]]) -> bool:
    """Return whether one of the ended ranks has failed."""
    import ray

    try:
        ray.get(ended)
    except ray.exceptions.RayError:
        return True
    return False
