"""Figures of a single run."""

from __future__ import annotations

from mutualrl.console.display import group_label
from mutualrl.reporting.figure_specs import Figure, Panel, filled
from mutualrl.runs.curves import curve, smooth_curve, tokens_per_second
from mutualrl.runs.logs import LoggedRun
from mutualrl.runs.record import measure_of
from mutualrl.storage.metrics import DEAD, RESAMPLE_ATTEMPTS, RESAMPLE_MISSING, REVIVED, TAUGHT, WAIT

MOST_GROUPS = 8


def figures(run: LoggedRun) -> list[Figure]:
    """Return the figures of learning, sharing, prompts, optimization and time for which the run has data."""
    made = (_learning, _groups, _gate, _regime, _prompts, _optimization, _resampling, _engine, _time)
    return [figure for figure in (make(run) for make in made) if figure.panels]


SMOOTHED = " Curves are moving averages over a twentieth of their points."


def _panel(run: LoggedRun, title: str, unit: str, key: str) -> Panel:
    """Return a panel with one metric of every policy."""
    return Panel(title, unit, {name: smooth_curve(run.series(name, key)) for name in run.policies})


def _learning(run: LoggedRun) -> Figure:
    measure = measure_of([run])
    accuracy = {name: curve(run.accuracy_of(name)) for name in run.policies}
    validated = f", and greedy {measure} on held-out prompts (not smoothed)" if any(map(len, accuracy.values())) else ""
    return Figure(
        "learning",
        "Did it learn?",
        f"Reward of its own rollouts in training (moving average over a twentieth of its points){validated}.",
        filled(
            Panel(f"validation {measure}", f"greedy {measure}", accuracy),
            _panel(run, "training reward", "mean reward of the step's rollouts", "reward"),
        ),
    )


def _groups(run: LoggedRun) -> Figure:
    measure = measure_of([run])
    groups = sorted({group for name in run.policies for group in run.groups(name)})
    panels = []
    for group in groups if 1 < len(groups) <= MOST_GROUPS else ():
        lines = {name: curve(run.accuracy_of(name, group)) for name in run.policies}
        panels.append(Panel(f"{group_label(group)}: validation {measure}", f"greedy {measure}", lines))
    return Figure(
        "groups",
        "Where did it learn?",
        f"Greedy {measure} on held-out prompts, by group of the data (of a mixture, by task).",
        filled(*panels),
        columns=3,
    )


def _optimization(run: LoggedRun) -> Figure:
    return Figure(
        "optimization",
        "Did training stay stable?",
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
    taught = {name: curve(run.series(name, TAUGHT.key).cumsum()) for name in run.policies}
    texts = [Panel("texts taught", "cumulative texts", taught)] if run.rule.teaches else []
    if run.gates == {"none"}:
        caption = f"The texts that {run.info.regime} taught, cumulative."
        return Figure("gate", "How much was taught?", caption, filled(*texts))
    cumulative = ", and the texts that were taught, cumulative" if texts else ""
    return Figure(
        "gate",
        "When could another member help?",
        f"The gate of {run.info.regime} opens on a prompt where another member has something to teach: the fraction of "
        f"a round's prompts (moving average over a twentieth of its points){cumulative}.",
        filled(Panel("gate rate", "fraction of prompts", rates), *texts),
    )


def _regime(run: LoggedRun) -> Figure:
    """Return the figure of further metrics that the regime declares for plotting."""
    panels = [_panel(run, m.panel, m.unit, m.key) for m in run.rule.metrics if m.panel is not None]
    meanings = "; ".join(f"{m.panel}: {m.meaning}" for m in run.rule.metrics if m.panel is not None)
    return Figure("regime", f"What did {run.info.regime} change?", f"{meanings}.{SMOOTHED}", filled(*panels))


def _prompts(run: LoggedRun) -> Figure:
    capability = {name: smooth_curve(run.series(name, f"capability/{name}")) for name in run.policies}
    dead = {name: curve(run.series(name, DEAD.key)) for name in run.policies}
    revived = {name: curve(run.series(name, REVIVED.key).cumsum()) for name in run.policies}
    return Figure(
        "prompts",
        "What became of failed prompts?",
        "Capability: the fraction of rollouts with a reward above 0 (moving average over a twentieth of its points). "
        "Dead: prompts without such a rollout in their last group. Revived: dead ones that had one again, cumulative.",
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
        "How much was sampled again?",
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
        "Did the engine and the trainer agree?",
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
    speed = Panel("speed", "tokens per second", {n: smooth_curve(tokens_per_second(run, n)) for n in run.policies})
    kinds = ["peers"] * (len(run.policies) > 1) + ["sources"] * bool(run.info.asked_sources)
    waiting = [Panel(str(WAIT.panel), "seconds per step", waits)] if kinds else []
    waited = f"Seconds per step waiting for {' and '.join(kinds)}; prompt" if kinds else "Prompt"
    with_waiting = " and waiting" if kinds else ""
    return Figure(
        "time",
        "Where did the time go?",
        f"{waited} and completion tokens per second of step time, with generation{with_waiting}, without validation."
        f"{SMOOTHED}",
        filled(*waiting, speed),
    )
