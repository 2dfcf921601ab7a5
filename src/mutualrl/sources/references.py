"""Names of recorded texts that are no paths."""

TASK = "task"  # the solutions in the task's own data
EMBEDDED = "tiny:"  # files of this package
