"""Size, time to first paint and height of the report's page for 1, 15 and 100 runs of 500 steps, beside those of
another version; and one figure drawn by our SVG and by uPlot. Needs Chromium with its driver.

    python benchmarks/page.py --before SRC --uplot DIR

SRC: directory `src` of the other version; DIR: the unpacked package uplot 1.6.32 of npm. Writes page.json.
"""

from __future__ import annotations

import base64
import importlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import harness

TESTS = Path(__file__).parents[1] / "tests" / "reporting"
sys.path.insert(0, str(TESTS))
from made_runs import made_run, rescue, with_rescues  # noqa: E402

COUNTS, STEPS, REPEATS = (1, 15, 100), 500, 5
ARMS = ("grpo", "sgt", "xgrpo", "prp", "grpo-noise")
#: keys of a step's row that vary from step to step, with the spread of the noise
NOISY = {"reward": 0.05, "entropy": 0.05, "ppo_kl": 0.002, "kl": 0.05, "step_time": 0.1, "see/wait_seconds": 0.05}
HEAD = (
    '<!doctype html><html lang="en"><head><title>Charts</title><style>{css}</style></head><body><main><h1>Charts</h1>'
)


def runs(root: Path, count: int, steps: int) -> list[Path]:
    """Write `count` runs with noise, and two rescues per step of sgt."""
    made = []
    for number in range(count):
        arm, seed = (ARMS[number % len(ARMS)], number // len(ARMS)) if count > 1 else ("sgt", 0)
        run = made_run(root / f"{arm}-{seed}", arm, seed=seed, steps=steps, gain=0.1 + 0.05 * ARMS.index(arm))
        draw = random.Random(number)
        for policy in ("ada", "bob"):
            path = run / "policies" / policy / "metrics.jsonl"
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            for row in rows:
                row |= {key: abs(row[key] + draw.gauss(0, spread)) for key, spread in NOISY.items()}
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        if arm == "sgt":
            text = "Let me think about it step by step. " * 8
            own = [{"text": f"{text}\\boxed{{{n}}}", "reward": 0.0} for n in range(4)]
            lessons = [rescue(1 + n // 2, f"p{n}", own=own, answer=f"{text}\\boxed{{6}}") for n in range(2 * steps)]
            with_rescues(run, "ada", lessons)
        made.append(run)
    return made


def opened(browser: Any, page: Path, repeats: int) -> dict[str, float]:
    """Return milliseconds to the first paint and until the script is done (medians), and the height at two widths."""
    paints, ready = [], []
    for _ in range(repeats):
        browser.get(page.as_uri())
        paints.append(browser.execute_async_script(PAINTED))
        ready.append(float(browser.execute_script("return document.documentElement.dataset.ready")))
    heights = {}
    for width in (1400, 390):
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get(page.as_uri())
        heights[f"height_{width}"] = browser.execute_script("return document.documentElement.scrollHeight")
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    return {"first_paint_ms": statistics.median(paints), "ready_ms": statistics.median(ready), **heights}


def reported(directories: list[Path], out: Path, source: Path | None) -> float:
    """Write the report with the version in `source` (None: the installed one); return the seconds."""
    environment = os.environ | ({} if source is None else {"PYTHONPATH": str(source.resolve())})
    command = [sys.executable, "-m", "mutualrl", "report", *map(str, directories), "--out", str(out)]
    began = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    return time.monotonic() - began


PAINTED = """
const done = arguments[0], name = "first-contentful-paint";
const look = () => {
  const [entry] = performance.getEntriesByName(name);
  if (entry) done(entry.startTime); else setTimeout(look, 5);
};
look();
"""


# ---- our SVG and uPlot, on the same numbers

UPLOT = """
const data = JSON.parse(document.getElementById("charts").textContent);
const steps = (x) => Array.isArray(x) ? x : Array.from({ length: x.to - x.from + 1 }, (_, i) => x.from + i);
const ink = matchMedia("(prefers-color-scheme: dark)").matches ? "#e4e7ea" : "#1d2329";
const sync = uPlot.sync("step");
for (const box of document.querySelectorAll("[data-chart]"))
  for (const panel of data.figures[box.dataset.chart].panels) {
    if (!panel.lines.length) continue;
    const x = steps(panel.lines[0].x), columns = [x], series = [{}], bands = [];
    for (const line of panel.lines) {
      const { colour, dash } = data.signs[line.label];
      columns.push(line.y);
      series.push({ label: line.label, stroke: colour, dash, width: 1.6 });
      if (line.low) {
        columns.push(line.high, line.low);
        series.push({ show: true, stroke: "transparent" }, { show: true, stroke: "transparent" });
        bands.push({ series: [series.length - 2, series.length - 1], fill: colour + "26" });
      }
    }
    const axis = { stroke: ink, font: "12px system-ui", grid: { stroke: "#8884", width: 0.6 } };
    new uPlot({ title: panel.title, width: box.clientWidth / 2 - 20, height: 200, series, bands,
      scales: { x: { time: false }, y: { range: panel.limits } },
      axes: [axis, axis], cursor: { sync: { key: sync.key } } }, columns, box);
  }
"""


def prototype(page: Path, out: Path, library: str, style: str, ours: str) -> Path:
    """Write a page with the charts of a report only, drawn by a script."""
    text = page.read_text("utf-8")
    block = text[text.index('<script type="application/json" id="charts">') :].partition("</script>")[0]
    keys = json.loads(block.partition(">")[2])["figures"]
    boxes = "".join(f'<h2>{key}</h2><h3>Charts</h3><div data-chart="{key}"></div>' for key in keys)
    timed = "const began = performance.now();" + ours
    timed += ";document.body.getBoundingClientRect();window.drawn = performance.now() - began;"
    script = f"<script>{library}</script><script>{timed}</script>"
    out.write_text(f"{HEAD.format(css=style)}{boxes}</main>{block}</script>{script}</body></html>", "utf-8")
    return out


def judged(browser: Any, page: Path, repeats: int) -> dict[str, Any]:
    """Return how long the drawing took, what axe-core finds, and whether print, screen readers and a change of the
    colour scheme get the chart."""
    axe = importlib.import_module("axe_core_python")
    times = []
    for _ in range(repeats):
        browser.get(page.as_uri())
        times.append(browser.execute_script("return window.drawn"))
    rules = (Path(str(axe.__file__)).parent / "axe.min.js").read_text()
    browser.execute_cdp_cmd("Runtime.evaluate", {"expression": rules})
    found = browser.execute_async_script("const done = arguments[0]; axe.run().then((r) => done(r.violations));")
    named = "return document.querySelectorAll('[data-chart] [tabindex=\"0\"][aria-label]').length"
    label = "return document.querySelector('.plot text, .u-axis') instanceof SVGElement"
    pdf = base64.b64decode(browser.execute_cdp_cmd("Page.printToPDF", {})["data"])
    return {
        "draw_ms": round(statistics.median(times), 1),
        "axe_violations": sorted(violation["id"] for violation in found),
        "charts_named_and_reached_by_keyboard": browser.execute_script(named),
        "labels_are_text_of_the_page": bool(browser.execute_script(label)),
        "images_in_the_printed_pdf": pdf.count(b"/Subtype /Image"),
    }


def compared(browser: Any, page: Path, place: Path, package: Path, repeats: int) -> dict[str, Any]:
    """Return both prototypes' figures."""
    assets = files("mutualrl.reporting") / "assets"
    ours, style = (assets / "charts.js").read_text("utf-8"), (assets / "page.css").read_text("utf-8")
    library, sheet = ((package / "dist" / name).read_text("utf-8") for name in ("uPlot.iife.min.js", "uPlot.min.css"))
    own = prototype(page, place / "own.html", "", style, ours)
    other = prototype(page, place / "uplot.html", library, sheet, UPLOT)
    return {
        "svg": {"kilobytes": len(ours) / 1e3, "lines_of_ours": len(ours.splitlines()), **judged(browser, own, repeats)},
        "uplot": {
            "kilobytes": (len(library) + len(sheet) + len(UPLOT)) / 1e3,
            "lines_of_ours": len(UPLOT.strip().splitlines()),
            **judged(browser, other, repeats),
        },
    }


def main() -> None:
    """Write reports with both versions, open them, and compare the prototypes."""
    parser = harness.options(__doc__)
    parser.add_argument("--before", type=Path, help="directory src of another version")
    parser.add_argument("--uplot", type=Path, help="unpacked package uplot of npm")
    args = harness.parse(parser)
    counts, steps, repeats = ((1, 2), 20, 1) if args.smoke else (COUNTS, STEPS, REPEATS)
    versions = {"now": None} if args.before is None else {"before": args.before, "now": None}
    result: dict[str, Any] = {"steps": steps, "repeats": repeats}
    place = Path(tempfile.mkdtemp(prefix="page-"))
    browser = harness.chromium(1400, 900)
    try:
        for count in counts:
            made = runs(place / f"{count}", count, steps)
            for name, source in versions.items():
                out = place / f"{name}-{count}"
                seconds = reported(made, out, source)
                page = out / "index.html"
                row = {"seconds": seconds, "megabytes": page.stat().st_size / 1e6, **opened(browser, page, repeats)}
                result[f"{name}/{count}"] = {key: round(value, 2) for key, value in row.items()}
        if args.uplot is not None:
            page = place / f"now-{counts[1]}" / "index.html"
            result["prototypes"] = compared(browser, page, place, args.uplot, repeats)
    finally:
        browser.quit()
        shutil.rmtree(place, ignore_errors=True)
    harness.write(args.out, "page", result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
