"""Figures of a single run."""

from __future__ import annotations

from dataclasses import replace

from mutualrl.reporting.figure_specs import Figure, Panel, filled
from mutualrl.runs.curves import curve, smooth_curve, tokens_per_second
from mutualrl.runs.logs import LoggedRun
from mutualrl.storage.metrics import DEAD, RESAMPLE_ATTEMPTS, RESAMPLE_MISSING, REVIVED, TAUGHT, WAIT

MOST_GROUPS = 8


def figures(run: LoggedRun) -> list[Figure]:
    """Return the figures of learning, optimization, sharing and time for which the run has data. Panels that are zero
    throughout are left out and listed in the first caption."""
    drawn: list[Figure] = []
    zero: list[str] = []
    for make in (_learning, _optimization, _gate, _regime, _prompts, _resampling, _engine, _time):
        figure = make(run)
        shown = tuple(panel for panel in figure.panels if not _is_zero(panel))
        zero += [panel.title for panel in figure.panels if panel not in shown]
        if shown:
            drawn.append(replace(figure, panels=shown))
    if zero and drawn:
        sentence = f"{drawn[0].caption} Zero throughout and not drawn: {', '.join(zero)}."
        drawn[0] = replace(drawn[0], caption=sentence)
    return drawn


def _is_zero(panel: Panel) -> bool:
    """Return whether every curve of a panel is zero at every step; an accuracy of zero is a result and is drawn."""
    if panel.bars or "accuracy" in panel.y:
        return False
    return all((drawn["value"] == 0.0).all() for drawn in panel.lines.values())


SMOOTHED = " Curves are moving averages over a twentieth of their points."


def _panel(run: LoggedRun, title: str, unit: str, key: str) -> Panel:
    """Return a panel with one metric of every policy."""
    return Panel(title, unit, {name: smooth_curve(run.series(name, key)) for name in run.policies})


def _learning(run: LoggedRun) -> Figure:
    measure = "accuracy" if run.measures_accuracy else "reward"
    panels = [_panel(run, "training reward", "mean reward of the step's rollouts", "reward")]
    for name in run.policies:
        lines = {"all": curve(run.accuracy_of(name))}
        groups = run.groups(name)
        if 1 < len(groups) <= MOST_GROUPS:
            lines |= {group: curve(run.accuracy_of(name, group)) for group in groups}
        panels.append(Panel(f"{name}: validation {measure}", f"greedy {measure}", lines))
    validated = f", and greedy {measure} on held-out prompts (not smoothed)" if any(map(_validated, panels[1:])) else ""
    return Figure(
        "learning",
        "Learning",
        f"Training reward (moving average over a twentieth of its points){validated}.",
        filled(*panels),
    )


def _validated(panel: Panel) -> bool:
    return any(map(len, panel.lines.values()))


def _optimization(run: LoggedRun) -> Figure:
    return Figure(
        "optimization",
        "Optimization diagnostics",
        "Entropy of the policy's own rollouts, mean log-ratio to the sampling policy (PPO KL), and KL to the initial "
        f"model (KL loss).{SMOOTHED}",
        filled(
            _panel(run, "entropy", "nats per token", "entropy"),
            _panel(run, "PPO KL", "nats per token", "ppo_kl"),
            _panel(run, "KL loss", "nats per token", "kl"),
        ),
        columns=3,
    )


def _gate(run: LoggedRun) -> Figure:
    rates = {name: smooth_curve(run.by_role(name, "gate_rate")) for name in run.policies}
    pairs = {name: curve(run.series(name, TAUGHT.key).cumsum()) for name in run.policies}
    return Figure(
        "gate",
        f"The gate of {run.info.regime}",
        "Fraction of a round's prompts on which the gate opens (moving average over a twentieth of its points); "
        "cumulative texts taught.",
        filled(Panel("gate rate", "fraction of prompts", rates), Panel("texts taught", "cumulative texts", pairs)),
    )


def _regime(run: LoggedRun) -> Figure:
    """Return the figure of further metrics that the regime declares for plotting."""
    panels = [_panel(run, m.panel, m.unit, m.key) for m in run.rule.metrics if m.panel is not None]
    meanings = "; ".join(f"{m.panel}: {m.meaning}" for m in run.rule.metrics if m.panel is not None)
    return Figure("regime", f"Metrics of {run.info.regime}", f"{meanings}.{SMOOTHED}", filled(*panels))


def _prompts(run: LoggedRun) -> Figure:
    capability = {name: smooth_curve(run.series(name, f"capability/{name}")) for name in run.policies}
    dead = {name: curve(run.series(name, DEAD.key)) for name in run.policies}
    revived = {name: curve(run.series(name, REVIVED.key).cumsum()) for name in run.policies}
    return Figure(
        "prompts",
        "Prompts with and without a success",
        "Fraction of rollouts with a reward above 0 (moving average over a twentieth of its points); prompts without "
        "such a rollout in their last group; cumulative prompts that had one again.",
        filled(
            Panel("capability", "fraction of rollouts", capability),
            Panel("dead prompts", "prompts", dead),
            Panel("revived prompts", "cumulative prompts", revived),
        ),
        columns=3,
    )


def _resampling(run: LoggedRun) -> Figure:
    """Return what dynamic sampling took, for runs with `round.resample`."""
    return Figure(
        "resampling",
        "Dynamic sampling",
        f"Per round: batches sampled beside its own; groups of equal rewards that are left in the batch.{SMOOTHED}",
        filled(
            _panel(run, "further batches", "batches per round", RESAMPLE_ATTEMPTS.key),
            _panel(run, "equal groups left", "groups per round", RESAMPLE_MISSING.key),
        ),
    )


def _engine(run: LoggedRun) -> Figure:
    """Return the mismatch between the sampling engine and the trainer, for runs with vLLM."""
    ratios = "sampling/importance_sampling_ratio"
    return Figure(
        "engine",
        "Engine versus trainer",
        "Log-probs of the sampled tokens under vLLM versus the trainer, and the importance ratios that correct for the "
        "difference, after truncation or masking (trainer.vllm_importance_sampling_mode): a minimum of 0 is a masked "
        f"completion.{SMOOTHED}",
        filled(
            _panel(run, "log-probability difference", "nats per token", "sampling/sampling_logp_difference/mean"),
            _panel(run, "mean importance ratio", "mean of the step", f"{ratios}/mean"),
            _panel(run, "smallest importance ratio", "smallest of the step", f"{ratios}/min"),
        ),
        columns=3,
    )


def _time(run: LoggedRun) -> Figure:
    waits = {name: smooth_curve(run.series(name, WAIT.key)) for name in run.policies}
    speeds = {name: smooth_curve(tokens_per_second(run, name)) for name in run.policies}
    return Figure(
        "time",
        "Time",
        "Seconds per step waiting for peers; prompt and completion tokens per second of step time, with generation and "
        f"waiting, without validation.{SMOOTHED}",
        filled(Panel(str(WAIT.panel), "seconds per step", waits), Panel("speed", "tokens per second", speeds)),
    )
