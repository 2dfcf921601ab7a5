"""Tables of a report, as rows of strings."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mutualrl.console.display import group_label
from mutualrl.process.status import RunState
from mutualrl.regimes import baseline
from mutualrl.reporting.comparability import Comparison
from mutualrl.reporting.pace import simulate
from mutualrl.runs.curves import busy_seconds, first_reaching, last, mean, mean_curve, policies_of
from mutualrl.runs.facts import silence_note
from mutualrl.runs.logs import LoggedRun, Series
from mutualrl.runs.read import part
from mutualrl.storage.metrics import RESAMPLE_ATTEMPTS, SAMPLED_TOKENS, WAIT, of_source


@dataclass(frozen=True, slots=True)
class Table:
    """Table with a title."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def figure(value: float | None) -> str:
    """Return an accuracy or a fraction to three decimals; empty for None."""
    return "" if value is None else f"{value:.3f}"


def format_mean(values: Sequence[float]) -> str:
    """Return mean ± standard deviation (n - 1); for one value, the value alone."""
    if not values:
        return ""
    mean = f"{statistics.fmean(values):.3f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.3f}"


def overview(runs: Sequence[LoggedRun]) -> Table:
    """Return one line per run."""
    rows = []
    for run in runs:
        completed = [str(run.steps[name]) for name in run.policies]
        planned = "?" if run.planned_steps is None else str(run.planned_steps)
        rows.append(
            [
                run.name,
                run.state,
                run.arm,
                run.pool,
                run.task,
                str(run.seed),
                f"{', '.join(dict.fromkeys(completed)) or '0'} of {planned}",
                "" if run.summary is None else f"{run.summary.seconds:.1f}{' (resumed)' * run.summary.resumed}",
            ]
        )
    return Table("Runs", ("run", "state", "regime", "pool", "task", "seed", "steps", "seconds"), rows)


def accuracy(run: LoggedRun) -> Table:
    """Return greedy accuracy before and after training, by policy and group."""
    rows = []
    for policy in run.policies:
        groups = run.groups(policy)
        for group in (None, *(groups if len(groups) > 1 else ())):  # one group is all
            measured = run.accuracy_of(policy, group)
            if measured.empty:
                continue
            before, last = measured.get(0), measured.iloc[-1]
            change = "" if before is None else f"{last - before:+.3f}"
            rows.append([policy, group_label(group), figure(before), figure(last), str(measured.index[-1]), change])
    title = "Greedy accuracy" if run.measures_accuracy else "Mean reward of greedy completions"
    return Table(title, ("policy", "group", "before training", "last", "at step", "change"), rows)


def sharing(run: LoggedRun) -> Table:
    """Return rescues, waiting and restarts of each policy; of a single one only what it has."""
    if len(run.policies) == 1:
        (policy,) = run.policies.values()
        attempts = "" if policy.result is None else str(policy.result.attempts)
        return Table(
            "Policies",
            ("policy", "model", "steps", "attempts"),
            [[policy.name, policy.model, str(run.steps[policy.name]), attempts]],
        )
    taught = {name: run.facts(name).taught for name in run.policies}
    teaches = any(texts is not None for texts in taught.values())
    rows = []
    for name, policy in run.policies.items():
        result = policy.result
        on_prompts = "" if result is None else str(result.rescued_prompts)
        rows.append(
            [
                name,
                policy.model,
                str(run.steps[name]),
                *([str(taught[name]), on_prompts] if teaches else []),
                f"{run.total(name, WAIT.key):.1f}",
                "" if result is None else _waited_for(result.waited_for_seconds),
                "" if result is None else str(result.attempts),
                "" if result is None else ", ".join(result.lost_peers),
            ]
        )
    head = (
        "policy",
        "model",
        "steps",
        *(("texts taught", "on prompts") if teaches else ()),
        "waited (s)",
        "waited for (s)",
        "attempts",
        "lost peers",
    )
    return Table("Policies", head, rows)


def _waited_for(seconds: Mapping[str, float]) -> str:
    """Return the peers that a finished policy waited for, with seconds; a round's wait counts for each late peer."""
    return ", ".join(f"{peer} {value:.1f}" for peer, value in sorted(seconds.items(), key=lambda item: -item[1]))


def sources(run: LoggedRun) -> Table:
    """Return what each source had before training, and what each policy learned from it; no rows without sources."""
    rows = []
    for source, summary in run.info.sources.items():
        known = [str(summary.get(key, "")) for key in ("prompts", "texts", "confirmed", "confirmed_prompts")]
        for policy in run.policies:
            learnt = part(part(summary, "learners"), policy)
            usable = learnt["encodable"] + learnt.get("runs", 0) if "encodable" in learnt else ""
            rescues = run.total(policy, of_source(source, "rescues"))
            prompts = _last(run, policy, of_source(source, "rescued_prompts"))
            uses = _last(run, policy, of_source(source, "uses_per_text"))
            learned = [
                f"{rescues:.0f}",
                "" if prompts is None else f"{prompts:.0f}",
                "" if uses is None else f"{uses:.1f}",
            ]
            rows.append([source, *known, policy, str(usable), *learned])
    head = (
        *("source", "prompts with a text", "texts", "confirmed", "on prompts"),
        *("policy", "can learn of the confirmed", "texts taught", "on prompts", "uses per text"),
    )
    return Table("Sources", head, rows)


def asked_sources(run: LoggedRun) -> Table:
    """Return what each source did that was asked during training, over the run: prompts and answers, tokens (also as a
    fraction of those that the policies sampled), what the learners took of it, and the time that they waited for it
    alone, as a fraction of theirs; no rows without such sources."""
    rows = []
    sampled = sum(last(sampled_tokens(run, policy)) for policy in run.policies)
    for source in run.info.asked_sources:
        facts = run.source_facts(source)
        if not facts.asked:  # its accounts are not at hand
            continue
        per_rescue = facts.tokens_per_rescue
        waits = {policy: waited_share(run, policy, source) for policy in run.policies}
        rows.append(
            [
                source,
                *(f"{getattr(facts, key):,}" for key in ASKED),
                f"{facts.tokens / sampled:.1%}" if sampled else "",
                *[f"{facts.rescues:,}", "" if per_rescue is None else f"{per_rescue:,.0f}"] * run.rule.teaches,
                ", ".join(f"{policy} {share:.0%}" for policy, share in waits.items() if share),
            ]
        )
    head = (
        *("source", "prompts", "questions sent", "asked again", "failed", "cut off", "not sent", "tokens asked"),
        *(
            "tokens returned",
            "confirmed",
            "of the policies' tokens",
            *["texts taught", "tokens per text taught"] * run.rule.teaches,
            "waited for it",
        ),
    )
    return Table("Sources that were asked", head, rows)


#: facts of a source that was asked, in the order of the table
ASKED = (
    *("prompts", "sent", "asked_again", "failed", "cut_off", "left_out"),
    *("prompt_tokens", "completion_tokens", "confirmed"),
)


def sampled_tokens(run: LoggedRun, policy: str) -> Series:
    """Return the tokens that a policy sampled by each step at which it sampled any, from the start: its rollouts, those
    of further batches (`round.resample`) included, and the samples that its regime requested."""
    plan = run.info.fingerprint
    completions = int(plan.get("prompts_per_round", 0)) * int(plan.get("rollouts_per_prompt", 0))
    lengths = run.series(policy, "completions/mean_length")  # over all batches of a round
    further = run.series(policy, RESAMPLE_ATTEMPTS.key).reindex(lengths.index, fill_value=0.0)
    requested = run.series(policy, SAMPLED_TOKENS.key).reindex(lengths.index, fill_value=0.0)
    return (lengths * (1 + further) * completions + requested).cumsum()


def waited_share(run: LoggedRun, policy: str, source: str) -> float:
    """Return the fraction of a policy's training time in which it waited for a source alone; 0 if that is not known."""
    result = run.policies[policy].result
    seconds = 0.0 if result is None else result.train_seconds
    return run.total(policy, of_source(source, "wait_seconds")) / seconds if seconds else 0.0


def asked_notes(run: LoggedRun) -> list[str]:
    """Return the notes on each source that was asked: without answers, and why; most answers cut off; waited for by a
    policy for more than a twentieth of its time."""
    notes = []
    staleness = run.setting("exchange.staleness")
    for source in run.info.asked_sources:
        facts = run.source_facts(source)
        if (silence := silence_note(source, facts)) is not None:
            notes.append(silence)
        cut, asked = facts.cut_off, facts.sent
        if cut > asked / 2:
            notes.append(
                f"{cut:,} of {asked:,} answers of source {source} were cut off, and a text that was cut off is "
                f"no success; raise sources.{source}.max_tokens, or see whether the server knows the model's end tokens"
            )
        shares = {policy: share for policy in run.policies if (share := waited_share(run, policy, source)) > WAITED}
        gone = facts.left_out > facts.over_budget  # then the time went to a server that no longer answers
        if shares and not staleness and not gone:
            waited = " and ".join(f"{share:.0%} of {policy}'s time" for policy, share in shares.items())
            notes.append(
                f"Waiting for source {source} alone took {waited}; "
                "exchange.staleness: 1 lets its answers be a round late, under regimes that can use them (mutualrl "
                "regimes show NAME)"
            )
    return notes


WAITED = 0.05


def _last(run: LoggedRun, policy: str, metric: str) -> float | None:
    values = run.series(policy, metric)
    return None if values.empty else float(values.iloc[-1])


STALENESS = (0, 1, 2, 4, 8)


def pace(run: LoggedRun) -> Table:
    """Return the time and waiting for several values of `exchange.staleness`, simulated from the run's rounds; no rows
    for a run without sharing or without step times, or of a regime that cannot use late rounds."""
    busy = {name: busy_seconds(run, name) for name in run.policies}
    rows = []
    if len(busy) > 1 and all(busy.values()) and run.rule.late:
        for staleness in STALENESS:
            simulated = simulate(busy, staleness)
            waits = [f"{100 * simulated.waiting[name]:.0f} %" for name in busy]
            rows.append([str(staleness), f"{simulated.seconds:.0f}", *waits])
    head = ("staleness", "seconds", *(f"{name} waits" for name in busy))
    title = "Time and waiting for policies by exchange.staleness, simulated from this run's rounds without outages"
    return Table(title, head, rows)


def arms(comparison: Comparison) -> Table:
    """Return one line per arm: final accuracy of each policy and of the pool, mean ± standard deviation (n - 1) over
    its finished runs (for the pool: those without a lost policy), and the first validation step at which the pool's
    mean curve reaches the final accuracy of the finished GRPO runs."""
    names = policies_of(comparison.runs)
    finished: dict[str, list[LoggedRun]] = {}
    for arm, runs in comparison.arms.items():
        finished[arm] = [run for run in runs if run.state == RunState.FINISHED]
    grpo_curve = _pool_curve(finished.get(baseline().name, ()), names)
    target = None if grpo_curve.empty else float(grpo_curve.iloc[-1])
    rows = []
    for arm, members in finished.items():
        by_name: dict[str, list[float]] = {name: [] for name in names}
        pools = []
        for run in members:
            finals = {name: value for name in names if (value := run.policies[name].final) is not None}
            for name, value in finals.items():
                by_name[name].append(value)
            if names and len(finals) == len(names):
                pools.append(statistics.fmean(finals.values()))
        by_policy, pool = [format_mean(by_name[name]) for name in names], format_mean(pools)
        reached = None if target is None else first_reaching(_pool_curve(members, names), target)
        reached_text = "not reached" if reached is None else str(reached)
        if target is None:
            reached_text = ""
        rows.append(
            [arm, str(len(members)), ", ".join(str(run.seed) for run in members), *by_policy, pool, reached_text]
        )
    head = ("regime", "finished runs", "seeds", *names, "mean of the pool", "steps to GRPO's final accuracy")
    return Table(f"Final accuracy, {comparison.name}", head, rows)


def _pool_curve(runs: Sequence[LoggedRun], names: Sequence[str]) -> Series:
    return mean_curve(mean([run.accuracy_of(name) for name in names]) for run in runs)["value"]


def commands(runs: Sequence[LoggedRun]) -> Table:
    """Return the command, the data and the package versions of each run."""
    rows = []
    for run in runs:
        versions = ", ".join(f"{name} {version}" for name, version in run.info.versions.items())
        rows.append([run.name, run.command, run.info.created, run.data, versions])
    return Table("Commands and versions", ("run", "command", "started", "data", "versions"), rows)


def settings(run: LoggedRun) -> Table:
    """Return the resolved recipe, flat."""
    rows = []
    for section, value in run.recipe.items():
        if isinstance(value, dict):
            rows += [[f"{section}.{key}", json.dumps(setting, default=str)] for key, setting in value.items()]
        elif section != "policies":
            rows.append([section, json.dumps(value, default=str)])
    return Table(f"Recipe of {run.name}", ("key", "value"), rows)
