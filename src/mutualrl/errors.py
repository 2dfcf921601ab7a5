"""One exception tree. Every class has a `kind` (a closed vocabulary for `--json`) and an exit code.

Exit codes: 0 ok, 1 the run failed, 2 usage or recipe, 3 a gate was not met, 4 environment,
5 a peer was lost, 6 the exchange is damaged, 130 interrupted.
"""

from __future__ import annotations


class MutualRLError(Exception):
    """Base of all errors that mutualrl raises on purpose: the message is for the user, no traceback needed."""

    kind = "failed"
    exit_code = 1


class UsageError(MutualRLError, ValueError):
    """Command, flag or argument that cannot be used as given."""

    kind = "usage"
    exit_code = 2


class RecipeError(UsageError):
    """One or more keys of a recipe are wrong; `problems` holds one line for each, all found at once."""

    kind = "recipe"

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        head = "the recipe has a problem" if len(problems) == 1 else f"the recipe has {len(problems)} problems"
        super().__init__(f"{head}:\n" + "\n".join(f"  - {p}" for p in problems))


class DataError(UsageError):
    """Data file is missing, empty, or has a row that does not fit its task."""

    kind = "data"


class RewardError(MutualRLError, RuntimeError):
    """Reward function raised, or returned what is not one number (or None) for each completion."""

    kind = "reward"


class RegimeError(UsageError):
    """Regime that cannot be loaded, or a plan of one that cannot be executed."""

    kind = "regime"


class TaskError(UsageError):
    """Task that cannot be loaded."""

    kind = "task"


class RunDirectoryError(UsageError):
    """Run directory cannot be used: already taken, or not writable."""

    kind = "run-directory"


class MachineError(MutualRLError, RuntimeError):
    """This machine lacks something that the command needs: a device, a package, a model."""

    kind = "environment"
    exit_code = 4


class DiskError(MachineError):
    """File could not be written: no space, a read-only or failing disk, too many open files. Nothing that was
    complete is lost; the message has the path."""

    kind = "disk"


class ModelError(MachineError):
    """Model or tokenizer could not be loaded."""

    kind = "model"


class TokenizerError(ModelError):
    """Tokenizer that THL cannot work with: slow, or with a decoder whose bytes it does not know."""

    kind = "tokenizer"


class AlignmentError(UsageError):
    """Trace cannot be aligned; the subclasses say why. Nothing is ever shifted to make it fit."""

    kind = "alignment"


class TokenError(AlignmentError):
    """Id that is no token of the tokenizer."""

    kind = "token"


class TraceError(AlignmentError):
    """Log-probs that are not one number per token."""

    kind = "trace"


class TextMismatchError(AlignmentError):
    """Ids that do not decode to the text, or a text that cannot be encoded."""

    kind = "text-mismatch"


class PeerLostError(MutualRLError, RuntimeError):
    """Policy of the pool died or fell silent for longer than the peer timeout."""

    kind = "peer-lost"
    exit_code = 5


class WaitTimeoutError(PeerLostError, TimeoutError):
    """Peer is alive but did not publish a round before the deadline."""

    kind = "wait-timeout"


class ExchangeDamagedError(MutualRLError, OSError):
    """Shard of the exchange does not match its commit marker, or cannot be parsed."""

    kind = "exchange-damaged"
    exit_code = 6


class ExchangeUnreachableError(MachineError, OSError):
    """Bucket of the exchange did not answer for longer than requests are tried again."""

    kind = "exchange-unreachable"


class FileDamagedError(MutualRLError, ValueError):
    """Small file of a run is not what was written: cut, changed, or no JSON."""

    kind = "damaged"
    exit_code = 6


class CheckpointDamagedError(MutualRLError, OSError):
    """Checkpoint does not match its marker. It is never loaded."""

    kind = "checkpoint-damaged"
    exit_code = 6


class FencedError(MutualRLError, RuntimeError):
    """Newer attempt of the same policy has started, or has published this round; this one must stop."""

    kind = "fenced"


class PlanMismatchError(MutualRLError, RuntimeError):
    """Policy's batch plan differs from the run's: it would compare rollouts of other prompts."""

    kind = "plan-mismatch"


class RunInterruptedError(MutualRLError):
    """User or the system asked the run to stop (SIGINT, SIGTERM)."""

    kind = "interrupted"
    exit_code = 130


class RoundAbortedError(RunInterruptedError):
    """Round was left while it waited for the peers: the policy is as it was after its last step."""


def exit_code_of(kind: str) -> int | None:
    """Return the exit code of an error kind, or None when the kind is not one of ours."""
    pending = [MutualRLError]
    while pending:
        cls = pending.pop()
        if cls.kind == kind:
            return cls.exit_code
        pending.extend(cls.__subclasses__())
    return None
