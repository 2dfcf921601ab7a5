"""Runs side by side: the paper's figures, drawn from our data.

A comparison is of runs of one task and one pool; an arm is a regime with its settings, its runs differ in their seeds.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mutualrl.reporting.plots import Bars, Figure, Panel, filled, over
from mutualrl.reporting.reading import Point, Policy, Run, number, part
from mutualrl.reporting.series import by_arm, deviation, mean_of, policies_of, tokens_per_second

#: what two runs may differ in and still be compared: what is compared, and what does not change a result
_FREE = {"regime", "hardware", "launch", "pool"}
_FREE_RUN = {"seed", "dir", "publish", "save_every", "keep_checkpoints", "keep_rounds", "max_restarts", "on_peer_loss",
             "peer_timeout", "round_timeout", "report_to"}  # fmt: skip
PLAIN_TRL = "trl"  # the regime in run.json of a run of plain TRL (benchmarks/fidelity.py)


Arms = Mapping[str, Sequence[Run]]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs that may be compared, and what keeps them from being matched, in words."""

    name: str
    runs: tuple[Run, ...]
    notes: tuple[str, ...]

    @property
    def arms(self) -> dict[str, list[Run]]:
        """Its runs by regime and settings."""
        return by_arm(self.runs)


def comparisons(runs: Sequence[Run]) -> list[Comparison]:
    """The runs by task and pool. Runs of different ones are never put side by side."""
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(_identity(run), []).append(run)
    found: list[Comparison] = []
    for group in groups.values():
        name = f"{group[0].task}, pool {group[0].pool}"
        twice = [other for other in found if other.name == name]
        found.append(
            Comparison(f"{name} ({len(twice) + 1})" if twice else name, tuple(group), tuple(_unmatched(group)))
        )
    return found


def _identity(run: Run) -> tuple[str, ...]:
    task = sorted(f"{key}={value!r}" for key, value in part(run.recipe, "task").items() if key != "max_prompt_tokens")
    models = [f"{name}={policy.model}" for name, policy in run.policies.items()]
    return (run.task, *task, *models)


def _unmatched(runs: Sequence[Run]) -> list[str]:
    """Settings in which runs of a comparison differ beyond regime and seed; runs that are not finished; a seed
    twice."""
    flat = {run.name: _flat(run.recipe) for run in runs}
    keys = sorted(set().union(*flat.values()))
    notes = []
    for key in keys:
        by_value: dict[str, list[str]] = {}
        for name, settings in flat.items():
            by_value.setdefault(json.dumps(settings.get(key), default=str), []).append(name)
        if len(by_value) > 1:
            notes.append(f"not matched: {key} is {_by_value(by_value)}")
    notes += _other_data(runs)
    seeds_of = {arm: sorted({str(run.seed) for run in members}) for arm, members in by_arm(runs).items()}
    if len({tuple(seeds) for seeds in seeds_of.values()}) > 1:
        told = "; ".join(f"{arm} {', '.join(seeds)}" for arm, seeds in seeds_of.items())
        notes.append(f"not matched: the arms have different seeds: {told}")
    for arm, members in by_arm(runs).items():
        seeds = [run.seed for run in members]
        if len(set(map(str, seeds))) < len(seeds):
            notes.append(f"{arm}: a seed is there twice ({', '.join(map(str, seeds))}); the spread is then too small")
        if unfinished := [run.name for run in members if run.state != "finished"]:
            notes.append(f"{arm}: not finished: {', '.join(unfinished)}; curves end where the shortest run does")
    return notes


def _by_value(names: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{value} ({', '.join(who[:3])}{', ...' if len(who) > 3 else ''})" for value, who in names.items())


def _other_data(runs: Sequence[Run]) -> list[str]:
    """Runs of one seed that saw other prompts, and runs of other versions."""
    notes = []
    by_seed: dict[str, dict[str, list[str]]] = {}
    by_version: dict[str, list[str]] = {}
    for run in runs:
        data = str(part(run.info, "fingerprint").get("data_sha256", "?"))[:12]
        by_seed.setdefault(str(run.seed), {}).setdefault(data, []).append(run.name)
        versions = part(run.info, "versions")
        told = ", ".join(f"{name} {versions.get(name, '?')}" for name in ("mutualrl", "trl", "torch"))
        by_version.setdefault(told, []).append(run.name)
    for seed, found in by_seed.items():
        if len(found) > 1:
            notes.append(f"not matched: the training data of seed {seed} are {_by_value(found)}")
    if len(by_version) > 1:
        notes.append(f"not matched: made by {_by_value(by_version)}")
    return notes


def _flat(recipe: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for section, value in recipe.items():
        if section in _FREE:
            continue
        if isinstance(value, dict):
            free = _FREE_RUN if section == "run" else set()
            found |= {f"{section}.{key}": each for key, each in value.items() if key not in free}
        else:
            found[section] = value
    return found


def figures(comparison: Comparison, slug: str) -> list[Figure]:
    """The paper's figures that a comparison has the arms for."""
    arms = comparison.arms
    main = _main(arms)
    drawn = [
        _probes(main, slug),
        _regularizers(main, slug),
        _gates(arms, slug),
        *(ablations := _ablations(arms, slug)),
        _further(arms, {*main, *(line.label for f in ablations for panel in f.panels for line in panel.lines)}, slug),
        _fidelity(arms, slug),
        _group_bars(arms, slug),
    ]
    return [figure for figure in drawn if figure is not None and figure.panels]


MOST_ARMS = 6  # in one panel


def _main(arms: Arms) -> Arms:
    """Of many arms the paper's four probes; the others have figures of their own."""
    probes = {arm: runs for arm, runs in arms.items() if arm in ("grpo", "prp", "xgrpo", "sgt")}
    return probes if len(arms) > MOST_ARMS and len(probes) > 1 else arms


Take = Callable[[Policy], list[Point]]


def _names(arms: Arms) -> list[str]:
    return policies_of([run for runs in arms.values() for run in runs])


def _panels(arms: Arms, what: str, unit: str, take: Take, *, smooth: bool, average: bool) -> list[Panel]:
    """A panel a policy, and one of the mean over the pool; a line an arm."""
    names = _names(arms)
    panels = [
        Panel(
            f"{name}: {what}",
            unit,
            tuple(over(arm, [take(p) for p in _there(runs, name)], smooth=smooth) for arm, runs in arms.items()),
        )
        for name in names
    ]
    if average and len(names) > 1:
        lines = tuple(
            over(
                arm,
                [mean_of([take(run.policies[name]) for name in names]) for run in runs if _whole(run)],
                smooth=smooth,
            )
            for arm, runs in arms.items()
        )
        panels.append(Panel(f"mean of the pool: {what}", unit, lines))
    return panels


def _there(runs: Sequence[Run], name: str) -> list[Policy]:
    """The policy in the runs, but for those that ended without it."""
    return [run.policies[name] for run in runs if run.state != "finished" or run.policies[name].result is not None]


def _whole(run: Run) -> bool:
    return run.state != "finished" or all(policy.result is not None for policy in run.policies.values())


def _columns(arms: Arms) -> int:
    names = len(_names(arms))
    return names + 1 if 1 < names < 4 else max(1, min(names, 4))


def _probes(arms: Arms, slug: str) -> Figure:
    return Figure(
        f"{slug}-probes",
        "Probe comparison",
        "Greedy validation accuracy (top) and training reward (below, moving mean) of each policy and of the pool's "
        "mean; mean over runs, the band is one sample deviation.",
        filled(
            *_panels(
                arms, "validation accuracy", "greedy accuracy", lambda p: p.accuracy(), smooth=False, average=True
            ),
            *_panels(arms, "training reward", "mean reward", lambda p: p.series("reward"), smooth=True, average=True),
        ),
        columns=_columns(arms),
        paper="Outcome-level sharing gives the best stability-support point (probe comparison)",
    )


def _regularizers(arms: Arms, slug: str) -> Figure:
    panels: list[Panel] = []
    for what, key in (("entropy", "entropy"), ("PPO KL", "ppo_kl"), ("KL loss", "kl")):
        panels += _panels(arms, what, "nats a token", lambda p, key=key: p.series(key), smooth=True, average=False)  # type: ignore[misc]
    return Figure(
        f"{slug}-regularizers",
        "Optimization diagnostics by regime",
        "Entropy, PPO KL and KL to the model before training; moving means, mean over runs, one sample deviation.",
        filled(*panels),
        columns=max(1, len(_names(arms))),
        paper="The regimes have distinct optimization signatures; SGT preserves entropy",
    )


def _gates(arms: Arms, slug: str) -> Figure:
    return Figure(
        f"{slug}-gate",
        "Gate rate over time",
        "Share of a round's prompts that SGT's gate opens on; moving mean, mean over runs, one sample deviation.",
        filled(
            *_panels(
                arms,
                "gate rate",
                "share of the prompts",
                lambda p: p.series("sgt/gate_rate"),
                smooth=True,
                average=False,
            )
        ),
        columns=max(1, min(len(_names(arms)), 3)),
    )


#: of each ablation: file, title, figure of the paper, which arms
_ABLATIONS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    (
        "prp-ablation",
        "Importance correction under PRP",
        "THL-aligned importance correction is required for tractable data-level sharing",
        ("grpo", "prp", "prp (denominator=snapshot)"),
    ),
    (
        "xgrpo-ablation",
        "Structured pool against noise under XGRPO",
        "XGRPO gains come from structured cross-policy normalization",
        ("grpo", "xgrpo", "grpo-noise", "xgrpo (pool=shuffled)"),
    ),
)


def _ablations(arms: Arms, slug: str) -> list[Figure]:
    found = []
    variants = ("grpo", "sgt", *(arm for arm in arms if arm.startswith("sgt (")))
    weights = ("sgt-variants", "SGT: weights, and the data's solution in place of a peer's", "", variants)
    for name, title, paper, wanted in (*_ABLATIONS, weights):
        chosen = {arm: arms[arm] for arm in wanted if arm in arms}
        if len(chosen) < 2 or set(chosen) == {"grpo"} or not set(chosen) & set(wanted[2:]):
            continue
        found.append(
            Figure(
                f"{slug}-{name}",
                title,
                "Greedy validation accuracy; mean over runs, the band is one sample deviation.",
                filled(
                    *_panels(
                        chosen,
                        "validation accuracy",
                        "greedy accuracy",
                        lambda p: p.accuracy(),
                        smooth=False,
                        average=True,
                    )
                ),
                columns=_columns(chosen),
                paper=paper,
            )
        )
    return found


def _further(arms: Arms, shown: set[str], slug: str) -> Figure | None:
    """Arms that no other figure has room for, beside GRPO."""
    rest = {arm: runs for arm, runs in arms.items() if arm not in shown or arm == "grpo"}
    if not set(rest) - {"grpo"}:
        return None
    panels = _panels(rest, "validation accuracy", "greedy accuracy", lambda p: p.accuracy(), smooth=False, average=True)
    return Figure(
        f"{slug}-further-arms", "Further arms", "Greedy validation accuracy; mean over runs, one sample deviation.",
        filled(*panels), columns=_columns(rest),
    )  # fmt: skip


def _fidelity(arms: Arms, slug: str) -> Figure | None:
    """Our grpo beside plain TRL."""
    if PLAIN_TRL not in arms or "grpo" not in arms:
        return None
    chosen = {"grpo": arms["grpo"], PLAIN_TRL: arms[PLAIN_TRL]}
    panels = [
        *_panels(chosen, "validation accuracy", "greedy accuracy", lambda p: p.accuracy(), smooth=False, average=False),
        *_panels(chosen, "training reward", "mean reward", lambda p: p.series("reward"), smooth=True, average=False),
        *_panels(
            chosen, "speed on steps without validation", "tokens a second",
            lambda p: tokens_per_second(p, without_validation=True), smooth=True, average=False,
        ),
        *_panels(chosen, "policy-gradient loss", "loss", lambda p: p.series("loss"), smooth=True, average=False),
    ]  # fmt: skip
    return Figure(
        f"{slug}-fidelity",
        "Fidelity against plain TRL",
        "The same policies through mutualrl's regime grpo and through TRL's GRPOTrainer alone.",
        filled(*panels),
        columns=max(1, len(_names(chosen))),
        paper="System sanity check on single-policy GRPO",
    )


def _group_bars(arms: Arms, slug: str) -> Figure | None:
    """Accuracy by group (of a mixture: by task) before training and after each arm."""
    names = _names(arms)
    ended = {arm: [run for run in runs if run.state == "finished"] for arm, runs in arms.items()}
    ended = {arm: runs for arm, runs in ended.items() if runs}
    groups = sorted({g for runs in ended.values() for run in runs for n in names for g in run.policies[n].groups})
    if not 1 < len(groups) <= 12 or not names:
        return None
    panels = []
    for name in names:
        first = next(iter(ended.values()))
        bars = [_bars("before training", groups, first, name, before=True)]
        bars += [_bars(arm, groups, runs, name, before=False) for arm, runs in ended.items()]
        panels.append(Panel(f"{name}: final accuracy by group", "greedy accuracy", bars=tuple(b for b in bars if b)))
    return Figure(
        f"{slug}-groups",
        "Accuracy by group",
        "Greedy accuracy at the end by group (of a mixture: by task); mean over runs, one sample deviation.",
        filled(*panels),
        columns=1 if len(groups) > 4 else max(1, min(len(names), 2)),
        paper="Outcome-level transfer extends beyond the main MATH comparison (per-task bars)",
    )


def _bars(label: str, groups: Sequence[str], runs: Sequence[Run], name: str, *, before: bool) -> Bars:
    values: list[float] = []
    errors: list[float | None] = []
    kept: list[str] = []
    for group in groups:
        curves = [curve for policy in _there(runs, name) if (curve := policy.accuracy(group))]
        found = [curve[0 if before else -1].value for curve in curves if not before or curve[0].step == 0]
        if found:
            kept.append(group)
            values.append(statistics.fmean(found))
            errors.append(deviation(found) if len(found) > 1 else None)
    return Bars(label, tuple(kept), tuple(values), tuple(errors))


def across(found: Sequence[Comparison]) -> list[Figure]:
    """Figures over several comparisons of one task: GRPO and XGRPO pool by pool."""
    by_task: dict[str, list[Panel]] = {}
    for comparison in found:
        arms = {arm: runs for arm, runs in comparison.arms.items() if arm in ("grpo", "xgrpo")}
        if len(arms) == 2:
            names = _names(arms)
            lines = tuple(
                over(arm, [mean_of([run.policies[name].accuracy() for name in names]) for run in runs if _whole(run)])
                for arm, runs in arms.items()
            )
            panel = Panel(f"{comparison.name}: mean of the pool", "greedy accuracy", lines)
            by_task.setdefault(comparison.runs[0].task, []).append(panel)
    return [
        Figure(
            "value-level-pools" if number == 1 else f"value-level-pools-{number}",
            f"Value-level sharing across pools ({task})",
            "Greedy validation accuracy, mean over the pool's policies; mean over runs, one sample deviation.",
            filled(*panels),
            columns=min(3, len(panels)),
            paper="Value-level sharing preserves the GRPO stability profile across model pools",
        )
        for number, (task, panels) in enumerate(by_task.items(), 1)
        if len(panels) > 1
    ]


def distillation_bars(path: Path, result: Mapping[str, Any], slug: str) -> Figure | None:
    """The bars of `mutualrl distill`: accuracy over standalone GRPO's, minus one."""
    learners = {name: about for name, about in part(result, "learners").items() if isinstance(about, dict)}
    labels = list(dict.fromkeys(label for about in learners.values() for label in part(about, "bars")))
    bars = []
    for label in labels:
        found = {
            name: value
            for name, about in learners.items()
            if (value := number(part(part(about, "bars"), label).get("relative"))) is not None
        }
        if found:
            bars.append(Bars(label, tuple(found), tuple(100 * value for value in found.values()), ()))
    if not bars:
        return None
    return Figure(
        slug,
        "Online gating versus sequential distillation",
        f"Greedy accuracy relative to standalone GRPO, per cent ({path.name}).",
        (Panel("against standalone GRPO", "per cent", bars=tuple(bars)),),
        columns=1,
        paper="Online gating versus sequential offline distillation",
    )
