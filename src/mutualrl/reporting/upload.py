"""Upload of trained models, with their cards, to the hub."""

from __future__ import annotations

import re
from pathlib import Path

from mutualrl.engines.model_files import require_finite
from mutualrl.errors import MachineError, UsageError
from mutualrl.reporting.card import write_cards
from mutualrl.runs.read import read_run
from mutualrl.storage.hub import hub_problem
from mutualrl.storage.rundir import RunDirectory
from mutualrl.storage.trained_model import has_trained_model, trained_model

_OWNER = re.compile(r"[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


def require_hub(owner: str) -> None:
    """Raise UsageError for an invalid owner, MachineError if the hub or a token is missing; called before training."""
    if _OWNER.fullmatch(owner) is None:
        raise UsageError(f"--push-to-hub {owner!r}: expected a user or organisation on the hub")
    if (problem := hub_problem()) is not None:
        raise MachineError(f"--push-to-hub: the hub cannot be used: {problem}")
    from huggingface_hub import get_token

    if get_token() is None:
        raise MachineError("--push-to-hub: found no hub token; run `hf auth login` or set HF_TOKEN")


def repository_name(run: str, policy: str) -> str:
    """Return RUN-POLICY as a valid hub name: at most 96 characters, cutting RUN first; no `--`, no `..`."""
    plain = re.sub(r"[-.]*[^A-Za-z0-9._-]+[-.]*|[-.]{2,}", "-", run)[: 95 - min(len(policy), 60)]
    return re.sub(r"[-.]{2,}", "-", f"{plain}-{policy[:60]}").strip("-.")


def push(root: Path, owner: str) -> list[str]:
    """Upload every trained model of a run to a private repository OWNER/RUN-POLICY; return their ids. Raises
    FileDamagedError, before any upload, for a model that does not match its checksums."""
    from huggingface_hub import HfApi

    run = RunDirectory(root)
    for policy in read_run(root).policies:
        if has_trained_model(run, policy):
            require_finite(trained_model(run, policy, verify=True))

    api = HfApi()
    pushed = []
    for card in write_cards(root):
        policy = card.parent.parent.name
        repo = f"{owner}/{repository_name(root.name, policy)}"
        api.create_repo(repo, private=True, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=card.parent, commit_message="Trained with mutualrl")
        pushed.append(repo)
    if not pushed:
        raise UsageError(f"{root} has no trained model to push (did it finish?)")
    return pushed
