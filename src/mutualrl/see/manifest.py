"""Manifest of an exchange in a bucket: its run, and the settings that all of its policies must share.

The manifest is `<url>/run.json`, created once, by the first policy to join.
"""

from __future__ import annotations

import re
import time
from dataclasses import asdict, dataclass, replace

from mutualrl.errors import ExchangeDamagedError, FileDamagedError
from mutualrl.references import POLICY_NAME
from mutualrl.see.store import ExchangeStore, reread
from mutualrl.storage.files import JsonObject, checksummed_bytes, parse_checksummed
from mutualrl.storage.format import FORMAT, other_format

NAME = "run.json"
_WRITE_ATTEMPTS = 20
_POLICY = re.compile(POLICY_NAME)  # policies are directories here


@dataclass(frozen=True, slots=True)
class Manifest:
    """Run of an exchange. `fingerprint`: see `recipes.agreement.fingerprint`; `recipe`: settings that all policies must
    share, by dotted key."""

    run_id: str
    policies: tuple[str, ...]
    regime: str
    fingerprint: JsonObject
    recipe: JsonObject
    created: str = ""
    format: int = FORMAT


def read_manifest(store: ExchangeStore) -> Manifest | None:
    """Return the manifest, or None if the exchange has no run. Raises ExchangeDamagedError."""
    return reread(store, lambda: _read(store))


def _read(store: ExchangeStore) -> Manifest | None:
    data, where = store.get("", NAME), store.describe("", NAME)
    if data is None:
        return None
    try:
        value = parse_checksummed(data, where)
        if (problem := other_format(value.get("format"), where)) is not None:
            raise ExchangeDamagedError(problem)
        policies = tuple(map(str, value["policies"]))
        if invalid := [name for name in policies if not _POLICY.fullmatch(name)]:
            raise ExchangeDamagedError(f"{where}: invalid policy name {invalid[0]!r:.80}")
        run_id, regime, created = (str(value[key]) for key in ("run_id", "regime", "created"))
        return Manifest(run_id, policies, regime, dict(value["fingerprint"]), dict(value["recipe"]), created)
    except (FileDamagedError, KeyError, TypeError, ValueError) as error:
        raise ExchangeDamagedError(f"{where}: not the manifest of an exchange ({error})") from None


def write_manifest(store: ExchangeStore, manifest: Manifest) -> Manifest:
    """Create the manifest, or return the existing one if another process created it first."""
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    data = checksummed_bytes(asdict(replace(manifest, created=created)))
    for _ in range(_WRITE_ATTEMPTS):
        store.create("", NAME, data)
        if (stored := read_manifest(store)) is not None:
            return stored
        time.sleep(0.5)  # a store may reject both of two concurrent creates
    where = store.describe("", NAME)
    raise ExchangeDamagedError(f"{where}: exists on write but not on read; the store may be inconsistent")
