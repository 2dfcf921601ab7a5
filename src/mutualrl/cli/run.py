"""What `train` and `join` do after a run: print its results, write cards and report, upload."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from mutualrl.cli.output import emit, prose, screen
from mutualrl.cli.results import show_summary
from mutualrl.console.display import print_text
from mutualrl.errors import MutualRLError
from mutualrl.reporting.card import write_cards
from mutualrl.reporting.upload import push
from mutualrl.storage.accounts import SourceFacts
from mutualrl.storage.run_info import Summary
from mutualrl.storage.rundir import RunDirectory


def finish(
    directory: RunDirectory, summary: Summary, *, report: bool, push_to: str | None = None, as_json: bool
) -> None:
    """Print the results of a run, write its cards and its report, and upload its models. `push_to`: owner on the
    hub."""
    root, console = directory.root, prose()
    if directory.info().joined_source:  # no policy trained here
        _finish_source(directory, summary, as_json=as_json)
        return
    if not as_json:
        show_summary(summary, root)
    write_cards(root)
    message = _write_report(root) if report else f"Curves and rescues: mutualrl report {root}"
    print_text(console, message, 4096)
    if push_to is not None:
        _push(root, push_to, console)
    if as_json:
        emit({"run_dir": str(root), **summary.to_json()})


def _finish_source(directory: RunDirectory, summary: Summary, *, as_json: bool) -> None:
    """Print what a source gave that joined an exchange alone. What the policies used of it, they say themselves."""
    if as_json:
        emit({"run_dir": str(directory.root), **summary.to_json()})
        return
    name = directory.info().joined_source
    facts = summary.source_facts.get(name, SourceFacts())
    asked = f"{facts.sent:,} questions, {facts.failed:,} without an answer, {facts.tokens:,} tokens"
    text = f"{name} has answered every round: {asked}; {summary.seconds:.0f} s in total"
    print_text(screen(), f"{text}. Rescues are in the policies' runs, its log in {directory.root}")


def _write_report(root: Path) -> str:
    """Write the report, and return a message. A failure to write it does not fail a successful run."""
    try:
        from mutualrl.cli.report import page_of  # what draws is imported at the end of a run

        written = page_of([root], root / "report")
    except (OSError, ImportError, MutualRLError) as error:
        return f"The report could not be written ({error}); to retry: mutualrl report {root} --out DIR"
    return f"Report: {written.page}"


def _push(root: Path, owner: str, console: Console) -> None:
    for repo in push(root, owner):
        print_text(console, f"Pushed: {repo}")
