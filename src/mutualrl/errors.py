"""Exception hierarchy. Every class has a `kind` (a closed vocabulary for `--json`) and an exit code.

Exit codes: 0 ok, 1 the run failed, 2 usage or recipe, 3 a gate was not met, 4 environment,
5 a peer was lost, 6 the exchange is damaged, 130 interrupted.
"""

from __future__ import annotations

MOST_PROBLEMS = 50  # shown of a recipe
DIED = "died"  # kind in the failure file of a worker that ended by any other exception


class MutualRLError(Exception):
    """Base class of the errors that mutualrl raises deliberately: the message suffices, without a traceback."""

    kind = "failed"
    exit_code = 1


class RecordedError(MutualRLError):
    """Error of another process, as that recorded it: its kind, exit code and message."""

    def __init__(self, kind: str, exit_code: int, message: str) -> None:
        super().__init__(message)
        self.kind, self.exit_code = kind, exit_code


class UsageError(MutualRLError, ValueError):
    """Invalid command, flag or argument."""

    kind = "usage"
    exit_code = 2


class RecipeError(UsageError):
    """Recipe with invalid keys; `problems` has one line per problem, all reported together."""

    kind = "recipe"

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        shown = problems[:MOST_PROBLEMS]
        if len(problems) > MOST_PROBLEMS:
            shown.append(f"and {len(problems) - MOST_PROBLEMS:,} more")
        head = "the recipe has a problem" if len(problems) == 1 else f"the recipe has {len(problems)} problems"
        super().__init__(f"{head}:\n" + "\n".join(f"  - {p}" for p in shown))


class DataError(UsageError):
    """Data file that is missing or empty, or has a row that does not fit its task."""

    kind = "data"


class DataUnavailableError(DataError):
    """Data set on the hub that cannot be loaded here and now."""


class RewardError(MutualRLError, RuntimeError):
    """Reward function that raised, or did not return one number (or None) per completion."""

    kind = "reward"


class RegimeError(UsageError):
    """Regime that cannot be loaded, or whose plan cannot be executed."""

    kind = "regime"


class TaskError(UsageError):
    """Task that cannot be loaded."""

    kind = "task"


class RunDirectoryError(UsageError):
    """Run directory that cannot be used: already taken, or not writable."""

    kind = "run-directory"


class DirectoryTakenError(RunDirectoryError):
    """Directory of another run, or one that another process uses."""


class MachineError(MutualRLError, RuntimeError):
    """Device, package or model that the command needs and this machine lacks."""

    kind = "environment"
    exit_code = 4


class DiskError(MachineError):
    """File that could not be written: no space, a read-only or failing disk, too many open files. Complete files are
    not lost; the message has the path."""

    kind = "disk"


class ModelError(MachineError):
    """Model or tokenizer that could not be loaded."""

    kind = "model"


class TokenizerError(ModelError):
    """Tokenizer that THL does not support: slow, or with a decoder whose bytes are unknown."""

    kind = "tokenizer"


class AlignmentError(UsageError):
    """Trace that cannot be aligned; the subclasses give the reason. A trace is never shifted to fit."""

    kind = "alignment"


class TokenError(AlignmentError):
    """Id that is not a token of the tokenizer."""

    kind = "token"


class TraceError(AlignmentError):
    """Log-probs without exactly one number per token."""

    kind = "trace"


class TextMismatchError(AlignmentError):
    """Ids that do not decode to the text, or a text that cannot be encoded."""

    kind = "text-mismatch"


class PeerLostError(MutualRLError, RuntimeError):
    """Policy of the pool that died, or was silent for longer than the peer time-out."""

    kind = "peer-lost"
    exit_code = 5


class WaitTimeoutError(PeerLostError, TimeoutError):
    """Peer that is alive but did not publish a round before the deadline."""

    kind = "wait-timeout"


class SourceLostError(PeerLostError):
    """A source that is asked gave no answer, and the recipe does not allow the run to go on without it."""

    kind = "source-lost"


class ExchangeDamagedError(MutualRLError, OSError):
    """Shard of the exchange that does not match its commit marker, or cannot be parsed."""

    kind = "exchange-damaged"
    exit_code = 6


class ExchangeUnreachableError(MachineError, OSError):
    """Bucket of the exchange that did not answer before the retries timed out."""

    kind = "exchange-unreachable"


class FileDamagedError(MutualRLError, ValueError):
    """Small file of a run that is truncated, altered, or not JSON."""

    kind = "damaged"
    exit_code = 6


class CheckpointDamagedError(MutualRLError, OSError):
    """Checkpoint that does not match its marker. It is never loaded."""

    kind = "checkpoint-damaged"
    exit_code = 6


class FencedError(MutualRLError, RuntimeError):
    """Attempt that must stop: a newer one of the same policy has started, or has published this round."""

    kind = "fenced"


class PlanMismatchError(MutualRLError, RuntimeError):
    """Batch plan of a policy that differs from the run's: it would compare rollouts of different prompts."""

    kind = "plan-mismatch"


class RunInterruptedError(MutualRLError):
    """Run stopped by the user or the system (SIGINT, SIGTERM)."""

    kind = "interrupted"
    exit_code = 130


class RoundAbortedError(RunInterruptedError):
    """Round aborted while it waited for peers: the policy is unchanged since its last step."""


def exit_code_of(kind: str) -> int | None:
    """Return the exit code of an error kind, or None for an unknown kind."""
    pending = [MutualRLError]
    while pending:
        cls = pending.pop()
        if cls.kind == kind:
            return cls.exit_code
        pending.extend(cls.__subclasses__())
    return None
