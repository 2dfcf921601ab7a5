"""Kills at every named point of a run and at random ones: is the result that of an undisturbed run?

    python benchmarks/kill_matrix.py     # about 50 minutes on 2 cores

First the named points (`pytest -m "extended or release or slow" tests/faults/test_kills.py` runs the same cases). Then
random kills: runs of the tiny pool under `sgt`, each killed with SIGKILL at a random moment in a random process
(supervisor, agent or worker of either policy), repeatedly, and resumed if the supervisor was killed. After each run:
`runs verify`, the weights byte for byte, each step once in metrics.jsonl, each round used once, no process left. Writes
benchmarks/results/kill_matrix.{json,md}."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from hashlib import sha256
from pathlib import Path
from typing import Any

import psutil

import harness

ROOT = Path(__file__).resolve().parents[1]
KILLS = "tests/faults/test_kills.py"
COMMAND = "python benchmarks/kill_matrix.py"
STEPS = 24
OPTIONS = [
    "--steps",
    str(STEPS),
    "--set",
    "round.optimizer_steps=2",
    "--set",
    "round.prompts=16",
    "--set",
    "run.save_every=3",
    "--set",
    "trainer.per_device_train_batch_size=32",
    "--set",
    "run.validate_every=0",
    "--set",
    "run.validation_limit=4",
    "--set",
    "run.keep_checkpoints=1",
    "--set",
    "run.max_restarts=50",
]


def start(run: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Start `mutualrl train` in the background, and return its process."""
    command = [sys.executable, "-m", "mutualrl", "train", "--run-dir", str(run), *arguments]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=(run.parent / "stderr.txt").open("ab"))


def processes(run: Path) -> dict[str, psutil.Process]:
    """Return the live processes of a run, by kind."""
    live = {}
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if f"--run-dir={run}" not in line:
            continue
        policy = next(w for w in line if w.startswith("--policy=")).removeprefix("--policy=")
        live[f"{'worker' if 'mutualrl.training.worker' in line else 'agent'} of {policy}"] = process
    return live


def weights(run: Path) -> dict[str, str]:
    """Return the sha256 of the trained weights, by policy."""
    paths = sorted((run / "policies").glob("*/model/model.safetensors"))
    return {p.parent.parent.name: sha256(p.read_bytes()).hexdigest() for p in paths}


def killed_run(run: Path, kills: int, rng: random.Random, longest: float) -> tuple[Counter[str], int]:
    """Make a run with up to `kills` kills at random moments, and return the victims and the number of resumes."""
    victims: Counter[str] = Counter()
    process, resumed = start(run, "--regime", "sgt", "--pool", "tiny", *OPTIONS), 0
    next_kill = time.monotonic() + rng.uniform(0.5, longest)
    while True:
        code = process.poll()
        if code == 0:
            return victims, resumed
        if code is not None and code >= 0:
            raise SystemExit(f"{run}: exit code {code}\n{(run.parent / 'stderr.txt').read_text()[-3000:]}")
        if code is not None and (run / "summary.json").exists():  # killed after the last write of the run
            return victims, resumed
        if code is not None:  # the supervisor was killed
            resumed += 1
            began = time.monotonic()
            while processes(run):
                if time.monotonic() - began > 5:
                    raise SystemExit(f"{run}: processes left 5 s after the supervisor: {processes(run)}")
                time.sleep(0.1)
            arguments = ["--resume"] if (run / "run.json").exists() else ["--clean", "--regime", "sgt", *OPTIONS]
            process = start(run, *arguments)
            next_kill = time.monotonic() + rng.uniform(0.5, longest)
        if sum(victims.values()) < kills and time.monotonic() >= next_kill:
            candidates: dict[str, Any] = {**processes(run), "supervisor": process}
            name = rng.choice(sorted(candidates))
            try:
                candidates[name].kill()
            except psutil.NoSuchProcess:
                continue
            process.wait() if name == "supervisor" else None
            victims[name] += 1
            next_kill = time.monotonic() + rng.uniform(0.5, longest)
        time.sleep(0.02)


def problems(run: Path, reference: dict[str, str]) -> list[str]:
    """Return the differences from an undisturbed run."""
    lines = []
    verify = subprocess.run(
        [sys.executable, "-m", "mutualrl", "runs", "verify", str(run)], capture_output=True, check=False
    )
    if verify.returncode:
        lines.append(f"runs verify: {verify.returncode}")
    if weights(run) != reference:
        lines.append("weights differ")
    for policy in reference:
        metrics = [json.loads(x) for x in (run / "policies" / policy / "metrics.jsonl").read_text().splitlines()]
        if [m["step"] for m in metrics] != list(range(1, STEPS + 1)):
            lines.append(f"{policy}: steps {[m['step'] for m in metrics]}")
        if [m["see/round"] for m in metrics if "see/round" in m] != list(range(STEPS // 2)):
            lines.append(f"{policy}: rounds used")
    return lines + [f"left: {name}" for name in processes(run)]


def random_kills(count: int, seed: int, longest: float) -> dict[str, Any]:
    """Make runs until there were `count` kills, each at most `longest` seconds after the one before; return their
    outcomes."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        plain = Path(name) / "plain" / "r"
        plain.parent.mkdir()
        if start(plain, "--regime", "sgt", "--pool", "tiny", *OPTIONS).wait() != 0:
            raise SystemExit((plain.parent / "stderr.txt").read_text())
        reference = weights(plain)
        victims: Counter[str] = Counter()
        runs: list[dict[str, object]] = []
        while sum(victims.values()) < count:
            run = Path(name) / str(len(runs)) / "r"
            run.parent.mkdir()
            hits, resumed = killed_run(run, min(6, count - sum(victims.values())), rng, longest)
            victims += hits
            runs.append({"kills": sum(hits.values()), "resumed": resumed, "problems": problems(run, reference)})
            print(f"run {len(runs)}: {dict(hits)}, {runs[-1]}", flush=True)
    return {"kills": sum(victims.values()), "victims": dict(sorted(victims.items())), "runs": runs, "seed": seed}


def named_points() -> list[dict[str, Any]]:
    """Return the cases of tests/faults/test_kills.py, as reported by pytest. Kills of one run share its verdict."""
    with tempfile.TemporaryDirectory() as name:
        report = Path(name) / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-m",
            "extended or release or slow",
            KILLS,
            f"--junit-xml={report}",
        ]
        subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.DEVNULL)
        cases = []
        for case in ET.parse(report).iter("testcase"):
            kills = json.loads(next(p.attrib["value"] for p in case.iter("property") if p.attrib["name"] == "kills"))
            passed = case.find("failure") is None and case.find("error") is None
            cases += [{"point": point, "victim": victim, "passed": passed} for point, victim, _ in kills]
    return cases


def markdown(cases: list[dict[str, Any]], result: dict[str, Any]) -> str:
    """Return the table of the note."""
    lines = ["| killed | where | kills | resumed, and byte for byte the undisturbed run |", "|---|---|---|---|"]
    for victim in ("worker", "agent", "supervisor"):
        of_victim = [c for c in cases if c["victim"] == victim]
        points = ", ".join(c["point"] for c in of_victim)
        lines.append(f"| {victim} | {points} | {len(of_victim)} | {sum(c['passed'] for c in of_victim)} |")
    good = sum(r["kills"] for r in result["runs"] if not r["problems"])
    victims = ", ".join(f"{name} {count}" for name, count in result["victims"].items())
    lines.append(f"| at random: {victims} | any moment of {len(result['runs'])} runs | {result['kills']} | {good} |")
    return "\n".join(lines)


def main() -> None:
    """Kill, compare, write, print."""
    parser = harness.options(__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = harness.parse(parser)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    result = random_kills(1 if args.smoke else args.kills, args.seed, longest=4 if args.smoke else 6)
    cases = [] if args.smoke else named_points()
    text = markdown(cases, result)
    content = {"command": COMMAND, "points": cases, "random": result}
    harness.write(args.out, "kill_matrix", content, text)


if __name__ == "__main__":
    main()
