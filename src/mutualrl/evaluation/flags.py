"""Options of `eval`, also for use from Python."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from mutualrl.console.options import SEED_LIMIT, TRUST_REMOTE_CODE, Option
from mutualrl.process.limits import REWARD_SECONDS


@dataclass(frozen=True, kw_only=True)
class EvalFlags:
    """Options of an evaluation; None and empty mean not given."""

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
    data: Annotated[Path | None, Option("The rows of one task: a file, a directory, or hub:OWNER/NAME.")] = None
    data_dir: Annotated[Path | None, Option("A directory with the tasks' files, instead of the hub.")] = None
    limit: Annotated[int | None, Option("Maximum number of prompts per task, stratified by group.", min=1)] = None
    max_new_tokens: Annotated[
        int | None,
        Option("Maximum completion length: a run's or pool's on its own task, else 3072 (arithmetic: 64).", min=1),
    ] = None
    samples: Annotated[int | None, Option("Completions per prompt, for pass@k (1).", min=1, max=1024)] = None
    temperature: Annotated[
        float | None, Option("0 is greedy, the default; 1 with several --samples.", min=0.0, max=10.0)
    ] = None
    engine: Annotated[
        str | None, Option("transformers or vllm; by default vllm if it is installed and supports the model.")
    ] = None
    batch_size: Annotated[int, Option("Batch size of the transformers engine.", min=1)] = 64
    template: Annotated[str | None, Option("Task dataset: prompt template, {field} for a field of the row.")] = None
    answer: Annotated[str | None, Option("Task dataset: field of the answer (answer).")] = None
    also: Annotated[tuple[str, ...], Option("Additional score besides exact match: math-verify.")] = ()
    step_timeout: Annotated[
        float, Option("Time-out of a reward function per part, in seconds.", min=0.001)
    ] = REWARD_SECONDS  # fmt: skip
    seed: Annotated[int, Option("Seed of sampling and of generated problems.", min=0, max=SEED_LIMIT)] = 0
    trust_remote_code: Annotated[bool, TRUST_REMOTE_CODE] = False
