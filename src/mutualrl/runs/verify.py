"""Verification of a run: every file is compared with its recorded checksum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from mutualrl.errors import CheckpointDamagedError, ExchangeDamagedError, FileDamagedError, UsageError
from mutualrl.recipes.published import missing_rounds
from mutualrl.recipes.run_sources import read as read_source
from mutualrl.see.exchange import claimed_attempt
from mutualrl.see.inspection import PolicyInspection, inspect_policy, writers
from mutualrl.see.location import record_store
from mutualrl.see.missing_peers import MissingPeers
from mutualrl.see.read_log import ReadLog
from mutualrl.see.store import ExchangeStore
from mutualrl.sources.answers import AnswerStore, read_account, stored_accounts
from mutualrl.storage.artifacts import verify_directory
from mutualrl.storage.checkpoints import Checkpoints
from mutualrl.storage.files import read_checksummed, read_regular
from mutualrl.storage.run_logs import recorded_sums, verify_log
from mutualrl.storage.rundir import PolicyFiles, RunDirectory, wrong_kinds
from mutualrl.storage.trained_model import has_trained_model, trained_model


@dataclass
class Verification:
    """Result of a verification: number of checks by kind of file, and messages about damaged files. `notes`: unused
    files; `exchange`: by policy."""

    checked: dict[str, int] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    exchange: list[PolicyInspection] = field(default_factory=list)

    def look(self, kind: str, check: Callable[[], object]) -> None:
        """Run a check of one file or of a group of files."""
        self.checked[kind] = self.checked.get(kind, 0) + 1
        try:
            check()
        except (FileDamagedError, CheckpointDamagedError, ExchangeDamagedError, UsageError) as error:
            self.damaged.append(str(error))
        except OSError as error:
            self.damaged.append(f"{error.filename or kind}: cannot be read ({error.strerror or error})")

    def to_json(self) -> dict[str, object]:
        """Return the result as plain values."""
        return {
            "intact": not self.damaged,
            "damaged": self.damaged,
            "notes": self.notes,
            "checked": self.checked,
            "policies": [inspection.to_json() for inspection in self.exchange],
        }


def verify_run(run: RunDirectory) -> Verification:
    """Return the verification of a run, which may be running: files replaced meanwhile are checked again. Raises
    UsageError for a directory that is not a run, FileDamagedError for a damaged run.json, which all checks require."""
    result = Verification()
    info = run.info()
    result.checked["run.json"] = 1
    if problems := wrong_kinds(run):  # what is behind such a path cannot be checked
        result.damaged += problems
        return result
    result.look("recipe.yaml", lambda: _recipe(run, info.recipe))
    for path in (run.summary, run.root / "supervisor" / "sessions.json", *sorted(run.evaluations.glob("*.json"))):
        if path.exists():
            kind = "evaluations" if path.parent == run.evaluations else path.name
            result.look(kind, partial(read_checksummed, path, root=run.root))
    for name in info.sources:
        result.look("sources", partial(read_source, run, name))
    for name in _policies(run):
        _verify_policy(run, run.policy(name), result, has_model=not info.scripts)
    for name in info.asked_sources:
        _verify_asked_source(run, name, result)
    verify_exchange(run, result)
    verify_checkpoints(run, result)
    return result


def _verify_asked_source(run: RunDirectory, name: str, result: Verification) -> None:
    """Verify what a source that was asked stored besides its rounds: accounts, and answers of an unfinished round."""
    store = record_store(run)
    for number in stored_accounts(store, name):
        result.look("accounts", partial(read_account, store, name, number))
    answers = AnswerStore(store, name)
    for answer in answers.names():
        result.look("answers", partial(answers.read, answer))
    if (path := run.policy(name).result).exists():
        result.look(path.name, partial(read_checksummed, path, root=run.root))


def _policies(run: RunDirectory) -> list[str]:
    directory = run.root / "policies"
    return sorted(path.name for path in directory.iterdir() if path.is_dir()) if directory.is_dir() else []


def _recipe(run: RunDirectory, text: str) -> None:
    if text and read_regular(run.recipe) != text.encode():
        raise FileDamagedError(f"{run.recipe}: is not the recipe in run.json")


def _verify_policy(run: RunDirectory, files: PolicyFiles, result: Verification, *, has_model: bool) -> None:
    """Verify a policy's files. `has_model`: False for users' own scripts, which save their models elsewhere."""
    name = files.root.name
    for path in (files.before, files.prompts, files.result):
        if path.exists():
            result.look(path.name, partial(read_checksummed, path, root=run.root))
    for path, expected in recorded_sums(files).items():
        result.look(path.name, partial(verify_log, path, expected))
    if (files.result.exists() and has_model) or has_trained_model(run, name):
        result.look("model", lambda: trained_model(run, name, verify=True))
    if files.adapter.exists():
        result.look("adapter", lambda: _adapter(files))


def _adapter(files: PolicyFiles) -> None:
    policy = verify_directory(files.adapter).get("policy")
    if policy != files.root.name:
        raise FileDamagedError(f"{files.adapter}: of policy {policy!r}, expected {files.root.name!r}")


def verify_checkpoints(run: RunDirectory, result: Verification) -> None:
    """Verify every file of every checkpoint against its marker."""
    for name in _policies(run):
        checkpoints = Checkpoints(run.policy(name).root)
        for step in checkpoints.steps():
            result.look("checkpoints", partial(_checkpoint, checkpoints, step))
        result.notes += [f"{path}: has no marker and is never read" for path in checkpoints.incomplete()]


def _checkpoint(checkpoints: Checkpoints, step: int) -> None:
    try:
        checkpoints.verify(step)
    except (CheckpointDamagedError, FileNotFoundError):
        if step in checkpoints.steps():  # else a running policy has just removed it
            raise


def verify_exchange(run: RunDirectory, result: Verification) -> None:
    """Verify the exchange against its commit markers, decode it, and check for missing rounds."""
    info, store = run.info(), record_store(run)
    run_id, asked = info.run_id, info.asked_sources
    for policy in writers(store):
        inspection = inspect_policy(store, run_id, policy, verify=True)
        result.exchange.append(inspection)
        result.damaged += inspection.damaged
        gaps = [f"policy {policy}: round {gap} is missing between others" for gap in inspection.gaps]
        if policy in asked:  # lost for a while; the policies went on without it
            result.notes += gaps
        else:
            result.damaged += gaps
        result.checked["rounds"] = result.checked.get("rounds", 0) + len(inspection.rounds)
        result.look("claims", partial(_claims, store, policy))
    result.damaged += missing_rounds(run, {inspection.policy: inspection.rounds for inspection in result.exchange})


def _claims(store: ExchangeStore, policy: str) -> None:
    claimed_attempt(store, policy)
    MissingPeers(store, policy)
    ReadLog(store, policy)
