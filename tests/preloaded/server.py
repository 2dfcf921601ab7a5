"""Start a run's workers by forking one process that has imported everything.

Importing torch, transformers and TRL costs a worker several CPU seconds, and the tests start hundreds of workers. With
`hooks/` on PYTHONPATH, `python -m mutualrl.training.worker` sends its arguments, environment and files to this server
and waits as a stand-in: it has the worker's place in the process tree, its command line and its exit code.

    stand-in (child of the agent) --socket--> handler (fork of the server) --fork--> worker

A signal to the stand-in that can be handled reaches the worker. When the stand-in is killed, the worker is, too. Tests
that freeze, inspect or list processes start them as users do (fixture `exec_workers`). A start whose environment could
change what an import does is refused here, logged, and made in the ordinary way.

python server.py SOCKET LOG     (ends when its stdin is closed)
"""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import select
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

#: variables that are set anew in each worker, or that nothing reads at import
PER_WORKER = (
    *("PYTHONUNBUFFERED", "PYTHONSAFEPATH", "OMP_NUM_THREADS", "MKL_NUM_THREADS"),
    *("PYTORCH_NVML_BASED_CUDA_CHECK", "PYTHONBREAKPOINT"),  # set by imports in a parent process
)
#: beginnings of the names of variables that an import might read
READ_AT_IMPORT = (
    *("ACCELERATE_", "ARROW_", "CUDA_", "DATASETS_", "DEEPSPEED", "DS_", "HF_", "HOME", "HUGGINGFACE", "LD_"),
    *("MALLOC_", "MKL_", "NUMEXPR", "OMP_", "OPENBLAS", "PEFT_", "PYTHON", "PYTORCH", "TORCH", "TRANSFORMERS", "TRL_"),
    *("USE_", "VLLM_USE", "XDG_"),
)


def differing(theirs: Mapping[str, str], ours: Mapping[str, str]) -> list[str]:
    """Return the variables that differ and that an import might read."""
    names = (theirs.keys() | ours.keys()) - set(PER_WORKER)
    return sorted(name for name in names if name.startswith(READ_AT_IMPORT) and theirs.get(name) != ours.get(name))


def serve(listener: socket.socket, log: Path) -> None:
    """Import what workers import when the first one comes, and fork a handler per connection until stdin is closed."""
    if listener not in select.select([listener, sys.stdin], [], [])[0]:
        return
    ours = dict(os.environ)
    import numpy as np

    from mutualrl.process.loading import fast_imports

    with fast_imports():
        import deepspeed  # noqa: F401  (accelerate imports it in every worker)
        import openai  # noqa: F401  (of sources that are asked)
        from transformers.models.llama import modeling_llama  # noqa: F401
        from transformers.models.qwen3 import modeling_qwen3  # noqa: F401

        from mutualrl.engines import frozen, transformers_engine  # noqa: F401
        from mutualrl.training import adapters, build, callback, resume, trackers, validation, vllm_generation, worker  # noqa: F401
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # handlers are reaped by the system
    added = {name: value for name, value in os.environ.items() if name not in ours}  # by imports, for this process
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if listener not in ready:
            return
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            random.seed()
            np.random.seed()
            _handle(connection, ours, added, log)
        connection.close()


def _handle(connection: socket.socket, ours: dict[str, str], added: dict[str, str], log: Path) -> NoReturn:
    """Start a worker for a stand-in, report how it ended, and kill it when the stand-in is gone."""
    from mutualrl.process.parent_watch import become_subreaper, end_children

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request, descriptors = _receive(connection)
    request["environment"] = {**added, **request["environment"]}
    if names := differing(request["environment"], {**added, **ours}):
        with log.open("a") as file:
            file.write(f"{' '.join(request['arguments'])}: {', '.join(names)}\n")
        connection.sendall(b"refused\n")
        os._exit(0)
    become_subreaper()
    sys.stdin.close()
    handler = os.getpid()
    worker = os.fork()
    if worker == 0:
        connection.close()
        _become_worker(request, descriptors, handler)
    for descriptor in descriptors:
        os.close(descriptor)
    connection.sendall(f"{worker}\n".encode())
    ended = os.pidfd_open(worker)
    ready, _, _ = select.select([ended, connection], [], [])
    if ended not in ready:
        os.kill(worker, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    end_children()
    with suppress(OSError):
        connection.sendall(f"{status}\n".encode())
    os._exit(0)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    head, descriptors, _, _ = socket.recv_fds(connection, 8, 64)
    size, data = int.from_bytes(head, "big"), b""
    while len(data) < size:
        data += connection.recv(size - len(data))
    return json.loads(data), list(descriptors)


def _become_worker(request: dict[str, Any], descriptors: list[int], handler: int) -> NoReturn:
    """Take over the stand-in's files, directory, environment, limits and arguments, and run the worker's main()."""
    spare = [os.dup2(descriptor, 200 + number) for number, descriptor in enumerate(descriptors)]
    os.closerange(3, 200)
    for descriptor, number in zip(spare, request["descriptors"], strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(request["directory"])
    os.umask(request["umask"])
    os.sched_setaffinity(0, request["cores"])
    for limit, values in request["limits"].items():
        resource.setrlimit(int(limit), values)
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # as inherited from the agent
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115  (for the process's lifetime)
    sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    sys.stderr.reconfigure(write_through=True)  # type: ignore[union-attr]

    import torch

    from mutualrl.training import worker

    torch.set_num_threads(int(request["environment"].get("OMP_NUM_THREADS", "1")))
    arguments = [f"--parent={handler}" if each.startswith("--parent=") else each for each in request["arguments"]]
    sys.argv = [str(worker.__file__), *arguments]
    sys.modules["__main__"] = worker
    code = 1
    try:
        worker.main(arguments)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001  (as the interpreter does at the top)
        sys.excepthook(*sys.exc_info())
    worker.leave(code)


if __name__ == "__main__":
    own_socket, own_log = sys.argv[1:]
    with socket.socket(socket.AF_UNIX) as own_listener:
        own_listener.bind(own_socket)
        own_listener.listen(128)
        serve(own_listener, Path(own_log))
