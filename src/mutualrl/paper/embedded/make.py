"""Rebuild the embedded models: the script behind `mutualrl/tiny/models`.

    python -m mutualrl.paper.embedded.make DIRECTORY [NAME ...]

About 15 seconds per model on one core, a minute for `fay` and `gus`, two for `hal` and `ivy`. Training is chaotic:
another processor, or another version of torch, sums in another order and yields other weights of the same quality.
Hence the weights are shipped.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from mutualrl.paper.embedded.spec import POLICIES


def main(arguments: Sequence[str] | None = None) -> None:
    """Build the named models (default: all) in DIRECTORY/NAME."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("names", nargs="*", choices=[*POLICIES], metavar="NAME")
    args = parser.parse_args(arguments)

    from mutualrl.paper.embedded.warmup import make

    for name in args.names or POLICIES:
        target = args.directory / name
        target.mkdir(parents=True, exist_ok=True)
        make(name, target)
        print(f"built {target}", flush=True)


if __name__ == "__main__":
    main()
