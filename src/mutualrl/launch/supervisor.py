"""Supervisor of a run: claims or reopens the directory, runs the policies, writes the summary."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from mutualrl.console.display import print_text
from mutualrl.errors import MutualRLError, RunInterruptedError
from mutualrl.launch.checks import check_sources
from mutualrl.launch.group import GRACE_SECONDS, ProcessTag, end
from mutualrl.launch.joining import claim_exchange, fetch_checkpoint, install_checkpoint, require_run
from mutualrl.launch.plan import plan, plan_resumption
from mutualrl.launch.policy_supervisor import PolicySupervisor
from mutualrl.launch.ray_launcher import run_on_cluster
from mutualrl.launch.rewind import readmit, rewind
from mutualrl.launch.session import Launch, next_session, resume_run, start_run
from mutualrl.launch.stop import request_stop, stopped
from mutualrl.machine.devices import Machine, this_machine
from mutualrl.machine.ray_cluster import join_cluster
from mutualrl.mwra.placement import Placement
from mutualrl.process.status import RunState, StatusWriter
from mutualrl.process.stop_signals import StopSignals, stop_signals
from mutualrl.recipes import Recipe
from mutualrl.recipes.run_sources import restore, store
from mutualrl.regimes.info import RegimeInfo
from mutualrl.reporting.progress import Progress
from mutualrl.runs.facts import accounts_of, facts_of_sources, finished_policies, silence_note, values_of
from mutualrl.runs.lines import last_steps
from mutualrl.runs.notes import notes_of
from mutualrl.see.location import record_store
from mutualrl.storage.files import try_stat, write_checksummed
from mutualrl.storage.run_info import Summary, is_accuracy
from mutualrl.storage.rundir import RunDirectory, clean_run, directory_is_gone, hold, require_creatable

POLL_SECONDS = 0.2


def train(recipe: Recipe, console: Console, launch: Launch | None = None) -> tuple[RunDirectory, Summary]:
    """Run a recipe, or resume its run; return the run directory and the summary.

    All checks that need no model are done before the directory is created. Raises RunInterruptedError, PeerLostError,
    or the error of the failed policy, after all processes have ended.
    """
    launch, began = launch or Launch(), time.monotonic()
    machine = this_machine() if launch.ray is None else join_cluster(launch.ray)
    with ExitStack() as held, stop_signals() as request:
        run, recipe, placement, notes = _open(recipe, machine, launch, console, held)
        request.raise_if_any()
        session = next_session(run)
        end([], ProcessTag(str(run.root)), grace=0)  # left by a supervisor that was killed
        print_text(console, f"Run directory: {run.root!s}")
        for note in notes:
            print_text(console, f"Note: {note}")
        if launch.ray is None:
            run_policies(run, recipe, placement, launch, session, console, request)
        else:
            run_on_cluster(run, recipe, placement, session, console, request)
        summary = summarize(run, recipe, launch.policies(recipe), time.monotonic() - began)
        summary = summary.model_copy(update={"resumed": session > 0})
        write_checksummed(run.summary, summary.to_json(), root=run.root)
    return run, summary


def _open(
    recipe: Recipe, machine: Machine, launch: Launch, console: Console, held: ExitStack
) -> tuple[RunDirectory, Recipe, Placement, list[str]]:
    """Return the locked run directory, created or reopened after every check that needs no model; the recipe, with its
    epochs converted to steps; the placement; and notes for the user."""
    path = None if recipe.run.dir is None else Path(recipe.run.dir)
    if launch.resume:
        return _reopen(recipe, machine, launch, console, held)
    if path is not None:
        require_creatable(path, clean=launch.clean)
    made = plan(recipe, machine, launch)
    recipe, placement = made.recipe, made.placement
    models = made.models  # before anything is claimed
    run_id = None if recipe.bucket is None else claim_exchange(recipe, made.fingerprint, launch, console)
    if launch.clean and path is not None:
        clean_run(path, held)
    staged = None if run_id is None or path is None else fetch_checkpoint(recipe, launch, run_id, path, models)
    run = start_run(recipe, made.run_info(run_id, launch.member), held)
    store(run, made.sources)
    fetched = [] if staged is None else [install_checkpoint(staged, run)]
    return run, recipe, placement, [*placement.notes, *made.notes, *fetched]


def _reopen(
    recipe: Recipe, machine: Machine, launch: Launch, console: Console, held: ExitStack
) -> tuple[RunDirectory, Recipe, Placement, list[str]]:
    run, made = plan_resumption(recipe, machine, launch)
    recipe, placement, notes = made.recipe, made.placement, made.notes
    if recipe.bucket is not None:
        require_run(recipe.bucket, run.info().run_id, launch.member, console)
    held.enter_context(hold(run.lock, str(run.root)))
    if recipe.recorded_sources:
        restore(run, recipe, lambda names: check_sources(recipe, made.inputs, names))
    if launch.member is None:
        rewind(run, recipe, console)
    staged = fetch_checkpoint(recipe, launch, run.info().run_id, run.root, made.models)
    readmit(run, recipe, [each.policy for each in (*placement.allocations, *placement.sources)])
    resume_run(run, recipe, placement, made.models, launch)
    if staged is not None:
        notes.append(install_checkpoint(staged, run))
    return run, recipe, placement, notes


def run_policies(
    run: RunDirectory,
    recipe: Recipe,
    placement: Placement,
    launch: Launch,
    session: int,
    console: Console,
    request: StopSignals,
) -> None:
    """Start the policies and supervise them until they end; end every process if the run fails or is stopped."""
    run.require_present()
    status_writer = StatusWriter(run.root, session)
    policy_supervisor = PolicySupervisor(run, recipe, placement, status_writer, console)
    kill_immediately = False
    require_same = watch_directory(run)
    try:
        names, limit = launch.policies(recipe), recipe.task.max_prompt_tokens
        sources = [] if names else launch.sources(recipe)
        metrics = recipe.regime_class.metrics
        with Progress(run, names, recipe.run.steps, console, metrics, limit, sources) as progress:
            policy_supervisor.start()
            deadline = None
            while policy_supervisor.active:
                require_same()
                if deadline is None and (request.received or run.stop_file.exists()):
                    deadline = time.monotonic() + recipe.run.round_timeout
                    policy_supervisor.stop()
                    request_stop(run, console, policies=bool(names))
                if len(request.received) > 1 or (deadline is not None and time.monotonic() > deadline):
                    kill_immediately = True
                    break
                policy_supervisor.poll()
                progress.update()
                time.sleep(POLL_SECONDS)
            progress.update()
        if deadline is not None or kill_immediately:
            raise RunInterruptedError(stopped(run, recipe, launch, request))
        status_writer.close(RunState.FINISHED)
    except MutualRLError as error:
        if run.run_json.exists():
            status_writer.close(f"{error.kind}: {error}")
        raise
    finally:
        end(policy_supervisor.groups, ProcessTag(str(run.root)), grace=0.0 if kill_immediately else GRACE_SECONDS)


def watch_directory(run: RunDirectory) -> Callable[[], None]:
    """Return a function that raises MachineError once a run's directory is no longer the one that it is now."""
    inode = run.root.stat().st_ino

    def require_same() -> None:
        state = try_stat(run.root)
        if state is None or state.st_ino != inode:
            raise directory_is_gone(run.root)
        run.require_present()

    return require_same


def summarize(run: RunDirectory, recipe: Recipe, names: Sequence[str], seconds: float) -> Summary:
    """Return the summary of a finished run, from the policies' results. Lost policies have no result and are listed."""
    info, notes = run.info(), list[str]()
    rows = {name: last_steps(run.policy(name).metrics) for name in names}
    values = {name: values_of(each) for name, each in rows.items()}
    policies = finished_policies(run, values, teaches=RegimeInfo.of(recipe.regime_class).teaches)
    lost = [name for name in names if name not in policies]
    if lost and recipe.run.on_peer_loss != "continue":
        raise MutualRLError(f"policy {lost[0]!r} ended without a result; logs: {run.policy(lost[0]).logs}")
    accounts = accounts_of(record_store(run), info.asked_sources, notes)
    asked = {each.name: (recipe.readers_of(each), each.prices) for each in recipe.active_sources}
    sources = facts_of_sources(values, asked, accounts)
    silences = [note for name, facts in sources.items() if (note := silence_note(name, facts)) is not None]
    return Summary(
        regime=recipe.regime_class.name,
        shares=recipe.regime_class().needs().shares and len(recipe.members) > 1,
        mean_reward=not is_accuracy(recipe.task.reward),
        pool=recipe.pool,
        task=recipe.task.name,
        seed=recipe.run.seed,
        steps=recipe.run.steps,
        seconds=round(seconds, 3),
        data=info.data,
        sources=info.sources if recipe.active_sources else {},
        source_facts=sources,
        policies=policies,
        lost=lost,
        notes=notes + silences + notes_of(run, rows, recipe.regime_class.metrics, recipe.task.max_prompt_tokens),
    )
