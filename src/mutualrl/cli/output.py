"""Output of the commands: results on stdout, messages on stderr, errors in a common form with their exit code."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, ParamSpec, TextIO

from rich import box
from rich.console import Console
from rich.table import Table

from mutualrl.console.display import clean
from mutualrl.errors import FileDamagedError, MachineError, MutualRLError, RunInterruptedError
from mutualrl.process.limits import end_process
from mutualrl.process.user_code import exit_now
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
    stream = _results[-1].stream if _results else sys.stdout
    if stream is not None:  # closed by the caller
        stream.write(text)
        stream.flush()
    if _results:
        _results[-1].written = True


@dataclass
class _Results:
    """The stream of a command's JSON object, and whether it is written."""

    stream: TextIO | None
    written: bool = False


_results: list[_Results] = []  # of the running command, if it has --json


@contextmanager
def _results_only() -> Iterator[_Results]:
    """Reserve stdout for `emit`: whatever else is printed on it, by user code, a library or a child process, goes to
    stderr."""
    results, saved, copy = _Results(sys.stdout), sys.stdout, None
    if sys.stdout is sys.__stdout__ and sys.stdout is not None and sys.stderr is not None:  # else a test captures it
        sys.stdout.flush()
        copy = os.dup(1)
        os.dup2(2, 1)
        results.stream = os.fdopen(copy, "w", encoding="ascii", closefd=False)
    sys.stdout = sys.stderr
    _results.append(results)
    try:
        yield results
    finally:
        _results.pop()
        sys.stdout = saved
        if copy is not None:
            os.dup2(copy, 1)
            os.close(copy)


def reports_errors(command: Callable[P, None]) -> Callable[P, None]:
    """Turn mutualrl's errors into a message on stderr (and, with `as_json`, an object on stdout) and an exit code.

    With `as_json`, stdout has that object or the command's, and nothing else. A command that would end with code 0
    without having run to its end, or without its object, fails. Any other exception is a bug and keeps its traceback.
    """

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        as_json = bool(kwargs.get("as_json"))
        with _results_only() if as_json else nullcontext() as results:
            end_process.append(functools.partial(_fail, as_json=as_json, leave=exit_now))
            try:
                _run(lambda: command(*args, **kwargs))
                if results is not None and not results.written:
                    raise MutualRLError("the command ended without its JSON object: please report this")
            except MutualRLError as error:
                _fail(error, as_json=as_json)
            finally:
                end_process.pop()

    return wrapped


def _run(command: Callable[[], None]) -> None:
    """Run a command. Raises MutualRLError for what the machine or the user ended, too."""
    try:
        command()
    except KeyboardInterrupt:
        raise RunInterruptedError("stopped by SIGINT") from None
    except OSError as error:
        if isinstance(error, MutualRLError) or not is_machine_failure(error):
            raise  # in the latter case a bug
        path = f": {error.filename}" if error.filename else ""
        raise MachineError(f"OS error: {error.strerror or error}{path}") from error
    except SystemExit as error:
        if error.code in (None, 0):
            raise MutualRLError("something called sys.exit before the command had its result") from error
        raise


def _fail(error: MutualRLError, *, as_json: bool, leave: Callable[[int], NoReturn] = sys.exit) -> NoReturn:
    if as_json:
        with contextlib.suppress(OSError):  # stdout itself may have failed; stderr and the exit code remain
            emit({"error": {"kind": error.kind, "message": str(error), "exit_code": error.exit_code}})
    prose().print(f"mutualrl: {clean(str(error), 20000)}", markup=False, highlight=False, soft_wrap=True)
    leave(error.exit_code)
