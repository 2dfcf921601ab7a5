"""Worker process of the lenient scorer: reads `{"completion", "answer"}` lines, writes `{"verdict"}` lines.

python -m mutualrl.evaluation.verify_worker     (started and killed by mutualrl.evaluation.verify)
"""

from __future__ import annotations

import json
import resource
import signal
import sys

OWN_DEADLINE = 4.0  # seconds per answer: SIGALRM ends an orphaned worker
MEMORY = 4 * 2**30  # bytes of address space: a power tower must not exhaust the machine's


def main() -> None:
    """Write verdicts until the input ends: true or false; null if the library cannot parse or compare."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    sys.set_int_max_str_digits(100_000)
    from math_verify import parse, verify

    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        row = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, OWN_DEADLINE)
        try:
            gold = parse("\\boxed{" + row["answer"] + "}", parsing_timeout=None)
            answer = parse(row["completion"], parsing_timeout=None)
            verdict: bool | None = bool(verify(gold, answer, timeout_seconds=None)) if gold else None
        except (Exception, RecursionError):  # noqa: BLE001  (a parser of model output may raise anything)
            verdict = None
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps({"verdict": verdict}), flush=True)


if __name__ == "__main__":
    main()
