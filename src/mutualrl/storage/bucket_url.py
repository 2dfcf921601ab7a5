"""URLs of an exchange that several machines reach: s3://BUCKET/PREFIX, gs://..., az://..., file:///DIRECTORY."""

from __future__ import annotations

import re

SCHEMES = ("s3", "gs", "az")
DIRECTORY = "file"


def is_bucket(location: object) -> bool:
    """Return whether a location is the URL of a bucket, or of a shared directory."""
    scheme, separator, _ = str(location).partition("://")
    return bool(separator) and scheme in (*SCHEMES, DIRECTORY)


def redacted(text: str) -> str:
    """Return a text without what may be a secret in a URL: what is before an `@`, and a query."""
    text = re.sub(r"(\b[a-z0-9]+://)[^/@\s]*@", r"\1...@", text)
    return re.sub(r"(\b[a-z0-9]+://[^?\s]*)\?[^\s'\"]*", r"\1?...", text)


def require_url(url: str) -> str:
    """Return a URL of a bucket or of a shared directory, without a slash at its end. Raises ValueError for any other,
    and for one that holds credentials: URLs are printed and stored."""
    if url.startswith(f"{DIRECTORY}://"):
        if not re.fullmatch(r"file:///[^?#]+", url) or not url.isprintable() or ".." in url.split("/"):
            raise ValueError("expected file:///DIRECTORY, an absolute path without '..'")
        return url.rstrip("/")
    match = re.fullmatch(r"([a-z0-9]+)://([^/?#]+)(/[^?#]*)?", url)
    known = ", ".join(f"{scheme}://BUCKET/PREFIX" for scheme in SCHEMES)
    if match is None or match[1] not in SCHEMES or not url.isprintable():
        raise ValueError(f"expected {known} or file:///DIRECTORY, without a query")
    if "@" in match[2]:
        raise ValueError("holds credentials; give them in the environment (AWS_ACCESS_KEY_ID, ...)")
    if ".." in (match[3] or "").split("/"):
        raise ValueError("expected a prefix without '..'")
    return url.rstrip("/")
