"""Check of the model hub. One short request, so that nothing waits through a library's retries."""

from __future__ import annotations

import functools
import os

TIMEOUT_SECONDS = 3.0
OFFLINE = "HF_HUB_OFFLINE is set"


@functools.cache
def hub_problem() -> str | None:
    """Return why the hub cannot be used; None when it answers. Asked once per process."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE or os.environ.get("TRANSFORMERS_OFFLINE", "").lower() in ("1", "true"):
        return OFFLINE
    try:
        get_session().head(constants.ENDPOINT, timeout=TIMEOUT_SECONDS)
    except Exception as error:  # noqa: BLE001  (whatever library carries the request, each has errors of its own)
        return f"{constants.ENDPOINT} does not answer ({type(error).__name__})"
    return None
