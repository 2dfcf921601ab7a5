"""`mutualrl thl-check`: can two models exchange traces?"""

from __future__ import annotations

import typer

from mutualrl.cli.output import emit, prose
from mutualrl.console.display import print_text
from mutualrl.console.options import given
from mutualrl.console.plots import directory_for
from mutualrl.errors import UsageError
from mutualrl.paper.thl.request import ThlRequest
from mutualrl.paper.thl.thl_check import check

TURNS = "turns"
OF_TURNS = ("--suite", "--source", "--target", "--pool", "--conversations", "--trust-remote-code", "--json")


def _turns(request: ThlRequest) -> None:
    """Check chat templates, of the models that are named, of a pool's, or of `tiny-tools`'."""
    from mutualrl.diagnostics.turns import DEFAULT, as_json, check_turns, markdown
    from mutualrl.recipes import resolve

    if unused := [option for option in given(request) if option not in OF_TURNS]:
        raise UsageError(f"{', '.join(unused)}: no effect with --suite {TURNS}, which has conversations of its own")
    named = [name for name in (request.source, request.target) if name is not None]
    if request.asked.pool is not None and not named:
        named = [policy.model for policy in resolve(request.asked).policies]
    checks = check_turns(named or DEFAULT, request.conversations, trust_remote_code=request.trust_remote_code)
    if request.as_json:
        emit({"templates": [as_json(check) for check in checks]})
    else:
        typer.echo(markdown(checks))
    if not all(check.keeps_all for check in checks):
        raise typer.Exit(3)


def thl_check(request: ThlRequest) -> None:
    """Run the suites, print their tables, and exit with 3 if a pair is unsafe, or a template loses a conversation."""
    if request.suite == TURNS:
        _turns(request)
        return
    if request.conversations is not None:
        raise UsageError("--conversations: only --suite turns reads conversations; add it, or omit the option")
    directory = None if request.plot is None else directory_for(request.plot)
    console = prose()
    result = check(request, console)
    drawn = [] if directory is None else [str(path) for path in result.plot(directory)]
    if request.as_json:
        emit({**result.plain(), **({"figures": drawn} if drawn else {})})
    else:
        typer.echo(result.markdown())
    unsafe = [(pair, reason) for pair in result.pairs for reason in pair.tokenizers.reasons]
    for pair, reason in unsafe:
        print_text(console, f"unsafe: {pair.source} -> {pair.target}: {reason}", 2000)
    if unsafe:
        raise typer.Exit(3)
