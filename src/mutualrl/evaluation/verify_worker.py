"""One process of the lenient scorer: reads `{"completion", "answer"}` lines, answers `{"verdict"}` lines.

python -m mutualrl.evaluation.verify_worker     (started, and killed, by mutualrl.evaluation.verify)
"""

from __future__ import annotations

import json
import resource
import signal
import sys

OWN_DEADLINE = 4.0  # seconds per answer, should nobody be there any more to end this process: SIGALRM does
MEMORY = 4 * 2**30  # bytes of address space: a tower of powers must not take the machine's


def main() -> None:
    """Answer until the input ends. A verdict is true or false; null for what the library cannot parse or compare."""
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
        except (Exception, RecursionError):  # noqa: BLE001  (a parser over a model's text: whatever it raises)
            verdict = None
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps({"verdict": verdict}), flush=True)


if __name__ == "__main__":
    main()
