"""`mutualrl report` through the command line: runs in every state, several runs, bad input."""

from __future__ import annotations

import json
import random
import re
import shutil
from contextlib import ExitStack
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from conftest import Cli
from made_runs import edit_recipe, made_run, publish, rescue, set_recipe, with_rescues
from mutualrl.paper.figures import across, figures
from mutualrl.recipes import Request, resolve
from mutualrl.reporting.comparability import comparisons
from mutualrl.reporting.signs import Signs
from mutualrl.runs.logs import read_runs
from mutualrl.storage.files import write_checksummed
from mutualrl.storage.rundir import RunDirectory, hold

HOSTILE = "<script>document.title='taken'</script><img src=x onerror=alert(1)>\u202e\x1b[31m</script>"


class Page(HTMLParser):
    """A page's tables as rows of texts, its notes, and everything that it would fetch or run."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.notes: list[str] = []
        self.fetched: list[str] = []
        self.scripts: list[dict[str, str | None]] = []
        self.data: list[str] = []
        self._open_tags: list[str] = []
        self._title = ""
        self.text = path.read_text("utf-8")
        self.feed(self.text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        assert not [name for name in values if name.startswith("on")], attributes
        for name in ("src", "href", "xlink:href", "srcset", "action"):
            if name in values and not str(values[name]).startswith("#"):
                self.fetched.append(str(values[name]))
        if tag == "script":
            self.scripts.append(values)
            self.data.append("")
        if tag == "table":
            self.tables[str(values.get("aria-labelledby", len(self.tables)))] = []
        if tag == "tr":
            self._row: list[str] = []
        if tag in ("td", "th"):
            self._row.append("")
        if tag == "p" and values.get("class") == "note":
            self.notes.append("")
        if tag not in ("meta", "link", "br", "input", "img"):
            self._open_tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open_tags.pop() == tag
        if tag == "tr":
            list(self.tables.values())[-1].append(self._row)

    def handle_data(self, data: str) -> None:
        if self._open_tags and self._open_tags[-1] in ("td", "th"):
            self._row[-1] += data
        if self._open_tags and self._open_tags[-1] == "p" and self.notes and "note" in self.text:
            self.notes[-1] += data
        if self._open_tags and self._open_tags[-1] == "script":
            self.data[-1] += data

    def rescues(self) -> list[dict[str, Any]]:
        """Return all records of the rescue browser."""
        blocks = [d for d, s in zip(self.data, self.scripts, strict=True) if s.get("class") == "rescues-data"]
        return [record for block in blocks for record in json.loads(block)]


def make_report(cli: Cli, *arguments: str | Path) -> tuple[Page, dict[str, Any], dict[str, Any]]:
    result = cli("report", *arguments, "--json")
    assert result.returncode == 0, result.stderr
    summary = json.loads(result.stdout)
    page = Path(summary["page"])
    return Page(page), json.loads((page.parent / "report.json").read_text()), summary


@pytest.mark.slow
def test_numbers_of_a_finished_run_match_its_files(cli_here: Cli, unbroken: Any, tmp_path: Path) -> None:
    run = unbroken.path
    page, data, output = make_report(cli_here, run, "--out", tmp_path / "page")
    assert output["notes"] == []
    summary = json.loads((run / "summary.json").read_text())
    metrics = {
        name: [json.loads(line) for line in (run / "policies" / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("ada", "bob")
    }
    (run_data,) = data["runs"]
    assert (run_data["state"], run_data["seed"], run_data["arm"]) == ("finished", summary["seed"], "sgt")
    for name, result in summary["policies"].items():
        expected = {0: result["initial_validation"], summary["steps"]: result["validation"]}
        expected |= {row["step"]: row["validation"] for row in metrics[name] if "validation" in row}
        assert run_data["policies"][name]["validation"] == [
            [step, value["accuracy"], value["by_group"]] for step, value in sorted(expected.items())
        ]
        rows = [row for row in page.tables["table-2-1"] if row[0] == name]
        assert [row[1] for row in rows] == ["all", *sorted(result["validation"]["by_group"])]
        assert float(rows[0][2]) == pytest.approx(result["initial_validation"]["accuracy"], abs=5e-5)
        assert float(rows[0][3]) == pytest.approx(result["validation"]["accuracy"], abs=5e-5)
        pairs = next(row for row in page.tables["table-2-2"] if row[0] == name)[3]
        assert int(pairs) == result["rescued_pairs"] == sum(row.get("sgt/pairs", 0) for row in metrics[name])
    figures = {figure["name"]: figure for figure in data["figures"]}
    assert set(figures) == {"learning", "groups", "optimization", "gate", "prompts", "time"}
    lines = {
        (panel["title"], line["label"]): dict(zip(line["x"], line["y"], strict=True))
        for figure in figures.values()
        for panel in figure["panels"]
        for line in panel["lines"]
    }
    for name in ("ada", "bob"):  # a run this short is not smoothed
        for title, key in (
            ("training reward", "reward"),
            ("entropy", "entropy"),
            ("KL loss", "kl"),
            ("gate rate", "sgt/gate_rate"),
        ):
            assert lines[title, name] == {row["step"]: row[key] for row in metrics[name] if key in row}
        waits = {row["step"]: row["see/wait_seconds"] for row in metrics[name] if "see/wait_seconds" in row}
        assert lines["waiting for other members", name] == waits
    assert not (tmp_path / "page" / "figures").exists()


@pytest.mark.slow
def test_every_rescued_pair_is_in_the_rescue_browser(cli_here: Cli, unbroken: Any, tmp_path: Path) -> None:
    import pyarrow as pa

    from mutualrl.see.inspection import tables

    run = unbroken.path
    info, summary = (json.loads((run / name).read_text()) for name in ("run.json", "summary.json"))
    page, _, _ = make_report(cli_here, run, "--out", tmp_path / "page")
    records = page.rescues()
    for name, result in summary["policies"].items():
        policy_records = [record for record in records if record["policy"] == name]
        assert len(policy_records) == result["rescued_pairs"] > 0
        peer = "bob" if name == "ada" else "ada"
        peer_rows = pa.concat_tables(list(tables(run / "exchange", info["run_id"], [peer]))).to_pylist()
        texts = {(row["prompt_id"], row["rollout"], row["y_text"]) for row in peer_rows}
        lines = [json.loads(line) for line in (run / "policies" / name / "rescues.jsonl").read_text().splitlines()]
        for line in lines:
            assert (line["prompt_id"], line["rollout"], line["answer"]) in texts  # as published by the peer
            assert [each["reward"] for each in line["own"]] == [0.0] * 4
        assert [record["answer"] for record in policy_records] == [line["answer"] for line in lines]
        assert {record["peer"] for record in policy_records} == {peer}


@pytest.mark.extended
def test_live_crashed_and_failed_runs_have_pages(cli_here: Cli, tmp_path: Path) -> None:
    live = made_run(tmp_path / "live", "sgt", finished=False)
    with ExitStack() as stack:
        stack.enter_context(hold(RunDirectory(live).lock, "live"))
        page, data, summary = make_report(cli_here, live)
        assert data["runs"][0]["state"] == "running"
        assert any("still running" in note for note in summary["notes"])
        assert Path(summary["page"]) == live / "report" / "index.html"
        assert page.tables["table-2-1"][1][:4] == ["ada", "all", "0.300", "0.450"]
    page, data, summary = make_report(cli_here, live)
    assert data["runs"][0]["state"] == "ended"
    assert any("without a final status" in note for note in summary["notes"])
    (live / "supervisor").mkdir()
    for outcome, state in (
        ("peer-lost: policy 'bob' was lost <b>", "failed"),
        ("interrupted: stopped by SIGINT", "stopped"),
    ):
        (live / "supervisor" / "node-0.json").write_text(json.dumps({"outcome": outcome}))
        page, data, summary = make_report(cli_here, live)
        assert data["runs"][0]["state"] == state
        assert any(outcome.partition(": ")[2] in note for note in page.notes)


def test_ten_runs_are_compared_by_arm_with_mean_and_spread_over_seeds(cli_here: Cli, tmp_path: Path) -> None:
    runs = [made_run(tmp_path / f"grpo-{seed}", "grpo", seed=seed, gain=0.1) for seed in range(4)]
    runs += [made_run(tmp_path / f"sgt-{seed}", "sgt", seed=seed, gain=0.3) for seed in range(3)]
    runs += [
        made_run(tmp_path / f"naive-{seed}", "prp", seed=seed, gain=-0.1, settings={"denominator": "snapshot"})
        for seed in range(3)
    ]
    page, data, summary = make_report(cli_here, *runs, "--out", "page")
    assert all("it has no exchange" in note or "different seeds" in note for note in summary["notes"])
    head, *rows = page.tables["table-2-1"]
    assert head[:3] == ["regime", "finished runs", "seeds"]
    by_arm = {row[0]: row for row in rows}
    assert list(by_arm) == ["grpo", "prp (denominator=snapshot)", "sgt"]
    # by hand: ada 0.3 + gain + 0.01 seed; bob 0.02 more
    assert by_arm["grpo"][1:3] == ["4", "0, 1, 2, 3"]
    assert by_arm["grpo"][3] == "0.415 ± 0.013"
    assert by_arm["sgt"][4] == "0.630 ± 0.010"
    assert by_arm["sgt"][5] == "0.620 ± 0.010"
    assert by_arm["grpo"][6] == "20"
    assert by_arm["sgt"][6] == "10"
    assert by_arm["prp (denominator=snapshot)"][6] == "not reached"
    figures = {figure["name"].split("-", 4)[-1]: figure for figure in data["figures"]}
    assert set(figures) == {"probes", "regularizers", "gate", "prp-ablation", "sgt-variants", "groups"} - {
        "sgt-variants"
    }
    probe = {(p["title"], line["label"]): line for p in figures["probes"]["panels"] for line in p["lines"]}
    final = probe["ada: validation accuracy", "grpo"]
    assert (final["x"][0], final["x"][-1]) == (0, 20)
    assert final["y"][-1] == pytest.approx(0.415)
    assert final["high"][-1] - final["y"][-1] == pytest.approx(0.0129099, abs=1e-6)
    assert figures["probes"]["paper"].startswith("Outcome-level sharing gives")


def test_paper_figures_need_their_arms(tmp_path: Path) -> None:
    arms_of = {
        "xgrpo-ablation": [("grpo", {}), ("xgrpo", {}), ("grpo-noise", {}), ("xgrpo", {"pool": "shuffled"})],
        "sgt-variants": [("grpo", {}), ("sgt", {}), ("sgt", {"weight": 0.3}), ("sgt", {"teacher": "source"})],
        "fidelity": [("grpo", {}), ("trl", {})],
    }
    for name, arms in arms_of.items():
        runs = [
            made_run(tmp_path / name / f"{n}", regime, settings=settings) for n, (regime, settings) in enumerate(arms)
        ]
        (result,) = comparisons(read_runs(runs))
        assert any(figure.name == f"c-{name}" for figure in figures(result, "c")), name
        (result,) = comparisons(read_runs(runs[:1]))
        assert not any(figure.name == f"c-{name}" for figure in figures(result, "c")), name
    pools = [
        made_run(tmp_path / f"p{n}-{regime}", regime, pool=f"pool{n}", policies=names)
        for n, names in enumerate((("a", "b"), ("c", "d", "e")))
        for regime in ("grpo", "xgrpo")
    ]
    (figure,) = across(comparisons(read_runs(pools)))
    assert [panel.title for panel in figure.panels] == [f"arithmetic, pool pool{n}: mean of the pool" for n in (0, 1)]
    assert [line["value"].iloc[-1] for line in figure.panels[0].lines.values()] == pytest.approx([0.51, 0.51])


#: figures of docs/paper-map.md that `report` draws from training runs, with their recipes
FIGURES = {
    "Outcome-level sharing gives": ["2qwen-grpo", "2qwen-prp", "2qwen-xgrpo", "2qwen-sgt"],
    "The regimes have distinct optimization signatures": ["2qwen-grpo", "2qwen-prp", "2qwen-xgrpo", "2qwen-sgt"],
    "THL-aligned importance correction is required": ["2qwen-grpo", "2qwen-prp", "2qwen-prp-naive"],
    "XGRPO gains come from structured": ["2qwen-grpo", "2qwen-xgrpo", "2qwen-grpo-noise", "2qwen-xgrpo-shuffled"],
    "Outcome-level transfer extends": ["qa-3qwen-grpo", "qa-3qwen-sgt"],
}


def run_of(recipe: str, root: Path, **changes: Any) -> Path:
    """Write a run with the regime and settings of a paper recipe, on two small policies; return its directory."""
    settings = resolve(Request(recipe=Path("paper", recipe))).model_dump(mode="json")["regime"]
    return made_run(root, settings["name"], settings=settings, **changes)


@pytest.mark.parametrize("paper", FIGURES)
def test_every_figure_of_the_paper_map_is_drawn_from_its_recipes_with_every_arm(tmp_path: Path, paper: str) -> None:
    runs = [run_of(name, tmp_path / name) for name in FIGURES[paper]]
    (result,) = comparisons(read_runs(runs))
    (figure,) = [f for f in figures(result, "c") if f.paper.startswith(paper)]
    panels = [panel for panel in figure.panels if panel.lines or panel.bars]
    assert panels
    for panel in panels:
        labels = list(panel.lines) or [label for label in panel.bars if label != "before training"]
        assert sorted(labels) == sorted(result.arms)
    assert len(result.arms) == len(runs)


def test_main_figures_show_the_published_arms_and_captions_name_the_others(tmp_path: Path) -> None:
    names = ["grpo", "prp", "prp-naive", "xgrpo", "xgrpo-shuffled", "grpo-noise", "sgt", "sgt-gold"]
    runs = [run_of(f"2qwen-{name}", tmp_path / name) for name in names]
    (result,) = comparisons(read_runs(runs))
    drawn = {figure.name: figure for figure in figures(result, "c")}
    shown = {name: {label for panel in f.panels for label in panel.lines} for name, f in drawn.items()}
    regimes = {arm.partition(" ")[0] for arm in shown["c-probes"]}
    assert regimes == {"grpo", "prp", "xgrpo", "sgt"}
    assert shown["c-regularizers"] == shown["c-probes"]
    assert all(arm in drawn["c-probes"].caption for arm in set(result.arms) - shown["c-probes"])
    assert set().union(*shown.values()) == set(result.arms)
    assert any("denominator=snapshot" in arm for arm in shown["c-prp-ablation"])
    assert any("pool=shuffled" in arm for arm in shown["c-xgrpo-ablation"])


@pytest.mark.extended
def test_evaluations_are_drawn_as_bars_by_task(cli_here: Cli, tmp_path: Path) -> None:
    tasks = {name: {"n": 100, "max_new_tokens": 3072} for name in ("math", "arc")}
    runs = []
    for number, name in enumerate(("qa-3qwen-grpo", "qa-3qwen-sgt")):
        runs.append(run_of(name, tmp_path / name))
        models = {
            p: {"tasks": {"math": {"accuracy": 0.25 + number / 4}, "arc": {"accuracy": 0.5}}} for p in ("ada", "bob")
        }
        evaluation = {"suite": "paper", "samples": 1, "temperature": 0.0, "seed": 0, "tasks": tasks, "models": models}
        (runs[-1] / "evaluations").mkdir()
        write_checksummed(runs[-1] / "evaluations" / "paper.json", evaluation, root=runs[-1])
    initial = {p: {"tasks": {"math": {"accuracy": 0.125}, "arc": {"accuracy": 0.0}}} for p in ("ada", "bob")}
    before = {**evaluation, "initial": True, "models": initial}
    write_checksummed(runs[0] / "evaluations" / "paper.initial.json", before, root=runs[0])
    (runs[0] / "evaluations" / "torn.json").write_text('{"suite": ')
    _, data, summary = make_report(cli_here, *runs, "--out", "page")
    (figure,) = [figure for figure in data["figures"] if figure["paper"].startswith("Outcome-level transfer extends")]
    bars = {(panel["title"], bar["label"]): bar for panel in figure["panels"] for bar in panel["bars"]}
    labels = [bar["label"] for bar in figure["panels"][0]["bars"]]
    assert labels == ["before training", "grpo", "sgt"]
    assert bars["ada: accuracy by task", "before training"]["values"] == [0.125, 0.0]
    assert bars["ada: accuracy by task", "grpo"]["categories"] == ["math", "arc"]
    assert bars["ada: accuracy by task", "grpo"]["values"] == [0.25, 0.5]
    assert bars["bob: accuracy by task", "sgt"]["values"] == [0.5, 0.5]
    assert any("evaluations/torn.json is left out: not JSON" in note for note in summary["notes"])
    changed = json.loads((runs[1] / "evaluations" / "paper.json").read_text())
    changed["tasks"]["math"]["max_new_tokens"] = 1024  # another limit: not compared
    write_checksummed(runs[1] / "evaluations" / "paper.json", changed, root=runs[1])
    _, data, _ = make_report(cli_here, *runs, "--out", "page2")
    assert [len(f["panels"][0]["bars"]) for f in data["figures"] if "-tasks" in f["name"]] == [2, 1]


def test_distillation_is_drawn_as_bars(cli_here: Cli, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    bars = {"sequential distillation": {"points": -0.1, "relative": -0.2}, "sgt": {"points": 0.1, "relative": 0.25}}
    write_checksummed(tmp_path / "d" / "distill.json", {"learners": {"ada": {"bars": bars}}})
    _, data, _ = make_report(cli_here, tmp_path / "d", made_run(tmp_path / "r"), "--out", "page")
    (figure,) = [figure for figure in data["figures"] if figure["name"] == "distillation"]
    values = {bar["label"]: bar["values"] for bar in figure["panels"][0]["bars"]}
    assert values == {"sequential distillation": [-20.0], "sgt": [25.0]}
    (tmp_path / "d" / "distill.json").write_text("{")
    result = cli_here("report", tmp_path / "d", "--out", "page")
    assert result.returncode == 6
    assert "distill.json: not JSON" in result.stderr


def test_torn_and_damaged_lines_are_reported_and_the_rest_is_shown(cli_here: Cli, tmp_path: Path) -> None:
    run = with_rescues(made_run(tmp_path / "r", "sgt"), "ada", [rescue(1)])
    metrics = run / "policies" / "ada" / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    lines[3] = "not json\n"
    lines[6] = json.dumps({"step": "seven"}) + "\n"
    lines[8] = json.dumps({**json.loads(lines[8]), "reward": "NaN", "entropy": None, "kl": True}) + "\n"
    metrics.write_text("".join(lines) + '{"step": 21, "rew')
    page, data, summary = make_report(cli_here, run)
    message = " ".join(summary["notes"])
    assert "policies/ada/metrics.jsonl: its last line is incomplete" in message
    assert "policies/ada/metrics.jsonl: 2 lines are not valid records (4, 7)" in message
    lines_of = {
        (p["title"], line["label"]): line["x"] for f in data["figures"] for p in f["panels"] for line in p["lines"]
    }
    assert lines_of["training reward", "ada"] == [n for n in range(1, 21) if n not in (4, 7, 9)]
    assert lines_of["training reward", "bob"] == list(range(1, 21))
    assert len(page.rescues()) == 1


def test_empty_runs_have_pages_and_other_formats_and_invalid_paths_are_rejected(cli_here: Cli, tmp_path: Path) -> None:
    other = cli_here("report", made_run(tmp_path / "other", format=7))
    assert other.returncode == 2
    assert "format 7, this version reads 1; use the mutualrl that wrote it" in other.stderr
    empty = made_run(tmp_path / "empty", finished=False)
    shutil.rmtree(empty / "policies")
    _, data, summary = make_report(cli_here, empty)
    assert data["figures"] == []
    assert any("'ada' has no step" in note for note in summary["notes"])
    (empty / "recipe.yaml").write_text("{")
    _, _, summary = make_report(cli_here, empty)
    assert any("recipe.yaml is missing or was changed" in note for note in summary["notes"])
    set_recipe(empty, "{")
    _, _, summary = make_report(cli_here, empty)
    assert any("recipe.yaml is missing" in note for note in summary["notes"])
    assert any("no policies" in note for note in summary["notes"])
    for path, message in ((tmp_path, "it has no run.json"), (tmp_path / "none", "it does not exist")):
        result = cli_here("report", path, "--out", "page")
        assert (result.returncode, message in result.stderr) == (2, True), result.stderr
    (empty / "run.json").write_text("{")
    assert "run.json: not JSON" in cli_here("report", empty).stderr
    whole = made_run(tmp_path / "whole")
    result = cli_here("report", whole, tmp_path / "." / "whole", "--out", "page")
    assert (result.returncode, "given twice" in result.stderr) == (2, True)
    (tmp_path / "file").touch()
    result = cli_here("report", whole, "--out", tmp_path / "file")
    assert (result.returncode, "--out" in result.stderr) == (2, True)


def test_runs_of_different_tasks_or_settings_are_not_silently_compared(cli_here: Cli, tmp_path: Path) -> None:
    runs = [
        made_run(tmp_path / "a"),
        made_run(tmp_path / "b", "sgt", task="math"),
        made_run(tmp_path / "c", "sgt", steps=40),
        made_run(tmp_path / "d", seed=0),
    ]
    page, _, summary = make_report(cli_here, *runs, "--out", "page")
    message = " ".join(summary["notes"])
    assert "runs of different tasks (arithmetic, math) are not compared" in message
    assert "not matched: run.steps is 20 (a, d); 40 (c)" in message
    assert "grpo: duplicate seeds" in message
    assert "Run b" in page.text
    for name in ("a", "b", "c", "d"):
        runs.append(made_run(tmp_path / f"{name}2", task=f"task-{name}"))
    page, _, _ = make_report(cli_here, *runs[-2:], "--out", "page2")
    assert "Run c2: Greedy accuracy" in page.text
    assert "Run d2: Greedy accuracy" in page.text


def test_runs_with_the_same_name_are_distinguished(cli_here: Cli, tmp_path: Path) -> None:
    runs = [made_run(tmp_path / parent / "r", seed=n) for n, parent in enumerate(("one", "two"))]
    _, data, _ = make_report(cli_here, *runs, "--out", "page")
    assert [run["name"] for run in data["runs"]] == ["r", "two/r"]


def test_later_answers_come_from_the_exchange_and_damage_is_reported(cli_here: Cli, tmp_path: Path) -> None:
    run = with_rescues(
        made_run(tmp_path / "r", "sgt"), "ada", [rescue(1, "p"), rescue(1, "q"), rescue(3, "p"), rescue(1, "z")]
    )
    rounds = [
        [("p", 0.0, None), ("q", 0.0, None)],
        [("p", 0.0, None)],
        [("p", 0.0, None), ("p", 1.0, " \\boxed{6}")],
        [("q", 0.0, None)],
    ]
    publish(run, "ada", rounds)
    page, _, summary = make_report(cli_here, run)
    later = {(r["step"], n): r["later"] for n, r in enumerate(page.rescues())}
    at_1 = {"round": 1, "correct": 0, "of": 1, "text": None}
    at_3 = {"round": 3, "correct": 0, "of": 1, "text": None}
    assert later == {(1, 0): at_1, (1, 1): at_3, (1, 2): None, (3, 3): None}
    assert [record["visits"] for record in page.rescues()] == [[[0, 1], [1, 2]], [[0, 1]], [], []]
    shard = run / "exchange" / "ada" / "000002.parquet"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    page, _, summary = make_report(cli_here, run)
    assert [record["later"] for record in page.rescues()] == [at_1, "unknown", "unknown", None]
    assert any("round 2 of 'ada' is left out" in note for note in summary["notes"])


@pytest.mark.parametrize("with_control", [False, True])
def test_fractions_after_a_rescue_are_those_of_the_exchange(cli_here: Cli, tmp_path: Path, with_control: bool) -> None:
    """Recompute the summary above the cards with pyarrow, from the exchange and rescues.jsonl alone."""
    draw = random.Random(0)
    runs = {}
    for regime in ("sgt", "grpo") if with_control else ("sgt",):
        runs[regime] = made_run(tmp_path / regime, regime)
        rounds = []
        for _ in range(12):
            prompts = draw.sample(["p", "q", "s", "t"], 3)
            rounds.append([(prompt, float(draw.random() < 0.15), None) for prompt in prompts for _ in range(4)])
        for name in ("ada", "bob"):
            publish(runs[regime], name, rounds)

    def visits_of(run: Path) -> dict[str, list[tuple[int, int]]]:
        visits: dict[str, list[tuple[int, int]]] = {}
        for path in sorted((run / "exchange" / "ada").glob("*.parquet")):
            rows = pq.read_table(path).to_pylist()
            for key in {row["prompt_id"] for row in rows}:
                correct = sum(row["reward"] for row in rows if row["prompt_id"] == key)
                visits.setdefault(key, []).append((int(path.stem), int(correct)))
        return visits

    own = visits_of(runs["sgt"])
    failed = [(key, number) for key, each in own.items() for number, correct in each if correct == 0]
    rescued = [event for event in failed if event[0] != "t" and draw.random() < 0.6]
    with_rescues(runs["sgt"], "ada", [rescue(number + 1, key, round=number) for key, number in rescued])
    page, _, _ = make_report(cli_here, *runs.values(), "--out", tmp_path / "page")
    (rows,) = [rows for name, rows in page.tables.items() if name.startswith("rescued-")]

    def expected(visits: dict[str, list[tuple[int, int]]], events: list[tuple[str, int]], since: int) -> list[str]:
        later = [[c for n, c in visits[key] if n > number] for key, number in events]
        counts = [each[since - 1] for each in later if len(each) >= since]
        if not counts:
            return ["0", "", ""]
        solved = sum(c > 0 for c in counts) / len(counts)
        return [str(len(counts)), f"{solved:.3f}", f"{sum(counts) / (4 * len(counts)):.3f}"]

    if with_control:
        others = visits_of(runs["grpo"])
        keys = {key for key, _ in rescued}
        beside = [(key, number) for key, each in others.items() if key in keys for number, c in each if c == 0]
    else:
        others, beside = own, [event for event in failed if event not in rescued]
    assert len(rescued) > 5
    assert len(beside) > 5
    for since, row in enumerate(rows[1:], 1):
        assert row == ["ada", str(since), *expected(own, rescued, since), *expected(others, beside, since)]
    head = rows[0]
    assert head[5] == ("failed in grpo: visits" if with_control else "failed, not rescued: visits")


def test_page_fetches_nothing_and_escapes_hostile_text(cli_here: Cli, tmp_path: Path) -> None:
    run = made_run(tmp_path / "<i>r", "sgt", pool=HOSTILE, command=["mutualrl", HOSTILE])
    with_rescues(
        run, "ada", [rescue(1, prompt=HOSTILE, answer=HOSTILE, own=[{"text": HOSTILE, "reward": 0}], peer=HOSTILE)]
    )
    metrics = run / "policies" / "ada" / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    rows[4]["validation"]["by_group"][HOSTILE + "$\\frac{1}$"] = 0.5
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    page, _, _ = make_report(cli_here, run, "--out", "page")
    recipe = "../%3Ci%3Er/recipe.yaml"
    assert page.fetched.count(recipe) == 1
    assert [link for link in page.fetched if link != recipe] == []
    assert len([script for script in page.scripts if script.get("type") != "application/json"]) == 1
    assert "<img" not in page.text
    assert "\u202e" not in page.text
    assert "\x1b" not in page.text
    (record,) = page.rescues()
    assert record["prompt"].startswith("<script>document.title=")
    assert re.search(r"script-src 'sha256-[\w+/=]+'", page.text)
    assert not re.search(r"https?://(?!www\.w3\.org)", page.text)


def test_figures_for_papers_are_written_on_demand_with_captions(cli_here: Cli, tmp_path: Path) -> None:
    runs = [made_run(tmp_path / f"{name}-{seed}", name, seed=seed) for name in ("grpo", "sgt") for seed in range(2)]
    _, data, _ = make_report(cli_here, *runs, "--out", "page", "--figures", "drawn")
    names = {figure["name"] for figure in data["figures"]}
    assert {path.name for path in (tmp_path / "drawn").iterdir()} == {
        "captions.md",
        *(f"{name}.{kind}" for name in names for kind in ("png", "svg")),
    }
    captions = (tmp_path / "drawn" / "captions.md").read_text()
    assert all(f"**{name}**" in captions for name in names)
    assert "In the paper: Outcome-level sharing gives the best stability-support point" in captions
    probes = next(name for name in names if name.endswith("-probes"))
    drawing = (tmp_path / "drawn" / f"{probes}.svg").read_text()
    signs = Signs(["grpo", "sgt"])
    assert all(signs.colour(arm) in drawing for arm in ("grpo", "sgt"))
    assert (tmp_path / "drawn" / f"{probes}.png").read_bytes()[:4] == b"\x89PNG"
    (tmp_path / "taken").touch()
    result = cli_here("report", runs[0], "--figures", tmp_path / "taken")
    assert (result.returncode, "--figures" in result.stderr) == (2, True)


def test_every_table_and_verdict_of_the_page_is_in_its_json(cli_here: Cli, tmp_path: Path) -> None:
    runs = [made_run(tmp_path / f"{name}-{seed}", name, seed=seed) for name in ("grpo", "sgt") for seed in range(3)]
    publish(runs[3], "ada", [[("p", 0.0, None)], [("p", 1.0, None)]])
    with_rescues(runs[3], "ada", [rescue(1, "p")])
    page, data, _ = make_report(cli_here, *runs, "--out", "page")
    stored = [[list(map(str, table["head"])), *table["rows"]] for table in data["tables"]]
    shown = [rows for name, rows in page.tables.items() if re.match(r"(table|rescued|made)-", name)]
    assert len(shown) >= 5
    assert all(rows in stored for rows in shown)
    (verdict,) = data["verdicts"]
    assert verdict["word"] in page.text and verdict["number"] in page.text and verdict["interval"] in page.text
    rows = [(line["label"], line["y"]) for figure in data["figures"] for p in figure["panels"] for line in p["lines"]]
    assert {label for label, _ in rows} >= {"grpo", "sgt", "rescued"}


def notes_of(summary: dict[str, Any]) -> str:
    return " | ".join(summary["notes"])


@pytest.mark.extended
def test_lost_policy_or_unreadable_result_has_no_final_accuracy(cli_here: Cli, tmp_path: Path) -> None:
    complete, lost = (made_run(tmp_path / f"r{n}", seed=n) for n in range(2))
    summary = json.loads((lost / "summary.json").read_text())
    summary["policies"].pop("bob")
    write_checksummed(lost / "summary.json", {**summary, "lost": ["bob"]}, root=lost)
    (lost / "policies" / "bob" / "result.json").unlink()
    metrics = lost / "policies" / "bob" / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:6]))
    page, data, output = make_report(cli_here, complete, lost, "--out", "page")
    assert "policy 'bob' was lost during the run" in notes_of(output)
    (row,) = page.tables["table-2-1"][1:]
    assert row[3:6] == ["0.505 ± 0.007", "0.520", "0.510"]  # bob and the pool: only of the complete run
    probe = {
        (p["title"], line["label"]): line["x"][-1] for f in data["figures"] for p in f["panels"] for line in p["lines"]
    }
    assert probe["ada: validation accuracy", "grpo"] == probe["bob: validation accuracy", "grpo"] == 20
    (complete / "policies" / "ada" / "result.json").write_text("{")
    page, _, output = make_report(cli_here, complete)
    assert page.tables["table-2-1"][1][:5] == ["ada", "all", "0.300", "0.500", "20"]  # the summary has it too
    (complete / "summary.json").write_text("{}")
    (complete / "supervisor").mkdir()
    (complete / "supervisor" / "node-0.json").write_text('{"outcome": "finished"}')
    _, data, output = make_report(cli_here, complete)
    assert data["runs"][0]["state"] == "ended"
    assert "summary.json is left out: its bytes do not match its checksum" in notes_of(output)
    assert "it finished but has no readable summary" in notes_of(output)


def test_reaching_grpos_accuracy_counts_from_step_0_over_finished_runs(cli_here: Cli, tmp_path: Path) -> None:
    runs = [
        made_run(tmp_path / "g", gain=-0.1),
        made_run(tmp_path / "s", "sgt", gain=-0.05),
        made_run(tmp_path / "killed", seed=1, gain=-0.25, finished=False),
    ]
    page, _, _ = make_report(cli_here, *runs, "--out", "page")
    assert [row[-1] for row in page.tables["table-2-1"][1:]] == ["0", "0"]


def test_differing_data_versions_and_seeds_are_reported(cli_here: Cli, tmp_path: Path) -> None:
    plan = {"task": "arithmetic", "prompts_per_round": 8, "data_sha256": "a" * 64}
    one = made_run(tmp_path / "one", fingerprint=plan)
    other = made_run(
        tmp_path / "other", "sgt", fingerprint={**plan, "data_sha256": "b" * 64}, versions={"mutualrl": "0.0.1"}
    )
    third = made_run(tmp_path / "third", "sgt", seed=3, fingerprint=plan)
    _, _, summary = make_report(cli_here, one, other, third, "--out", "page")
    assert "the training data of seed 0 are aaaaaaaaaaaa (one); bbbbbbbbbbbb (other)" in notes_of(summary)
    assert "made by mutualrl 0.1.0, trl ?, torch ? (one, third); mutualrl 0.0.1" in notes_of(summary)
    assert "the arms have different seeds: grpo 0; sgt 0, 3" in notes_of(summary)


def test_every_arm_is_drawn_and_settings_of_a_policy_make_an_arm(tmp_path: Path) -> None:
    runs = [made_run(tmp_path / "g"), made_run(tmp_path / "s", "sgt")]
    runs += [made_run(tmp_path / f"x{n}", "xgrpo", settings={"mix": 0.1 * n + 0.25}) for n in range(5)]
    (result,) = comparisons(read_runs(runs))
    drawn = {label for figure in figures(result, "c") for panel in figure.panels for label in panel.lines}
    assert drawn == set(result.arms)
    policy_settings = {"weight": 0.9, "success_above": 0.5}
    edit_recipe(runs[1], lambda recipe: recipe["policies"][1].update(regime=policy_settings))
    (run,) = read_runs(runs[1:2])
    assert run.arm == "sgt (bob: success_above=0.5, bob: weight=0.9)"
    assert (run.success_above("ada"), run.success_above("bob")) == (0.8, 0.5)
    tasks = [
        made_run(tmp_path / f"{task}-{regime}", regime, task=task)
        for task in ("arithmetic", "math")
        for regime in ("grpo", "xgrpo")
    ]
    assert across(comparisons(read_runs(tasks))) == []


@pytest.mark.extended
def test_malformed_files_have_a_page_or_an_error_message(cli_here: Cli, tmp_path: Path) -> None:
    def variant(name: str, recipe: str | None = None, **changes: Any) -> Path:
        run = made_run(tmp_path / "runs" / name, "sgt", steps=60, **changes)
        if recipe is not None:
            set_recipe(run, recipe)
        return run

    def metric(run: Path, number: int, **changes: Any) -> Path:
        path = run / "policies" / "ada" / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True)
        lines[number] = json.dumps({**json.loads(lines[number]), **changes}) + "\n"
        path.write_text("".join(lines))
        return run

    huge = metric(variant("huge"), 3, reward=10**400, entropy=1.7e308, kl=float("nan"))
    runs = [
        metric(huge, 4, validation={"accuracy": 0.4, "by_group": {"+": float("nan"), "*": 0.3, "": 0.1}}),
        variant("date", recipe="regime: {name: sgt}\nrun: {note: 2026-99-99}\n"),
        variant("deep", recipe="[" * 3000),
        variant("five", recipe="policies: 5\n"),
        variant(
            "nameless",
            recipe="policies: [{model: x}, 3, {name: ../../huge/policies/ada}, {name: /etc}, {name: 'a\\0'}]\n",
        ),
        variant("keys", recipe="task: {name: a, 3: b, null: c}\n"),
        variant("regime", recipe="regime: [sgt]\n"),
    ]
    for run in runs:
        assert set(read_runs([run])[0].policies) == {"ada", "bob"}, run
    _, data, _ = make_report(cli_here, *runs, "--out", tmp_path / "all")
    assert len(data["runs"]) == len(runs)
    make_report(cli_here, huge)
    (tmp_path / "runs" / "lock").mkdir()
    locked = variant("locked", finished=False)
    (locked / ".node-0.lock").mkdir()
    _, data, summary = make_report(cli_here, locked)
    assert data["runs"][0]["state"] == "unknown"
    assert "cannot determine whether it is running" in notes_of(summary)
    listed = json.loads(cli_here("runs", "ls", tmp_path / "runs", "--json").stdout)
    assert len(listed["runs"]) == len(runs) + 1
    for bad in ({"learners": {"a": 5}}, {"learners": {"a": {"bars": {"sgt": {"relative": float("nan")}}}}}):
        (tmp_path / "d").mkdir(exist_ok=True)
        (tmp_path / "d" / "distill.json").write_text(json.dumps(bad))
        assert cli_here("report", tmp_path / "d", "--out", "page").returncode in (2, 6)


def test_page_says_nothing_of_peers_to_one_policy_nor_of_texts_where_none_is_taught(cli: Cli, tmp_path: Path) -> None:
    """A gate of `none` for one of two policies is enough: not all texts are rescues."""
    alone = made_run(tmp_path / "alone", "sgt", policies=("ada",))
    _, data, _ = make_report(cli, alone, "--out", tmp_path / "page")
    assert "waiting for other members" not in json.dumps(data)
    pair = made_run(tmp_path / "pair", "guided")
    _, data, _ = make_report(cli, pair, "--out", tmp_path / "page-2")
    assert "texts taught" not in json.dumps(data)
    (table,) = [table for table in data["tables"] if table["title"] == "Policies"]
    assert "waited (s)" in table["head"]
    assert "waiting for other members" in json.dumps(data)
    mixed = made_run(tmp_path / "mixed", "sgt")
    edit_recipe(mixed, lambda recipe: recipe["policies"][1].update(regime={"gate": "none"}))
    (run,) = read_runs([mixed])
    assert (run.gates, run.gated) == ({"all", "none"}, False)


def test_what_a_hint_led_to_is_said_to_be_the_policys_own(cli: Cli, tmp_path: Path) -> None:
    lines = [rescue(3, hint=" \\boxed{6}"), rescue(5)]
    for number, some in enumerate((lines[:1], lines)):
        run = with_rescues(made_run(tmp_path / f"r{number}", "hinted"), "ada", some)
        make_report(cli, run, "--out", tmp_path / f"page{number}")
        text = (tmp_path / f"page{number}" / "index.html").read_text()
        assert "its own confirmed answer to a peer's or a source's success as a hint" in text
        assert ("or that success itself" in text) == (len(some) == 2), "one was taught as it is"


@pytest.mark.parametrize(
    ("regime", "settings", "word"),
    [
        ("sgt", {}, "rescued"),
        ("hinted", {}, "rescued"),
        ("sgt", {"gate": "any"}, "taught"),
        ("sgt", {"gate": "relative"}, "taught"),
        ("sgt", {"gate": "none"}, "taught"),
        ("chord", {}, "taught"),
    ],
)
def test_only_what_a_gate_opened_for_is_called_a_rescue(
    cli: Cli, tmp_path: Path, regime: str, settings: dict[str, Any], word: str
) -> None:
    run = with_rescues(made_run(tmp_path / "r", regime, settings=settings), "ada", [rescue(3), rescue(5)])
    page, data, _ = make_report(cli, run, "--out", tmp_path / "page")
    text = (tmp_path / "page" / "index.html").read_text()
    assert f"What was {word}?" in text
    assert ("A rescue: a prompt" in text) == (word == "rescued")
    assert ("bob's success" in text) <= (word == "rescued")
    assert "success as a hint" not in text, "no card has one"
    assert {record["gated"] for record in page.rescues()} == {word == "rescued"}
    assert [f["name"] for f in data["figures"] if "after-a-rescue" in f["name"]] == []  # no exchange: nothing followed
