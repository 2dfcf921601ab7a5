"""Pictures of pages in README and docs, from runs of their commands. Needs Chromium with its driver.

    python benchmarks/pictures.py                       # trains (ten minutes on two cores), then draws
    python benchmarks/pictures.py --run runs/NAME       # the first screen and the rescue from that run

Writes docs/images/rescue.png, the first rescue on the page of the run; what one sees of four pages without scrolling,
at 1,400 pixels (light) and 390 (dark): first-screen of that run, fifteen-runs of three arms, one-source, two-scripts;
and rescue.json: the text of the card, the command, and the sha256 of what the page is made from. A test fails when
these have changed since.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness

REPOSITORY = Path(__file__).resolve().parents[1]
IMAGES = REPOSITORY / "docs" / "images"
COMMAND = "mutualrl train --regime sgt --pool tiny"
REPORTING = REPOSITORY / "src" / "mutualrl" / "reporting"
#: what a card and the first screen are made from
SOURCES = (
    *("assets/page.css", "assets/page.html.j2", "assets/page.js", "assets/charts.js", "assets/cards.js"),
    *("page.py", "charts.py", "signs.py", "rescues.py", "../study/verdict.py"),
)
WIDTH = 1280
SCREENS = {"": (1400, 900, "light"), "-phone": (390, 844, "dark")}
ARMS, SEEDS = ("grpo", "sgt", "xgrpo"), 5
PLACE = Path(tempfile.gettempdir()) / "mutualrl-pictures"  # the page shows its run's path


def sources() -> dict[str, str]:
    """Return the sha256 of each source of a card."""
    return {name: hashlib.sha256((REPORTING / name).read_bytes()).hexdigest() for name in SOURCES}


def draw_rescue(driver: Any, page: Path, images: Path) -> str:
    """Write the picture of the first rescue on a page; return its text."""
    driver.get(page.as_uri())
    card = driver.find_element("css selector", ".rescue")
    box = {key: card.rect[key] for key in ("x", "y", "width", "height")}
    shot = driver.execute_cdp_cmd(
        "Page.captureScreenshot", {"captureBeyondViewport": True, "clip": {**box, "scale": 1.5}}
    )
    (images / "rescue.png").write_bytes(base64.b64decode(shot["data"]))
    return str(card.text)


def draw_screens(driver: Any, page: Path, images: Path, name: str) -> None:
    """Write what one sees of a page without scrolling, wide and on a phone."""
    for suffix, (width, height, scheme) in SCREENS.items():
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        driver.get(page.as_uri())
        (images / f"{name}{suffix}.png").write_bytes(driver.get_screenshot_as_png())
    driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def trained(run: Path, *arguments: str) -> Path:
    """Train a run."""
    command = [sys.executable, "-m", "mutualrl", "train", *arguments, "--run-dir", str(run), "--no-report"]
    subprocess.run(command, check=True)
    return run


def scripted(place: Path) -> Path:
    """Train a run by the scripts of docs/scripts.md."""
    script = [sys.executable, str(REPOSITORY / "examples" / "two_scripts.py")]
    running = [subprocess.Popen([*script, name], cwd=place) for name in ("ada", "bob")]
    if any(process.wait() for process in running):
        raise SystemExit("a script failed")
    return place / "runs" / "two-scripts"


def reported(out: Path, *runs: Path) -> Path:
    """Write the report of runs; return its page."""
    command = [sys.executable, "-m", "mutualrl", "report", *map(str, runs), "--out", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return out / "index.html"


def main() -> None:
    """Train what is not given, write the reports, draw."""
    parser = harness.options(__doc__)
    parser.add_argument("--run", type=Path, help="run directory of README's command; no other picture is made")
    args = harness.parse(parser)
    images = IMAGES if args.out == harness.RESULTS else args.out
    place = Path(tempfile.mkdtemp(prefix="pictures-")) if args.smoke else PLACE
    few = ("--steps", "8") if args.smoke else ()
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    driver = harness.chromium(WIDTH, 1600)
    try:
        run = place / "runs" / "sgt"
        if args.run is None:
            trained(run, *COMMAND.split()[2:], *few)
        else:
            shutil.copytree(args.run, run)
        page = reported(place / "page", run)
        text = draw_rescue(driver, page, images)
        draw_screens(driver, page, images, "first-screen")
        if args.run is None:
            short = few or ("--steps", "40")
            fifteen = [
                trained(
                    place / "runs" / f"{arm}-{seed}", "--regime", arm, "--pool", "tiny", "--seed", str(seed), *short
                )
                for arm in ARMS
                for seed in range(1 if args.smoke else SEEDS)
            ]
            draw_screens(driver, reported(place / "fifteen", *fifteen), images, "fifteen-runs")
            book = trained(place / "runs" / "with-book", "--regime", "sgt", "--pool", "tiny-recorded", *few)
            draw_screens(driver, reported(place / "source", book), images, "one-source")
            if not args.smoke:
                draw_screens(driver, reported(place / "scripts", scripted(place)), images, "two-scripts")
    finally:
        driver.quit()
        shutil.rmtree(place, ignore_errors=True)
    described = {
        "code": harness.code(),
        "command": f"{COMMAND}; python benchmarks/pictures.py",
        "text": text,
        "sources": sources(),
    }
    (images / "rescue.json").write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
