"""Request of an evaluation, which is the options of `eval`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from mutualrl.console.options import SEED_LIMIT, TRUST_REMOTE_CODE, Option, OptionGroup, WithJson
from mutualrl.engines.sampling import SamplingOptions
from mutualrl.process.limits import REWARD_SECONDS
from mutualrl.tasks.options import RowOptions


@dataclass(frozen=True, kw_only=True)
class EvalRequest(WithJson):
    """Evaluate models: one greedy completion per prompt, exact match of the boxed answer.

    Example: mutualrl eval --model ./a --model ./b --suite math500,arc --data-dir data --out results
    """

    run: Annotated[
        Path | None, Option("A run directory: the trained models of its policies.", complete="run_directories")
    ] = None
    models: Annotated[tuple[str, ...], Option("A model (path, hub id, tiny:NAME). Repeatable.", "--model")] = ()
    pool: Annotated[str | None, Option("The models of a pool, before training.", complete="pool_names")] = None
    initial: Annotated[bool, Option("With --run: its models before training, for the report's first bars.")] = False
    suite: Annotated[
        str | None,
        Option("Comma-separated tasks (`mutualrl tasks ls`), or `paper`: its seven. A run's task by default."),
    ] = None
    rows: Annotated[RowOptions, OptionGroup()] = RowOptions()
    data_dir: Annotated[Path | None, Option("A directory with the tasks' files, instead of the hub.")] = None
    limit: Annotated[int | None, Option("Maximum number of prompts per task, stratified by group.", min=1)] = None
    sampling: Annotated[
        SamplingOptions,
        OptionGroup(
            samples=Option("Completions per prompt, for pass@k (1).", min=1, max=1024),
            max_new_tokens=Option(
                "Maximum completion length: a run's or pool's on its own task, else 3072 (arithmetic: 64).", min=1
            ),
            temperature=Option("0 is greedy, the default; 1 with several --samples.", min=0.0, max=10.0),
            engine=Option("transformers or vllm; by default vllm if it is installed and supports the model."),
            seed=Option("Seed of sampling and of generated problems.", min=0, max=SEED_LIMIT),
        ),
    ] = SamplingOptions()
    batch_size: Annotated[int, Option("Batch size of the transformers engine.", min=1)] = 64
    also: Annotated[tuple[str, ...], Option("Additional score besides exact match: math-verify.")] = ()
    step_timeout: Annotated[
        float, Option("Time-out of a reward function per part, in seconds.", min=0.001)
    ] = REWARD_SECONDS  # fmt: skip
    trust_remote_code: Annotated[bool, TRUST_REMOTE_CODE] = False
    out: Annotated[
        Path | None,
        Option("Directory for all completions (Parquet) and the results; the same command resumes."),
    ] = None
    score: Annotated[Path | None, Option("Score a file with columns `completion` and `answer`; no model is run.")] = (
        None
    )
