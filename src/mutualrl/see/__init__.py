"""The Shared Experience Exchange (SEE): the only code that touches a peer's files."""

from mutualrl.see.absences import Absences
from mutualrl.see.exchange import Exchange, Listener, Patience
from mutualrl.see.liveness import Heartbeat
from mutualrl.see.schema import OPTIONAL_FIELDS, Marker
from mutualrl.see.shard import Shard

__all__ = ["OPTIONAL_FIELDS", "Absences", "Exchange", "Heartbeat", "Listener", "Marker", "Patience", "Shard"]
