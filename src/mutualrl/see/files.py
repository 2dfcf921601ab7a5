"""Names of the objects of an exchange."""

from __future__ import annotations

import re

from mutualrl.see.store import ExchangeStore

#: requests to a store: (puts, gets) to publish a round with one part; gets to read a peer's committed round
PUBLISH_REQUESTS = (2, 5)
READ_REQUESTS = 2

PART_NAME = re.compile(r"([0-9]{6,})(\.[0-9]+)?(\.a[0-9]+)?(\.scores)?\.parquet")
MARKER_NAME = re.compile(r"([0-9]{6,})\.json")


def round_of(name: str) -> int | None:
    """Return the round of a part or a marker; None for any other object."""
    match = PART_NAME.fullmatch(name) or MARKER_NAME.fullmatch(name)
    return None if match is None else int(match[1])


def committed_rounds(store: ExchangeStore, policy: str) -> list[int]:
    """Return the rounds of a policy that have a commit marker, in order."""
    matches = [MARKER_NAME.fullmatch(name) for name in store.names(policy)]
    return sorted(int(match[1]) for match in matches if match)


def marker_name(round_index: int) -> str:
    """Return the name of a round's commit marker."""
    return f"{round_index:06d}.json"
