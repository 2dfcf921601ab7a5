"""Changes between two sessions of a run: those that resume accepts, and those that it rejects by name."""

from __future__ import annotations

import errno
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from mutualrl.errors import DataError, DiskError, FileDamagedError, RecipeError, RunDirectoryError, UsageError
from mutualrl.launch.plan import StartPlan, known, plan, rehearse
from mutualrl.launch.rewind import readmit
from mutualrl.launch.session import (
    Launch,
    accept_changes,
    counted,
    next_session,
    open_resumable_run,
    require_same_plan,
    resume_run,
    start_run,
)
from mutualrl.machine.devices import Machine
from mutualrl.mwra.placement import Placement, place
from mutualrl.recipes import Recipe, Request, load_run, resolve, stored, stored_recipe, validation
from mutualrl.recipes.differences import changed_keys
from mutualrl.recipes.free import may_differ
from mutualrl.see import MissingPeers, open_store
from mutualrl.storage.files import write_checksummed
from mutualrl.storage.rundir import RunDirectory
from mutualrl.tiny import resolve_path

TWO = Machine((), 2)
MODELS = {"ada": "sha256:a", "bob": "sha256:b"}


def recipe(*assignments: str, **request: Any) -> Recipe:
    return resolve(Request(pool="tiny", regime="sgt", assignments=assignments, **request))


@pytest.mark.parametrize(
    ("assignment", "key"),
    [
        ("regime.weight=0.2", "regime.weight"),
        ("trainer.learning_rate=1e-4", "trainer.learning_rate"),
        ("run.seed=3", "run.seed"),
        ("round.prompts=16", "round.prompts"),
        ("run.steps=7", "run.steps"),
    ],
)
def test_resume_rejects_each_setting_that_determines_results_with_both_values(assignment: str, key: str) -> None:
    with pytest.raises(UsageError, match=rf"{key}: .*the run has .*start another run with --run-dir"):
        accept_changes(recipe(), recipe(assignment))


def test_all_rejected_changes_are_named_together() -> None:
    with pytest.raises(UsageError) as caught:
        accept_changes(recipe(), recipe("regime.weight=0.2", "run.seed=3"))
    assert "regime.weight: 0.2, the run has 0.1" in str(caught.value)
    assert "run.seed: 3, the run has 0" in str(caught.value)


@pytest.mark.parametrize(
    "assignment",
    [
        "run.max_restarts=9",
        "run.peer_timeout=5",
        "run.round_timeout=50",
        "run.on_peer_loss=wait",
        "run.keep_checkpoints=9",
        "run.keep_rounds=9",
        "run.save_every=9",
        "run.validate_every=9",
    ],
)
def test_resume_accepts_and_reports_settings_that_only_affect_upkeep(assignment: str) -> None:
    key = assignment.partition("=")[0]
    assert may_differ(Recipe, key, "resume")
    (note,) = accept_changes(recipe(), recipe(assignment))
    assert note.startswith(f"{key} is now ")
    assert "(was " in note


def test_setting_of_a_policy_is_named_with_the_policy(tmp_path: Path) -> None:
    pool = tmp_path / "p.yaml"
    text = 'policies: [{{name: a, model: "tiny:ada", regime: {{weight: {}}}}}, {{name: b, model: "tiny:bob"}}]\n'
    recipes = []
    for weight in (0.1, 0.4):
        pool.write_text(text.format(weight))
        recipes.append(resolve(Request(pool=str(pool), regime="sgt")))
    assert changed_keys(*recipes) == {"policies.a.regime.weight": (0.1, 0.4)}


def test_directory_is_not_a_change_and_steps_derived_from_epochs_are_compared_later() -> None:
    assert changed_keys(recipe(run_dir=Path("/x")), recipe(run_dir=Path("/y"))) == {}
    epochs = recipe("run.epochs=2")
    steps = counted(epochs, place(epochs, TWO).allocations[0].batch, 211)
    assert steps.run.steps > 0
    assert accept_changes(steps, epochs) == []


def started_run(root: Path, *assignments: str) -> tuple[RunDirectory, Recipe]:
    resolved = recipe(*assignments, run_dir=root)
    plan = StartPlan(resolved, Launch(), None, TWO, {"two": TWO}, online=False)
    plan.__dict__.update(fingerprint={"prompts": "x", "seed": 0}, models=MODELS)  # facts that are known
    with ExitStack() as stack:
        run = start_run(resolved, plan.run_info(), stack)
    return run, resolved


def test_new_run_records_its_placement_and_its_recipe_without_the_directory(tmp_path: Path) -> None:
    run, resolved = started_run(tmp_path / "r")
    info = run.info()
    assert (info.regime, info.pool, info.seed) == ("sgt", "tiny", 0)
    assert {name: a.processes for name, a in info.placement.items()} == {"ada": 1, "bob": 1}
    stored = load_run(run)
    assert stored.run.dir is None
    assert changed_keys(resolved, stored) == {}
    assert run.recipe.read_text().startswith("# [")  # the command that started it


def test_policies_read_the_resolved_recipe_without_another_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    shutil.copytree(resolve_path("tiny:ada"), model)
    assignments = (f"policies.ada.model={model}", "policies.bob.trainer.learning_rate=0.01", "regime.weight=0.2")
    run, resolved = started_run(tmp_path / "r", *assignments)
    checked: list[str] = []
    for module, name in ((stored, "validate"), (validation, "get_regime"), (validation, "validate_trainer_key")):
        monkeypatch.setattr(module, name, lambda *arguments, name=name, **keys: checked.append(name))
    without_dir = resolved.model_copy(update={"run": resolved.run.model_copy(update={"dir": None})})
    assert stored_recipe(run) == without_dir
    assert checked == []
    shutil.rmtree(model)  # a machine of a cluster that lacks it
    with pytest.raises(RecipeError, match=r"policies\.0\.model: model not found"):
        stored_recipe(run)


def test_resume_reports_other_devices_and_rejects_other_process_counts(tmp_path: Path) -> None:
    run, resolved = started_run(tmp_path / "r")
    plan = {"prompts": "x", "seed": 0}
    assert require_same_plan(run.info(), place(resolved, TWO), plan, MODELS) == []
    notes = require_same_plan(run.info(), place(resolved, Machine((), 8)), plan, MODELS)
    assert notes == [
        f"policy {name} runs on threads 4 (before: 1); sums may differ in the last digits" for name in ("ada", "bob")
    ]
    two_processes = recipe("launch.processes=2", "trainer.per_device_train_batch_size=16")
    with pytest.raises(UsageError, match=r"policy 'ada' ran with processes 1, here it would be 2.*launch.processes=N"):
        require_same_plan(run.info(), place(two_processes, TWO), plan, MODELS)
    with pytest.raises(UsageError, match=r"--resume: .*seed: 1, the run has 0.*restore the run's data"):
        require_same_plan(run.info(), place(resolved, TWO), {**plan, "seed": 1}, MODELS)
    with pytest.raises(UsageError, match=r"--resume: policy 'bob': the files of its base model have changed"):
        require_same_plan(run.info(), place(resolved, TWO), plan, {**MODELS, "bob": "sha256:other"})


def test_sessions_are_numbered_and_recorded(tmp_path: Path) -> None:
    run, _ = started_run(tmp_path / "r")
    assert [next_session(run) for _ in range(3)] == [0, 1, 2]
    text = (run.root / "supervisor" / "sessions.json").read_text()
    assert text.count('"began"') == 3


def test_resume_readmits_all_peers_and_clears_the_stop_request(tmp_path: Path) -> None:
    run, resolved = started_run(tmp_path / "r")
    missing = MissingPeers(open_store(run.exchange), "ada")
    missing.mark_missing("bob", 0)
    readmit(run, resolved, ["ada"])
    assert MissingPeers(open_store(run.exchange), "ada").current() == {}
    run.stop_file.parent.mkdir(parents=True, exist_ok=True)
    run.stop_file.write_text("{}")
    write_checksummed(run.summary, {"lost": ["bob"]}, root=run.root)
    changed = recipe("run.max_restarts=7", run_dir=run.root)
    resume_run(run, changed, place(resolved, TWO), MODELS, Launch())
    assert not run.stop_file.exists()
    assert not run.summary.exists()
    assert load_run(run).run.max_restarts == 7


def test_digests_of_models_have_the_frozen_sources(tmp_path: Path) -> None:
    _, resolved = started_run(tmp_path / "r", "sources=[{name: old, frozen: 'tiny:ada'}]")
    digests = StartPlan(resolved, Launch(), None, TWO, {}, online=False).models
    assert list(digests) == ["ada", "bob", "old"]
    assert digests["old"] == digests["ada"] != digests["bob"]
    for member in ("bob", "old"):  # of a member that joins, only its own
        alone = StartPlan(resolved, Launch(member=member), None, TWO, {}, online=False)
        assert alone.models == {member: digests[member]}


def test_a_fact_that_fails_is_looked_for_once_and_stops_what_rests_on_it(tmp_path: Path) -> None:
    """A check that rests on the data raises the data's problem, not one of its own."""
    absent = recipe("task.name=dataset", f"task.data={tmp_path / 'absent.jsonl'}", run_dir=tmp_path / "r")
    made = StartPlan(absent, Launch(), None, TWO, {"two": TWO}, online=False)
    problems = []
    for fact in ("inputs", "counted", "fingerprint", "inputs"):
        with pytest.raises(DataError, match=r"absent\.jsonl") as raised:
            getattr(made, fact)
        problems.append(raised.value)
    assert len(set(map(id, problems))) == 1
    assert made.recipe is absent
    (tmp_path / "absent.jsonl").write_text('{"prompt": "p", "answer": "1"}\n')
    assert known(lambda: made.inputs) is None  # a plan is of one moment
    assert isinstance(made.placement, Placement)


def test_a_rehearsal_collects_each_problem_once() -> None:
    made = rehearse(recipe("task.name=dataset", "task.data=absent.jsonl", "hardware.gpus=3"), TWO, Launch())
    assert list(made.placements) == ["the recipe's hardware: 3 GPUs", "this machine: 0 GPUs, 2 CPU cores"]
    assert [str(problem).partition(":")[0] for problem in made.problems] == ["data file not found"]
    assert [line.partition(" (")[0] for line in made.missing] == ["3 of the 3 GPUs of the recipe"]
    with pytest.raises(DataError, match=r"absent\.jsonl"):
        made.require()
    with pytest.raises(DataError, match=r"absent\.jsonl"):
        plan(recipe("task.name=dataset", "task.data=absent.jsonl"), TWO, Launch())


def test_resume_readmits_the_learners_that_a_source_had_given_up(tmp_path: Path) -> None:
    run, resolved = started_run(tmp_path / "r", "sources=[{name: teacher, served: 'http://127.0.0.1:9/v1'}]")
    missing = MissingPeers(open_store(run.exchange), "teacher")
    missing.mark_missing("bob", 3)
    readmit(run, resolved, ["ada", "bob", "teacher"])
    assert not MissingPeers(open_store(run.exchange), "teacher").is_missing("bob", 12)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda run: write_checksummed(run.summary, {}, root=run.root), "nothing to resume, the run .* is finished"),
        (lambda run: run.run_json.write_text('{"format": 2, "run_id": "1"}'), "format 2, this version reads 1"),
        (
            lambda run: write_checksummed(run.run_json, {"format": 1, "run_id": "1"}, root=run.root),
            "lacks fingerprint, placement, versions, recipe",
        ),
    ],
)
def test_run_that_cannot_be_resumed_is_rejected_with_the_reason_and_the_flag(
    tmp_path: Path, damage: Any, message: str
) -> None:
    run, _ = started_run(tmp_path / "r")
    assert open_resumable_run(run.root).root == run.root
    damage(run)
    with pytest.raises(UsageError, match=message) as caught:
        open_resumable_run(run.root)
    assert any(flag in str(caught.value) for flag in ("--clean", "--run-dir"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda run: run.summary.write_text("{}"), "summary.json: its bytes do not match its checksum"),
        (lambda run: run.summary.write_text('{"\\ud800": 1}'), "summary.json: its bytes do not match its checksum"),
        (lambda run: edit(run.run_json, '"seed": 0', '"seed": 1'), "run.json: its bytes do not match its checksum"),
        (lambda run: edit(run.recipe, "weight: 0.1", "weight: 0.3"), r"regime.weight: 0.3, the run has 0.1\)"),
        (lambda run: run.recipe.write_bytes(run.recipe.read_bytes()[:90]), "recipe.yaml: changed since the run wrote"),
    ],
)
def test_changed_file_of_a_run_is_named_on_resume(tmp_path: Path, damage: Any, message: str) -> None:
    run, _ = started_run(tmp_path / "r")
    damage(run)
    with pytest.raises(FileDamagedError, match=message):
        open_resumable_run(run.root)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_kill_between_writing_the_two_files_of_a_session_is_repaired(tmp_path: Path) -> None:
    """Accept the recipe.yaml of the session before, or none: run.json is written first."""
    run, resolved = started_run(tmp_path / "r")
    before = run.recipe.read_bytes()
    changed = recipe("run.max_restarts=7", run_dir=run.root)
    resume_run(run, changed, place(resolved, TWO), MODELS, Launch())
    after = run.recipe.read_bytes()
    assert after != before
    run.recipe.write_bytes(before)
    assert load_run(open_resumable_run(run.root)).run.max_restarts == 7
    run.recipe.unlink()
    resume_run(open_resumable_run(run.root), changed, place(resolved, TWO), MODELS, Launch())
    assert run.recipe.read_bytes() == after


def test_link_and_missing_directory_cannot_be_resumed(tmp_path: Path) -> None:
    run, _ = started_run(tmp_path / "r")
    (tmp_path / "link").symlink_to(run.root)
    with pytest.raises(UsageError, match="symbolic link"):
        open_resumable_run(tmp_path / "link")
    with pytest.raises(UsageError, match="there is no directory"):
        open_resumable_run(tmp_path / "nowhere")


def test_a_recipe_for_the_cpu_is_rehearsed_on_this_machine_alone() -> None:
    assert list(rehearse(recipe(), TWO, Launch()).placements) == ["this machine: 0 GPUs, 2 CPU cores"]


def test_a_run_starts_on_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    run, _ = started_run(tmp_path / "r")
    assert run.recipe.read_text() == run.info().recipe


def test_a_disk_that_cannot_be_written_ends_the_search_for_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise DiskError("no space left")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mutualrl.storage.rundir.write_checksummed", full)
    plan = StartPlan(recipe(), Launch(), None, TWO, {"two": TWO}, online=False)
    plan.__dict__.update(fingerprint={}, models=MODELS)
    with ExitStack() as stack, pytest.raises(RunDirectoryError, match="no space left"):
        start_run(recipe(), plan.run_info(), stack)
    assert len(list((tmp_path / "runs").iterdir())) == 1
