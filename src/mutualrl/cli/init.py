"""`mutualrl init`: the files of a new project, checked before they are written."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mutualrl.cli.options import JsonFlag, TrustRemoteCode
from mutualrl.cli.output import emit, prose, reports_errors

if TYPE_CHECKING:
    from mutualrl.recipes import Recipe
    from mutualrl.recipes.starter import Starter

DirectoryArgument = Annotated[Path, typer.Argument(help="Where the files go; it is made if it is not there.")]
ModelOption = Annotated[
    list[str] | None,
    typer.Option(help="A model: a directory, a hub id, or NAME=MODEL. Twice or more.", show_default=False),
]
TaskOption = Annotated[str | None, typer.Option(help="What to train on: a name of `tasks ls`.", show_default=False)]
DataOption = Annotated[
    Path | None,
    typer.Option(
        help="Your own rows in its place, with prompt and answer: JSON Lines, CSV, Parquet.", show_default=False
    ),
]
RewardOption = Annotated[
    str | None,
    typer.Option(help="boxed, own (a reward.py to change), or FILE.py:FUNCTION.", show_default=False),
]
GpusOption = Annotated[
    int | None, typer.Option(min=0, help="GPUs to train on: those of this machine.", show_default=False)
]
TokensOption = Annotated[
    int | None, typer.Option(min=1, help="Longest completion: 64 tokens on CPU, 512 on GPUs.", show_default=False)
]
YesOption = Annotated[bool, typer.Option("--yes", help="Ask nothing: defaults for what is not given.")]
NoCheckOption = Annotated[
    bool, typer.Option("--no-check", help="Write the files without a look at models, data and placement.")
]

SHOWN = 5  # prompts


@reports_errors
def init(
    directory: DirectoryArgument = Path(),
    model: ModelOption = None,
    task: TaskOption = None,
    data: DataOption = None,
    reward: RewardOption = None,
    gpus: GpusOption = None,
    max_completion_length: TokensOption = None,
    yes: YesOption = False,
    no_check: NoCheckOption = False,
    trust_remote_code: TrustRemoteCode = False,
    as_json: JsonFlag = False,
) -> None:
    """Write pool.yaml, reward.py and a README for models and data of your own, after a check of all of them.

    Asks for what is not given. Writes over no file.
    Example: mutualrl init my-run --model ./a --model ./b --data rows.jsonl --reward own
    """
    from mutualrl.recipes import starter as project
    from mutualrl.storage.files import user_path

    asks = not yes and not as_json and sys.stdin is not None and sys.stdin.isatty()
    target = user_path(directory)
    _require_free(target)
    starter = _starter(model, task, data, reward, gpus, max_completion_length, trust_remote_code, asks=asks)
    contents = project.files(starter)
    with tempfile.TemporaryDirectory(prefix="mutualrl-init-") as staging:
        for name, text in contents.items():
            (Path(staging) / name).write_text(text, encoding="utf-8")
        if not no_check:
            _check(Path(staging) / "pool.yaml", quiet=as_json)
    target.mkdir(parents=True, exist_ok=True)
    for name, text in contents.items():
        _create(target / name, text)
    if as_json:
        emit({"directory": str(target), "files": sorted(contents), "next": list(project.NEXT)})
        return
    typer.echo(f"Written to {target}: {', '.join(sorted(contents))}. Next, in that directory:")
    for command in project.NEXT:
        typer.echo(f"  {command}")


def _require_free(target: Path) -> None:
    """Raise UsageError where one of the files is there: nothing is written over."""
    from mutualrl.errors import UsageError

    if target.exists() and not target.is_dir():
        raise UsageError(f"{target} is a file, expected a directory")
    there = [name for name in ("pool.yaml", "reward.py", "README.md") if (target / name).exists()]
    if there:
        raise UsageError(f"{target} has {', '.join(there)} already; name another directory, or move them away")


def _create(path: Path, text: str) -> None:
    from mutualrl.errors import UsageError
    from mutualrl.storage.files import create_atomic

    if not create_atomic(path, text.encode()):
        raise UsageError(f"{path} has appeared meanwhile; it was left as it is")


def _starter(
    models: list[str] | None,
    task: str | None,
    data: Path | None,
    reward: str | None,
    gpus: int | None,
    tokens: int | None,
    trust_remote_code: bool,
    *,
    asks: bool,
) -> Starter:
    """Return what was given, was answered, or is the default. Raises UsageError for what is missing or contradicts."""
    from mutualrl.errors import UsageError
    from mutualrl.machine.devices import this_machine
    from mutualrl.recipes.resolve import data_path
    from mutualrl.recipes.starter import BOXED, OWN, Starter, named

    if task not in (None, "dataset") and data is not None:
        raise UsageError(f"--task {task} and --data: give one; --data is of task dataset, whose rows are your own")
    chosen = list(models or ())
    while asks and len(chosen) < 2:
        chosen.append(_ask(f"Model {len(chosen) + 1} (a directory or hub id)"))
    named(chosen)
    if task is None and data is None:
        if not asks:
            raise UsageError("nothing to train on: give --task NAME (mutualrl tasks ls), or --data FILE of your own")
        answer = _ask("Data (a file with prompt and answer), or a task (arithmetic, boolq, math, ...)")
        if Path(answer).expanduser().exists() or answer.startswith("hub:"):
            data = Path(answer)
        else:
            task = answer
    if reward is None:
        reward = OWN if data is not None else BOXED
        if asks and data is not None:
            reward = _ask(
                "Reward: boxed (the answer in \\boxed{}), own (a reward.py to change), or FILE.py:FUNCTION", OWN
            )
    if gpus is None:
        gpus = len(this_machine().gpus)
        if asks:
            gpus = int(typer.prompt("GPUs", default=gpus, type=int, err=True))
    return Starter(
        models=tuple(chosen),
        task=task or "dataset",
        data=None if data is None else Path(data_path(data)),
        reward=_anchored(reward),
        gpus=gpus,
        max_completion_length=tokens or (512 if gpus else 64),
        trust_remote_code=trust_remote_code,
    )


def _ask(question: str, default: str | None = None) -> str:
    return str(typer.prompt(question, default=default, err=True)).strip()


def _anchored(reward: str) -> str:
    """Return an import path whose file is absolute: the pool may lie in another directory."""
    from mutualrl.plugins import absolute_path

    return absolute_path(reward)


def _check(pool: Path, *, quiet: bool) -> None:
    """Check the recipe, its tokenizers, data, reward and placement, and show them unless `quiet`.

    Raises what the commands raise for them; exits with 3 where two tokenizers cannot share.
    """
    from mutualrl.cli.dry_run import plan_of, show_plan
    from mutualrl.diagnostics.thl.thl_check import check
    from mutualrl.diagnostics.thl.thl_request import ThlFlags, ThlRequest
    from mutualrl.diagnostics.thl.thl_tables import verdict
    from mutualrl.mwra.session import Launch
    from mutualrl.recipes import Request, resolve
    from mutualrl.regimes import at_level

    recipe = resolve(Request(regime=at_level("outcome").name, pool=str(pool)))
    result = check(ThlRequest.of(ThlFlags(pool=str(pool), suite="tokenizers")), prose())
    if not quiet:
        typer.echo(f"Tokenizers. {verdict(result['pairs'])}")
    reasons = [reason for pair in result["pairs"] for reason in pair["reasons"]]
    for reason in reasons:
        prose().print(f"unsafe: {reason}", markup=False, highlight=False, soft_wrap=True)
    if reasons:
        raise typer.Exit(3)
    prompts = _shown_prompts(recipe)
    plan = plan_of(recipe, Launch())
    if quiet:
        return
    for line in prompts:
        typer.echo(line)
    show_plan(plan)


def _shown_prompts(recipe: Recipe) -> list[str]:
    """Return the first prompts as each policy sees them, under its chat template. Raises DataError, ModelError."""
    from mutualrl.console.display import clean
    from mutualrl.recipes.agreement import load_recipe_prompts
    from mutualrl.tasks.prompting import prompt_ids
    from mutualrl.training.models import load_tokenizers

    prompts = load_recipe_prompts(recipe, "train")
    lines = [f"Data: {len(prompts)} training prompts."]
    for number, (name, tokenizer) in enumerate(load_tokenizers(recipe).items()):
        shown = prompts[: SHOWN if number == 0 else 1]
        template = recipe.trainer_settings(name).get("chat_template_kwargs")
        for prompt, ids in zip(shown, prompt_ids([p.content for p in shown], tokenizer, template), strict=True):
            lines.append(f"--- {name} sees, for the answer {clean(prompt.answer, 200)!r}")
            lines.append(clean(tokenizer.decode(ids), 2000))
    return lines
