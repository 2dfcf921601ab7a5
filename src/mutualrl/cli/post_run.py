"""Steps after a run: model cards, the report, upload to the hub."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from mutualrl.console.display import print_text
from mutualrl.errors import MutualRLError


def close(root: Path, console: Console, *, report: bool, push_to: str | None) -> None:
    """Write model cards and the report, print its path, and push the models if requested. A failure to write the
    report is printed, and does not fail a successful run."""
    from mutualrl.reporting.card import write_cards

    write_cards(root)
    message = f"Curves and rescues: mutualrl report {root}"
    if report:
        from mutualrl.reporting.report import write_report
        from mutualrl.storage.rundir import command_line
        from mutualrl.study.verdict import verdicts

        try:
            written = write_report([root], root / "report", " ".join(command_line()), verdicts)
            message = f"Report: {written.page}"
        except (OSError, MutualRLError) as error:
            message = f"The report could not be written ({error}); to retry: mutualrl report {root} --out DIR"
    print_text(console, message, 4096)
    if push_to is not None:
        from mutualrl.reporting.upload import push

        for repo in push(root, push_to):
            print_text(console, f"Pushed: {repo}")
