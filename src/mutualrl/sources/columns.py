"""Section `columns` of a recorded source."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from mutualrl.section import Section, as_tuple


class Columns(Section):
    """Columns of a recorded file that the user named; those left out are guessed."""

    id: str | None = Field(None, description="id of the prompt")
    prompt: str | None = Field(None, description="the prompt: a string or messages")
    text: Annotated[tuple[str, ...], BeforeValidator(as_tuple), Field(strict=False)] = Field(
        (), description="the response: a string, a list of strings or messages; or several columns"
    )
    ended: str | None = Field(None, description="false for a text that was cut off")
    verdict: str | None = Field(None, description="texts with a false one are left out; a true one proves nothing")

    @property
    def named(self) -> list[str]:
        """Return the columns that the user named."""
        return [name for name in (self.id, self.prompt, self.ended, self.verdict, *self.text) if name]
