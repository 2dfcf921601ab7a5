"""`mutualrl thl-check`: can two models exchange traces?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mutualrl.cli.options import JsonFlag, TrustRemoteCode
from mutualrl.cli.output import emit, prose, reports_errors
from mutualrl.console.display import print_text

PoolOption = Annotated[
    str | None,
    typer.Option(help="All ordered pairs of a pool; `tiny` by default.", show_default=False),
]
SourceOption = Annotated[
    str | None,
    typer.Option(help="Sampling model or its tokenizer (directory, hub id, tiny:NAME).", show_default=False),
]
TargetOption = Annotated[str | None, typer.Option(help="Learning model or its tokenizer.", show_default=False)]
TextOption = Annotated[
    Path | None,
    typer.Option(help="JSON Lines with `text`, or plain text; by default a bundled text.", show_default=False),
]
TaskOption = Annotated[
    str | None,
    typer.Option(help="Task of the prompts (the pool's, or openings of the text).", show_default=False),
]
DataOption = Annotated[Path | None, typer.Option(help="The task's rows (JSON Lines).", show_default=False)]
PromptsOption = Annotated[int | None, typer.Option(min=2, help="Maximum number of prompts (256).", show_default=False)]
SamplesOption = Annotated[int | None, typer.Option(min=1, help="Responses per prompt (5).", show_default=False)]
MaxNewTokensOption = Annotated[
    int | None, typer.Option(min=1, help="Maximum response length in tokens (the pool's, or 64).", show_default=False)
]
SuiteOption = Annotated[
    str | None,
    typer.Option(
        help="tokenizers (no model needed), mass, length, scripts, ratio, sequence, all (default, of models: these); "
        "example: one text, word by word.",
        show_default=False,
    ),
]
AnchorOption = Annotated[
    str | None, typer.Option(help="Alignment: span (default), word, char, paper, paper-fallback.", show_default=False)
]
LimitOption = Annotated[
    int | None,
    typer.Option(min=1, help="Maximum number of texts, spans, sequences, prompts per suite.", show_default=False),
]
PlotOption = Annotated[Path | None, typer.Option(help="Write figures to this directory.", show_default=False)]
SeedOption = Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Seed of draws and sampling.")]


@reports_errors
def thl_check(
    pool: PoolOption = None,
    source: SourceOption = None,
    target: TargetOption = None,
    text: TextOption = None,
    task: TaskOption = None,
    data: DataOption = None,
    prompts: PromptsOption = None,
    samples: SamplesOption = None,
    max_new_tokens: MaxNewTokensOption = None,
    suite: SuiteOption = None,
    anchor: AnchorOption = None,
    limit: LimitOption = None,
    plot: PlotOption = None,
    seed: SeedOption = 0,
    trust_remote_code: TrustRemoteCode = False,
    as_json: JsonFlag = False,
) -> None:
    """Check whether models can exchange traces: their tokenizers, then the paper's tables on THL.

    Exits with 3 if a pair is unsafe, and prints the reason.
    Example: mutualrl thl-check --source A --target B --suite tokenizers
    """
    from mutualrl.diagnostics.thl.thl_request import ThlFlags, ThlRequest

    request = ThlRequest.of(
        ThlFlags(
            pool=pool,
            source=source,
            target=target,
            text=text,
            task=task,
            data=data,
            prompts=prompts,
            samples=samples,
            max_new_tokens=max_new_tokens,
            suite=suite,
            anchor=anchor,
            limit=limit,
            seed=seed,
            trust_remote_code=trust_remote_code,
        )
    )
    directory = None
    if plot is not None:
        from mutualrl.console.plots import directory_for

        directory = directory_for(plot)
    from mutualrl.diagnostics.thl.thl_check import check
    from mutualrl.diagnostics.thl.thl_tables import markdown

    console = prose()
    result = check(request, console)
    if directory is not None:
        from mutualrl.diagnostics.thl.thl_plots import plot as draw

        result["figures"] = [str(path) for path in draw(result, directory)]
    if as_json:
        emit(result)
    else:
        typer.echo(markdown(result))
    unsafe = [(pair, reason) for pair in result["pairs"] for reason in pair["reasons"]]
    for pair, reason in unsafe:
        print_text(console, f"unsafe: {pair['source']} -> {pair['target']}: {reason}", 2000)
    if unsafe:
        raise typer.Exit(3)
