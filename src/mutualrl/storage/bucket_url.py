"""URLs of an exchange that several machines reach: s3://BUCKET/PREFIX, gs://..., az://..., file:///DIRECTORY."""

from __future__ import annotations

import re

SCHEMES = ("s3", "gs", "az")
DIRECTORY = "file"


def is_bucket(location: object) -> bool:
    """Return whether a location is the URL of a bucket or of a shared directory."""
    scheme, separator, _ = str(location).partition("://")
    return bool(separator) and scheme in (*SCHEMES, DIRECTORY)


def redacted(text: str) -> str:
    """Return a text without the parts of its URLs that may be secret: the user info before an `@`, and the query."""
    text = re.sub(r"(\b[a-z0-9]+://)[^/@\s]*@", r"\1...@", text)
    return re.sub(r"(\b[a-z0-9]+://[^?\s]*)\?[^\s'\"]*", r"\1?...", text)


def require_url(url: str) -> str:
    """Return the URL of a bucket or of a shared directory, without a trailing slash. Raises ValueError for any other
    URL, and for one with credentials: URLs are printed and stored."""
    if url.startswith(f"{DIRECTORY}://"):
        if not re.fullmatch(r"file:///[^?#]+", url) or not url.isprintable() or ".." in url.split("/"):
            raise ValueError("expected file:///DIRECTORY, an absolute path without '..'")
        return url.rstrip("/")
    match = re.fullmatch(r"([a-z0-9]+)://([^/?#]+)(/[^?#]*)?", url)
    expected = ", ".join(f"{scheme}://BUCKET/PREFIX" for scheme in SCHEMES)
    if match is None or match[1] not in SCHEMES or not url.isprintable():
        raise ValueError(f"expected {expected} or file:///DIRECTORY, without a query")
    if "@" in match[2]:
        raise ValueError("contains credentials; set them in the environment (AWS_ACCESS_KEY_ID, ...)")
    if ".." in (match[3] or "").split("/"):
        raise ValueError("expected a prefix without '..'")
    return url.rstrip("/")
