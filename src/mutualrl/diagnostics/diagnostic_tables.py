"""Diagnostics as Markdown, in the form of the paper's tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mutualrl.console.markdown import name, number, table
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


def _about(result: Header) -> str:
    left = f"; {result['left_out_prompts']} prompts left out" if result["left_out_prompts"] else ""
    rounds = f" in {result['rounds']} rounds" if result["rounds"] > 1 else ""
    return f"{name(result['origin'])}, {result['prompts']} prompts{rounds}{left}"


def _with(value: float | None, interval: Sequence[float | None]) -> str:
    low, high = interval
    return f"{number(value)} [{number(low, 2)}, {number(high, 2)}]"


MOST_PAIRS = 400  # of models, in a table: 20 of them


def complementarity(result: Complementarity) -> str:
    """Return pairs, pool, buckets, gate rates, and the recommendation."""
    rows = []
    pairs = [columns_of(row) for row in result["pairs"]]
    left_out = ""
    if len(pairs) > MOST_PAIRS:
        left_out = f"; the {MOST_PAIRS} of {len(pairs):,} pairs with the most rescues, all of them with --json"
        pairs = sorted(pairs, key=lambda row: -(row["rescue"] or 0.0))[:MOST_PAIRS]
    for row in pairs:
        cells = [name(row["learner"]), name(row["peer"])]
        for key in ("learner_success", "peer_success", "jaccard", "rescue"):
            cells.append(_with(row[key], row[f"{key}_ci"]))
        rows.append(cells)
    which = {"first": "the first rollout", "any": "any rollout"}[result["success"]]
    parts = [
        table(
            f"Prompt-level complementarity ({_about(result)}; success: {which}{left_out}) [95 % bootstrap]",
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
            [[str(len(result["policies"])), *(_with(pool[key], pool[f"{key}_ci"]) for key in keys)]],
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
        "SGT's gate: share of prompts that open it, G_n(x), with K rollouts per model",
        ["learner", "in these rollouts", *(f"K = {k}{stars[k]}" for k in k_values)],
        [_gate_cells(gate) for gate in result["gate"]],
    )
    if any(stars.values()):
        text += "\n\n\\* more than was sampled: (1 - c/n)^K, which counts a prompt without a success as hopeless"
    parts.append(text)
    parts.append(f"Recommendation: {clean_sentence(result['recommendation'])}")
    return "\n\n".join(parts)


def _gate_cells(gate: GateRow) -> list[str]:
    rates = [number(at["rate"]) for at in gate["at"]]
    return [name(gate["learner"]), _with(gate["observed"], gate["observed_ci"]), *rates]


def clean_sentence(text: str) -> str:
    """Return a sentence with names of the user's in it, cleaned."""
    from mutualrl.console.display import clean

    return clean(text, 1000).replace("\n", " ")


def xgrpo_check(result: ValueCheck) -> str:
    """Return the table of true against shuffled pool."""
    keys = ("correlation", "sign_flips", "sign_changes", "advantage_change", "signed_change")
    head = [
        "learner",
        "pool",
        "corr. peer spread ↔ adv. change",
        "adv. sign-flip rate",
        "the same, from and to 0 too",
        "mean abs. adv. change",
        "mean signed change",
    ]
    lines = [(row["learner"], columns_of(row)) for row in result["rows"]]
    rows = []
    for learner, row in [*lines, ("mean", columns_of(result["mean"]))]:
        for pool in ("true", "shuffled"):
            rows.append([name(learner), pool, *(number(row[pool][key]) for key in keys)])
    return table(f"Pooled normalization vs. shuffled pool ({_about(result)}; scale: {result['scale']})", head, rows)


def sgt_check(result: Activation) -> str:
    """Return activation profile, by task where there are several, and the teachers' NLL."""
    prompts = result["prompts"]
    rows = []
    for row in result["rows"]:
        gated, failed = f"{row['gated']}/{prompts}", f"{result['all_fail']}/{prompts}"
        rows.append([name(row["learner"]), gated, _fraction(row["on"]), _fraction(row["off"]), failed])
    head = ["learner", "SGT prompts", "succ./all (gate on)", "succ./all (gate off)", "all-fail prompts"]
    parts = [table(f"SGT activation profile ({_about(result)})", head, rows)]
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
            _with(row["difference"], row["difference_ci"]),
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
    """Return the six rows, over all learners and for each."""
    learners = [name(row["learner"]) for row in result["learners"]]
    head = ["usable regimes on a prompt", "all learners (%)", *(f"{learner} (%)" for learner in learners)]
    own: list[dict[str, float]] = []
    for learner in result["learners"]:
        own.append({row["usable"]: row["share"] for row in learner["rows"]})
    rows = []
    for row in result["rows"]:
        rates = [row["share"], *(each.get(row["usable"], 0.0) for each in own)]
        rows.append([row["usable"], *(f"{100 * share:.2f}" for share in rates)])
    left = {reason: count for reason, count in result["left_out"].items() if count}
    note = "" if not left else f"\n\nPeer responses without a ratio: {', '.join(f'{r} {c}' for r, c in left.items())}"
    if result["rescored"]:
        note += (
            f"\n\n{result['rescored']} of {result['responses']} ratios have the model as it is now in the denominator: "
            "no trace of the response was recorded (train with --exchange full)"
        )
    ratios = [
        [
            name(row["learner"]),
            name(row["peer"]),
            f"{row['tokens']:,}",
            number(row["effective_sample_size"]),
            number(row["chi_square"]),
        ]
        for row in result["ratios"]
    ]
    parts = [table(f"Joint usability of the three regimes ({_about(result)})", head, rows) + note]
    if ratios:
        columns = ["learner", "peer", "tokens", "effective sample size", "chi-square"]
        parts.append(table("Importance ratios of the peers' tokens, as PRP has them", columns, ratios))
    return "\n\n".join(parts)


def cost(result: Cost) -> str:
    """Return extra tokens by regime, over all learners and for each; the analytic bound."""
    rows = [
        [row["regime"].upper(), f"{row['extra_tokens']:,}", f"{number(row['ratio'])}x rollout"]
        for row in result["rows"]
    ]
    parts = [
        table(
            f"Extra compute on the same rollouts ({_about(result)}; {result['rollout_tokens']:,} response tokens)",
            ["regime", "extra response tokens", "extra cost"],
            rows,
        )
    ]
    cells = []
    for row in result["learners"]:
        extra = [row[regime] for regime in (VALUE, OUTCOME, DATA)]
        costs = [f"{each['extra_tokens']:,} ({number(each['ratio'])}x)" for each in extra]
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
