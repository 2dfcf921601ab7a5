"""Ports of this machine."""

from __future__ import annotations

import socket


def free_port(host: str = "") -> int:
    """A TCP port that nobody uses now, chosen by the system."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
