"""Pictures of pages in README and docs, from a run of README's first command. Needs Chromium with its driver.

    python benchmarks/pictures.py                       # trains (two minutes on two cores), then draws
    python benchmarks/pictures.py --run runs/NAME       # from that run

Writes docs/images/rescue.png, the first rescue on the page of the run; first-screen.png and first-screen-phone.png,
what one sees of it without scrolling; and rescue.json: the text of the card, the command, and the sha256 of what the
page is made from. A test fails when these have changed since.
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

import harness

REPOSITORY = Path(__file__).resolve().parents[1]
IMAGES = REPOSITORY / "docs" / "images"
COMMAND = "mutualrl train --regime sgt --pool tiny"
REPORTING = REPOSITORY / "src" / "mutualrl" / "reporting"
#: what a card and the first screen are made from
SOURCES = ("assets/page.css", "assets/page.html.j2", "assets/page.js", "rescues.py", "../study/verdict.py")
WIDTH = 1280
SCREENS = {"first-screen": (1400, 900, "light"), "first-screen-phone": (390, 844, "dark")}
PLACE = Path(tempfile.gettempdir()) / "mutualrl-pictures"  # the page shows its run's path


def sources() -> dict[str, str]:
    """Return the sha256 of each source of a card."""
    return {name: hashlib.sha256((REPORTING / name).read_bytes()).hexdigest() for name in SOURCES}


def draw(page: Path, images: Path) -> str:
    """Write the pictures of a page; return the text of the first rescue on it."""
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = str(shutil.which("chromium"))
    for flag in ("--headless", "--no-sandbox", "--disable-dev-shm-usage", f"--window-size={WIDTH},1600"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        driver.get(page.as_uri())
        card = driver.find_element("css selector", ".rescue")
        box = {key: card.rect[key] for key in ("x", "y", "width", "height")}
        clip = {**box, "scale": 1.5}
        shot = driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
        (images / "rescue.png").write_bytes(base64.b64decode(shot["data"]))
        text = str(card.text)
        for name, (width, height, scheme) in SCREENS.items():
            metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
            feature = {"name": "prefers-color-scheme", "value": scheme}
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
            driver.execute_script("window.scrollTo(0, 0)")  # another navigation could still be running at the shot
            (images / f"{name}.png").write_bytes(driver.get_screenshot_as_png())
        return text
    finally:
        driver.quit()


def main() -> None:
    """Train if no run is given, write its report, draw."""
    parser = harness.options(__doc__)
    parser.add_argument("--run", type=Path, help="run directory of README's command")
    args = harness.parse(parser)
    images = IMAGES if args.out == harness.RESULTS else args.out
    place = Path(tempfile.mkdtemp(prefix="pictures-")) if args.smoke else PLACE
    run, page = place / "runs" / "sgt", place / "page"
    shutil.rmtree(place, ignore_errors=True)
    try:
        if args.run is None:
            command = [sys.executable, "-m", *COMMAND.split(), "--run-dir", str(run), "--no-report"]
            command += ["--steps", "8"] if args.smoke else []
            subprocess.run(command, check=True)
        else:
            shutil.copytree(args.run, run)
        report = [sys.executable, "-m", "mutualrl", "report", str(run), "--out", str(page)]
        subprocess.run(report, check=True, stdout=subprocess.DEVNULL)
        text = draw(page / "index.html", images)
    finally:
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
