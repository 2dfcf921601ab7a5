"""Command line and result files, the same in every benchmark."""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mutualrl.storage.rundir import checkout

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
SMOKE = "the smallest form, which only checks that the script runs; writes to a temporary directory, or to --out"


def options(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark: `--out` and `--smoke`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="directory of the results (benchmarks/results)")
    parser.add_argument("--smoke", action="store_true", help=SMOKE)
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line; `out` is the existing directory of the results, never that of the repository under
    `--smoke`."""
    args = parser.parse_args()
    if args.out is None:
        args.out = Path(tempfile.mkdtemp(prefix="smoke-")) if args.smoke else RESULTS
    args.out.mkdir(parents=True, exist_ok=True)
    return args


def code() -> dict[str, Any]:
    """Return the commit of the code, and whether tracked files other than results differ from it; the commit is None
    outside a checkout."""
    own = checkout(Path(__file__).resolve())
    if own is None:
        return {"commit": None}
    commit, _, changed = own.partition("+")
    return {"commit": commit, "changed": bool(changed)}


def write(out: Path, name: str, content: Mapping[str, Any], text: str | None = None, indent: int | None = 1) -> None:
    """Write a result with the commit that made it as `NAME.json`, and a text as `NAME.md`, which is also printed.
    Values that are there already keep the commit that made them."""
    path = out / f"{name}.json"
    value = {"code": code(), **content}
    if path.is_file():
        stored = json.loads(path.read_text(encoding="utf-8"))
        if json.dumps({**stored, "code": None}) == json.dumps({**value, "code": None}):
            value = stored
    path.write_text(json.dumps(value, indent=indent) + "\n", encoding="utf-8")
    if text is not None:
        (out / f"{name}.md").write_text(text.rstrip("\n") + "\n", encoding="utf-8")
        print(text)


def chromium(width: int, height: int) -> Any:
    """Start headless Chromium with a window of this size, without scroll bars."""
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = str(shutil.which("chromium"))
    for flag in ("--headless", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(flag)
    options.add_argument(f"--window-size={width},{height}")
    return webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
