"""Every command: its options, its help, and the function that runs it.

A command is a dataclass whose docstring is its help and whose fields are its options (`console.options`). `COMMANDS`
names the function, which gets the dataclass and is imported when the command runs: nothing here imports an engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from mutualrl.cli.declared import Command, CommandGroup, DiagnosticCommand, diagnostics
from mutualrl.console.options import SEED_LIMIT, Option, OptionGroup, WithJson
from mutualrl.diagnostics.request import REQUESTS, DiagnosticRequest, LearnerRequest
from mutualrl.evaluation.request import EvalRequest
from mutualrl.launch.import_request import ImportRequest
from mutualrl.paper.thl.request import ThlRequest
from mutualrl.recipes.project import ProjectRequest
from mutualrl.recipes.request import Request
from mutualrl.tasks.options import RowOptions

REPORT = Option("Write the HTML report at the end of the run.", "--report/--no-report", variable="MUTUALRL_REPORT")
RUN = Option("The run directory.", argument=True, complete="run_directories")
ONLY_POLICY = Option("Only this policy. Repeatable.")
TASK_FILE = Option("Its rows: a file, a directory, or hub:OWNER/NAME.")


@dataclass(frozen=True, kw_only=True)
class OfRun(WithJson):
    """Options of a command about one run."""

    run: Annotated[Path, RUN]


@dataclass(frozen=True, kw_only=True)
class Train(Request, WithJson):
    """Train a pool of policies together, or one policy with a source: recorded texts, a served model, a frozen one.

    Without arguments: the bundled `tiny` pool with plain GRPO. Example: mutualrl train --regime sgt --pool tiny
    """

    resume: Annotated[bool, Option("Resume the run in --run-dir, each policy from its last checkpoint.")] = False
    clean: Annotated[bool, Option("Delete an existing run in --run-dir first.")] = False
    exchange: Annotated[str | None, Option("Fields to publish: regime (those it reads), or full.")] = None
    report_to: Annotated[tuple[str, ...], Option("Also log to a tracker, such as trackio or wandb. Repeatable.")] = ()
    report: Annotated[bool, REPORT] = True
    push_to_hub: Annotated[
        str | None, Option("After the run, upload each model with its card to OWNER on the hub.")
    ] = None
    device_map: Annotated[Path | None, Option("A YAML file that assigns devices to policies.")] = None
    launcher: Annotated[str, Option("Where the policies run: local (this machine), or ray (a Ray cluster).")] = "local"
    address: Annotated[str | None, Option("The Ray cluster: HOST:PORT, or auto (RAY_ADDRESS).")] = None
    dry_run: Annotated[bool, Option("Show recipe and placement, try the reward on two prompts; start nothing.")] = False


@dataclass(frozen=True, kw_only=True)
class Join(Request, WithJson):
    """Run one member that shares with the others through a bucket: a policy, or a source that is asked. Each can start
    anywhere, at any time.

    The first process creates the run; the others compare their recipe and data with it. The same command resumes
    after a stop or a crash: a policy from its last checkpoint, a source from the rounds that it has published.
    Example: mutualrl join s3://my-bucket/run-1 --policy ada --regime sgt --pool tiny
    """

    exchange: Annotated[
        str,
        Option("URL of the run's exchange: s3://, gs:// or az://BUCKET/PREFIX, or file:///DIRECTORY.", argument=True),
    ]
    policy: Annotated[str, Option("The recipe's policy to train here, or its source to ask.", complete="policy_names")]
    recipe: Annotated[
        Path | None,
        Option("A recipe (YAML), the same for every policy. Flags override it.", complete="recipe_names"),
    ] = None
    models: tuple[str, ...] = ()
    run_dir: Annotated[Path | None, Option("Directory of this policy's files; by default runs/PREFIX-POLICY.")] = None
    restart: Annotated[bool, Option("Train from the start, even if the exchange has rounds of this policy.")] = False
    report: Annotated[bool, REPORT] = True


@dataclass(frozen=True, kw_only=True)
class Watch(WithJson):
    """Follow a run: curves, gate, waiting, newest rescues, logs. In a pipe: a line when something changed, else every
    two minutes, until it ends.

    With --json: its current state, once. For a run in a bucket: the files that its policies mirror there, every minute
    by default. Example: mutualrl watch runs/sgt
    """

    run: Annotated[str, Option("The run directory, or its URL in a bucket.", argument=True, complete="run_directories")]
    plain: Annotated[bool, Option("A table instead of the screen; in a pipe, lines.")] = False


@dataclass(frozen=True, kw_only=True)
class Distill(WithJson):
    """Sequential Peer Distillation: fine-tune each policy on its peers' successes, after plain GRPO.

    Example: mutualrl paper distill runs/grpo --beside runs/sgt --out runs/distilled
    """

    runs: Annotated[tuple[Path, ...], Option("Standalone runs (train --regime grpo --exchange full).", argument=True)]
    out: Annotated[Path, Option("New directory for the models and distill.json.")] = Path("runs/distill")
    start: Annotated[str, Option("Models to fine-tune: trained (after RL), or base.")] = "trained"
    beside: Annotated[tuple[Path, ...], Option("A run whose models are also compared, such as SGT's. Repeatable.")] = ()
    assignments: Annotated[
        tuple[str, ...],
        Option(
            "learning_rate, epochs, batch_size, limit, lora.r, trainer.KEY of TRL's SFTConfig, ...",
            "--set",
            metavar="KEY=VALUE",
        ),
    ] = ()
    seed: Annotated[int, Option("Seed of the fine-tuning.", min=0, max=SEED_LIMIT)] = 0
    engine: Annotated[str | None, Option("transformers or vllm (vllm if it supports the model).")] = None


@dataclass(frozen=True, kw_only=True)
class Report(WithJson):
    """Write an HTML report of runs: did it help, curves, rescues, samples, regimes side by side. Works offline.

    Example: mutualrl report runs/grpo-0 runs/sgt-0 --out page
    """

    runs: Annotated[
        tuple[str, ...],
        Option(
            "Run directories in any state, URLs of runs in a bucket, `distill` directories.",
            argument=True,
            complete="run_directories",
        ),
    ]
    out: Annotated[
        Path | None,
        Option("Output directory; RUN/report for a single run (RUN-report for one in a bucket), else report."),
    ] = None
    figures: Annotated[
        Path | None, Option("Also write the figures to this directory, as PNG and SVG, with the paper's captions.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class Export(OfRun):
    """Copy the trained models of a run: weights, tokenizer, card, the base's licence, checksums.

    Example: mutualrl export runs/one --to models
    """

    to: Annotated[Path, Option("Output directory, with one directory per model.")]
    policy: Annotated[tuple[str, ...], ONLY_POLICY] = ()


@dataclass(frozen=True, kw_only=True)
class SweepRequest(WithJson):
    """Run a grid of regimes, settings, pools and seeds, and compare the arms. The same command resumes.

    Example: mutualrl sweep examples/sweep.yaml --dry-run
    """

    file: Annotated[Path, Option("A sweep file (YAML).", argument=True)]
    out: Annotated[Path | None, Option("Directory of the pieces; by default runs/NAME, from FILE.")] = None
    jobs: Annotated[
        int | None, Option("Parallel pieces; by default as many as the cores allow, one on GPUs.", min=1)
    ] = None
    dry_run: Annotated[bool, Option("Show pieces, minutes and disk; start nothing.")] = False


@dataclass(frozen=True, kw_only=True)
class Compare(WithJson):
    """Compare arms, paired by seed: differences with intervals, effect sizes, budgets, and declared claims.

    Example: mutualrl compare runs/grpo-0 runs/grpo-1 runs/grpo-2 runs/sgt-0 runs/sgt-1 runs/sgt-2
    """

    paths: Annotated[
        tuple[Path, ...],
        Option("A sweep directory, or run directories.", argument=True, complete="run_directories"),
    ]
    claims: Annotated[Path | None, Option("Claims with their margins (YAML).")] = None
    reference: Annotated[str | None, Option("Reference arm of the comparisons; by default plain GRPO.")] = None


@dataclass(frozen=True, kw_only=True)
class Doctor(WithJson):
    """Check versions, devices, NCCL, vLLM, the hub, shared memory, ports, the file system, and a bucket. Exits with 4
    if a check fails."""

    run_dir: Annotated[
        Path | None, Option("Directory of a future run, whose file system is probed (the current one).")
    ] = None
    exchange: Annotated[str | None, Option("Also probe a bucket for an exchange (s3://, gs://, az://).")] = None


@dataclass(frozen=True, kw_only=True)
class RunsLs(WithJson):
    """List the runs in a directory, newest first, with their states."""

    directory: Annotated[Path, Option("Directory of the runs.", argument=True)] = Path("runs")


@dataclass(frozen=True, kw_only=True)
class RunsPush(OfRun):
    """Upload the trained models of a run, each with its card, as private repositories OWNER/RUN-POLICY."""

    owner: Annotated[str, Option("User or organisation on the hub.", argument=True)]


SHOWN_PROMPTS = 3


@dataclass(frozen=True, kw_only=True)
class TasksShow(WithJson):
    """Print prompts exactly as a model sees them (before its chat template), with the canonical answers."""

    task: Annotated[str, Option("The task's name.", argument=True, complete="task_names")]
    rows: Annotated[RowOptions, OptionGroup(data=TASK_FILE)] = RowOptions()
    split: Annotated[
        str, Option("train, or validation (the evaluated prompts). Of a file, all rows are used.")
    ] = "validation"  # fmt: skip
    limit: Annotated[int | None, Option(f"Number of prompts ({SHOWN_PROMPTS}; all with --json).", min=1)] = None
    seed: Annotated[int, Option("Seed of generated problems and of a mixture.", min=0, max=SEED_LIMIT)] = 0


@dataclass(frozen=True, kw_only=True)
class RecipesLs(WithJson):
    """List pools, regimes, tasks, the paper's runs and batch scripts, by their names on the command line."""

    verbose: Annotated[bool, Option("Full descriptions, over several lines.", "--verbose -v")] = False


@dataclass(frozen=True, kw_only=True)
class RecipesShow(WithJson):
    """Print a shipped recipe; above a pool, its policies as a table of comments."""

    name: Annotated[str, Option("Name of a recipe (`mutualrl recipes ls`).", argument=True, complete="copied_names")]


@dataclass(frozen=True, kw_only=True)
class RecipesCp(WithJson):
    """Copy a recipe or a batch script, to edit."""

    name: Annotated[
        str,
        Option("Name of a recipe or batch script, such as paper/2qwen-sgt.", argument=True, complete="copied_names"),
    ]
    target: Annotated[Path, Option("A directory, or the new file name.", argument=True)] = Path()


COMPARED = Option(
    "A recipe (paper/2qwen-sgt, a .yaml file), POOL:REGIME (2qwen:sgt), or a run directory.", argument=True
)


@dataclass(frozen=True, kw_only=True)
class RecipesDiff(WithJson):
    """List the keys in which two resolved recipes differ.

    Example: mutualrl recipes diff paper/2qwen-prp 2qwen:prp
    """

    a: Annotated[str, COMPARED]
    b: Annotated[str, COMPARED]


@dataclass(frozen=True, kw_only=True)
class OfRegime(WithJson):
    """Options of a command about one regime."""

    name: Annotated[
        str, Option("A name, FILE.py:CLASS or package.module:CLASS.", argument=True, complete="regime_names")
    ]


@dataclass(frozen=True, kw_only=True)
class ExchangeShow(OfRun):
    """Show rollouts of a round: reward, and text or turns with calls and results. Long ones are cut.

    Failures have no text unless the run published every field (train --exchange full). Example: mutualrl exchange show
    runs/one --round 3
    """

    policy: Annotated[tuple[str, ...], ONLY_POLICY] = ()
    round: Annotated[int | None, Option("Only this round; by default the newest of each policy.", min=0)] = None
    prompt: Annotated[str | None, Option("Only the prompt with this id.")] = None
    limit: Annotated[int, Option("Number of rollouts per policy; those with a text come first.", min=1)] = 4


@dataclass(frozen=True, kw_only=True)
class ExchangeExport(OfRun):
    """Export all records to one Parquet or JSONL file, for `datasets`, pandas or DuckDB."""

    out: Annotated[Path, Option("Output file: .parquet or .jsonl.")]
    policy: Annotated[tuple[str, ...], ONLY_POLICY] = ()


@dataclass(frozen=True, kw_only=True)
class ExchangeGc(OfRun):
    """Delete rounds that are no longer needed: older than any round that a resume from a kept checkpoint
    may read."""

    keep_rounds: Annotated[int, Option("Number of newest rounds to keep per policy.", min=1)] = 1
    dry_run: Annotated[bool, Option("Show what would be deleted; delete nothing.")] = False


VERIFY = """Verify every file of a run against its recorded checksum. Exits with 6 if one is damaged.

Recipe, results, metrics, checkpoints, the exchange, the trained models.
"""
CHECK_REGIME = """Run a regime on recorded rounds. Exits with 3 if it is unsound: an impure plan, rows without ids,
state that does not round-trip through JSON."""
LS_EXCHANGE = """List rounds, records and bytes of every policy, and gaps between rounds. Reads only the commit
markers."""

#: requests of the paper's diagnostics: their help need not import them
PAPER_REQUESTS: Mapping[str, type[DiagnosticRequest]] = {
    "xgrpo-check": DiagnosticRequest,
    "channels": LearnerRequest,
    "cost": LearnerRequest,
}

PAPER: dict[str, Command | DiagnosticCommand] = {
    **diagnostics("paper/specs", PAPER_REQUESTS),
    "distill": Command(Distill, "distill.distill"),
}

COMMANDS: Mapping[str, Command | DiagnosticCommand | CommandGroup] = {
    "init": Command(ProjectRequest, "init.init"),
    "train": Command(Train, "train.train"),
    "join": Command(Join, "join.join"),
    "watch": Command(Watch, "watch.watch"),
    "eval": Command(EvalRequest, "evaluate.evaluate"),
    "thl-check": Command(ThlRequest, "thl_check.thl_check"),
    **diagnostics("diagnostics/specs", REQUESTS),
    "report": Command(Report, "report.report"),
    "export": Command(Export, "export.export"),
    "sweep": Command(SweepRequest, "sweep.sweep"),
    "compare": Command(Compare, "sweep.compare"),
    "doctor": Command(Doctor, "doctor.doctor"),
    "runs": CommandGroup(
        "Runs: list them, verify the files of one, push its models.",
        {
            "ls": Command(RunsLs, "runs.ls"),
            "verify": Command(OfRun, "runs.verify", VERIFY),
            "push": Command(RunsPush, "runs.push"),
        },
    ),
    "tasks": CommandGroup(
        "The tasks: their data, and their prompts as a model sees them.",
        {
            "ls": Command(
                WithJson,
                "tasks.ls",
                "List the tasks, with the default data of each.",
            ),
            "show": Command(TasksShow, "tasks.show"),
        },
    ),
    "recipes": CommandGroup(
        "The recipes that ship with mutualrl.",
        {
            "ls": Command(RecipesLs, "recipes.ls"),
            "show": Command(RecipesShow, "recipes.show"),
            "cp": Command(RecipesCp, "recipes.cp"),
            "diff": Command(RecipesDiff, "recipes.diff"),
        },
    ),
    "regimes": CommandGroup(
        "The regimes: rules by which policies share experience.",
        {
            "ls": Command(
                WithJson,
                "regimes.ls",
                "List the regimes of mutualrl and of installed packages.",
            ),
            "show": Command(
                OfRegime,
                "regimes.show",
                "Show a regime's settings with their defaults, and its metrics.",
            ),
            "check": Command(OfRegime, "regimes.check", CHECK_REGIME),
        },
    ),
    "exchange": CommandGroup(
        "Inspect the exchange of a run: rounds, bytes, damage.",
        {
            "ls": Command(OfRun, "exchange.ls", LS_EXCHANGE),
            "show": Command(ExchangeShow, "exchange.show"),
            "export": Command(ExchangeExport, "exchange.export"),
            "import": Command(ImportRequest, "exchange.import_file"),
            "gc": Command(ExchangeGc, "exchange.gc"),
        },
    ),
    "paper": CommandGroup("The paper's evidence: its diagnostics, and its control by distillation.", PAPER),
}
