"""`mutualrl init`: the files of a new project, checked before they are written."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mutualrl.cli.options import JsonFlag, TrustRemoteCode
from mutualrl.cli.output import emit, prose, reports_errors
from mutualrl.console.display import clean

if TYPE_CHECKING:
    from mutualrl.cli.dry_run import Plan
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
BF16_WEIGHTS = 50_000_000  # from here on bfloat16 is faster on a CPU that has it: docs/results.md
FEW_HELD_OUT = 32


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
    from mutualrl.cli.dry_run import plan_json
    from mutualrl.recipes import starter as project
    from mutualrl.storage.files import user_path

    asks = not yes and not as_json and sys.stdin is not None and sys.stdin.isatty()
    target = user_path(directory)
    _require_free(target)
    starter = _starter(model, task, data, reward, gpus, max_completion_length, trust_remote_code, asks=asks)
    plan = None
    if not no_check:
        starter = replace(starter, bf16=_in_bf16(starter))
        with _staged(starter) as pool:
            plan = _checked(pool, as_json=as_json)
    contents = project.files(starter)
    target.mkdir(parents=True, exist_ok=True)
    for name, text in contents.items():
        _create(target / name, text)
    if as_json:
        checked = None if plan is None else plan_json(plan)
        emit({"directory": str(target), "files": sorted(contents), "next": list(project.NEXT), "plan": checked})
        return
    typer.echo(f"Written to {target}: {', '.join(sorted(contents))}. Next, in that directory:")
    for command in project.NEXT:
        typer.echo(f"  {command}")


@contextmanager
def _staged(starter: Starter) -> Iterator[Path]:
    """Write the project's files for as long as the block lasts; yield its pool."""
    from mutualrl.recipes import starter as project

    with tempfile.TemporaryDirectory(prefix="mutualrl-init-") as staging:
        for name, text in project.files(starter).items():
            (Path(staging) / name).write_text(text, encoding="utf-8")
        yield Path(staging) / "pool.yaml"


def _recipe(pool: Path) -> Recipe:
    from mutualrl.recipes import Request, resolve
    from mutualrl.regimes import at_level

    return resolve(Request(regime=at_level("outcome").name, pool=str(pool)))


def _require_free(target: Path) -> None:
    """Raise UsageError where one of the files exists: none is overwritten."""
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
    from mutualrl.plugins import absolute_path
    from mutualrl.recipes.resolve import data_path
    from mutualrl.recipes.starter import BOXED, OWN, Starter, named
    from mutualrl.storage.files import user_path
    from mutualrl.tasks import get_task

    if data is not None and task is not None and not get_task(task).takes_data:
        raise UsageError(f"--task {task} makes its own problems; leave --data out, or --task")
    chosen = list(models or ())
    while asks and len(chosen) < 2:
        chosen.append(_ask(f"Model {len(chosen) + 1} (a directory or hub id)"))
    named(chosen)
    if task is None and data is None:
        if not asks:
            raise UsageError("nothing to train on: give --task NAME (mutualrl tasks ls), or --data FILE of your own")
        answer = _ask("Data (a file with prompt and answer), or a task (arithmetic, boolq, math, ...)")
        if user_path(Path(answer)).exists() or answer.startswith("hub:"):
            data = Path(answer)
        else:
            task = answer
    if reward is None:
        own_rows = task in (None, "dataset")
        reward = OWN if own_rows else BOXED
        if asks and own_rows:
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
        reward=absolute_path(reward),  # the pool may lie in another directory
        gpus=gpus,
        max_completion_length=tokens or (512 if gpus else 64),
        trust_remote_code=trust_remote_code,
    )


def _in_bf16(starter: Starter) -> frozenset[str]:
    """Return the names of the policies that a CPU trains faster in bfloat16: none on GPUs, where it is TRL's default,
    and none where the CPU does not compute in it."""
    if starter.gpus:
        return frozenset()
    import torch

    from mutualrl.mwra.memory import parameter_count

    capabilities = torch.cpu.get_capabilities()
    if not (capabilities.get("avx512_bf16") or capabilities.get("amx_bf16")):
        return frozenset()
    large = set()
    with _staged(starter) as pool:
        for policy in _recipe(pool).policies:
            weights = parameter_count(policy)
            if weights is not None and weights >= BF16_WEIGHTS:
                large.add(policy.name)
    return frozenset(large)


def _ask(question: str, default: str | None = None) -> str:
    return str(typer.prompt(question, default=default, err=True)).strip()


def _checked(pool: Path, *, as_json: bool) -> Plan:
    """Check the recipe, its tokenizers, data, reward and placement, and show them unless `as_json`.

    Raises what the commands raise for them; exits with 3 where two tokenizers cannot share.
    """
    from mutualrl.cli.dry_run import plan_of, show_plan
    from mutualrl.diagnostics.thl.thl_check import check
    from mutualrl.diagnostics.thl.thl_request import ThlFlags, ThlRequest
    from mutualrl.diagnostics.thl.thl_tables import verdict
    from mutualrl.mwra.session import Launch

    recipe = _recipe(pool)
    result = check(ThlRequest.of(ThlFlags(pool=str(pool), suite="tokenizers")), prose())
    reasons = [reason for pair in result["pairs"] for reason in pair["reasons"]]
    for reason in reasons:
        prose().print(clean(f"unsafe: {reason}"), markup=False, highlight=False, soft_wrap=True)
    if reasons:
        if as_json:
            emit({"safe": False, "reasons": reasons, "files": []})
        raise typer.Exit(3)
    prompts = _shown_prompts(recipe)
    plan = plan_of(recipe, Launch())
    if plan.failure is not None:
        raise plan.failure
    if not as_json:
        typer.echo(f"Tokenizers. {verdict(result['pairs'])}")
        for line in prompts:
            typer.echo(line)
        show_plan(plan)
    return plan


def _shown_prompts(recipe: Recipe) -> list[str]:
    """Return the first prompts as each policy sees them, under its chat template. Raises DataError, also where a round
    or the validation would have too few, and ModelError."""
    from mutualrl.recipes.agreement import load_recipe_prompts, require_enough
    from mutualrl.tasks.prompting import prompt_ids
    from mutualrl.training.models import load_tokenizers

    prompts = load_recipe_prompts(recipe, "train")
    require_enough(prompts, recipe.round.prompts or 1)
    held_out = load_recipe_prompts(recipe, "validation")
    lines = [f"Data: {len(prompts)} training prompts, {len(held_out)} held out."]
    if len(held_out) < FEW_HELD_OUT:
        lines.append(
            f"{len(held_out)} held-out prompts show no change smaller than 1 in {len(held_out)}: name a file of more "
            "under task.validation_data of pool.yaml"
        )
    for number, (name, tokenizer) in enumerate(load_tokenizers(recipe).items()):
        shown = prompts[: SHOWN if number == 0 else 1]
        template = recipe.trainer_settings(name).get("chat_template_kwargs")
        for prompt, ids in zip(shown, prompt_ids([p.content for p in shown], tokenizer, template), strict=True):
            lines.append(f"--- {name} sees, for the answer {clean(prompt.answer, 200)!r}")
            lines.append(clean(tokenizer.decode(ids), 2000))
    return lines
