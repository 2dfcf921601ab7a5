"""Sequential Peer Distillation end to end: collect successes, fine-tune each learner on its peers', evaluate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from mutualrl.console.display import print_text
from mutualrl.console.markdown import name as shown_name
from mutualrl.console.markdown import number, table
from mutualrl.console.user_path import user_path
from mutualrl.engines.model_files import check_model
from mutualrl.engines.sampling import SamplingOptions
from mutualrl.errors import DataError, UsageError
from mutualrl.evaluation.evaluate import run_plan
from mutualrl.evaluation.plan import EvalModel, EvalPlan, plan_evaluation
from mutualrl.evaluation.request import EvalRequest
from mutualrl.paper.distillation.sources import SourceRun, require_same_prompts, sources
from mutualrl.paper.distillation.successes import (
    DistillationExample,
    SuccessSet,
    collect_successes,
    distillation_examples,
)
from mutualrl.process.loading import fast_imports
from mutualrl.records import Prompt
from mutualrl.regimes import baseline
from mutualrl.reporting.distilled import RESULT
from mutualrl.runs.logs import read_runs
from mutualrl.see.location import record_store
from mutualrl.storage.files import JsonObject, write_checksummed
from mutualrl.storage.format import FORMAT
from mutualrl.storage.rundir import RunDirectory, command_line, versions
from mutualrl.storage.trained_model import has_trained_model, trained_model
from mutualrl.study.distill_settings import DistillSettings, open_directory
from mutualrl.thl import end_token
from mutualrl.tiny import resolve_path

_MATCHED = ("seed", "steps", "prompts_per_round", "rollouts_per_prompt")
BEFORE, BASELINE, DISTILLED = "before training", baseline().name, "sequential distillation"


def distill(
    runs: Sequence[Path],
    beside: Sequence[Path],
    out: Path,
    settings: DistillSettings,
    engine: str | None,
    console: Console,
) -> JsonObject:
    """Collect the successes in the runs' exchanges, fine-tune each policy on its peers' successes (or, by
    `settings.teacher`, its own, or the data's solutions), and evaluate it along with the model before training, the
    standalone one, and those of the runs `beside`. Writes `out`/distill.json and returns it. If interrupted, the same
    command resumes from a learner's newest checkpoint and from the newest part of an evaluation.

    Raises UsageError, DataError, ModelError or ExchangeDamagedError.
    """
    source_runs = sources(runs, alone=settings.teacher != "peer")
    other_runs = _other_runs(beside, source_runs, console)
    success_sets = {
        name: collect_successes(record_store(s.run), s.info.run_id, name, settings.success_above, s.rounds)
        for name, s in source_runs.items()
    }
    prompts = {name: source.prompts for name, source in source_runs.items()}
    require_same_prompts(prompts)
    texts = {name: {key: prompt.text for key, prompt in own_prompts.items()} for name, own_prompts in prompts.items()}
    plans = {name: _evaluation(source, engine) for name, source in source_runs.items()}
    directory = open_directory(user_path(out), _description(source_runs, other_runs, settings, engine))
    for name, successes in success_sets.items():
        _print(console, f"{name}: {len(successes.distinct)} distinct successes in {successes.rollouts} rollouts")
    learners = {}
    for name, source in source_runs.items():
        training = _train(
            source,
            _examples(settings, success_sets, texts, prompts[name].values(), name),
            success_sets[name].end_tokens,
            prompts[name].values(),
            settings,
            directory,
            console,
        )
        learners[name] = {
            **_summary(success_sets[name]),
            "peers": [other for other in source_runs if other != name],
            **training,
        }
    accuracy = {
        name: _evaluated(source, plans[name], other_runs, directory, console) for name, source in source_runs.items()
    }
    result: JsonObject = {
        "command": command_line(),
        "versions": versions(),
        "runs": [str(user_path(run)) for run in runs],
        "task": next(iter(source_runs.values())).recipe.task.name,
        "seeds": sorted({source.recipe.run.seed for source in source_runs.values()}),
        "settings": settings.model_dump(mode="json"),
        "learners": {
            name: {**learners[name], "accuracy": accuracy[name], "bars": bars(accuracy[name])} for name in source_runs
        },
    }
    write_checksummed(directory / RESULT, result)
    return result


def _examples(
    settings: DistillSettings,
    success_sets: Mapping[str, SuccessSet],
    texts: Mapping[str, Mapping[str, str]],
    prompts: Iterable[Prompt],
    learner: str,
) -> list[DistillationExample]:
    """Return a learner's training examples. Raises DataError if `teacher: gold` finds no solution in the data."""
    if settings.teacher == "peer":
        return distillation_examples(success_sets, texts, learner)
    if settings.teacher == "own":
        own = success_sets[learner].distinct
        return sorted({DistillationExample(texts[learner][success.prompt_id], success.text) for success in own})
    gold = sorted({DistillationExample(p.text, p.solution) for p in prompts if p.solution is not None})
    if not gold:
        raise DataError("teacher: gold trains on the solutions in the data, but no training prompt has one")
    return gold


def _description(
    source_runs: Mapping[str, SourceRun],
    other_runs: Sequence[tuple[str, RunDirectory]],
    settings: DistillSettings,
    engine: str | None,
) -> JsonObject:
    """Return the request in comparable form: equal descriptions give the same models and results."""
    comparable = settings.model_dump(mode="json")
    del comparable["save_every"]  # affects checkpoints, not results
    return {
        "format": FORMAT,
        "runs": {name: [source.info.run_id, source.info.fingerprint] for name, source in source_runs.items()},
        "beside": {label: run.info().run_id for label, run in other_runs},
        "settings": comparable,
        "engine": engine,
        "versions": versions(),
    }


def bars(accuracy: dict[str, JsonObject]) -> dict[str, dict[str, float | None]]:
    """Return the bars of the paper's figure "Online gating versus sequential offline distillation": for each treatment
    except standalone GRPO, its accuracy minus GRPO's (`points`), and divided by GRPO's, minus one (`relative`; None if
    GRPO's is 0)."""
    base = accuracy[BASELINE]["accuracy"]
    return {
        name: {
            "points": figures["accuracy"] - base,
            "relative": figures["accuracy"] / base - 1 if base else None,
        }
        for name, figures in accuracy.items()
        if name != BASELINE
    }


def _summary(successes: SuccessSet) -> dict[str, object]:
    return {
        "found": {
            "rollouts": successes.rollouts,
            "rewarded": successes.rewarded,
            "cut": successes.cut,
            "distinct": len(successes.distinct),
        }
    }


def _train(
    source: SourceRun,
    selected: Sequence[DistillationExample],
    end_tokens: Mapping[int, int],
    prompts: Iterable[Prompt],
    settings: DistillSettings,
    out: Path,
    console: Console,
) -> dict[str, object]:
    with fast_imports():
        from mutualrl.engines.generation_defaults import eos_token_ids
        from mutualrl.engines.transformers_engine import load_tokenizer
        from mutualrl.paper.distillation.sft import StartModel, examples, fine_tune, finished

    policy = source.recipe.policy(source.policy)
    trained = settings.start == "trained"
    start = str(trained_model(source.run, policy.name)) if trained else resolve_path(policy.model)
    revision = None if trained else policy.revision
    check_model(start, revision, trust_remote_code=policy.trust_remote_code)
    tokenizer = load_tokenizer(start, revision=revision, trust_remote_code=policy.trust_remote_code)
    ends = eos_token_ids(start, tokenizer, revision=revision, trust_remote_code=policy.trust_remote_code)
    end = end_token(tokenizer, ends, end_tokens)
    model = StartModel(start, revision, policy.trust_remote_code, tokenizer)
    dataset = examples(selected, prompts, tokenizer, source.template, settings.limit, end)
    directory = out / "policies" / policy.name
    training = finished(directory)
    if training is None:
        texts = {"peer": "successes of its peers", "own": "own successes", "gold": "solutions in the data"}
        _print(console, f"{policy.name}: fine-tuning on {len(dataset.data)} {texts[settings.teacher]}")
        training = fine_tune(model, dataset.data, settings, directory)
    else:
        _print(console, f"{policy.name}: already fine-tuned")
    return {"examples": len(dataset.data), "unfit": dataset.unencodable, **training}


def _other_runs(
    beside: Sequence[Path], learners: dict[str, SourceRun], console: Console
) -> list[tuple[str, RunDirectory]]:
    """Return the further runs to evaluate, labelled with their regime and settings. Raises UsageError for a run of
    other models or another task; prints its other differences."""
    labelled: dict[str, RunDirectory] = {}
    for read in read_runs(beside):
        run = RunDirectory(read.root)
        missing = [name for name in learners if not has_trained_model(run, name)]
        if missing:
            raise UsageError(f"--beside {read.root}: it has no trained model of {', '.join(missing)}")
        for name, source in learners.items():
            model = source.recipe.policy(name).model
            if (other_model := read.policies[name].model) != model or read.task != source.recipe.task.name:
                raise UsageError(
                    f"--beside {read.root}: its {name!r} is {other_model} trained on {read.task}, here it is {model} "
                    f"trained on {source.recipe.task.name}"
                )
            expected, actual = source.info.fingerprint, read.info.fingerprint
            differing = [key for key in _MATCHED if actual.get(key) != expected[key]]
            if differing:
                differences = "; ".join(f"{key} is {actual.get(key)!r}, here {expected[key]!r}" for key in differing)
                _print(console, f"Note: {read.root} is not matched: {differences}")
        label = read.arm if read.arm not in (BASELINE, *labelled) else f"{read.arm} ({read.name})"
        labelled[label] = run
    return list(labelled.items())


def _evaluation(source: SourceRun, engine: str | None) -> EvalPlan:
    """Plan the evaluation of one policy's run, before any work, to report missing data early."""
    trust = source.recipe.policy(source.policy).trust_remote_code
    sampling = SamplingOptions(engine=engine)
    return plan_evaluation(EvalRequest(run=source.run.root, sampling=sampling, trust_remote_code=trust))


def _evaluated(
    source: SourceRun, plan: EvalPlan, other_runs: Sequence[tuple[str, RunDirectory]], out: Path, console: Console
) -> JsonObject:
    """Return greedy results of a learner under each treatment, on its own run's task."""
    policy = source.recipe.policy(source.policy)
    standalone = next(model for model in plan.models if model.name == policy.name)
    paths = {BASELINE: standalone.path, DISTILLED: str(out / "policies" / policy.name / "model")}
    paths |= {label: str(trained_model(run, policy.name, verify=True)) for label, run in other_runs}
    models = [EvalModel(BEFORE, policy.model, policy.revision, standalone.trust_remote_code, standalone.template)]
    models += [replace(standalone, name=label, path=path) for label, path in paths.items()]
    _print(console, f"{policy.name}: evaluating")
    stored = replace(plan.request, out=out / "evaluations" / policy.name)
    results = run_plan(replace(plan, request=stored, models=models), console)
    return {
        label: {key: figures[key] for key in ("accuracy", "stderr", "n")} | {"by_group": _groups(figures)}
        for label, figures in results["models"].items()
    }


def _groups(figures: JsonObject) -> dict[str, float]:
    return {
        group: group_accuracy["accuracy"]
        for task in figures["tasks"].values()
        for group, group_accuracy in task["groups"].items()
    }


def _print(console: Console, message: str) -> None:
    print_text(console, message)


def markdown(result: JsonObject) -> str:
    """Return the result as tables: each learner's training, and the bars of the paper's figure."""

    rows = []
    for learner, details in result["learners"].items():
        for treatment, figures in details["accuracy"].items():
            bar = details["bars"].get(treatment)
            relative = None if bar is None else bar["relative"]
            rows.append(
                [
                    shown_name(learner),
                    shown_name(treatment),
                    number(figures["accuracy"], 3),
                    number(figures["stderr"], 3),
                    "" if bar is None else f"{100 * bar['points']:+.1f}",
                    "" if relative is None or math.isnan(relative) else f"{100 * relative:+.1f} %",
                ]
            )
    training_rows = [
        [
            shown_name(learner),
            ", ".join(map(shown_name, details["peers"])),
            str(details["examples"]),
            str(details["unfit"]),
            str(details["steps"]),
            f"{details['loss'][0]:.3f} -> {details['loss'][1]:.3f}",
        ]
        for learner, details in result["learners"].items()
    ]
    return "\n\n".join(
        [
            table(
                f"Sequential Peer Distillation, from the {result['settings']['start']} models",
                ["learner", "taught by", "successes", "not encoded exactly", "steps", "loss (nats per token)"],
                training_rows,
            ),
            table(
                f"Greedy accuracy on held-out {result['task']}, and against standalone GRPO",
                ["learner", "treatment", "accuracy", "standard error", "points", "relative"],
                rows,
            ),
        ]
    )
