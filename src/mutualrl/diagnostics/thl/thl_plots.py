"""Figures of a THL check, one PNG and one SVG for each suite that ran."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from mutualrl.console.plots import Axes, save
from mutualrl.diagnostics.results import Columns, ThlCheck, columns_of
from mutualrl.diagnostics.thl.ratio import BINS


def plot(result: ThlCheck, directory: Path) -> list[Path]:
    """Draw the figures of a check into `directory`; return the files."""
    import matplotlib.pyplot as plt

    files = []
    for name, draw in _FIGURES.items():
        pairs = [columns for pair in result["pairs"] if (columns := columns_of(pair)).get(name)]
        if not pairs:
            continue
        figure, axes = plt.subplots(1, len(pairs), figsize=(5.5 * len(pairs), 4), squeeze=False, layout="constrained")
        for axis, pair in zip(axes[0], pairs, strict=True):
            axis.set_title(f"{pair['source']} → {pair['target']}", fontsize=10, parse_math=False)
            draw(axis, pair[name])
        files += save(figure, directory, name)
    return files


def _tokenizers(axis: Axes, columns: Columns) -> None:
    sizes = sorted(columns.get("group_sizes", {}).items(), key=lambda item: -item[1])[:12]
    axis.bar([size for size, _ in sizes], [count for _, count in sizes])
    axis.set(yscale="log", xlabel="group, source : target tokens", ylabel="groups")


def _mass(axis: Axes, columns: Columns) -> None:
    rows = columns["rows"]
    positions = np.arange(len(rows))
    axis.bar(positions - 0.2, [row["source_aligned_mae"] for row in rows], 0.4, label="Src→Aligned")
    axis.bar(positions + 0.2, [row["aligned_target_mae"] for row in rows], 0.4, label="Aligned→Target")
    labels = [f"{row['source']} →\n{row['target']}\n{row['anchor']}" for row in rows]
    axis.set_xticks(positions, labels, fontsize=7, parse_math=False)
    axis.set(ylabel="MAE of word mass (nats)")
    axis.legend()


def _length(axis: Axes, columns: Columns) -> None:
    tokens = [row["target_tokens"] for row in columns["rows"]]
    for name, label in (("aligned", columns["anchor"]), ("paper", "the paper's map"), ("naive", "copy by position")):
        axis.plot(tokens, [100 * row[name] for row in columns["rows"]], marker="o", label=label)
    axis.set_xscale("log", base=2)
    axis.set_yscale("symlog", linthresh=0.01)
    axis.set_ylim(bottom=0)
    axis.set(xlabel="target tokens", ylabel="relative MAE (%)")
    axis.legend()


def _scripts(axis: Axes, columns: Columns) -> None:
    positions = np.arange(len(columns["rows"]))
    for number, rule in enumerate(("word", "char", "auto", "span")):
        axis.bar(positions + 0.2 * (number - 1.5), [100 * row[rule] for row in columns["rows"]], 0.2, label=rule)
    axis.set_xticks(positions, [row["family"] for row in columns["rows"]])
    axis.set(ylabel="relative MAE (%)")
    axis.legend()


def _histogram(label: str) -> Callable[[Axes, Columns], None]:
    def draw(axis: Axes, columns: Columns) -> None:
        for row in columns["rows"]:
            counts = np.array(row["histogram"]) / max(1, sum(row["histogram"]))
            axis.stairs(counts, BINS, label=row["denominator"])
        axis.axvspan(np.log(0.8), np.log(1.2), alpha=0.15)
        axis.set(yscale="log", xlabel=label, ylabel="fraction")
        axis.legend(fontsize=7)

    return draw


_FIGURES: dict[str, Callable[[Axes, Columns], None]] = {
    "tokenizers": _tokenizers,
    "mass": _mass,
    "length": _length,
    "scripts": _scripts,
    "ratio": _histogram("log of the token ratio"),
    "sequence": _histogram("mean log-ratio of a response"),
}
