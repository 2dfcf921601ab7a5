"""Check of the model hub, in one short request, to avoid a library's long retries."""

from __future__ import annotations

import functools
import os

TIMEOUT_SECONDS = 3.0
OFFLINE = "HF_HUB_OFFLINE is set"


@functools.cache
def hub_problem() -> str | None:
    """Return why the hub cannot be used, or None if it responds. Checked once per process."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE or os.environ.get("TRANSFORMERS_OFFLINE", "").lower() in ("1", "true"):
        return OFFLINE
    try:
        get_session().head(constants.ENDPOINT, timeout=TIMEOUT_SECONDS)
    except Exception as error:  # noqa: BLE001  (each HTTP library raises its own errors)
        return f"{constants.ENDPOINT} does not answer ({type(error).__name__})"
    return None
