"""Output of the commands: results on stdout, messages on stderr, errors in a common form with their exit code."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TextIO

from rich import box
from rich.console import Console
from rich.table import Table

from mutualrl.console.display import PLAIN_BELOW, make_console, print_text, shortened
from mutualrl.errors import MachineError, MutualRLError, RunInterruptedError
from mutualrl.process.limits import end_process
from mutualrl.process.user_code import exit_now
from mutualrl.storage.files import is_machine_failure


def prose() -> Console:
    """Return the console for messages: stderr."""
    return make_console(stderr=True)


PIPE_WIDTH = 4096  # width when stdout is not a terminal: a table row is one line, however long


def screen() -> Console:
    """Return the console for tables of results: stdout."""
    console = make_console()
    return console if console.is_terminal or "COLUMNS" in os.environ else make_console(width=PIPE_WIDTH)


def show_table(table: Table) -> None:
    """Print a table on stdout: with borders on a terminal, as Markdown in a pipe or a log, and as lines `column: value`
    in a few columns."""
    console = screen()
    if console.width < PLAIN_BELOW:
        for line in plain_lines(table):
            console.print(line, highlight=False, soft_wrap=True)
        return
    if not console.is_terminal:
        table.box = box.MARKDOWN
    console.print(table)


def plain_lines(table: Table) -> list[str]:
    """Return a table as lines of markup: its title, and a block of `column: value` per row."""
    names = [str(column.header) for column in table.columns]
    lines = [str(table.title)] if table.title else []
    for row in zip(*(column.cells for column in table.columns), strict=True):
        lines += ["", *(f"{name}: {value}" for name, value in zip(names, row, strict=True))]
    return [*lines, str(table.caption)] if table.caption else lines


def note_all(notes: Iterable[str]) -> None:
    """Print notes on stderr."""
    for note in notes:
        print_text(prose(), f"Note: {note}")


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


@contextmanager
def reported_errors(*, as_json: bool) -> Iterator[None]:
    """Turn mutualrl's errors within the block into a message on stderr (and, with `as_json`, an object on stdout) and
    an exit code.

    With `as_json`, stdout has that object or the command's, and nothing else. A command that would end with code 0
    without having run to its end, or without its object, fails. Any other exception is a bug and keeps its traceback.
    """
    with _results_only() if as_json else nullcontext() as results:
        end_process.append(functools.partial(_fail, as_json=as_json, leave=exit_now))
        try:
            with _named_endings():
                require_working_directory()
                yield
            if results is not None and not results.written:
                raise MutualRLError("the command ended without its JSON object: please report this")
        except MutualRLError as error:
            _fail(error, as_json=as_json)
        finally:
            end_process.pop()


@contextmanager
def _named_endings() -> Iterator[None]:
    """Raise MutualRLError for what the machine or the user ended within the block, too."""
    try:
        yield
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


def require_working_directory() -> None:
    """Raise MachineError if the working directory was deleted: relative paths, and processes of ours, need one."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise MachineError("the working directory was deleted; change to another one (cd), and repeat") from None


def _fail(error: MutualRLError, *, as_json: bool, leave: Callable[[int], NoReturn] = sys.exit) -> NoReturn:
    message = shortened(str(error))
    if as_json:
        with contextlib.suppress(OSError):  # stdout itself may have failed; stderr and the exit code remain
            emit({"error": {"kind": error.kind, "message": message, "exit_code": error.exit_code}})
    print_text(prose(), f"mutualrl: {message}")
    leave(error.exit_code)
