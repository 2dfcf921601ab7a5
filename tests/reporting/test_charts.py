"""What the page's charts draw, as numbers: limits, thinning, rounding, constant metrics, signs."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from conftest import Cli
from made_runs import made_run, publish, rescue, with_rescues
from mutualrl.reporting.charts import chart, constants, limits
from mutualrl.reporting.figure_specs import Figure, Panel
from mutualrl.reporting.signs import BEFORE, COLOURS, NEUTRAL, Signs, rgb
from mutualrl.runs.curves import Curve, keeping_extremes, mean_bars


def curve(values: list[float], first: int = 1) -> Curve:
    return pd.DataFrame({"value": values}, index=range(first, first + len(values)))


def test_limits_by_hand() -> None:
    assert limits([curve([0.0, 1.0])]) == (0.0, 1.05)  # no value below 0: neither is the axis
    assert limits([curve([-1.0, 1.0])]) == (-1.1, 1.1)
    assert limits([curve([0.2, 0.8])], whole=True) == (0.17, 0.83)
    assert limits([curve([0.0, 0.99])], whole=True)[1] == 1.0
    assert limits([curve([0.0, 1.0])], whole=True)[1] == 1.05  # room for the line at 1
    assert limits([curve([0.70, 0.72])], whole=True) == (0.61, 0.81)  # one problem of fifty is a tenth of the axis
    assert limits([curve([0.02, 0.04])], whole=True) == (0.0, 0.2)
    assert limits([curve([0.98, 0.99])], whole=True) == (0.8, 1.0)
    assert limits([curve([3.0, 3.0])]) == (1.5, 4.5)
    assert limits([curve([0.0])]) == (0.0, 0.5)
    with pytest.raises(ValueError, match="at least one"):
        limits([])


def test_one_spike_does_not_stretch_an_axis() -> None:
    """Of 0, 1, ... 100 and one more value the inner eight tenths span 81: above 91 + 4 * 81 = 415 a value is a spike."""
    ramp = [float(n) for n in range(101)]

    def with_spike(value: float) -> tuple[float, float]:
        return limits([curve([*ramp[:50], value, *ramp[50:]])])

    assert with_spike(430.0) == (0.0, 105.0)
    assert with_spike(410.0)[1] > 410
    assert with_spike(-330.0) == (0.0, 105.0)
    assert limits([curve([1.0, 500.0, 2.0])])[1] > 500  # too few to tell
    assert limits([curve([*[5.0] * 50, 9.0, 5.0])])[1] > 9  # no span to compare with
    band = curve([*ramp, 1e6, 3.0]).assign(low=-1.0, high=[*ramp, 2e6, 3.0])
    assert limits([band])[1] < 500
    assert limits([band])[0] < -1


def test_what_does_not_come_back_is_no_spike() -> None:
    """A late jump of learning, and a fraction, are drawn whole."""
    ramp = [float(n) for n in range(101)]
    assert limits([curve([*ramp, 470.0])])[1] > 470
    assert limits([curve([*ramp, 470.0, 480.0]), curve(ramp)])[1] > 480
    assert limits([curve([*ramp, *[1000.0] * 20, 5.0])])[1] > 1000  # too many to be a spike
    learnt = curve([*(0.05 + 0.0001 * n for n in range(96)), 0.1, 0.3, 0.6, 0.06])
    assert limits([learnt], whole=True)[1] > 0.6
    assert limits([curve([3.0] * 20), curve([*[900.0] * 3])])[1] > 900  # outside throughout


@pytest.mark.parametrize("values", [[1.000001 + 1e-7 * n for n in range(20)], [123456.2 + 0.01 * n for n in range(20)]])
def test_small_differences_of_large_values_are_drawn(values: list[float]) -> None:
    bottom, top = limits([curve(values)])
    assert bottom < values[0] < values[-1] < top
    drawn = chart(Figure("f", "F?", "", (Panel("p", "u", {"ada": curve(values)}),)), Signs())
    shown = drawn["panels"][0]["lines"][0]["y"]
    assert len(set(shown)) == 20
    assert shown == pytest.approx(values, abs=(values[-1] - values[0]) / 1000)


def test_thinned_curves_keep_ends_minima_and_maxima() -> None:
    draw = random.Random(0)
    for length in (3, 199, 200, 201, 5_000):
        values = curve([draw.gauss(0, 1) for _ in range(length)])
        thin = keeping_extremes(values, 200)
        assert len(thin) <= 200
        assert (len(thin) == length) == (length <= 200)
        assert thin.index.is_monotonic_increasing and thin.index.is_unique
        for taken in (thin["value"].max, thin["value"].min):
            assert taken() == getattr(values["value"], taken.__name__)()
        assert [thin.index[0], thin.index[-1]] == [1, length]
        assert (values.loc[thin.index, "value"] == thin["value"]).all()


def test_every_span_keeps_its_spike() -> None:
    values = np.zeros(1_000)
    values[[123, 500, 877]] = (5.0, -3.0, 4.0)
    thin = keeping_extremes(curve(values.tolist()), 50)
    assert {124: 5.0, 501: -3.0, 878: 4.0}.items() <= thin["value"].to_dict().items()


def test_constant_metrics_leave_the_figures_for_a_table() -> None:
    moving, still = curve([1.0, 2.0]), curve([0.5, 0.5], first=0)
    band = still.assign(low=0.4, high=0.6)
    figures = [
        Figure(
            "a", "A?", "", (Panel("moves", "u", {"ada": moving, "bob": still}), Panel("still", "u", {"ada": still}))
        ),
        Figure("b", "B?", "", (Panel("one", "v", {"ada": curve([7.0], first=4)}),)),
        Figure("c", "C?", "", (Panel("band", "w", {"ada": band}),)),
        Figure("d", "D?", "", (Panel("bars", "w", bars={"ada": mean_bars({"x": [1.0]})}),)),
    ]
    kept, table = constants(figures)
    assert [(figure.name, [panel.title for panel in figure.panels]) for figure in kept] == [
        ("a", ["moves"]),
        ("c", ["band"]),
        ("d", ["bars"]),
    ]
    assert table.rows == [["still", "ada", "0.5", "u", "0 to 1"], ["one", "ada", "7", "v", "4"]]


def test_a_chart_has_rounded_values_and_whole_ones_as_they_are() -> None:
    lines = {"ada": curve([0.123456789, 123456.0]).assign(low=[0.1, 2.0], high=[math.nan, 3.0])}
    bars = {BEFORE: mean_bars({"x": [0.25], "y": [1.0, 2.0]})}
    figure = Figure("f", "F?", "", (Panel("p", "u", lines), Panel("q", "u", bars=bars)))
    signs = Signs()
    drawn = chart(figure, signs)
    (line,) = drawn["panels"][0]["lines"]
    assert (line["x"], line["y"], line["low"]) == ([1, 2], [0.12346, 123456], [0.1, 2])
    assert line["high"] == [None, 3]
    (bar,) = drawn["panels"][1]["bars"]
    assert (bar["categories"], bar["values"], bar["errors"]) == (["x", "y"], [0.25, 1.5], [None, 0.70711])
    assert list(signs.to_json()) == [BEFORE, "ada"]
    long = chart(Figure("f", "F?", "", (Panel("p", "u", {"ada": curve([1.0] * 9 + [2.0])}),)), signs)
    assert long["panels"][0]["lines"][0]["x"] == {"from": 1, "to": 10}


def test_signs_differ_and_have_contrast_on_both_backgrounds() -> None:
    def luminance(colour: str) -> float:
        parts = [part / 255 for part in rgb(colour)]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(one: str, other: str) -> float:
        low, high = sorted((luminance(one), luminance(other)))
        return (high + 0.05) / (low + 0.05)

    assert all(contrast(colour, paper) >= 3 for colour in (*COLOURS, NEUTRAL) for paper in ("#ffffff", "#14171a"))
    names = [f"arm {n}" for n in range(30)]
    signs = Signs(names)
    assert len({(signs.colour(name), signs.dash(name)) for name in (BEFORE, *names)}) == 31
    assert len({(signs.colour(name), signs.hatch(name)) for name in (BEFORE, *names)}) == 31
    assert NEUTRAL not in COLOURS
    assert signs.colour(BEFORE) == NEUTRAL
    assert Signs(names).colour("arm 3") == Signs(reversed(names)).colour("arm 26")


def embedded(page: Path) -> dict[str, object]:
    text = page.read_text("utf-8")
    block = text[text.index('id="charts">') :].partition("</script>")[0]
    charts: dict[str, object] = json.loads(block.partition(">")[2])
    return charts


@pytest.mark.extended
def test_page_of_a_hundred_runs_has_arms_and_is_small(cli_here: Cli, tmp_path: Path) -> None:
    """Minima and maxima of each arm's mean are on it, at most 200 points per curve, no run's own curve, no samples."""
    draw, runs = random.Random(0), []
    for number in range(100):
        arm = ("grpo", "sgt", "xgrpo", "prp")[number % 4]
        run = made_run(tmp_path / f"{arm}-{number}", arm, seed=number // 4, steps=500)
        for policy in ("ada", "bob"):
            path = run / "policies" / policy / "metrics.jsonl"
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            path.write_text("".join(json.dumps(row | {"entropy": draw.random()}) + "\n" for row in rows))
            (run / "policies" / policy / "samples.jsonl").write_text('{"step": 1, "rollouts": [{"prompt_id": "p"}]}\n')
        if arm == "sgt":
            text = "Let me think about it. " * 40
            own = [{"text": text, "reward": 0.0}] * 4
            with_rescues(run, "ada", [rescue(step, f"p{step}", own=own, answer=text) for step in range(1, 501)])
        runs.append(run)
    assert cli_here("report", *runs, "--out", "page").returncode == 0
    page = tmp_path / "page" / "index.html"
    assert page.stat().st_size < 3_000_000
    assert "samples-data" not in page.read_text().split("<script>")[0]
    data = json.loads((tmp_path / "page" / "report.json").read_text())
    whole = {
        (figure["title"], panel["title"], line["label"]): line
        for figure in data["figures"]
        for panel in figure["panels"]
        for line in panel["lines"]
    }
    lines = [line for f in embedded(page)["figures"].values() for p in f["panels"] for line in p["lines"]]  # type: ignore[attr-defined]
    assert lines and max(len(line["y"]) for line in lines) <= 200
    entropy = next(line for key, line in whole.items() if key[1:] == ("ada: entropy", "sgt"))
    drawn = next(line for line in lines if line["y"][0] == float(f"{entropy['y'][0]:.5g}"))
    for taken in (min, max):
        assert taken(drawn["y"]) == float(f"{taken(entropy['y']):.5g}")


def test_what_followed_a_rescue_is_counted_over_the_runs_of_an_arm(cli_here: Cli, tmp_path: Path) -> None:
    """Two runs: p failed, was rescued and then solved in one of two; in grpo it failed again."""
    runs = []
    for seed, solved in ((0, 1.0), (1, 0.0)):
        for arm in ("sgt", "grpo"):
            run = made_run(tmp_path / f"{arm}-{seed}", arm, seed=seed)
            later = solved if arm == "sgt" else 0.0
            for policy in ("ada", "bob"):
                publish(run, policy, [[("p", 0.0, None)], [("p", later, None)]])
            if arm == "sgt":
                with_rescues(run, "ada", [rescue(1, "p")])
            runs.append(run)
    result = cli_here("report", *runs, "--out", "page", "--json")
    assert result.returncode == 0
    data = json.loads((tmp_path / "page" / "report.json").read_text())
    (figure,) = [each for each in data["figures"] if each["name"].startswith("after-a-rescue")]
    (panel,) = figure["panels"]
    assert {line["label"]: (line["x"], line["y"]) for line in panel["lines"]} == {
        "rescued": ([1], [0.5]),
        "failed in grpo": ([1], [0.0]),
    }
    assert "over 2 runs" in (tmp_path / "page" / "index.html").read_text()


def test_rescues_of_different_tasks_are_not_counted_together(cli_here: Cli, tmp_path: Path) -> None:
    runs = []
    for task, later in (("arithmetic", 1.0), ("math", 0.0)):
        run = made_run(tmp_path / task, "sgt", task=task)
        publish(run, "ada", [[("p", 0.0, None)], [("p", later, None)]])
        runs.append(with_rescues(run, "ada", [rescue(1, "p")]))
    assert cli_here("report", *runs, "--out", "page").returncode == 0
    data = json.loads((tmp_path / "page" / "report.json").read_text())
    figures = [each for each in data["figures"] if "after-a-rescue" in each["name"]]
    assert [each["name"].partition("-")[0] for each in figures] == ["1", "2"]
    assert ["arithmetic" in figures[0]["title"], "math" in figures[1]["title"]] == [True, True]
    assert [each["panels"][0]["lines"][0]["y"] for each in figures] == [[1.0], [0.0]]
