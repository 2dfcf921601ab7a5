"""Ports of this machine."""

from __future__ import annotations

import errno
import socket


def free_port(host: str = "") -> int:
    """Return a free TCP port, chosen by the system."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def in_use(port: int) -> bool:
    """Return whether something on this machine listens on a TCP port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False
