"""Rebuild the tables of all sweeps, the pages that quote them, the prediction and the board, from the raw values.

    python benchmarks/rebuild.py            # rewrite benchmarks/results and docs in place
    python benchmarks/rebuild.py --check    # change nothing; say which files are not what the raw values give

Raw values are the `pieces` in benchmarks/results/*.json: one per run. Comparisons, claims, pictures and tables are made
again from them and from the claims in benchmarks/sweeps; no run is needed. A page that shows a table shows the new one.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import sweep_results as sweeps

HERE = Path(__file__).parent
ROOT = HERE.parent
#: commands with further values or pictures of their own; the last two read the results of the others
OWN = ("study", "paper")
LAST = ("prediction", "board")


def names() -> list[str]:
    """Return the results files that are a table of a sweep and nothing else."""
    tables = []
    for path in sorted(sweeps.RESULTS.glob("*.json")):
        content = sweeps.stored(path.stem)
        if isinstance(content, dict) and content.get("comparison", {}).get("registered") and path.stem not in OWN:
            tables.append(path.stem)
    return tables


def rebuild() -> None:
    """Make every derived file again."""
    tables = {path: path.read_text(encoding="utf-8").strip() for path in sweeps.RESULTS.glob("*.md")}
    for name in names():
        content = sweeps.stored(name)
        claims = sweeps.SWEEPS / content["comparison"]["registered"]["file"]
        content, comparison = sweeps.of_results(name, claims)
        sweeps.write(name, content["command"], content, comparison, sweeps.RESULTS)
    for name in (*OWN, *LAST):
        subprocess.run([sys.executable, str(HERE / f"{name}.py")], check=True, cwd=ROOT)
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = page = path.read_text(encoding="utf-8")
        for table, old in tables.items():
            page = page.replace(old, table.read_text(encoding="utf-8").strip())
        if page != text:
            path.write_text(page, encoding="utf-8")


def derived(root: Path) -> dict[str, bytes]:
    """Return the files that a rebuild may write, by their path below the project."""
    places = [root / "README.md", *(root / "benchmarks" / "results").iterdir(), *(root / "docs").rglob("*")]
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(places) if path.is_file()}


def rebuilt_copy() -> dict[str, bytes]:
    """Return what a rebuild makes in a copy of the project."""
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory)
        for name in ("benchmarks", "docs"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "README.md", copy)
        subprocess.run([sys.executable, str(copy / "benchmarks" / "rebuild.py")], check=True, cwd=copy)
        return derived(copy)


def main() -> None:
    """Rebuild, or say what a rebuild would change."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail where a file is not up to date")
    args = parser.parse_args()
    before = derived(ROOT)
    if args.check:
        after = rebuilt_copy()
    else:
        rebuild()
        after = derived(ROOT)
    changed = [name for name in after if after[name] != before.get(name)]
    print("\n".join(changed) or "every file is what the raw values give")
    if args.check and changed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
