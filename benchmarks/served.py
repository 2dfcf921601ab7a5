"""A learner that asks a served model where it fails: `sgt` and `hinted` against GRPO with the same tokens.

    python benchmarks/served.py            # everything, half an hour on 2 cores; resumes after an interruption
    python benchmarks/served.py --table    # the table of the existing pieces

It starts `transformers serve` (pip install 'mutualrl[served]' 'transformers[serving]') with the embedded model `ivy` on
a port of the loopback, runs `mutualrl sweep benchmarks/sweeps/served.yaml`, one run after another (the server has one
random state), and writes `benchmarks/results/served.json` and `.md`. All tokens that the source reads and writes are
counted.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import harness
import sweep_results as sweeps
from mutualrl.process.ports import in_use
from mutualrl.tiny import path_of

PORT = 8799  # in benchmarks/sweeps/served-pool.yaml
START_SECONDS = 120.0


@contextmanager
def server(directory: Path) -> Iterator[None]:
    """Serve `ivy` while the block runs. Raises RuntimeError if it does not answer."""
    if in_use(PORT):
        raise RuntimeError(f"port {PORT} of the loopback is in use: end what uses it")
    model = directory / "ivy"
    shutil.copytree(path_of("ivy"), model)
    settings = json.loads((model / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps({**settings, "do_sample": True}))  # else it is greedy
    command = [Path(sys.executable).parent / "transformers", "serve", "ivy", "--host", "127.0.0.1"]
    command += ["--port", str(PORT), "--device", "cpu"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with (directory / "server.log").open("wb") as log:
        process = subprocess.Popen(  # from where the name of the model is that of its directory
            list(map(str, command)), cwd=directory, stdout=log, stderr=subprocess.STDOUT, env=environment
        )
    try:
        until = time.monotonic() + START_SECONDS
        while not answers():
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"transformers serve: {(directory / 'server.log').read_text()[-2000:]}")
            time.sleep(0.5)
        yield
    finally:
        process.terminate()
        process.wait()


def answers() -> bool:
    """Return whether the server answers a question."""
    body = json.dumps({"model": "ivy", "prompt": "1", "max_tokens": 1}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/v1/completions", body, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def main() -> None:
    """Make the missing runs, and write the table."""
    args = harness.parse(sweeps.options(__doc__))
    with tempfile.TemporaryDirectory(prefix="mutualrl-") as directory, ExitStack() as stack:
        if not (args.table or args.add):
            stack.enter_context(server(Path(directory)))
        sweeps.make("served", "python benchmarks/served.py", args, ("sgt",), jobs=1)


if __name__ == "__main__":
    main()
