"""The Shared Experience Exchange (SEE): the only code that touches a peer's files."""

from mutualrl.see.absences import Absences
from mutualrl.see.exchange import Exchange, Listener, Patience
from mutualrl.see.liveness import Heartbeat
from mutualrl.see.schema import Marker
from mutualrl.see.shard import Shard
from mutualrl.see.store import ExchangeStore, LocalStore, open_store

__all__ = [
    "Absences",
    "Exchange",
    "ExchangeStore",
    "Heartbeat",
    "Listener",
    "LocalStore",
    "Marker",
    "Patience",
    "Shard",
    "open_store",
]
