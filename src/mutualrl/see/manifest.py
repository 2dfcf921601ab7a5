"""Manifest of an exchange in a bucket: which run it holds, and what all of its policies must agree on.

`<url>/run.json`, created once by the first to come.
"""

from __future__ import annotations

import re
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from mutualrl.errors import ExchangeDamagedError, FileDamagedError
from mutualrl.records import POLICY_NAME
from mutualrl.see.store import ExchangeStore
from mutualrl.storage.files import checksummed_bytes, parse_checksummed

NAME = "run.json"
FORMAT = 1
_CONTESTS = 20
_POLICY = re.compile(POLICY_NAME)  # policies are directories here


@dataclass(frozen=True, slots=True)
class Manifest:
    """Run of an exchange. `fingerprint`: see `recipes.agreement.fingerprint`; `recipe`: what all policies must have
    alike, by dotted key."""

    run_id: str
    policies: tuple[str, ...]
    regime: str
    fingerprint: dict[str, Any]
    recipe: dict[str, Any]
    created: str = ""
    format: int = FORMAT


def read_manifest(store: ExchangeStore) -> Manifest | None:
    """Return the manifest; None where the exchange holds no run. Raises ExchangeDamagedError."""
    data, where = store.get("", NAME), store.describe("", NAME)
    if data is None:
        return None
    try:
        value = parse_checksummed(data, where)
        if value.get("format") != FORMAT:
            raise ExchangeDamagedError(f"{where}: format {value.get('format')!r}, this version reads {FORMAT}")
        policies = tuple(map(str, value["policies"]))
        if strange := [name for name in policies if not _POLICY.fullmatch(name)]:
            raise ExchangeDamagedError(f"{where}: no policy can be called {strange[0]!r:.80}")
        run_id, regime, created = (str(value[key]) for key in ("run_id", "regime", "created"))
        return Manifest(run_id, policies, regime, dict(value["fingerprint"]), dict(value["recipe"]), created)
    except (FileDamagedError, KeyError, TypeError, ValueError) as error:
        raise ExchangeDamagedError(f"{where}: not the manifest of an exchange ({error})") from None


def write_manifest(store: ExchangeStore, manifest: Manifest) -> Manifest:
    """Create the manifest, or return the one that somebody else has created first."""
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    data = checksummed_bytes(asdict(replace(manifest, created=created)))
    for _ in range(_CONTESTS):
        store.create("", NAME, data)
        if (stored := read_manifest(store)) is not None:
            return stored
        time.sleep(0.5)  # a store may refuse both of two creates that come at once
    where = store.describe("", NAME)
    raise ExchangeDamagedError(f"{where}: was created, and is not there; is its store sound?")
