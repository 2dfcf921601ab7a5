"""Recipe of a `train` or `join` command: a new one, or that of the run it resumes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mutualrl.console.user_path import user_path
from mutualrl.errors import UsageError
from mutualrl.launch.session import Launch, accept_changes, open_resumable_run
from mutualrl.recipes import Recipe, Request, load_run, resolve, revise
from mutualrl.storage.bucket_url import redacted, require_url
from mutualrl.storage.files import try_read_json
from mutualrl.storage.rundir import RunDirectory


def recipe_to_join(
    request: Request, url: str, member: str, run_dir: Path, *, restart: bool
) -> tuple[Recipe | None, Launch, list[str]]:
    """Return the recipe of a policy, or of an asked source, that joins an exchange, its launch, and notes; no recipe if
    it has finished. Raises UsageError and RecipeError."""
    try:
        url = require_url(url)
    except ValueError as error:
        raise UsageError(f"{redacted(url)!r}: {error}") from None
    path = user_path(run_dir)
    assignments = (*request.assignments, f"exchange.url={url}")
    request = replace(request, run_dir=path, assignments=assignments)
    exists = (path / "run.json").exists()
    if exists:
        require_joined(path, url, member)
    if exists and finished(path):
        run = RunDirectory(path)
        accept_changes(load_run(run, run_code=True), _waiting(revise(run, request)))  # are these the results asked for?
        return None, Launch(), [f"{member} has finished: its results are in {path}"]
    launch = Launch(member=member, resume=exists, restart=restart)
    recipe = revise(open_resumable_run(path, joining=True), request) if exists else resolve(request)
    _require_member(recipe, member, restart=restart)
    notes = []
    if recipe.run.on_peer_loss == "fail":
        notes.append("the run waits for a lost policy (run.on_peer_loss=wait), which may come back")
        recipe = _waiting(recipe)
    if recipe.run.keep_rounds is not None and not recipe.exchange.checkpoints:
        notes.append(
            "run.keep_rounds deletes rounds that no policy's checkpoints need: after that, a policy whose run "
            "directory is lost cannot go on (exchange.checkpoints=true keeps a copy in the bucket)"
        )
    return recipe, launch, notes


def _waiting(recipe: Recipe) -> Recipe:
    """Return a recipe under which a policy waits for a lost peer, which may be started again elsewhere."""
    section = recipe.run
    if section.on_peer_loss == "fail":
        section = section.model_copy(update={"on_peer_loss": "wait"})
    return recipe.model_copy(update={"run": section})


def _require_member(recipe: Recipe, member: str, *, restart: bool) -> None:
    """Raise UsageError unless a recipe has a member of this name that can join."""
    policies, asked = [each.name for each in recipe.policies], [each.name for each in recipe.asked_sources]
    if member in asked and restart:
        raise UsageError(
            f"--restart: {member!r} is a source; it answers the rounds that are not published: omit the option"
        )
    if member not in (*policies, *asked):
        sources = f", and the sources {', '.join(asked)}" if asked else ""
        raise UsageError(
            f"--policy {member}: the recipe has {', '.join(policies)}{sources}; name one of them, or, for a "
            f"source, add it as the run has it: --source {member}=served:URL or --source {member}=frozen:MODEL"
        )


def default_directory(url: str, member: str) -> Path:
    """Return the default run directory of a member that joins an exchange."""
    return Path("runs") / f"{url.rstrip('/').rpartition('/')[2]}-{member}"


def require_joined(path: Path, url: str, policy: str) -> None:
    """Raise UsageError if a directory belongs to another run, or to another member of this one."""
    info = RunDirectory(path).info()
    if info.exchange != url or info.joined != policy:
        location, member = info.exchange or "a directory", info.joined or ", ".join(info.placement)
        raise UsageError(
            f"--run-dir: {path} has {member} of the run in {location}, expected {policy} of {url}; "
            "choose another directory"
        )


def finished(path: Path) -> bool:
    """Return whether the run in a directory has finished with all of its results."""
    summary = try_read_json(path / "summary.json")
    return summary is not None and not summary.get("lost")


def cluster_address(launcher: str, address: str | None) -> str | None:
    """Return the address of the Ray cluster that runs the policies; None for this machine. Raises UsageError."""
    if launcher not in ("local", "ray"):
        raise UsageError(f"--launcher: found {launcher!r}, expected local or ray")
    if launcher == "local" and address is not None:
        raise UsageError("--address requires --launcher ray; add it, or omit --address")
    return (address or "auto") if launcher == "ray" else None


def recipe_of(request: Request, launch: Launch) -> Recipe:
    """Return the resolved recipe of a command. Raises UsageError for flags that contradict each other, and
    RecipeError."""
    if launch.resume and launch.clean:
        raise UsageError("--resume continues a run, --clean deletes it; give only one")
    if launch.ray is not None and launch.device_map is not None:
        raise UsageError("--device-map is for this machine; on a Ray cluster, Ray places the policies: omit it")
    if launch.clean and request.run_dir is None:
        raise UsageError("--clean: give the run to delete with --run-dir DIR")
    if not launch.resume:
        return resolve(request)
    if request.run_dir is None:
        raise UsageError("--resume: give the run with --run-dir DIR (printed by the command that started it)")
    path = user_path(request.run_dir)
    return revise(open_resumable_run(path), replace(request, run_dir=path))
