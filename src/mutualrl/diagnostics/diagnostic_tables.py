"""Diagnostics as Markdown, in the form of the paper's tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mutualrl.console.display import clean
from mutualrl.console.markdown import name, number, significant, table
from mutualrl.diagnostics.channels import DATA, OUTCOME, VALUE
from mutualrl.diagnostics.results import (
    Activation,
    Channels,
    Complementarity,
    Cost,
    GateRow,
    Header,
    SuccessRate,
    ValueCheck,
    columns_of,
)

MOST_TASKS = 12


def _scope(result: Header) -> str:
    left_out = f"; {result['left_out_prompts']} prompts left out" if result["left_out_prompts"] else ""
    rounds = f" in {result['rounds']} rounds" if result["rounds"] > 1 else ""
    return f"{name(result['origin'])}, {result['prompts']} prompts{rounds}{left_out}"


def _with_interval(value: float | None, interval: Sequence[float | None]) -> str:
    low, high = interval
    return f"{number(value)} [{number(low, 2)}, {number(high, 2)}]"


MOST_PAIRS = 400  # rows of the table, enough for 20 models


def complementarity(result: Complementarity) -> str:
    """Return the tables of pairs, pool, buckets and gate rates, and the recommendation."""
    rows = []
    pairs = [columns_of(row) for row in result["pairs"]]
    left_out = ""
    if len(pairs) > MOST_PAIRS:
        left_out = f"; the {MOST_PAIRS} of {len(pairs):,} pairs with the most rescues; --json has all"
        pairs = sorted(pairs, key=lambda row: -(row["rescue"] or 0.0))[:MOST_PAIRS]
    for row in pairs:
        cells = [name(row["learner"]), name(row["peer"])]
        for key in ("learner_success", "peer_success", "jaccard", "rescue"):
            cells.append(_with_interval(row[key], row[f"{key}_ci"]))
        rows.append(cells)
    criterion = {"first": "the first rollout", "any": "any rollout"}[result["success"]] + _own_thresholds(result)
    parts = [
        table(
            f"Prompt-level complementarity ({_scope(result)}; success: {criterion}{left_out}) [95 % bootstrap]",
            ["learner", "peer", "learner succ.", "peer succ.", "Jaccard", "peer rescues fail"],
            rows,
        )
    ]
    pool = columns_of(result["pool"])
    keys = ("mean", "any", "all", "exactly_one", "jaccard")
    parts.append(
        table(
            "Pool-level success",
            ["models", "mean single-model", "any model", "all models", "exactly one", "Jaccard of the pool"],
            [[str(len(result["policies"])), *(_with_interval(pool[key], pool[f"{key}_ci"]) for key in keys)]],
        )
    )
    rows = []
    for b in result["buckets"]:
        rates = (number(b["mean_reward"]), number(b["jaccard"]), number(b["exactly_one"]))
        rows.append([b["bucket"], str(b["prompts"]), *rates])
    head = ["bucket", "prompts", "mean reward", "Jaccard", "exactly one"]
    parts.append(table("Difficulty-conditioned diversity", head, rows))
    k_values = [at["k"] for at in result["gate"][0]["at"]]
    stars = {at["k"]: "*" if at["extrapolated"] else "" for at in result["gate"][0]["at"]}
    text = table(
        "SGT's gate: fraction of prompts that open it, G_n(x), with K rollouts per model",
        ["learner", "in these rollouts", *(f"K = {k}{stars[k]}" for k in k_values)],
        [_gate_cells(gate) for gate in result["gate"]],
    )
    if any(stars.values()):
        text += "\n\n\\* more than were sampled: (1 - c/n)^K, which counts a prompt without a success as unsolvable"
    parts.append(text)
    parts.append(f"Recommendation: {clean_sentence(result['recommendation'])}")
    if result["caveat"]:
        parts.append(result["caveat"])
    return "\n\n".join(parts)


def _own_thresholds(result: Header) -> str:
    """Return the success thresholds by policy, if they differ."""
    limits = {policy: rule["success_above"] for policy, rule in result["thresholds"].get("own", {}).items()}
    if len(set(limits.values())) < 2:
        return ""
    return " above " + ", ".join(f"{limit:g} ({name(policy)})" for policy, limit in limits.items())


def _gate_cells(gate: GateRow) -> list[str]:
    rates = [number(at["rate"]) for at in gate["at"]]
    return [name(gate["learner"]), _with_interval(gate["observed"], gate["observed_ci"]), *rates]


def clean_sentence(text: str) -> str:
    """Return a sentence with user-supplied names, cleaned for display."""
    return clean(text, 1000).replace("\n", " ")


def xgrpo_check(result: ValueCheck) -> str:
    """Return the table of the true against the shuffled pool."""
    keys = ("correlation", "sign_flips", "sign_changes", "advantage_change", "signed_change")
    head = [
        "learner",
        "pool",
        "corr. peer spread ↔ adv. change",
        "adv. sign-flip rate",
        "adv. sign-change rate, 0 counted",
        "mean abs. adv. change",
        "mean signed change",
    ]
    lines = [(row["learner"], columns_of(row)) for row in result["rows"]]
    rows = []
    for learner, row in [*lines, ("mean", columns_of(result["mean"]))]:
        for pool in ("true", "shuffled"):
            rows.append([name(learner), pool, *(number(row[pool][key]) for key in keys)])
    return table(f"Pooled normalization vs. shuffled pool ({_scope(result)}; scale: {result['scale']})", head, rows)


def sgt_check(result: Activation) -> str:
    """Return the activation profile, also by task if there are several, and the teachers' NLL."""
    prompts = result["prompts"]
    rows = []
    for row in result["rows"]:
        gated, failed = f"{row['gated']}/{prompts}", f"{result['all_fail']}/{prompts}"
        rows.append([name(row["learner"]), gated, _fraction(row["on"]), _fraction(row["off"]), failed])
    head = ["learner", "SGT prompts", "succ./all (gate on)", "succ./all (gate off)", "all-fail prompts"]
    parts = [table(f"SGT activation profile ({_scope(result)})", head, rows)]
    tasks = list(result["rows"][0]["by_task"])
    if 1 < len(tasks) <= MOST_TASKS:
        cells = []
        for row in result["rows"]:
            rates = [f"{t['gated']}/{t['prompts']} ({100 * t['rate']:.2f} %)" for t in row["by_task"].values()]
            cells.append([name(row["learner"]), *rates])
        parts.append(table("Prompts that open the gate, by task", ["learner", *map(name, tasks)], cells))
    nll = result["nll"]
    if nll is None:
        parts.append(f"Teacher NLL: not measured; {clean_sentence(str(result['nll_needs']))}")
        return "\n\n".join(parts)
    cells = [
        [
            name(row["learner"]),
            str(row["lessons"]),
            number(row["matched"]),
            number(row["mismatched"]),
            _with_interval(row["difference"], row["difference_ci"]),
            number(row["own"]),
        ]
        for row in nll["rows"]
    ]
    head = ["learner", "prompts", "matched teacher NLL", "mismatched teacher NLL", "difference [95 %]"]
    head.append("NLL of own successes")
    without = f"; {nll['without']} gated prompts without such a pair" if nll["without"] else ""
    parts.append(table(f"Matched vs. mismatched teacher, nats per token{without}", head, cells))
    return "\n\n".join(parts)


def _fraction(rates: SuccessRate) -> str:
    return f"{rates['successes']}/{rates['rollouts']} ({number(rates['rate'], 3)})"


def channels(result: Channels) -> str:
    """Return the six rows, over all learners and per learner, and the importance ratios."""
    learners = [name(row["learner"]) for row in result["learners"]]
    head = ["usable regimes on a prompt", "all learners (%)", *(f"{learner} (%)" for learner in learners)]
    learner_shares: list[dict[str, float]] = []
    for learner in result["learners"]:
        learner_shares.append({row["usable"]: row["share"] for row in learner["rows"]})
    rows = []
    for row in result["rows"]:
        shares = [row["share"], *(by_name.get(row["usable"], 0.0) for by_name in learner_shares)]
        rows.append([row["usable"], *(f"{100 * share:.2f}" for share in shares)])
    note = ""
    if left_out := [f"{reason} {count}" for reason, count in result["left_out"].items() if count]:
        note = f"\n\nPeer responses without a ratio: {', '.join(left_out)}"
    if result["rescored"]:
        note += (
            f"\n\n{result['rescored']} of {result['responses']} ratios have the current model in the denominator: "
            "no trace of the response was recorded (train with --exchange full)"
        )
    ratios = [
        [
            name(row["learner"]),
            name(row["peer"]),
            f"{row['tokens']:,}",
            number(row["effective_sample_size"]),
            significant(row["token_chi_square"]),
            f"{row['responses']:,}",
            significant(row["response_chi_square"]),
        ]
        for row in result["ratios"]
    ]
    parts = [table(f"Joint usability of the three regimes ({_scope(result)})", head, rows) + note]
    if ratios:
        columns = ["learner", "peer", "tokens", "effective sample size", "chi-square of tokens", "responses"]
        columns.append("chi-square of responses")
        parts.append(
            table("Importance ratios of the peers' tokens and responses, as PRP computes them", columns, ratios)
        )
    return "\n\n".join(parts)


def cost(result: Cost) -> str:
    """Return the extra tokens by regime, over all learners and per learner, and the analytic bound."""
    rows = [
        [row["regime"].upper(), f"{row['extra_tokens']:,}", f"{number(row['ratio'])}x rollout"]
        for row in result["rows"]
    ]
    parts = [
        table(
            f"Extra compute on the same rollouts ({_scope(result)}; {result['rollout_tokens']:,} response tokens)",
            ["regime", "extra response tokens", "extra cost"],
            rows,
        )
    ]
    cells = []
    for row in result["learners"]:
        extra = [row[regime] for regime in (VALUE, OUTCOME, DATA)]
        costs = [f"{added['extra_tokens']:,} ({number(added['ratio'])}x)" for added in extra]
        cells.append([name(row["learner"]), f"{row['rollout_tokens']:,}", str(row["teachers"]), *costs])
    parts.append(table("By learner", ["learner", "rollout tokens", "teachers", "XGRPO", "SGT", "PRP"], cells))
    parts.append(
        f"SGT's teachers are {result['sequences']:.4f} of all rollouts; the bound (M-1)/(MN) is {result['bound']:.4f}. "
        f"Teachers are counted in {result['teacher_tokens']} tokens."
    )
    return "\n\n".join(parts)


MARKDOWN: dict[str, Callable[..., str]] = {
    "complementarity": complementarity,
    "xgrpo-check": xgrpo_check,
    "sgt-check": sgt_check,
    "channels": channels,
    "cost": cost,
}
