"""Makes one embedded model into the cache, in a process of its own.

    python -m mutualrl.tiny.make --run-dir DIR --policy NAME --parent PID     (started by the supervisor)

Progress goes to stdout, a JSON line now and then.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence

from mutualrl.process.parent_watch import watch_parent


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the model unless the cache has it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--policy", required=True)
    parser.add_argument("--parent", type=int, required=True)
    given = parser.parse_args(arguments)
    watch_parent(given.parent)

    from mutualrl.tiny.cache import ensure

    last = 0.0

    def say(share: float) -> None:
        nonlocal last
        if time.monotonic() - last >= 0.5 or share >= 1:
            last = time.monotonic()
            print(json.dumps({"done": round(share, 4)}), flush=True)

    ensure(given.policy, say)


if __name__ == "__main__":
    main()
