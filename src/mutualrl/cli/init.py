"""`mutualrl init`: the files of a new project, checked before they are written."""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import typer

from mutualrl.cli.dry_run import Rehearsal, plan_json, show_plan, try_out
from mutualrl.cli.output import emit, prose
from mutualrl.console.display import clean, print_text
from mutualrl.console.user_path import user_path
from mutualrl.diagnostics.endpoints import Endpoint
from mutualrl.diagnostics.lazy_model import LazyModel
from mutualrl.diagnostics.passages import load_passages
from mutualrl.diagnostics.vocabulary import check_models, direction, verdict
from mutualrl.errors import UsageError
from mutualrl.launch.session import Launch
from mutualrl.machine.devices import this_machine
from mutualrl.mwra.model_shape import parameter_count
from mutualrl.process.plugins import absolute_path
from mutualrl.recipes import Recipe, Request, resolve
from mutualrl.recipes.agreement import load_recipe_prompts, require_enough
from mutualrl.recipes.pool_tokenizers import load_tokenizers
from mutualrl.recipes.project import ProjectRequest
from mutualrl.recipes.starter import BOXED, OWN, OWN_ROWS, files, named, next_commands
from mutualrl.references import data_path, is_hub
from mutualrl.regimes import regimes
from mutualrl.regimes.sgt import SGT
from mutualrl.storage.files import create_atomic
from mutualrl.tasks import get_task
from mutualrl.tasks.dataset import first_row
from mutualrl.tasks.prompting import prompt_ids
from mutualrl.tasks.template import fields_of
from mutualrl.thl import DEFAULT_ANCHOR

SHOWN = 5  # prompts
BF16_WEIGHTS = 50_000_000  # from this size on, bfloat16 is faster on a CPU that supports it: docs/results.md


def init(request: ProjectRequest) -> None:
    """Check everything in a temporary directory, then write the files."""
    interactive = not request.yes and not request.as_json and sys.stdin is not None and sys.stdin.isatty()
    target = user_path(request.directory)
    _require_free(target)
    project = _with_columns(_answered(request, interactive=interactive), interactive=interactive)
    plan, bf16 = None, frozenset[str]()
    if not request.no_check:
        bf16 = _bf16_policies(project)
        with _staged(project, bf16) as pool:
            plan = _check(pool, as_json=request.as_json, accept_unsafe=request.accept_unsafe)
    contents, following = files(project, bf16), next_commands(project)
    target.mkdir(parents=True, exist_ok=True)
    for name, text in contents.items():
        _create(target / name, text)
    if request.as_json:
        checked = None if plan is None else plan_json(plan)
        emit({"directory": str(target), "files": sorted(contents), "next": list(following), "plan": checked})
        return
    typer.echo(f"Written to {target}: {', '.join(sorted(contents))}. Next, in that directory:")
    for command in following:
        typer.echo(f"  {command}")


@contextmanager
def _staged(project: ProjectRequest, bf16: Collection[str] = ()) -> Iterator[Path]:
    """Write the project's files to a temporary directory for the duration of the block; yield its pool file."""
    with tempfile.TemporaryDirectory(prefix="mutualrl-init-") as staging:
        for name, text in files(project, bf16).items():
            (Path(staging) / name).write_text(text, encoding="utf-8")
        yield Path(staging) / "pool.yaml"


def _recipe(pool: Path) -> Recipe:
    return resolve(Request(regime=SGT.name, pool=str(pool)))


def _require_free(target: Path) -> None:
    """Raise UsageError if one of the files exists: none is overwritten."""
    if target.exists() and not target.is_dir():
        raise UsageError(f"{target} is a file, expected a directory")
    existing = [name for name in ("pool.yaml", "reward.py", "README.md") if (target / name).exists()]
    if existing:
        raise UsageError(f"{target} already has {', '.join(existing)}; choose another directory, or move them away")


def _create(path: Path, text: str) -> None:
    if not create_atomic(path, text.encode()):
        raise UsageError(f"{path} was created in the meantime; it is unchanged")


def _answered(request: ProjectRequest, *, interactive: bool) -> ProjectRequest:
    """Return the request with the user's answers and the defaults. Raises UsageError for missing or contradictory
    options."""
    task, data, reward, gpus = request.asked.task, request.asked.data, request.reward, request.gpus
    if data is not None and task is not None and not get_task(task).takes_data:
        raise UsageError(f"--task {task} generates its own problems; omit --data or --task")
    chosen = list(request.asked.models)
    while interactive and len(chosen) < (1 if request.asked.sources else 2):
        chosen.append(_ask(f"Model {len(chosen) + 1} (a directory or hub id)"))
    named(chosen, request.asked.sources)
    if task is None and data is None:
        if not interactive:
            raise UsageError(
                "nothing to train on: give --task NAME (mutualrl tasks ls), or --data FILE with your own rows"
            )
        answer = _ask("Data (a file with prompt and answer), or a task (arithmetic, boolq, math, ...)")
        if user_path(Path(answer)).exists() or answer.startswith("hub:"):
            data = Path(answer)
        else:
            task = answer
    if reward is None:
        own_rows = task in (None, OWN_ROWS)
        reward = OWN if own_rows else BOXED
        if interactive and own_rows:
            reward = _ask(
                "Reward: boxed (the answer in \\boxed{}), own (a reward.py to edit), or FILE.py:FUNCTION", OWN
            )
    if gpus is None:
        gpus = len(this_machine().gpus)
        if interactive:
            gpus = int(typer.prompt("GPUs", default=gpus, type=int, err=True))
    asked = replace(
        request.asked,
        models=tuple(chosen),
        task=task or OWN_ROWS,
        data=None if data is None else Path(data_path(data)),
    )
    return replace(request, asked=asked, reward=absolute_path(reward), gpus=gpus)  # the pool may be elsewhere


def _bf16_policies(project: ProjectRequest) -> frozenset[str]:
    """Return the names of the policies that train faster in bfloat16 on the CPU: none on GPUs, where it is TRL's
    default, and none if the CPU does not support it."""
    if project.gpus:
        return frozenset()
    import torch

    capabilities = torch.cpu.get_capabilities()
    if not (capabilities.get("avx512_bf16") or capabilities.get("amx_bf16")):
        return frozenset()
    large = set()
    with _staged(project) as pool:
        for policy in _recipe(pool).policies:
            weights = parameter_count(policy)
            if weights is not None and weights >= BF16_WEIGHTS:
                large.add(policy.name)
    return frozenset(large)


def _ask(question: str, default: str | None = None) -> str:
    return str(typer.prompt(question, default=default, err=True)).strip()


def _with_columns(project: ProjectRequest, *, interactive: bool) -> ProjectRequest:
    """Return the project with the columns of its data: as given, asked for, or `prompt` and `answer`.

    Raises UsageError, with the option to add, if the data have no such column."""
    prompt, answer, template = project.prompt_column, project.answer_column, project.template
    if prompt is not None and template is not None:
        raise UsageError("--prompt-column and --template both make the prompt; give one of them")
    if project.asked.task != OWN_ROWS or project.asked.data is None or is_hub(project.asked.data):
        if prompt or answer or template:
            raise UsageError("--prompt-column, --answer-column and --template are for rows in a file (--data FILE)")
        return project
    columns = list(first_row(project.asked.data))
    given = {assignment.partition("=")[0].strip() for assignment in project.asked.assignments}
    if template is None and "task.template" not in given:
        prompt = prompt or _column("prompt", columns, interactive=interactive)
        template = None if prompt == "prompt" else f"{{{prompt}}}"
    if "task.answer" not in given:
        answer = answer or _column("answer", columns, interactive=interactive)
    answer = answer or "answer"
    flags = {"--prompt-column or --template": fields_of(template or ""), "--answer-column": [answer]}
    for flag, names in flags.items() if "task.answer" not in given else ():
        if missing := [name for name in names if name.partition(".")[0] not in columns]:
            raise UsageError(f"{flag}: {project.asked.data} has no column {missing[0]!r}; it has {', '.join(columns)}")
    return replace(project, template=template, answer_column=None if answer == "answer" else answer)


#: names under which data sets have prompts and answers, in order of preference
USUAL = {
    "prompt": ("question", "problem", "instruction", "query", "input"),
    "answer": ("label", "target", "final_answer", "ground_truth", "output", "solution"),
}


def _column(name: str, columns: list[str], *, interactive: bool) -> str:
    """Return the column to use for `name`: itself if it exists, else the user's choice. Raises UsageError."""
    if name in columns:
        return name
    likely = next((usual for usual in USUAL[name] if usual in columns), columns[0] if columns else name)
    if interactive:
        return _ask(f"The data have no column {name!r}, but {', '.join(columns)}. Column with the {name}", likely)
    raise UsageError(
        f"the data have no column {name!r}; they have {', '.join(columns)}: add --{name}-column {likely}"
        + (f", or a template such as --template '{{{likely}}}'" if name == "prompt" else "")
    )


def _ways_on() -> list[str]:
    """Return what remains possible with an unsafe pair of tokenizers."""
    fields = {name: regime().needs().reads.fields for name, regime in regimes().items()}
    rewards_only = [name for name, own in fields.items() if "text" not in own]
    texts = [name for name, own in fields.items() if "text" in own and "logprobs" not in own]
    return [
        f"Regimes that share rewards only do not use the tokenizers: {', '.join(rewards_only)}.",
        f"{', '.join(texts)} leave out, one by one, the texts that a tokenizer changes (metric thl/changed).",
        "To write the files all the same, add --accept-unsafe; to look closer: mutualrl thl-check --suite tokenizers.",
    ]


def _check(pool: Path, *, as_json: bool, accept_unsafe: bool = False) -> Rehearsal:
    """Check the recipe, its tokenizers, data, reward and placement, and print them unless `as_json`.

    Raises the errors of the underlying commands; exits with 3 if two tokenizers are unsafe together.
    """
    recipe = _recipe(pool)
    models = [LazyModel(Endpoint.of_policy(policy)) for policy in recipe.policies]
    passages = load_passages(None)
    checks = []
    for source, target in itertools.permutations(models, 2):
        found = check_models(passages, source, target, DEFAULT_ANCHOR, lambda done: None)
        checks.append((direction(source.name, target.name), found))
    reasons = [reason for _, found in checks for reason in found.reasons]
    for reason in reasons:
        print_text(prose(), f"unsafe: {reason}")
    if reasons and not accept_unsafe:
        ways = _ways_on()
        for way in ways:
            print_text(prose(), way)
        if as_json:
            emit({"safe": False, "reasons": reasons, "ways_on": ways, "files": []})
        raise typer.Exit(3)
    lines = _prompt_lines(recipe)
    rehearsal = try_out(recipe, Launch())
    rehearsal.plan.require()
    if not as_json:
        if checks:
            typer.echo(f"Tokenizers. {verdict(checks)}")
        for line in lines:
            typer.echo(line)
        show_plan(rehearsal)
    return rehearsal


def _prompt_lines(recipe: Recipe) -> list[str]:
    """Return the first prompts as each policy sees them, under its chat template. Raises ModelError, and DataError,
    also for too few prompts for a round or the validation."""
    prompts = load_recipe_prompts(recipe, "train")
    require_enough(prompts, recipe.round.prompts or 1)
    held_out = load_recipe_prompts(recipe, "validation")
    lines = [f"Data: {len(prompts)} training prompts, {len(held_out)} held out."]
    for number, (name, tokenizer) in enumerate(load_tokenizers(recipe).items()):
        shown = prompts[: SHOWN if number == 0 else 1]
        template = recipe.trainer_settings(name).get("chat_template_kwargs")
        for prompt, ids in zip(shown, prompt_ids([p.content for p in shown], tokenizer, template), strict=True):
            lines.append(f"--- prompt of {name}, with the answer {clean(prompt.answer, 200)!r}")
            lines.append(clean(tokenizer.decode(ids), 2000))
    return lines
