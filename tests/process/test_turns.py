"""Turns: one process at a time; a killed process does not block the others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from conftest import PATIENCE
from mutualrl.process.turns import turn

WORKER = """
import sys, time
from pathlib import Path
from mutualrl.process.turns import turn
lock, log = map(Path, sys.argv[1:3])
with turn(lock, lambda: print("waits", flush=True)):
    with log.open("a") as file:
        file.write("begin\\n"); file.flush()
        time.sleep(0.2)
        file.write("end\\n")
"""


def test_blocks_of_several_processes_do_not_overlap(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WORKER, str(tmp_path / "x.lock"), str(tmp_path / "log")]
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(4)]
    assert [worker.wait(PATIENCE) for worker in workers] == [0] * 4
    assert (tmp_path / "log").read_text().split() == ["begin", "end"] * 4


def test_killed_holder_does_not_block_others(tmp_path: Path) -> None:
    lock = tmp_path / "x.lock"
    code = f"import time\nfrom pathlib import Path\nfrom mutualrl.process.turns import turn\nwith turn(Path({str(lock)!r})):\n"
    code += "    print('held', flush=True)\n    time.sleep(3600)\n"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        waited: list[bool] = []

        def kill_holder() -> None:
            waited.append(True)
            holder.kill()

        with turn(lock, kill_holder):
            assert waited == [True]
