"""The Shared Experience Exchange (SEE): the only code that touches a peer's files."""

from mutualrl.see.exchange import Exchange, Patience
from mutualrl.see.liveness import Heartbeat
from mutualrl.see.schema import OPTIONAL_FIELDS, Marker
from mutualrl.see.shard import Shard

__all__ = ["OPTIONAL_FIELDS", "Exchange", "Heartbeat", "Marker", "Patience", "Shard"]
