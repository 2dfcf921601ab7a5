"""Policies joined over a slow, failing and absent bucket, killed meanwhile, train the same weights."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from threading import Timer

import psutil
import pytest

from buckets import Faults, proxied, reachable, serving
from conftest import REPEATS
from mutualrl.errors import MachineError
from mutualrl.see import open_store
from mutualrl.see.inspection import inspect_policy
from mutualrl.see.manifest import read_manifest
from runs import FinishedRun, wait_until
from test_join import Joined


def kill_and_rejoin(joined: Joined) -> None:
    """SIGKILL a policy's supervisor and all its descendants, and run the same command again."""
    try:
        parent = psutil.Process(joined.process.pid)
        descendants = parent.children(recursive=True)
    except psutil.NoSuchProcess:
        descendants = []
    for process in descendants:
        if process.is_running():
            os.kill(process.pid, signal.SIGKILL)
    joined.process.kill()
    joined.process.wait()
    wait_until(lambda: not any(process.is_running() and process.status() != "zombie" for process in descendants))
    joined.begin()


def has_finished(joined: Joined) -> bool:
    """Return whether a policy has finished; restart one that failed because the store was down."""
    code = joined.process.poll()
    if code == MachineError.exit_code:
        joined.begin()
    assert code in (None, 0, MachineError.exit_code), joined.errors
    return code == 0


KILLS = 3 * REPEATS  # per server


@pytest.mark.release
@pytest.mark.parametrize("server", ["seaweedfs", "moto"] if REPEATS > 1 else ["seaweedfs"])
def test_weights_survive_kills_and_a_failing_store(unbroken: FinishedRun, tmp_path: Path, server: str) -> None:
    rng, faults = random.Random(server), Faults(delay=0.2, failing=0.2)
    with serving(server, tmp_path / "server") as real, proxied(real, faults) as proxy, reachable(proxy):
        url = real.bucket()
        policies = [Joined(tmp_path, url, name, core=core) for core, name in enumerate(("ada", "bob"))]
        try:
            for number in range(KILLS):
                time.sleep(rng.uniform(0, 15))
                running = [joined for joined in policies if joined.process.poll() is None]
                if number == 1:  # the store is down for half a minute
                    faults.down = True
                    Timer(30, lambda: setattr(faults, "down", False)).start()
                elif running:
                    kill_and_rejoin(rng.choice(running))
            wait_until(lambda: [has_finished(joined) for joined in policies] == [True, True])  # check every policy
        finally:
            for joined in policies:
                joined.process.kill()
        assert {joined.policy: joined.weights() for joined in policies} == unbroken.weights()
        assert faults.failed > 5
        faults.failing = faults.delay = 0.0
        manifest = read_manifest(open_store(url))
        assert manifest is not None
        for name in ("ada", "bob"):
            inspection = inspect_policy(url, manifest.run_id, name, verify=True)
            assert (inspection.rounds, inspection.damaged, inspection.gaps) == ([0, 1, 2], [], [])
