"""Output of the commands: results on stdout, messages on stderr, errors in a common form with their exit code."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ParamSpec

from rich import box
from rich.console import Console
from rich.table import Table

from mutualrl.console.display import clean
from mutualrl.errors import FileDamagedError, MachineError, MutualRLError, RunInterruptedError
from mutualrl.storage.files import is_machine_failure

if TYPE_CHECKING:
    from mutualrl.reporting.verify_run import Verification

P = ParamSpec("P")


def prose() -> Console:
    """Return the console for messages: stderr. Names such as `:x:` are not rendered as emoji."""
    return Console(stderr=True, emoji=False)


PIPE_WIDTH = 4096  # width when stdout is not a terminal: a table row is one line, however long


def screen() -> Console:
    """Return the console for tables of results: stdout."""
    console = Console(emoji=False)
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(emoji=False, width=PIPE_WIDTH)


def show_table(table: Table) -> None:
    """Print a table on stdout: with borders on a terminal, as Markdown in a pipe or a log."""
    console = screen()
    if not console.is_terminal:
        table.box = box.MARKDOWN
    console.print(table)


def show_verification(result: Verification, *, as_json: bool) -> None:
    """Print the result of a verification: as JSON on stdout, or each damaged file on stderr. Exits with 6 if any file
    is damaged."""
    if as_json:
        emit(result.to_json())
    for line in result.notes:
        prose().print(f"Note: {clean(line)}", markup=False, highlight=False, soft_wrap=True)
    for line in result.damaged:
        prose().print(f"damaged: {clean(line)}", markup=False, highlight=False, soft_wrap=True)
    if result.damaged:
        error = FileDamagedError(f"{len(result.damaged)} damaged items in the run; readers refuse them")
        if as_json:
            sys.exit(error.exit_code)
        raise error


def emit(value: Mapping[str, object]) -> None:
    """Print one JSON object on stdout."""
    text = json.dumps(value, allow_nan=False) + "\n"  # ASCII: safe for any terminal and pipe
    if sys.stdout is not None:  # closed by the caller
        sys.stdout.write(text)
        sys.stdout.flush()


def reports_errors(command: Callable[P, None]) -> Callable[P, None]:
    """Turn mutualrl's errors into a message on stderr (and, with `as_json`, an object on stdout) and an exit code.

    Any other exception is a bug and keeps its traceback.
    """

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except KeyboardInterrupt:
            _fail(RunInterruptedError("stopped by SIGINT"), as_json=bool(kwargs.get("as_json")))
        except MutualRLError as error:
            _fail(error, as_json=bool(kwargs.get("as_json")))
        except OSError as error:
            if not is_machine_failure(error):
                raise  # a bug
            path = f": {error.filename}" if error.filename else ""
            problem = MachineError(f"OS error: {error.strerror or error}{path}")
            _fail(problem, as_json=bool(kwargs.get("as_json")))

    return wrapped


def _fail(error: MutualRLError, *, as_json: bool) -> None:
    if as_json:
        with contextlib.suppress(OSError):  # stdout itself may have failed; stderr and the exit code remain
            emit({"error": {"kind": error.kind, "message": str(error), "exit_code": error.exit_code}})
    prose().print(f"mutualrl: {clean(str(error), 20000)}", markup=False, highlight=False, soft_wrap=True)
    sys.exit(error.exit_code)
