"""Random kills and random damages: does a run ever end differently, or is a damaged file ever accepted?

    python benchmarks/fuzz.py                                  # 100 schedules and 500 damages: hours on 2 cores
    python benchmarks/fuzz.py --schedules 10 --damages 100     # continues where an earlier call ended

A schedule disturbs a run up to four times at random moments: SIGKILL to a worker, an agent or the supervisor; SIGINT or
SIGTERM to the supervisor; SIGSTOP to a worker, for less or for more than `run.peer_timeout`. Killed and stopped runs
are resumed. Variants: every regime, two and three policies, two ranks, LoRA, `num_iterations` 2. It must end like the
same run without disturbances: the same weights byte for byte, each step once, `runs verify` without a finding, no
process left.

A damage changes one file of a finished run, a stopped run or an evaluation (a flipped bit, a cut, an insertion, another
file's content, a JSON value of another kind, a removal, a pipe in its place), and one command reads the directory:
it must reject the file by name, report what it left out, or give the same result as without the damage.

Every schedule and damage is determined by its number and `--seed`. Writes benchmarks/results/fuzz.{json,md}: the
outcome of each, and the table of classes. Earlier outcomes under the same seed are kept."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from typer.testing import CliRunner

import harness
from mutualrl.cli.app import app
from mutualrl.errors import MutualRLError
from mutualrl.process.limits import time_limit

COMMAND = "python benchmarks/fuzz.py"
STEPS = 6
SCHEDULE_SECONDS = 600.0  # a run that has not ended by then counts as a hang
DAMAGE_SECONDS = 180.0  # a command that has not ended by then counts as a hang
PEER_TIMEOUT = 8.0
COMMON = (
    *("--steps", str(STEPS), "--set", "round.optimizer_steps=2", "--set", "round.prompts=16"),
    *("--set", "trainer.per_device_train_batch_size=32", "--set", "run.save_every=2"),
    *("--set", "run.validate_every=0", "--set", "run.validation_limit=4", "--set", "run.keep_checkpoints=2"),
    *("--set", "run.max_restarts=20", "--set", f"run.peer_timeout={PEER_TIMEOUT}", "--no-report"),
)
TWO_RANKS = ("--pool", "tiny", "--set", "launch.processes=2", "--set", "trainer.per_device_train_batch_size=16")
LORA = ("--set", "lora={r: 4}")
TWICE = ("--set", "trainer.num_iterations=2")
VARIANTS: dict[str, tuple[str, ...]] = {
    "sgt, three policies": ("--regime", "sgt", "--pool", "tiny-three"),
    "xgrpo, three policies": ("--regime", "xgrpo", "--pool", "tiny-three"),
    "prp, three policies": ("--regime", "prp", "--pool", "tiny-three"),
    "grpo, every field": ("--regime", "grpo", "--pool", "tiny", "--exchange", "full"),
    "grpo-noise": ("--regime", "grpo-noise", "--pool", "tiny"),
    "sgt, two ranks": ("--regime", "sgt", *TWO_RANKS),
    "xgrpo, two ranks": ("--regime", "xgrpo", *TWO_RANKS),
    "prp, LoRA": ("--regime", "prp", "--pool", "tiny", *LORA),
    "sgt, LoRA, num_iterations 2": ("--regime", "sgt", "--pool", "tiny", *LORA, *TWICE),
    "prp, num_iterations 2": ("--regime", "prp", "--pool", "tiny", *TWICE),
}


# ---- schedules


def start(run: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Start `mutualrl train` in the background, and return its process."""
    command = [sys.executable, "-m", "mutualrl", "train", "--run-dir", str(run), *arguments]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=(run.parent / "stderr.txt").open("ab"))


def processes(run: Path) -> list[psutil.Process]:
    """Return the live processes of a run below its supervisor: agents, launchers, workers."""
    live = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if f"--run-dir={run}" in (process.info["cmdline"] or []) and process.info["status"] != psutil.STATUS_ZOMBIE:
            live.append(process)
    return live


def weights(run: Path) -> dict[str, str]:
    """Return the sha256 of the trained weights, by policy."""
    paths = sorted((run / "policies").glob("*/model/model.safetensors"))
    return {p.parent.parent.name: sha256(p.read_bytes()).hexdigest() for p in paths}


class Disturbance(NamedTuple):
    """One action on a run, and its delay in seconds after the previous one."""

    delay: float
    action: str


ACTIONS = ("kill worker", "kill worker", "kill agent", "kill supervisor", "SIGINT", "SIGTERM", "freeze", "pause")


def schedule(seed: int, number: int) -> tuple[str, list[Disturbance]]:
    """Return the variant and the disturbances of a schedule."""
    rng = random.Random(f"{seed} schedule {number}")
    names = list(VARIANTS)
    count = rng.randint(1, 4)
    return names[number % len(names)], [Disturbance(rng.uniform(0.5, 12), rng.choice(ACTIONS)) for _ in range(count)]


def disturb(run: Path, supervisor: subprocess.Popen[bytes], action: str, rng: random.Random) -> None:
    """Carry out one disturbance, if there is a live process of its kind."""
    if action == "kill supervisor":
        supervisor.kill()
        return
    if action in ("SIGINT", "SIGTERM"):
        supervisor.send_signal(getattr(signal, action))
        return
    module = "mutualrl.launch.agent" if action == "kill agent" else "mutualrl.training.worker"
    chosen = [process for process in processes(run) if module in " ".join(process.cmdline())]
    if not chosen:
        return
    victim = rng.choice(sorted(chosen, key=lambda process: process.pid))
    try:
        if action.startswith("kill"):
            victim.kill()
            return
        victim.suspend()
        time.sleep(2 * PEER_TIMEOUT if action == "freeze" else PEER_TIMEOUT / 3)
        victim.resume()
    except psutil.NoSuchProcess:
        return


def disturbed(run: Path, variant: str, disturbances: list[Disturbance], seed: str) -> str | None:
    """Carry out a run with its disturbances, resumed until it ends. Return the problem, or None."""
    rng = random.Random(seed)
    arguments = (*COMMON, *VARIANTS[variant])
    process, deadline = start(run, *arguments), time.monotonic() + SCHEDULE_SECONDS
    for disturbance in disturbances:
        until = time.monotonic() + disturbance.delay
        while time.monotonic() < until and process.poll() is None:
            time.sleep(0.05)
        if process.poll() is None:
            disturb(run, process, disturbance.action, rng)
        if (code := _code(process, deadline, patient=disturbance.action in ("SIGINT", "SIGTERM"))) is None:
            continue
        if code == 0 or (run / "summary.json").exists():  # the signal came after the end of the run
            return None
        if code in (1, 2, 4, 5, 6):
            return _ended(run, code)
        process = _resumed(run, arguments)
    while True:
        code = _code(process, deadline, patient=True)
        if code is None:
            return "hang: not ended in time"
        if code == 0 or (run / "summary.json").exists():
            return None
        if code != 130 and code >= 0:
            return _ended(run, code)
        process = _resumed(run, arguments)


def _code(process: subprocess.Popen[bytes], deadline: float, *, patient: bool) -> int | None:
    """Return the exit code of a run; None while it is running or after the deadline."""
    try:
        return process.wait(max(0.1, deadline - time.monotonic()) if patient else 0.2)
    except subprocess.TimeoutExpired:
        return None


def _ended(run: Path, code: int) -> str:
    errors = (run.parent / "stderr.txt").read_text()
    kind = "traceback" if "Traceback" in errors else "refused"
    return f"{kind}: exit code {code}: {errors.strip().splitlines()[-1][:300]}"


def _resumed(run: Path, arguments: tuple[str, ...]) -> subprocess.Popen[bytes]:
    """Restart a run once its processes have exited, which takes seconds after their supervisor's exit."""
    until = time.monotonic() + 20
    while processes(run) and time.monotonic() < until:
        time.sleep(0.1)
    return start(run, "--resume") if (run / "run.json").exists() else start(run, "--clean", *arguments)


def compared(run: Path, reference: dict[str, str]) -> str | None:
    """Return the difference of an ended run from the undisturbed one, or None."""
    command = [sys.executable, "-m", "mutualrl", "runs", "verify", str(run)]
    verified = subprocess.run(command, capture_output=True, text=True, check=False)
    if verified.returncode:
        return f"wrong: runs verify: {verified.stderr.strip()[:300]}"
    if weights(run) != reference:
        return "wrong: the weights differ"
    for policy in reference:
        lines = (run / "policies" / policy / "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(line)["step"] for line in lines]
        if steps != list(range(1, STEPS + 1)):
            return f"wrong: {policy} has steps {steps}"
    if remaining := processes(run):
        return f"wrong: processes left: {remaining}"
    return None


def references(directory: Path, known: dict[str, dict[str, str]], variants: set[str]) -> dict[str, dict[str, str]]:
    """Return the weights of each variant's undisturbed run."""
    for variant in sorted(variants - set(known)):
        run = directory / f"reference-{list(VARIANTS).index(variant)}" / "r"
        run.parent.mkdir()
        if start(run, *COMMON, *VARIANTS[variant]).wait() != 0:
            raise SystemExit((run.parent / "stderr.txt").read_text())
        known[variant] = weights(run)
        print(f"reference: {variant}", flush=True)
    return known


def run_schedules(seed: int, numbers: list[int], outcomes: dict[str, Any], save: Callable[[], None]) -> None:
    """Carry out schedules, keeping each outcome immediately."""
    with tempfile.TemporaryDirectory() as name:
        known: dict[str, dict[str, str]] = {}
        for number in numbers:
            variant, disturbances = schedule(seed, number)
            reference = references(Path(name), known, {variant})[variant]
            run = Path(name) / f"schedule-{number}" / "r"
            run.parent.mkdir()
            problem = disturbed(run, variant, disturbances, f"{seed} victims {number}")
            problem = problem or compared(run, reference)
            for process in processes(run):
                process.kill()
            outcomes[str(number)] = {
                "variant": variant,
                "disturbances": [f"{d.action} after {d.delay:.1f} s" for d in disturbances],
                "outcome": (problem or "as undisturbed").partition(":")[0],
                "words": problem or "",
            }
            save()
            print(f"schedule {number}: {outcomes[str(number)]}", flush=True)
            shutil.rmtree(run.parent)


# ---- damages


class Place(NamedTuple):
    """Directory that is damaged, and the commands that read it."""

    root: Path
    commands: tuple[tuple[str, ...], ...]


KINDS = ("alone", "distilled", "evaluated", "finished", "stopped")


def places(directory: Path, kinds: Collection[str] = KINDS) -> dict[str, Place]:
    """Make the directories to damage: a finished run with adapters and an evaluation, a stopped run, a separate
    evaluation, a standalone run, a distillation of it."""

    def mutualrl(*arguments: str | Path, expected: int = 0) -> None:
        command = [sys.executable, "-m", "mutualrl", *map(str, arguments)]
        result = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
        if result.returncode != expected:
            raise SystemExit(f"{command}: {result.returncode}\n{result.stderr}")

    short = ("--limit", "6", "--max-new-tokens", "4", "--engine", "transformers")
    distilled = ("paper", "distill", "alone", "--set", "limit=8", "--set", "lora=null", "--engine", "transformers")
    if "finished" in kinds:
        mutualrl("train", "--regime", "sgt", "--pool", "tiny", *LORA, *COMMON, "--run-dir", "finished")
        mutualrl("eval", "--run", "finished", *short)
    if "evaluated" in kinds:
        mutualrl("eval", "--pool", "tiny", *short, "--out", "evaluated")
    if {"alone", "distilled"} & set(kinds):
        mutualrl("train", "--regime", "grpo", "--pool", "tiny", "--exchange", "full", *COMMON, "--run-dir", "alone")
    if "distilled" in kinds:
        mutualrl(*distilled, "--out", "distilled")
    if "stopped" in kinds:
        _stop_a_run(directory / "stopped")
    read_commands: tuple[tuple[str, ...], ...] = (
        ("report", "DIR", "--out", "page", "--json"),
        ("runs", "ls", "DIR", "--json"),
        ("runs", "verify", "DIR", "--json"),
        ("exchange", "export", "DIR", "--out", "all.jsonl", "--json"),
        ("complementarity", "--run", "DIR", "--json"),
    )
    directories = {
        "finished": Place(directory / "finished", (*read_commands, ("eval", "--run", "DIR", *short, "--json"))),
        "stopped": Place(directory / "stopped", (*read_commands, ("train", "--resume", "--run-dir", "DIR", "--json"))),
        "alone": Place(
            directory / "alone",
            (("paper", "distill", "DIR", *distilled[3:], "--out", "again", "--json"), *read_commands),
        ),
        "evaluated": Place(directory / "evaluated", (("eval", "--pool", "tiny", *short, "--out", "DIR", "--json"),)),
        "distilled": Place(directory / "distilled", ((*distilled, "--out", "DIR", "--json"),)),
    }
    return {kind: place for kind, place in directories.items() if kind in kinds}


def _stop_a_run(stopped: Path) -> None:
    """Make a run that was stopped at its fourth step."""
    process = subprocess.Popen(
        [sys.executable, "-m", "mutualrl", "train", "--regime", "sgt", "--pool", "tiny", *COMMON, "--run-dir", stopped],
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    while not list(stopped.glob("policies/bob/checkpoints/step-000004/complete.json")):
        if process.poll() is not None:
            raise SystemExit("the run that was to be stopped has ended")
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    if process.wait() != 130:
        raise SystemExit("the run ended before it was stopped")


def flip(data: bytes, rng: random.Random) -> bytes:
    """Return bytes with a bit flipped."""
    changed = bytearray(data)
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def mutated(value: Any, rng: random.Random) -> Any:
    """Return a JSON value with one inner value replaced by one of another kind, or removed."""
    if isinstance(value, dict) and value:
        key = rng.choice(sorted(value))
        if rng.random() < 0.3:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: mutated(value[key], rng)}
    if isinstance(value, list) and value:
        index = rng.randrange(len(value))
        return [*value[:index], mutated(value[index], rng), *value[index + 1 :]]
    return rng.choice([None, 0, -1, 10**30, 1.5, "x", "", [], {}, True, "../../etc/passwd"])


DAMAGES = ("flip", "cut", "empty", "insert", "swap", "json", "remove", "pipe", "digit")


def damage(root: Path, rng: random.Random) -> str:
    """Damage one file below a directory, and return a description."""
    files = sorted(path for path in root.rglob("*") if path.is_file() and ".lock" not in path.name)
    path = rng.choice([file for file in files if file.stat().st_size])
    kind, data = rng.choice(DAMAGES), path.read_bytes()
    if kind == "json" and path.suffix not in (".json", ".jsonl"):
        kind = "flip"
    if kind == "flip":
        path.write_bytes(flip(data, rng))
    elif kind == "cut":
        path.write_bytes(data[: rng.randrange(len(data))])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "insert":
        index = rng.randrange(len(data))
        path.write_bytes(data[:index] + rng.randbytes(rng.randint(1, 9)) + data[index:])
    elif kind == "swap":
        similar = [file for file in files if file.suffix == path.suffix and file.read_bytes() != data]
        path.write_bytes(rng.choice(similar).read_bytes() if similar else flip(data, rng))
    elif kind == "json":
        *lines, last = [line for line in data.splitlines() if line.strip()]
        try:
            lines.append(json.dumps(mutated(json.loads(last), rng)).encode())
        except ValueError:
            lines.append(flip(last, rng))
        path.write_bytes(b"\n".join(lines) + b"\n")
    elif kind == "digit":
        digits = [index for index, byte in enumerate(data) if byte in b"0123456789"]
        if digits:
            index = rng.choice(digits)
            data = data[:index] + str((int(chr(data[index])) + 1) % 10).encode() + data[index + 1 :]
        path.write_bytes(data)
    else:
        path.unlink()
        if kind == "pipe":
            os.mkfifo(path)
    return f"{kind} {path.relative_to(root)}"


class Answer(NamedTuple):
    """Outcome of a command on a directory."""

    code: int
    result: Any
    errors: str
    notes: list[str]


#: result keys that differ between calls, or are compared separately
CHANGING = {
    *("seconds", "train_seconds", "wait_seconds", "waited_for_seconds", "attempts", "resumed_from", "checksum"),
    *("state", "files", "command", "notes", "unreadable"),
}


def steady(value: Any) -> Any:
    """Return a result without times and paths."""
    if isinstance(value, dict):
        return {key: steady(each) for key, each in value.items() if key not in CHANGING}
    if isinstance(value, str) and value.startswith("/"):
        return "a path"
    return [steady(each) for each in value] if isinstance(value, list) else value


def answer(directory: Path, command: tuple[str, ...], root: Path) -> Answer:
    """Run a command in this process (a run that it resumes has separate processes)."""
    arguments = [str(root) if word == "DIR" else word for word in command]
    before = Path.cwd()
    os.chdir(directory)
    try:
        with time_limit(DAMAGE_SECONDS, MutualRLError("not ended in time")):
            completed = CliRunner().invoke(app, arguments)
    except MutualRLError as error:
        for process in processes(root):
            process.kill()
        return Answer(-1, None, str(error), [])
    finally:
        os.chdir(before)
    if completed.exception is not None and not isinstance(completed.exception, SystemExit):
        return Answer(-2, None, "".join(traceback.format_exception(completed.exception)), [])
    try:
        result = json.loads(completed.stdout.splitlines()[-1]) if completed.stdout.strip() else None
    except ValueError:
        result = completed.stdout
    notes = _notes(result)
    exported = directory / "all.jsonl"
    if exported.exists():
        result = [result, sha256(exported.read_bytes()).hexdigest()]
    if (data := directory / "page" / "report.json").exists():
        result = json.loads(data.read_text())
    return Answer(completed.exit_code, steady(result), completed.stderr, notes)


#: files that `runs verify` need not check: no figure comes from them
WITHOUT_CHECKSUM = ("/logs/", "/heartbeat", "/node-", "/latest.json", "/README.md", "/stop.json", "/trainer/")


def _notes(result: Any) -> list[str]:
    """Return a command's notes on omissions, from anywhere in its result."""
    if not isinstance(result, dict):
        return []
    rows = [result, *(row for row in result.get("runs", ()) if isinstance(row, dict))]
    return [str(note) for row in rows for key in ("notes", "unreadable") for note in row.get(key) or ()]


def judged(before: Answer, after: Answer, path: str, *, verified: bool) -> tuple[str, str]:
    """Return the class of an outcome, and a message. `verified`: whether the command was `runs verify`, which must find
    every damage."""
    if after.code == -1:
        return "hang", after.errors
    if after.code == -2 or "Traceback" in after.errors:
        return "traceback", after.errors[-900:]
    if after.code not in (0, before.code):
        named = Path(path).name in after.errors or "mutualrl:" in after.errors
        return ("refused by name", after.errors[-300:]) if named else ("refused without a name", after.errors[-300:])
    if (after.code, after.result) == (before.code, before.result):
        missed = verified and not any(part in f"/{path}" for part in WITHOUT_CHECKSUM)
        return ("wrong accepted", "the damage was not found") if missed else ("as undamaged", "")
    if set(after.notes) - set(before.notes):
        return "left out with a word", str(sorted(set(after.notes) - set(before.notes)))[:300]
    return "wrong accepted", f"{json.dumps(after.result, default=str)[:1500]}"


@contextmanager
def workplace(place: Place, name: str) -> Iterator[tuple[Path, Path]]:
    """Yield an empty directory, with a copy of the directory to damage below it."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory), Path(shutil.copytree(place.root, Path(directory) / name, symlinks=True))


def run_damages(
    seed: int, numbers: list[int], outcomes: dict[str, Any], save: Callable[[], None], kinds: Collection[str] = KINDS
) -> None:
    """Carry out damages, keeping each outcome immediately."""
    with tempfile.TemporaryDirectory() as name:
        targets = places(Path(name), kinds)
        undamaged: dict[tuple[str, tuple[str, ...]], Answer] = {}
        for number in numbers:
            rng = random.Random(f"{seed} damage {number}")
            key = rng.choice(sorted(targets))
            target = targets[key]
            command = rng.choice(target.commands)
            if (key, command) not in undamaged:
                with workplace(target, key) as (directory, root):
                    if key == "distilled":
                        shutil.copytree(targets["alone"].root, directory / "alone")
                    undamaged[key, command] = answer(directory, command, root)
            with workplace(target, key) as (directory, root):
                if key == "distilled":
                    shutil.copytree(targets["alone"].root, directory / "alone")
                description = damage(root, rng)
                after = answer(directory, command, root)
                path, verified = description.split(" ", 1)[1], command[:2] == ("runs", "verify")
                outcome, message = judged(undamaged[key, command], after, path, verified=verified)
            outcomes[str(number)] = {
                "of": key,
                "damage": description,
                "command": " ".join(command[:2]),
                "outcome": outcome,
                "words": message,
            }
            save()
            print(
                f"damage {number}: {key}, {description}, {' '.join(command[:2])}: {outcome} {message[:200]}", flush=True
            )


# ---- the table

GOOD = ("as undisturbed", "as undamaged", "refused by name", "left out with a word")


def markdown(result: dict[str, Any]) -> str:
    """Return the classes of outcomes, by variant and by command."""
    lines = ["| disturbed | runs | as undisturbed | anything else |", "|---|---|---|---|"]
    schedules = result["schedules"].values()
    for variant in VARIANTS:
        of_variant = [each for each in schedules if each["variant"] == variant]
        good = sum(each["outcome"] == "as undisturbed" for each in of_variant)
        lines.append(f"| {variant} | {len(of_variant)} | {good} | {len(of_variant) - good} |")
    total = sum(each["outcome"] == "as undisturbed" for each in schedules)
    lines.append(f"| all | {len(schedules)} | {total} | {len(schedules) - total} |")
    counts = Counter((each["command"], each["outcome"]) for each in result["damages"].values())
    classes = (*GOOD[1:], "refused without a name", "wrong accepted", "traceback", "hang")
    lines += [
        "",
        f"| command on a damaged directory | damages | {' | '.join(classes)} |",
        "|---" * (len(classes) + 2) + "|",
    ]
    for command in (*sorted({command for command, _ in counts}), "all"):
        by_class = {
            kind: sum(n for (c, k), n in counts.items() if k == kind and command in (c, "all")) for kind in classes
        }
        lines.append(
            f"| {command} | {sum(by_class.values())} | {' | '.join(str(by_class[kind]) for kind in classes)} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Disturb, damage, compare, write, print. Return 1 if any outcome was wrong."""
    parser = harness.options(__doc__)
    parser.add_argument("--schedules", type=int, default=100)
    parser.add_argument("--damages", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--of", nargs="+", default=KINDS, choices=KINDS, help="what is damaged")
    args = harness.parse(parser)
    if args.smoke:
        args.schedules, args.damages, args.of = 0, 1, ["alone"]
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    file = args.out / "fuzz.json"
    result: dict[str, Any] = {"command": COMMAND, "seed": args.seed, "schedules": {}, "damages": {}}
    if file.exists() and (before := json.loads(file.read_text()))["seed"] == args.seed:
        result = before

    def save() -> None:
        harness.write(args.out, "fuzz", result)

    for kind, count, run_sweep in (
        ("damages", args.damages, partial(run_damages, kinds=args.of)),
        ("schedules", args.schedules, run_schedules),
    ):
        missing = [number for number in range(count) if str(number) not in result[kind]]
        if missing:
            run_sweep(args.seed, missing, result[kind], save)
    text = markdown(result)
    harness.write(args.out, "fuzz", result, text)
    outcomes = [each["outcome"] for kind in ("schedules", "damages") for each in result[kind].values()]
    return int(any(outcome not in GOOD for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
