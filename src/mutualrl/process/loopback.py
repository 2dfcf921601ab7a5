"""Sockets of a policy's process group on one machine: on the loopback interface only.

torch's TCPStore, over which ranks find each other, listens on all interfaces and without authentication, whatever
address it is given; gloo, NCCL and vLLM choose an interface by the host's name. Here the store is bound to the address
under which the ranks reach it (the loopback; under Ray, where ranks span machines, rank 0's). The libraries are told to
use the loopback, unless the user has chosen another interface.
"""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Mapping

import psutil

ADDRESS = "127.0.0.1"
#: environment variable with the descriptor of the listening socket that the agent made for the store of rank 0
STORE_SOCKET = "MUTUALRL_STORE_SOCKET"
_kept: list[socket.socket] = []


def interface() -> str | None:
    """Return the name of the loopback interface; None if there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.family == socket.AF_INET and each.address == ADDRESS for each in addresses):
            return str(name)
    return None


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that keep gloo, NCCL and vLLM on the loopback, without those that `environment` sets."""
    name = interface()
    chosen = {} if name is None else {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
    chosen["VLLM_HOST_IP"] = ADDRESS
    return {key: value for key, value in chosen.items() if key not in environment}


def listen() -> socket.socket:
    """Return a socket that listens on the loopback, on a port chosen by the system."""
    return socket.create_server((ADDRESS, 0))


def bind_stores() -> None:
    """Make every TCPStore that this process serves listen on its own address only."""
    from torch.distributed import TCPStore

    rendezvous = importlib.import_module("torch.distributed.rendezvous")  # the attribute of that name is a function
    if rendezvous.TCPStore is not TCPStore:
        return

    class BoundStore(TCPStore):  # type: ignore[misc]  # torch is followed as Any
        """TCPStore that listens on the address under which its clients reach it, instead of all interfaces."""

        def __init__(self, host_name: str, port: int, *args: object, **kwargs: object) -> None:
            serves = bool(kwargs.get("is_master", args[1] if len(args) > 1 else False))
            if serves and kwargs.get("master_listen_fd") is None:
                kwargs["master_listen_fd"] = _listening(host_name, port)
            super().__init__(host_name, port, *args, **kwargs)

    rendezvous.TCPStore = BoundStore  # type: ignore[attr-defined]


def _listening(host: str, port: int) -> int:
    """Return the descriptor of a socket that listens on an address: the agent's, if it is for that port."""
    given = _take_store_socket()
    if given is not None:
        if given.getsockname()[1] == port:
            return given.detach()
        given.close()
    return socket.create_server((host, port)).detach()


def keep_store_socket() -> None:
    """Keep the agent's socket for a store that may be made later (vLLM's, in a policy of one process), and out of the
    environment of this process's children, which do not inherit the socket."""
    if (given := _take_store_socket()) is not None:
        _kept.append(given)


def _take_store_socket() -> socket.socket | None:
    """Return the agent's socket, once; None if this process inherited none."""
    inherited = os.environ.pop(STORE_SOCKET, "")
    if inherited.isdecimal():
        return socket.socket(fileno=int(inherited))
    return _kept.pop() if _kept else None
