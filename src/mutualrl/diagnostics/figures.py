"""Figures of the diagnostics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mutualrl.console.display import clean
from mutualrl.console.plots import Axes, Draw
from mutualrl.diagnostics.results import (
    Activation,
    Channels,
    Columns,
    Complementarity,
    Cost,
    SuccessRate,
    ValueCheck,
    columns_of,
)
from mutualrl.regimes import at_level

Figures = Mapping[str, tuple[tuple[float, float], Draw]]
_REGIME_COLOURS = {"PRP": "#4477AA", "XGRPO": "#CCBB44", "SGT": "#EE6677"}
_ROW_COLOURS = ("#BBBBBB", "#CCBB44", "#EE8866", "#4477AA", "#66AA88", "#AA3377", "#222222")


def _short(text: str) -> str:
    text = clean(text, 200).replace("\n", " ")
    return text if len(text) <= 24 else "…" + text[-23:]


def _nan_if_none(value: float | None) -> float:
    """Return NaN, which is not drawn, for an undefined value."""
    return float("nan") if value is None else value


def _legend(axis: Axes, **options: object) -> None:
    """Draw a legend without parsing its labels as formulas."""
    for text in axis.legend(**options).get_texts():
        text.set_parse_math(False)


def complementarity(result: Complementarity) -> Figures:
    """Return the overlap and rescue matrices, the buckets, and the gate rate over K."""
    models = len(result["policies"])
    return {
        "overlap": ((3 + 2.4 * models, 2 + 1.1 * models), lambda figure: _overlap(figure, result)),
        "buckets": ((6, 4), lambda figure: _buckets(figure.subplots(), result)),
        "gate": ((6, 4), lambda figure: _gate(figure.subplots(), result)),
    }


def _overlap(figure: Any, result: Complementarity) -> None:
    names = result["policies"]
    jaccard, rescue = np.ones((len(names), len(names))), np.full((len(names), len(names)), np.nan)
    for row in result["pairs"]:
        a, b = names.index(row["learner"]), names.index(row["peer"])
        jaccard[a, b], rescue[a, b] = _nan_if_none(row["jaccard"]), _nan_if_none(row["rescue"])
    left, right = figure.subplots(1, 2)
    _matrix(left, jaccard, names, "Jaccard overlap of solved prompts")
    _matrix(right, rescue, names, "P(column solves | row fails)")
    right.set(ylabel="learner", xlabel="peer")


def _matrix(axis: Axes, values: Any, names: Sequence[str], title: str) -> None:
    axis.imshow(values, vmin=0, vmax=1, cmap="cividis")
    labels = [_short(n) for n in names]
    axis.set_xticks(range(len(names)), labels, rotation=30, ha="right", fontsize=8, parse_math=False)
    axis.set_yticks(range(len(names)), labels, fontsize=8, parse_math=False)
    axis.set_title(title, fontsize=10)
    for a, b in np.ndindex(*values.shape):
        if a == b and np.isnan(values[a, b]):
            continue
        text = "NaN" if np.isnan(values[a, b]) else f"{values[a, b]:.2f}"
        axis.text(b, a, text, ha="center", va="center", color="white" if not values[a, b] > 0.6 else "black")


def _buckets(axis: Axes, result: Complementarity) -> None:
    positions = np.arange(len(result["buckets"]))
    for offset, key, label in ((-0.2, "jaccard", "Jaccard overlap"), (0.2, "exactly_one", "solved by exactly one")):
        values = [_nan_if_none(columns_of(b)[key]) for b in result["buckets"]]
        bars = axis.bar(positions + offset, values, 0.4, label=label)
        axis.bar_label(bars, ["NaN" if np.isnan(v) else f"{v:.2f}" for v in values], fontsize=8)
    axis.set_xticks(positions, [f"{b['bucket']}\n({b['prompts']} prompts)" for b in result["buckets"]])
    axis.set(ylim=(0, 1.1), ylabel="fraction of prompts", title="Overlap by difficulty")
    _legend(axis, fontsize=8)


def _gate(axis: Axes, result: Complementarity) -> None:
    for row in result["gate"]:
        k_values = [at["k"] for at in row["at"]]
        rates = np.array([at["rate"] for at in row["at"]])
        low, high = (np.array([at["rate_ci"][i] for at in row["at"]]) for i in (0, 1))
        errors = [np.maximum(rates - low, 0), np.maximum(high - rates, 0)]  # rounding may leave the mean outside
        axis.errorbar(k_values, rates, errors, marker="o", capsize=3, label=_short(row["learner"]))
    axis.set_xscale("log", base=2)
    axis.set_xticks(k_values, [str(k) for k in k_values])
    axis.set_ylim(bottom=0)
    axis.set(xlabel="rollouts per model, K", ylabel="fraction of prompts", title="SGT's gate rate, E[G(x)]")
    _legend(axis, title="learner", fontsize=8)


def xgrpo_check(result: ValueCheck) -> Figures:
    """Return the three measures under the true and the shuffled pool."""

    def draw(figure: Any) -> None:
        measures = (
            ("correlation", "corr. of peer spread and change"),
            ("sign_changes", "sign changes, 0 counted"),
            ("advantage_change", "mean |change|"),
        )
        for axis, (key, title) in zip(figure.subplots(1, 3), measures, strict=True):
            positions = np.arange(len(result["rows"]))
            for offset, pool in ((-0.2, "true"), (0.2, "shuffled")):
                values = [_nan_if_none(columns_of(row)[pool][key]) for row in result["rows"]]
                axis.bar(positions + offset, values, 0.4, label=f"{pool} pool")
            axis.axhline(0, color="black", linewidth=0.6)
            axis.set_xticks(positions, [_short(row["learner"]) for row in result["rows"]], fontsize=8, parse_math=False)
            axis.set_title(title, fontsize=10)
        _legend(axis, fontsize=8)

    return {at_level("value").name: ((11, 3.6), draw)}


def sgt_check(result: Activation) -> Figures:
    """Return the success rates with the gate on and off, and the teachers' NLL if measured."""
    figures: dict[str, tuple[tuple[float, float], Draw]] = {
        "sgt_activation": ((6, 4), lambda figure: _activation(figure.subplots(), result))
    }
    if (nll := result["nll"]) is not None:
        rows = [columns_of(row) for row in nll["rows"]]
        figures["sgt_teachers"] = ((6, 4), lambda figure: _teachers(figure.subplots(), rows))
    return figures


def _activation(axis: Axes, result: Activation) -> None:
    positions = np.arange(len(result["rows"]))
    for offset, side in ((-0.2, "on"), (0.2, "off")):
        rates: list[SuccessRate] = [columns_of(row)[side] for row in result["rows"]]
        bars = axis.bar(positions + offset, [_nan_if_none(rate["rate"]) for rate in rates], 0.4, label=f"gate {side}")
        axis.bar_label(bars, [f"{rate['successes']}/{rate['rollouts']}" for rate in rates], fontsize=8)
    labels = [f"{_short(row['learner'])}\n{row['gated']} of {result['prompts']} prompts" for row in result["rows"]]
    axis.set_xticks(positions, labels, fontsize=8, parse_math=False)
    axis.set(ylabel="pool-wide success rate", ylim=(0, 1), title="Where SGT acts")
    _legend(axis, fontsize=8)


def _teachers(axis: Axes, rows: Sequence[Columns]) -> None:
    positions = np.arange(len(rows))
    labels = {"own": "own successes", "matched": "matched teacher", "mismatched": "mismatched teacher"}
    for offset, (kind, label) in zip((-0.27, 0.0, 0.27), labels.items(), strict=True):
        values = [_nan_if_none(row[kind]) for row in rows]
        axis.bar_label(axis.bar(positions + offset, values, 0.27, label=label), fmt="%.3f", fontsize=8)
    axis.set_xticks(positions, [_short(row["learner"]) for row in rows], fontsize=8, parse_math=False)
    axis.set(ylabel="NLL, nats per token", title="Is SGT's transfer specific to the prompt?")
    _legend(axis, fontsize=8)


def channels(result: Channels) -> Figures:
    """Return the stacked fractions of the rows, over all learners and per learner."""

    def draw(figure: Any) -> None:
        axis = figure.subplots()
        groups = [("all learners", result["rows"]), *((_short(r["learner"]), r["rows"]) for r in result["learners"])]
        group_shares = [{r["usable"]: r["share"] for r in rows} for _, rows in groups]
        starts = np.zeros(len(groups))
        for row, colour in zip(result["rows"], _ROW_COLOURS, strict=False):
            widths = np.array([100 * shares.get(row["usable"], 0.0) for shares in group_shares])
            bars = axis.barh(range(len(groups)), widths, left=starts, color=colour, label=row["usable"])
            axis.bar_label(bars, [f"{w:.0f}" if w >= 4 else "" for w in widths], label_type="center", fontsize=8)
            starts += widths
        axis.set_yticks(range(len(groups)), [label for label, _ in groups], fontsize=8, parse_math=False)
        axis.invert_yaxis()
        axis.set(xlabel="prompts (%)", xlim=(0, 100), title="Usable regimes on a prompt")
        _legend(axis, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=3)

    return {"channels": ((8, 2.2 + 0.6 * len(result["learners"])), draw)}


def cost(result: Cost) -> Figures:
    """Return the extra cost of each regime, relative to the rollouts."""

    def draw(figure: Any) -> None:
        axis = figure.subplots()
        names = [row["regime"].upper() for row in result["rows"]]
        ratios = [_nan_if_none(row["ratio"]) for row in result["rows"]]
        bars = axis.bar(names, ratios, color=[_REGIME_COLOURS[n] for n in names])
        axis.bar_label(bars, [f"{ratio:.4f}x" for ratio in ratios])
        axis.set(ylabel="extra response tokens / rollout tokens", title="What each regime adds to a round")

    return {"cost": ((5, 4), draw)}


FIGURES: dict[str, Callable[..., Figures]] = {
    "complementarity": complementarity,
    "xgrpo-check": xgrpo_check,
    "sgt-check": sgt_check,
    "channels": channels,
    "cost": cost,
}
