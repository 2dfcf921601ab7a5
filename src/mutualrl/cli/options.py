"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Let a hub model run its own code.")]
