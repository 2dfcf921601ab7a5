"""URLs of buckets: s3://BUCKET/PREFIX, gs://..., az://..."""

from __future__ import annotations

import re

SCHEMES = ("s3", "gs", "az")


def is_bucket(location: object) -> bool:
    """Return whether a location is the URL of a bucket."""
    scheme, separator, _ = str(location).partition("://")
    return bool(separator) and scheme in SCHEMES


def redacted(text: str) -> str:
    """Return a text without what may be a secret in a URL: what is before an `@`, and a query."""
    text = re.sub(r"(\b[a-z0-9]+://)[^/@\s]*@", r"\1...@", text)
    return re.sub(r"(\b[a-z0-9]+://[^?\s]*)\?[^\s'\"]*", r"\1?...", text)


def require_url(url: str) -> str:
    """Return a URL of a bucket, without a slash at its end. Raises ValueError for any other, and for one that holds
    credentials: URLs are printed and stored."""
    match = re.fullmatch(r"([a-z0-9]+)://([^/?#]+)(/[^?#]*)?", url)
    if match is None or match[1] not in SCHEMES or not url.isprintable():
        raise ValueError(f"expected {', '.join(f'{scheme}://BUCKET/PREFIX' for scheme in SCHEMES)}, without a query")
    if "@" in match[2]:
        raise ValueError("holds credentials; give them in the environment (AWS_ACCESS_KEY_ID, ...)")
    if ".." in (match[3] or "").split("/"):
        raise ValueError("expected a prefix without '..'")
    return url.rstrip("/")
