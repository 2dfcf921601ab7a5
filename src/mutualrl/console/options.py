"""What a command line says of a field: each option is declared once, as a field of a dataclass.

A field `limit: Annotated[int | None, Option("Number of prompts.", min=1)] = None` is the option `--limit`. A field
without `Option` is no option. A subclass hides an inherited option by declaring the field again without one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Option:
    """Option of a command. `name`: as typed, by default `--FIELD`; None, () and False as default mean not given.
    `complete`: what completes it in a shell, a function of `cli.completion`. `variable`: environment variable that
    also sets it. `argument`: it has no name, and is given by its place."""

    help: str
    name: str | None = None
    metavar: str | None = None
    min: float | None = None
    max: float | None = None
    complete: str | None = None
    variable: str | None = None
    argument: bool = False


SEED_LIMIT = 2**31 - 1
ENGINE = Option("transformers or vllm (vllm if it supports the model).")
PLOT = Option("Write figures to this directory.")
JSON = Option("Print one JSON object on stdout.", "--json")
TRUST_REMOTE_CODE = Option("Let a hub model run its own code.")
