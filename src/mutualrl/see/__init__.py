"""Shared Experience Exchange (SEE): the only code that reads a peer's files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mutualrl.imported import on_first_use

if TYPE_CHECKING:
    from mutualrl.see.exchange import Exchange, WaitCallbacks, WaitTimeouts
    from mutualrl.see.liveness import Heartbeat
    from mutualrl.see.missing_peers import MissingPeers
    from mutualrl.see.read_log import ReadLog
    from mutualrl.see.schema import Marker
    from mutualrl.see.shard import Shard
    from mutualrl.see.store import ExchangeStore, LocalStore, open_store

_MODULES = {
    "exchange": ("Exchange", "WaitCallbacks", "WaitTimeouts"),
    "liveness": ("Heartbeat",),
    "missing_peers": ("MissingPeers",),
    "read_log": ("ReadLog",),
    "schema": ("Marker",),
    "shard": ("Shard",),
    "store": ("ExchangeStore", "LocalStore", "open_store"),
}
__all__ = [
    "Exchange",
    "ExchangeStore",
    "Heartbeat",
    "LocalStore",
    "Marker",
    "MissingPeers",
    "ReadLog",
    "Shard",
    "WaitCallbacks",
    "WaitTimeouts",
    "open_store",
]
__getattr__ = on_first_use(__name__, _MODULES)
