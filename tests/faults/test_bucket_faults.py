"""Policies that join over a bucket which is slow, fails and goes away, while they are killed: the same weights."""

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
from mutualrl.errors import MachineError
from mutualrl.see import open_store
from mutualrl.see.inspection import inspect_policy
from mutualrl.see.manifest import read_manifest
from runs import FinishedRun, wait_until
from test_join import Joined


def killed(joined: Joined) -> None:
    """SIGKILL a policy's supervisor and everything below it, and start the same command again."""
    try:
        parent = psutil.Process(joined.process.pid)
        below = parent.children(recursive=True)
    except psutil.NoSuchProcess:
        below = []
    for process in below:
        if process.is_running():
            os.kill(process.pid, signal.SIGKILL)
    joined.process.kill()
    joined.process.wait()
    wait_until(lambda: not any(process.is_running() and process.status() != "zombie" for process in below))
    joined.begin()


def ended(joined: Joined) -> bool:
    """Return whether a policy has finished; one that began while the store was away is started again."""
    code = joined.process.poll()
    if code == MachineError.exit_code:
        joined.begin()
    assert code in (None, 0, MachineError.exit_code), joined.errors
    return code == 0


KILLS = 6  # with each server


@pytest.mark.extended
@pytest.mark.parametrize("server", ["moto", "seaweedfs"])
def test_kills_and_a_failing_store_leave_no_trace(unbroken: FinishedRun, tmp_path: Path, server: str) -> None:
    rng, faults = random.Random(server), Faults(delay=0.2, failing=0.2)
    with serving(server, tmp_path / "server") as real, proxied(real, faults) as proxy, reachable(proxy):
        url = real.bucket()
        policies = [Joined(tmp_path, url, name, core=core) for core, name in enumerate(("ada", "bob"))]
        try:
            for number in range(KILLS):
                time.sleep(rng.uniform(0, 20))
                running = [each for each in policies if each.process.poll() is None]
                if number == 1:  # half a minute without the store
                    faults.down = True
                    Timer(30, lambda: setattr(faults, "down", False)).start()
                elif running:
                    killed(rng.choice(running))
            wait_until(lambda: [ended(each) for each in policies] == [True, True])  # each is looked at
        finally:
            for each in policies:
                each.process.kill()
        assert {each.policy: each.weights() for each in policies} == unbroken.weights()
        assert faults.failed > 20
        faults.failing = faults.delay = 0.0
        manifest = read_manifest(open_store(url))
        assert manifest is not None
        for name in ("ada", "bob"):
            inspection = inspect_policy(url, manifest.run_id, name, verify=True)
            assert (inspection.rounds, inspection.damaged, inspection.gaps) == ([0, 1, 2], [], [])
