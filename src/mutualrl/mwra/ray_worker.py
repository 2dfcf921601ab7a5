"""One rank of one policy inside a Ray Train worker: a process of its own, as the agent starts it on one machine.

A process, because a rank takes signals, and ends without the interpreter's own end. Its output is the Ray worker's.
Ray starts a policy again when this function raises; it returns where another start would end in the same way.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from mutualrl.console.lines import notify
from mutualrl.mwra.group import (
    CONSEQUENCES,
    ProcessTag,
    clear_attempt,
    environment,
    failure_of,
    how_it_died,
    next_attempt,
)
from mutualrl.mwra.watch import Watch
from mutualrl.process.ports import free_port
from mutualrl.recipes import load_run
from mutualrl.storage.rundir import RunDirectory

POLL_SECONDS = 0.5
SIBLING_SECONDS = 10.0  # after another rank of the policy has failed: this one may wait for it in a collective


class PolicyDiedError(RuntimeError):
    """Policy that ended before its result, and may be started again."""


def train_policy(config: dict[str, Any]) -> None:
    """Carry out this worker's rank of a policy: `config` has `run_dir`, `policy`, `threads`, and the
    supervisor's `host`. Raises PolicyDiedError
    where it died, and where the run's directory is not on this node."""
    import ray
    import ray.train
    from ray.train.collective import broadcast_from_rank_zero

    context = ray.train.get_context()
    rank, policy, run = context.get_world_rank(), str(config["policy"]), RunDirectory(Path(config["run_dir"]))
    host = ray.util.get_node_ip_address()
    if not run.run_json.is_file():
        raise PolicyDiedError(
            f"{run.root} is not on the node {host}: expected a file system that all nodes of the cluster share"
        )
    if run.policy(policy).result.exists():
        return
    begin = None
    if rank == 0:
        attempt = next_attempt(run, policy)
        clear_attempt(run, policy)
        begin = {"attempt": attempt, "host": host, "port": free_port(host)}
    begin = broadcast_from_rank_zero(begin)
    assert begin is not None
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    variables = {
        **environment(int(config["threads"]), gpus.split(",") if gpus else []),
        **ProcessTag(str(run.root), policy).variables(),
        "RANK": str(rank),
        "WORLD_SIZE": str(context.get_world_size()),
        # Ray shows each worker its own GPU alone, which is the first of those it sees.
        "LOCAL_RANK": "0" if gpus else str(context.get_local_rank()),
        "LOCAL_WORLD_SIZE": "1" if gpus else str(context.get_local_world_size()),
        "MASTER_ADDR": begin["host"],
        "MASTER_PORT": str(begin["port"]),
    }
    command = [sys.executable, "-m", "mutualrl.training.worker", f"--run-dir={run.root}", f"--policy={policy}"]
    command += [f"--attempt={begin['attempt']}", f"--parent={os.getpid()}"]
    if host != config["host"]:
        command.append("--elsewhere")
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=variables)
    try:
        trouble = _see_through(process, run, policy, watching=rank == 0)
    finally:
        process.kill()
        process.wait()
    if trouble is not None and not _is_final(run, policy):
        raise PolicyDiedError(f"policy {policy!r} {trouble}")


def _see_through(process: subprocess.Popen[bytes], run: RunDirectory, policy: str, *, watching: bool) -> str | None:
    """Wait until a rank's process ends; the main one's worker also looks for a policy that is frozen, or makes no
    progress. Return what went wrong, None where nothing did."""
    watch = Watch(run.exchange, policy, load_run(run, without_models=True).run, notify)
    failed_at = None
    while (code := process.poll()) is None:
        time.sleep(POLL_SECONDS)
        if failed_at is None and failure_of(run, policy) is not None:
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() > failed_at + SIBLING_SECONDS:
            return "was left waiting by another rank, which failed"
        if not watching:
            continue
        if (silent := watch.frozen_for()) is not None:
            return f"is frozen: no heartbeat for {silent}"
        if (stalled := watch.stalled_for()) is not None:
            return f"lives, and hangs: {stalled}"
    return None if code == 0 else how_it_died(run, policy, code)


def _is_final(run: RunDirectory, policy: str) -> bool:
    """Return whether another start would end in the same way: the run is asked to stop, the result is written, or the
    policy has left an error that is its own."""
    failure = failure_of(run, policy)
    own_error = failure is not None and failure[0] not in ("died", *CONSEQUENCES)
    return own_error or run.stop_file.exists() or run.policy(policy).result.exists()
