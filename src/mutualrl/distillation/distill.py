"""Sequential Peer Distillation from end to end: harvest, fine-tune each learner on its peers', evaluate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from mutualrl.console.display import clean
from mutualrl.distillation.settings import DistillSettings, open_directory
from mutualrl.distillation.sources import SourceRun, require_same_prompts, sources
from mutualrl.distillation.successes import DistillationExample, SuccessSet, collect_successes, distillation_examples
from mutualrl.engines.model_files import require_sound
from mutualrl.errors import DataError, UsageError
from mutualrl.evaluation.eval_request import EvalFlags, EvalRequest, ModelRequest
from mutualrl.evaluation.evaluate import evaluate_models
from mutualrl.process.loading import importing
from mutualrl.records import Prompt
from mutualrl.regimes import baseline
from mutualrl.reporting.report import read_runs
from mutualrl.reporting.run_reader import part
from mutualrl.see.location import records_of
from mutualrl.storage.files import JsonObject, user_path, write_checksummed
from mutualrl.storage.rundir import RunDirectory, command_line, versions
from mutualrl.storage.trained_model import has_trained_model, trained_model

_MATCHED = ("seed", "steps", "prompts_per_round", "rollouts_per_prompt")
BEFORE, BASELINE, DISTILLED = "before training", baseline().name, "sequential distillation"
FILE = "distill.json"


def distill(
    runs: Sequence[Path],
    beside: Sequence[Path],
    out: Path,
    settings: DistillSettings,
    engine: str | None,
    console: Console,
) -> JsonObject:
    """Collect the successes in the runs' exchanges, fine-tune each policy on its peers' successes (or, by
    `settings.teacher`, its own, or the data's solutions), and evaluate it beside the model before training, the
    standalone one, and those of the runs `beside`. Writes `out`/distill.json and returns it. Killed, the same command
    resumes: from a learner's newest checkpoint, and from the newest part of an evaluation.

    Raises UsageError, DataError, ModelError or ExchangeDamagedError.
    """
    source_runs = sources(runs, alone=settings.teacher != "peer")
    others = _others(beside, source_runs, console)
    success_sets = {
        name: collect_successes(records_of(s.run), s.info.run_id, name, settings.success_above, s.rounds)
        for name, s in source_runs.items()
    }
    prompts = {name: source.prompts for name, source in source_runs.items()}
    require_same_prompts(prompts)
    texts = {name: {key: prompt.text for key, prompt in own_prompts.items()} for name, own_prompts in prompts.items()}
    requests = {name: _request(source, engine) for name, source in source_runs.items()}
    directory = open_directory(user_path(out), _described(source_runs, others, settings, engine))
    for name, each in success_sets.items():
        _print(console, f"{name}: {len(each.distinct)} distinct successes of {each.rollouts} rollouts")
    learners = {}
    for name, source in source_runs.items():
        taught = _learner(
            source,
            _examples(settings, success_sets, texts, prompts[name].values(), name),
            prompts[name].values(),
            settings,
            directory,
            console,
        )
        learners[name] = {
            **_summary(success_sets[name]),
            "peers": [other for other in source_runs if other != name],
            **taught,
        }
    accuracy = {
        name: _evaluated(source, requests[name], others, directory, console) for name, source in source_runs.items()
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
    write_checksummed(directory / FILE, result)
    return result


def _examples(
    settings: DistillSettings,
    success_sets: Mapping[str, SuccessSet],
    texts: Mapping[str, Mapping[str, str]],
    prompts: Iterable[Prompt],
    learner: str,
) -> list[DistillationExample]:
    """Return what a learner is taught. Raises DataError where the data have no solution that `teacher: gold` learns."""
    if settings.teacher == "peer":
        return distillation_examples(success_sets, texts, learner)
    if settings.teacher == "own":
        own = success_sets[learner].distinct
        return sorted({DistillationExample(texts[learner][success.prompt_id], success.text) for success in own})
    gold = sorted({DistillationExample(p.text, p.solution) for p in prompts if p.solution is not None})
    if not gold:
        raise DataError("teacher: gold learns the solutions in the data, and no training prompt has one")
    return gold


def _described(
    source_runs: Mapping[str, SourceRun],
    others: Sequence[tuple[str, RunDirectory]],
    settings: DistillSettings,
    engine: str | None,
) -> JsonObject:
    """Return the request in comparable form: the same description gives the same models and figures."""
    chosen = settings.model_dump(mode="json")
    del chosen["save_every"]  # decides how it is kept, not what it computes
    return {
        "format": 1,
        "runs": {name: [source.info.run_id, source.info.fingerprint] for name, source in source_runs.items()},
        "beside": {label: run.info().run_id for label, run in others},
        "settings": chosen,
        "engine": engine,
        "versions": versions(),
    }


def bars(accuracy: dict[str, JsonObject]) -> dict[str, dict[str, float | None]]:
    """Return the bars of the paper's figure "Online gating versus sequential offline distillation": of each
    treatment but standalone GRPO, its accuracy minus GRPO's (`points`) and over GRPO's, minus one (`relative`; None
    over 0)."""
    base = accuracy[BASELINE]["accuracy"]
    return {
        name: {
            "points": figures["accuracy"] - base,
            "relative": figures["accuracy"] / base - 1 if base else None,
        }
        for name, figures in accuracy.items()
        if name != BASELINE
    }


def _summary(own: SuccessSet) -> dict[str, object]:
    return {
        "found": {"rollouts": own.rollouts, "rewarded": own.rewarded, "cut": own.cut, "distinct": len(own.distinct)}
    }


def _learner(
    source: SourceRun,
    taught: Sequence[DistillationExample],
    prompts: Iterable[Prompt],
    settings: DistillSettings,
    out: Path,
    console: Console,
) -> dict[str, object]:
    with importing():
        from mutualrl.distillation.sft import examples, fine_tune, finished
        from mutualrl.engines.transformers_engine import load_tokenizer
    from mutualrl.tiny import located

    policy = source.recipe.policy(source.policy)
    trained = settings.start == "trained"
    start = str(trained_model(source.run, policy.name)) if trained else located(policy.model)
    require_sound(Path(start))
    revision = None if trained else policy.revision
    tokenizer = load_tokenizer(start, revision=revision, trust_remote_code=policy.trust_remote_code)
    dataset = examples(taught, prompts, tokenizer, source.template, settings.limit)
    directory = out / "policies" / policy.name
    training = finished(directory)
    if training is None:
        texts = {"peer": "successes of its peers", "own": "successes of its own", "gold": "solutions in the data"}
        _print(console, f"{policy.name}: fine-tuning on {len(dataset.data)} {texts[settings.teacher]}")
        training = fine_tune(start, revision, policy.trust_remote_code, tokenizer, dataset.data, settings, directory)
    else:
        _print(console, f"{policy.name}: was fine-tuned before")
    return {"examples": len(dataset.data), "unfit": dataset.unencodable, **training}


def _others(beside: Sequence[Path], learners: dict[str, SourceRun], console: Console) -> list[tuple[str, RunDirectory]]:
    """Return the runs whose models are evaluated too, by their regime and settings. Raises UsageError for one of
    other models or another task; says in what else it is not matched."""
    named: dict[str, RunDirectory] = {}
    for read in read_runs(beside):
        run = RunDirectory(read.root)
        lacking = [name for name in learners if not has_trained_model(run, name)]
        if lacking:
            raise UsageError(f"--beside {read.root}: it has no trained model of {', '.join(lacking)}")
        for name, source in learners.items():
            model = source.recipe.policy(name).model
            if (other_model := read.policies[name].model) != model or read.task != source.recipe.task.name:
                raise UsageError(
                    f"--beside {read.root}: its {name!r} is {other_model} trained on {read.task}, here it is {model} "
                    f"trained on {source.recipe.task.name}"
                )
            plan, its = source.info.fingerprint, part(read.info, "fingerprint")
            if differences := [
                f"{key} is {its.get(key)!r}, here {plan[key]!r}" for key in _MATCHED if its.get(key) != plan[key]
            ]:
                _print(console, f"Note: {read.root} is not matched: {'; '.join(differences)}")
        label = read.arm if read.arm not in (BASELINE, *named) else f"{read.arm} ({read.name})"
        named[label] = run
    return list(named.items())


def _request(source: SourceRun, engine: str | None) -> EvalRequest:
    """Return the evaluation of one policy's run: made before any work, so that missing data are found then."""
    trust = source.recipe.policy(source.policy).trust_remote_code
    return EvalRequest.of(EvalFlags(run=source.run.root, engine=engine, trust_remote_code=trust))


def _evaluated(
    source: SourceRun, request: EvalRequest, others: Sequence[tuple[str, RunDirectory]], out: Path, console: Console
) -> JsonObject:
    """Return greedy figures of a learner under each treatment, on its own run's task."""
    policy = source.recipe.policy(source.policy)
    own = next(model for model in request.models if model.name == policy.name)
    paths = {BASELINE: own.path, DISTILLED: str(out / "policies" / policy.name / "model")}
    paths |= {label: str(trained_model(run, policy.name, verify=True)) for label, run in others}
    models = [ModelRequest(BEFORE, policy.model, policy.revision, own.trust_remote_code, own.template)]
    models += [replace(own, name=label, path=path) for label, path in paths.items()]
    _print(console, f"{policy.name}: evaluating")
    results = evaluate_models(replace(request, models=models), console, out / "evaluations" / policy.name)
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


def _print(console: Console, words: str) -> None:
    console.print(clean(words), markup=False, highlight=False, soft_wrap=True)


def markdown(result: JsonObject) -> str:
    """Return the result as a table: what each was taught, and the bars of the paper's figure."""
    from mutualrl.console.markdown import name, number, table

    rows = []
    for learner, details in result["learners"].items():
        for treatment, figures in details["accuracy"].items():
            bar = details["bars"].get(treatment)
            relative = None if bar is None else bar["relative"]
            rows.append(
                [
                    name(learner),
                    name(treatment),
                    number(figures["accuracy"], 3),
                    number(figures["stderr"], 3),
                    "" if bar is None else f"{100 * bar['points']:+.1f}",
                    "" if relative is None or math.isnan(relative) else f"{100 * relative:+.1f} %",
                ]
            )
    taught = [
        [
            name(n),
            ", ".join(map(name, a["peers"])),
            str(a["examples"]),
            str(a["unfit"]),
            str(a["steps"]),
            f"{a['loss'][0]:.3f} -> {a['loss'][1]:.3f}",
        ]
        for n, a in result["learners"].items()
    ]
    return "\n\n".join(
        [
            table(
                f"Sequential Peer Distillation, from the {result['settings']['start']} models",
                ["learner", "taught by", "successes", "not encoded exactly", "steps", "loss (nats per token)"],
                taught,
            ),
            table(
                f"Greedy accuracy on held-out {result['task']}, and against standalone GRPO",
                ["learner", "treatment", "accuracy", "standard error", "points", "relative"],
                rows,
            ),
        ]
    )
