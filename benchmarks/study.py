"""The study of sharing on the embedded pools: every regime, its controls and sequential distillation, several seeds.

    python benchmarks/study.py                        # every piece that is not there yet, then the results
    python benchmarks/study.py --seeds 0 --pools tiny # some pieces
    python benchmarks/study.py --collect              # the results of the pieces that are there

A piece is one `mutualrl train` (pool, arm, seed) or one `mutualrl distill` of the seed's plain GRPO run. Pieces lie
under runs/study and are never made twice: stopped at any moment, the same command goes on. Prompts, rollouts, steps,
learning rate and decoding are the same in all arms; accuracy is greedy, on all 64 held-out problems. About half an hour
a seed on two cores. Writes benchmarks/results/study.{json,md} and the figures beside them."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mutualrl.console.plots import directory_for
from mutualrl.reporting.drawing import draw_figure
from mutualrl.reporting.figure_specs import Bars, Figure, Panel, over
from mutualrl.reporting.run_reader import Point, Run, read_run
from mutualrl.reporting.series import first_reaching, mean_of

HERE = Path(__file__).parent
RESULTS = HERE / "results"
STEPS = 160
SEEDS = (0, 1, 2, 3, 4)
POOLS = ("tiny", "tiny-near", "tiny-three")
#: of each arm the regime, and what is set
ARMS: dict[str, tuple[str, ...]] = {
    "grpo": ("grpo", "run.publish=full"),
    "sgt": ("sgt",),
    "sgt gold": ("sgt", "regime.teacher=gold"),
    "xgrpo": ("xgrpo",),
    "prp": ("prp",),
    "prp naive": ("prp", "regime.denominator=snapshot"),
    "grpo-noise": ("grpo-noise", "regime.equal_groups=exempt"),
    "xgrpo shuffled": ("xgrpo", "regime.pool=shuffled"),
    "sgt 0.03": ("sgt", "regime.weight=0.03"),
    "sgt 0.3": ("sgt", "regime.weight=0.3"),
}
#: of each distillation of a seed's grpo run: what is set. The first are the paper's settings, the second has the
#: learning rate of the pools, since the paper's hardly moves models of this size
DISTILLED: dict[str, tuple[str, ...]] = {"distilled": (), "distilled 5e-4": ("learning_rate=5e-4",)}
COMMON = ("run.validation_limit=1000", "run.validate_every=10", "run.save_every=0")


#: of Student's t, two-sided 95 %, by degrees of freedom
T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
CLOSE = 0.05  # of accuracy: two arms within this are called close
NEAR = 0.25  # of GRPO's entropy or KL: signals within this share of it are called close
GRID = 1 / 64  # accuracy is counted on 64 problems: no interval of accuracies is narrower than a problem to each side
FEWEST = 3  # seeds: fewer decide nothing


@dataclass(frozen=True, slots=True)
class Piece:
    """One run of the study."""

    pool: str
    arm: str
    seed: int

    def directory(self, work: Path) -> Path:
        """Return where it lies."""
        return work / self.pool / f"{self.arm.replace(' ', '-')}-{self.seed}"

    def command(self, work: Path, steps: int) -> list[str]:
        """Return the command that makes it."""
        if self.arm in DISTILLED:
            of, beside = (Piece(self.pool, arm, self.seed).directory(work) for arm in ("grpo", "sgt"))
            command = ["distill", str(of), "--beside", str(beside), "--seed", str(self.seed)]
            for assignment in DISTILLED[self.arm]:
                command += ["--set", assignment]
            return [*command, "--out", str(self.directory(work))]
        regime, *assignments = ARMS[self.arm]
        command = ["train", "--regime", regime, "--pool", self.pool, "--seed", str(self.seed), "--steps", str(steps)]
        for assignment in (*COMMON, *assignments):
            command += ["--set", assignment]
        return [*command, "--run-dir", str(self.directory(work)), "--clean", "--no-report"]

    def done(self, work: Path, steps: int | None = None) -> bool:
        """Return whether it is there. Ends the program when it is one of another number of steps."""
        directory = self.directory(work)
        if self.arm in DISTILLED:
            return (directory / "distill.json").is_file()
        if not (directory / "summary.json").is_file():
            return False
        created = json.loads((directory / "summary.json").read_text())["steps"]
        if steps is not None and created != steps:
            raise SystemExit(f"{directory} was made with --steps {created}, not {steps}; give another --work")
        return True


def make(pieces: list[Piece], work: Path, steps: int) -> None:
    """Make the pieces that are not there, one after another."""
    for number, piece in enumerate(pieces, 1):
        directory = piece.directory(work)
        if piece.done(work, steps):
            continue
        directory.parent.mkdir(parents=True, exist_ok=True)
        if piece.arm in DISTILLED:  # one that was cut off is made anew
            shutil.rmtree(directory, ignore_errors=True)
        began = time.monotonic()
        command = [sys.executable, "-m", "mutualrl", *piece.command(work, steps)]
        with directory.with_name(f"{directory.name}.log").open("w") as log:
            subprocess.run(command, stdout=log, stderr=log, check=True)
        for checkpoints in directory.glob("policies/*/checkpoints"):
            shutil.rmtree(checkpoints)  # a finished run needs none
        message = (
            f"{number}/{len(pieces)} {piece.pool}, {piece.arm}, seed {piece.seed}: {time.monotonic() - began:.0f} s"
        )
        print(message, file=sys.stderr, flush=True)


# ---- what comes out, by pool, arm and seed


def measured(piece: Piece, work: Path) -> dict[str, Any]:
    """Return the figures of one training run: accuracy by policy and group, signals over the last quarter of the
    steps, the gate rate in ten parts of the run, tokens and seconds."""
    run = read_run(piece.directory(work))
    policies = {}
    for name, policy in run.policies.items():
        assert policy.result is not None
        rows = policy.metrics
        last = rows[-max(1, len(rows) // 4) :]
        own = sum(row["completions/mean_length"] for row in rows)
        rollouts = run.info["fingerprint"]["prompts_per_round"] * run.info["fingerprint"]["rollouts_per_prompt"]
        extra = sum(row.get("sgt/extra_tokens", 0.0) + row.get("prp/extra_tokens", 0.0) for row in rows)
        rates = [row["sgt/gate_rate"] for row in rows if "sgt/gate_rate" in row]
        gate = [
            statistics.fmean(rates[i * len(rates) // 10 : (i + 1) * len(rates) // 10])
            for i in range(10)
            if len(rates) >= 10
        ]
        policies[name] = {
            "before": _accuracies(policy.result["initial_validation"]),
            "after": _accuracies(policy.result["validation"]),
            "curve": [[point.step, point.value] for point in policy.accuracy()],
            "entropy": statistics.fmean(row["entropy"] for row in last),
            "kl": statistics.fmean(row["kl"] for row in last),
            "gate": gate,
            "extra_tokens": extra / (own * rollouts),
            "seconds": policy.result["train_seconds"],
        }
    return {"pool": piece.pool, "arm": piece.arm, "seed": piece.seed, "steps": run.planned_steps, "policies": policies}


def _accuracies(validation: dict[str, Any]) -> dict[str, float]:
    return {"all": validation["accuracy"], **validation["by_group"]}


def distilled(piece: Piece, work: Path) -> dict[str, Any]:
    """Return the figures of one distillation."""
    result = json.loads((piece.directory(work) / "distill.json").read_text())
    policies = {
        name: {
            "after": {"all": details["accuracy"]["sequential distillation"]["accuracy"]}
            | details["accuracy"]["sequential distillation"]["by_group"],
            "examples": details["examples"],
            "steps": details["steps"],
        }
        for name, details in result["learners"].items()
    }
    return {"pool": piece.pool, "arm": piece.arm, "seed": piece.seed, "policies": policies}


class Study:
    """All pieces that are there, and the questions that are asked of them."""

    def __init__(self, pieces: list[dict[str, Any]]) -> None:
        self.by = {(p["pool"], p["arm"], p["seed"]): p["policies"] for p in pieces}
        self.pools = [pool for pool in POOLS if self.seeds(pool, "grpo")]  # everything is asked against GRPO

    def arms(self, pool: str) -> list[str]:
        """Return the arms of a pool, in the study's order."""
        return [arm for arm in (*ARMS, *DISTILLED) if any(key[:2] == (pool, arm) for key in self.by)]

    def seeds(self, pool: str, *arms: str) -> list[int]:
        """Return seeds for which all these arms are there."""
        sets = [{key[2] for key in self.by if key[:2] == (pool, arm)} for arm in arms]
        return sorted(set.intersection(*sets)) if sets else []

    def names(self, pool: str) -> list[str]:
        """Return its policies."""
        return list(next(policies for key, policies in self.by.items() if key[0] == pool))

    def accuracy(self, pool: str, arm: str, seed: int, policy: str | None = None, group: str = "all") -> float:
        """Return final accuracy of a policy, or the mean over the pool."""
        policies = self.by[pool, arm, seed]
        return statistics.fmean(policies[name]["after"][group] for name in ([policy] if policy else policies))

    def signal(self, pool: str, arm: str, seed: int, key: str, policy: str | None = None) -> float:
        """Return entropy or KL over the last quarter of the steps, of a policy or the mean over the pool."""
        policies = self.by[pool, arm, seed]
        return statistics.fmean(policies[name][key] for name in ([policy] if policy else policies))

    def gate_change(self, pool: str, policy: str) -> Interval:
        """Return SGT's gate rate in the last tenth of the run minus the first."""
        gates = [self.by[pool, "sgt", seed][policy]["gate"] for seed in self.seeds(pool, "sgt")]
        return interval([gate[-1] - gate[0] for gate in gates])

    def weaker(self, pool: str) -> str:
        """Return the policy that is worst before training."""
        some = self.by[pool, "grpo", self.seeds(pool, "grpo")[0]]
        return min(some, key=lambda name: some[name]["before"]["all"])

    def stronger(self, pool: str) -> str:
        """Return the policy that is best before training."""
        some = self.by[pool, "grpo", self.seeds(pool, "grpo")[0]]
        return max(some, key=lambda name: some[name]["before"]["all"])

    def difference(
        self, pool: str, one: str, other: str, take: Callable[[str, int], float], grid: float = GRID
    ) -> Interval:
        """Return `take(arm, seed)` of one arm minus the other's, paired by seed."""
        return interval([take(one, seed) - take(other, seed) for seed in self.seeds(pool, one, other)], grid)

    def level(self, pool: str, key: str, policy: str | None = None) -> float:
        """Return GRPO's own entropy or KL, mean over seeds: what a difference is measured by."""
        seeds = self.seeds(pool, "grpo")
        return statistics.fmean(self.signal(pool, "grpo", seed, key, policy) for seed in seeds)

    def first(self, pool: str, arm: str, seed: int) -> int | None:
        """Return the step at which the pool's mean validation is first at GRPO's final one, of the same seed."""
        return first_reaching(_pool_curve(self, pool, arm, seed), self.accuracy(pool, "grpo", seed))


@dataclass(frozen=True, slots=True)
class Interval:
    """Mean over `n` seeds and its 95 % interval (Student's t); the interval of a single seed is everything."""

    mean: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        if math.isinf(self.low):
            return f"{self.mean:.2f}"
        return f"{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]"

    @property
    def sign(self) -> str:
        """Return a number with its sign, for differences."""
        if math.isinf(self.low):
            return f"{self.mean:+.3f}"
        return f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"

    @property
    def above(self) -> bool | None:
        """Return whether it is above 0; None where the interval holds 0, or the seeds are too few."""
        return self.over(0.0)

    def over(self, bound: float) -> bool | None:
        """Return whether it is above `bound`."""
        if self.n < FEWEST:
            return None
        return True if self.low > bound else False if self.high < bound else None

    def within(self, bound: float) -> bool | None:
        """Return whether it is within `bound` of 0 to either side."""
        if self.n < FEWEST:
            return None
        if -bound < self.low and self.high < bound:
            return True
        return False if self.low > bound or self.high < -bound else None


def interval(values: Sequence[float], grid: float = 0.0) -> Interval:
    """Return mean and 95 % interval, no narrower than `grid` to each side."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Interval(mean, -math.inf, math.inf, len(values))
    half = max(grid, T95[min(len(values) - 1, 9)] * statistics.stdev(values) / math.sqrt(len(values)))
    return Interval(mean, mean - half, mean + half, len(values))


# ---- the claims


def verdict(answers: Sequence[bool | None]) -> str:
    """Return held where every interval says so, not held where one says the opposite, else not decided."""
    if any(answer is False for answer in answers):
        return "not held"
    return "held" if answers and all(answer is True for answer in answers) else "not decided"


@dataclass(frozen=True, slots=True)
class Claim:
    """Claim about a pool, what was measured, and what the interval says."""

    text: str
    pool: str
    measured: str
    answers: tuple[bool | None, ...]


def claims(study: Study) -> list[Claim]:
    """Return the paper's qualitative claims, pool by pool; and some of ours, which say so."""
    results = []
    for pool in study.pools:
        ask = Questions(study, pool)
        results += [*ask.sgt(), *ask.xgrpo(), *ask.prp(), *ask.distillation()]
    return [*results, *_heterogeneity(study)]


def _claim(text: str, pool: str, summary: Sequence[tuple[str, Interval]], answers: Sequence[bool | None]) -> Claim:
    return Claim(text, pool, "; ".join(f"{name} {d.sign}" for name, d in summary), tuple(answers))


class Questions:
    """Questions asked of one pool."""

    def __init__(self, study: Study, pool: str) -> None:
        self.study = study
        self.pool = pool
        self.arms = set(study.arms(pool))

    def accuracy(self, one: str, other: str, policy: str | None = None) -> Interval:
        """Return final accuracy of one arm minus the other's."""
        return self.study.difference(self.pool, one, other, partial(self.study.accuracy, self.pool, policy=policy))

    def signal(self, key: str, one: str, policy: str | None = None) -> Interval:
        """Return entropy or KL of an arm minus GRPO's."""
        take = partial(self.study.signal, self.pool, key=key, policy=policy)
        return self.study.difference(self.pool, one, "grpo", take, grid=0.0)

    def each(self, one: str, other: str) -> list[tuple[str, Interval]]:
        """Return final accuracy of one arm minus the other's, policy by policy."""
        return [(name, self.accuracy(one, other, name)) for name in self.study.names(self.pool)]

    def pair(self, text: str, d: Interval, answer: bool | None, who: str = "pool") -> Claim:
        """Return a claim about one difference."""
        return _claim(text, self.pool, [(who, d)], [answer])

    def sgt(self) -> Iterator[Claim]:
        """Probe comparison, optimization diagnostics and activation of SGT."""
        if not {"sgt", "grpo"} <= self.arms:
            return
        summary = self.each("sgt", "grpo")
        yield _claim(
            "SGT above GRPO, for every policy (final accuracy)", self.pool, summary, [d.above for _, d in summary]
        )
        d = self.accuracy("sgt", "grpo")
        yield self.pair("SGT above GRPO, mean of the pool (final accuracy)", d, d.above)
        seeds = self.study.seeds(self.pool, "sgt", "grpo")
        steps = [(self.study.first(self.pool, "sgt", s), self.study.first(self.pool, "grpo", s)) for s in seeds]
        if all(one is not None and other is not None for one, other in steps):
            d = interval([float(one or 0) - float(other or 0) for one, other in steps])
            yield self.pair(
                "SGT reaches GRPO's final accuracy earlier (steps, against GRPO's own first)", d, _flip(d.above)
            )
        d, level = self.signal("entropy", "sgt"), self.study.level(self.pool, "entropy")
        yield self.pair("SGT keeps entropy (not more than a quarter below GRPO's)", d, d.over(-NEAR * level))
        d, level = self.signal("kl", "sgt"), self.study.level(self.pool, "kl")
        yield self.pair("SGT keeps KL low (not more than a quarter above GRPO's)", d, _flip(d.over(NEAR * level)))
        gates = [(name, self.study.gate_change(self.pool, name)) for name in self.study.names(self.pool)]
        text = "the gate shuts as the learner improves (last tenth of the run minus the first)"
        yield _claim(text, self.pool, gates, [_flip(d.above) for _, d in gates])
        if "sgt gold" in self.arms:
            d = self.accuracy("sgt", "sgt gold")
            yield self.pair("ours: a peer's text teaches more than the data's solution", d, d.above)

    def xgrpo(self) -> Iterator[Claim]:
        """Yield value-level sharing, its control, and ours."""
        if not {"xgrpo", "grpo"} <= self.arms:
            return
        d = self.accuracy("xgrpo", "grpo")
        yield self.pair(f"XGRPO close to GRPO, or above it (not more than {CLOSE} below)", d, d.over(-CLOSE))
        for what, key in (("entropy", "entropy"), ("KL", "kl")):
            d, level = self.signal(key, "xgrpo"), self.study.level(self.pool, key)
            yield self.pair(f"XGRPO's {what} close to GRPO's (within a quarter)", d, d.within(NEAR * level))
        for text, control in (
            ("XGRPO above noise", "grpo-noise"),
            ("ours: XGRPO above its shuffled pool", "xgrpo shuffled"),
        ):
            if control in self.arms:
                d = self.accuracy("xgrpo", control)
                yield self.pair(text, d, d.above)

    def prp(self) -> Iterator[Claim]:
        """Yield data-level sharing, with TRL's surrogate and byte-synchronous alignment: our defaults, not the
        paper's band."""
        weak, strong = self.study.weaker(self.pool), self.study.stronger(self.pool)
        if {"prp", "prp naive"} <= self.arms:
            summary = self.each("prp naive", "prp")
            yield _claim(
                "naive PRP below corrected PRP, for every policy",
                self.pool,
                summary,
                [_flip(d.above) for _, d in summary],
            )
            d = self.accuracy("prp naive", "prp")
            yield self.pair("naive PRP below corrected PRP, mean of the pool", d, _flip(d.above))
        if {"prp", "grpo"} <= self.arms:
            d = self.accuracy("prp", "grpo", weak)
            yield self.pair("corrected PRP below GRPO for the weaker policy", d, _flip(d.above), weak)
            d = self.accuracy("prp", "grpo")
            yield self.pair("PRP reduces the pool's mean accuracy", d, _flip(d.above))
            d = self.signal("entropy", "prp", strong)
            yield self.pair("PRP lowers the stronger policy's entropy", d, _flip(d.above), strong)
            d = self.signal("kl", "prp", weak)
            yield self.pair("PRP raises the weaker policy's KL", d, d.above, weak)

    def distillation(self) -> Iterator[Claim]:
        """Yield online gating against sequential distillation."""
        for arm in DISTILLED:
            if {arm, "grpo"} <= self.arms:
                summary = self.each(arm, "grpo")
                text = f"sequential distillation below GRPO, for every policy ({arm})"
                yield _claim(text, self.pool, summary, [_flip(d.above) for _, d in summary])
            if {arm, "sgt"} <= self.arms:
                d = self.accuracy("sgt", arm)
                yield self.pair(f"SGT above sequential distillation ({arm})", d, d.above)


def _flip(answer: bool | None) -> bool | None:
    return None if answer is None else not answer


def _heterogeneity(study: Study) -> Iterator[Claim]:
    """Yield whether SGT gives more where the skills overlap less."""
    pools = ("tiny", "tiny-near")
    if not set(pools) <= set(study.pools):
        return
    seeds = sorted(set(study.seeds(pools[0], "sgt", "grpo")) & set(study.seeds(pools[1], "sgt", "grpo")))
    if seeds:
        far, near = ([study.accuracy(p, "sgt", s) - study.accuracy(p, "grpo", s) for s in seeds] for p in pools)
        d = interval([one - other for one, other in zip(far, near, strict=True)], GRID)
        yield _claim("gains of SGT grow with heterogeneity (tiny minus tiny-near)", "both", [("pool", d)], [d.above])


#: differences that a page may quote, beside every arm's with plain GRPO
QUOTED = (
    ("prp naive", "prp"),
    ("sgt", "sgt gold"),
    ("sgt 0.3", "sgt"),
    ("xgrpo", "grpo-noise"),
    ("xgrpo", "xgrpo shuffled"),
    *(("sgt", arm) for arm in DISTILLED),
)


def effects(study: Study) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    """Return `{pool: {"ARM - OTHER": {measure: {"mean", "low", "high", "n"}}}}`, paired by seed, 95 % intervals.

    Measures: `accuracy` (mean of the pool), `accuracy/POLICY`, `entropy`, `kl` (last quarter of the steps), and
    `extra_tokens`, `seconds` (ratios to GRPO's, mean and median, without an interval).
    """
    result: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for pool in study.pools:
        arms = study.arms(pool)
        pairs = [(arm, "grpo") for arm in arms if arm != "grpo"]
        pairs += [(one, other) for one, other in QUOTED if one in arms and other in arms]
        for one, other in pairs:
            measures = {"accuracy": study.difference(pool, one, other, partial(study.accuracy, pool))}
            for name in study.names(pool):
                take = partial(study.accuracy, pool, policy=name)
                measures[f"accuracy/{name}"] = study.difference(pool, one, other, take)
            if one not in DISTILLED and other not in DISTILLED:
                for key in ("entropy", "kl"):
                    take = partial(study.signal, pool, key=key)
                    measures[key] = study.difference(pool, one, other, take, grid=0.0)
            values = {name: asdict(value) for name, value in measures.items()}
            if other == "grpo" and one not in DISTILLED:
                seeds = study.seeds(pool, one, other)
                values["extra_tokens"] = {"mean": statistics.fmean(_extra_tokens(study, pool, one, seeds))}
                values["seconds"] = {"median": statistics.median(_seconds(study, pool, one, seeds))}
            result.setdefault(pool, {})[f"{one} - {other}"] = values
    return result


def _extra_tokens(study: Study, pool: str, arm: str, seeds: Sequence[int]) -> list[float]:
    return [study.signal(pool, arm, seed, "extra_tokens") for seed in seeds]


def _seconds(study: Study, pool: str, arm: str, seeds: Sequence[int]) -> list[float]:
    return [study.signal(pool, arm, s, "seconds") / study.signal(pool, "grpo", s, "seconds") for s in seeds]


def gates(study: Study) -> dict[str, dict[str, list[float]]]:
    """Return SGT's gate rate over ten parts of the run, `{pool: {policy: [10]}}`, mean over seeds."""
    result: dict[str, dict[str, list[float]]] = {}
    for pool in study.pools:
        seeds = study.seeds(pool, "sgt")
        for name in study.names(pool) if seeds else []:
            rates = [study.by[pool, "sgt", seed][name]["gate"] for seed in seeds]
            result.setdefault(pool, {})[name] = [statistics.fmean(column) for column in zip(*rates, strict=True)]
    return result


# ---- tables


def tables(study: Study) -> str:
    """Return everything, as Markdown."""
    parts = []
    for pool in study.pools:
        parts += [_final(study, pool), _gains(study, pool)]
    parts += [_gate(study), _claims(study)]
    return "\n\n".join(parts)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _head(*cells: str) -> list[str]:
    return [_row(*cells), "|" + "---|" * len(cells)]


def _final(study: Study, pool: str) -> str:
    names = study.names(pool)
    groups = sorted(next(iter(next(iter(study.by.values())).values()))["after"])
    groups = [group for group in groups if group != "all"]
    cells = [(name, group) for name in names for group in groups]
    lines = [f"**Final greedy accuracy, pool {pool}: mean over seeds [95 % interval]**", ""]
    lines += _head("arm", "seeds", *(f"{name} `{group}`" for name, group in cells), "pool")
    some = study.by[pool, "grpo", study.seeds(pool, "grpo")[0]]
    start = statistics.fmean(details["before"]["all"] for details in some.values())
    lines.append(_row("before training", "", *(f"{some[n]['before'][g]:.2f}" for n, g in cells), f"{start:.2f}"))
    for arm in study.arms(pool):
        seeds = study.seeds(pool, arm)
        shown = [str(interval([study.accuracy(pool, arm, s, n, g) for s in seeds])) for n, g in cells]
        lines.append(_row(arm, str(len(seeds)), *shown, str(interval([study.accuracy(pool, arm, s) for s in seeds]))))
    return "\n".join(lines)


def _gains(study: Study, pool: str) -> str:
    lines = [f"**Against the same seed's GRPO, pool {pool}**", ""]
    lines += _head(
        "arm", "accuracy", "steps to GRPO's final accuracy", "entropy", "KL", "extra tokens", "training time"
    )
    own = study.seeds(pool, "grpo")
    lines.append(_row("grpo itself", "", reached(study, pool, "grpo", own), "", "", "", ""))
    for arm in study.arms(pool):
        seeds = study.seeds(pool, arm, "grpo")
        if arm == "grpo" or not seeds:
            continue
        gain = study.difference(pool, arm, "grpo", partial(study.accuracy, pool)).sign
        if arm in DISTILLED:
            lines.append(_row(arm, gain, "", "", "", "", ""))
            continue
        entropy = study.difference(pool, arm, "grpo", partial(study.signal, pool, key="entropy")).sign
        kl = study.difference(pool, arm, "grpo", partial(study.signal, pool, key="kl")).sign
        extra = statistics.fmean(_extra_tokens(study, pool, arm, seeds))
        ratio = statistics.median(_seconds(study, pool, arm, seeds))
        lines.append(_row(arm, gain, reached(study, pool, arm, seeds), entropy, kl, f"{extra:.2f}x", f"{ratio:.2f}x"))
    return "\n".join(lines)


def reached(study: Study, pool: str, arm: str, seeds: Sequence[int]) -> str:
    """Return the step at which the pool's mean validation is first at its seed's GRPO final one, seed by seed."""
    results = [study.first(pool, arm, seed) for seed in seeds]
    return ", ".join("-" if step is None else str(step) for step in results)


def _pool_curve(study: Study, pool: str, arm: str, seed: int) -> list[Point]:
    return mean_of([[Point(*point) for point in details["curve"]] for details in study.by[pool, arm, seed].values()])


def _gate(study: Study) -> str:
    lines = ["**SGT's gate rate over ten parts of the run (weight 0.1), mean over seeds**", ""]
    lines += _head("pool", "policy", *(f"{i + 1}" for i in range(10)))
    for pool, by_policy in gates(study).items():
        for name, means in by_policy.items():
            lines.append(_row(pool, name, *(f"{value:.2f}" for value in means)))
    return "\n".join(lines)


def _claims(study: Study) -> str:
    lines = ["**The claims, one by one (differences are paired by seed, with 95 % intervals)**", ""]
    lines += _head("claim", "pool", "measured", "at this scale")
    for claim in sorted(claims(study), key=lambda c: c.text):
        lines.append(_row(claim.text, claim.pool, claim.measured, verdict(claim.answers)))
    return "\n".join(lines)


# ---- figures


def figures(study: Study, runs: dict[tuple[str, str, int], Run]) -> list[Figure]:
    """Return curves of the four probes pool by pool, and every arm's final gain over GRPO."""
    curves = []
    for pool in study.pools:
        lines = tuple(
            over(arm, [_mean_curve(runs[pool, arm, seed]) for seed in study.seeds(pool, arm)])
            for arm in ("grpo", "xgrpo", "prp", "sgt")
            if study.seeds(pool, arm)
        )
        curves.append(Panel(f"pool {pool}", "greedy accuracy, mean of the pool", lines))
    gains = []
    all_items = [arm for arm in (*ARMS, *DISTILLED) if arm != "grpo"]
    for pool in study.pools:
        arms = [arm for arm in all_items if study.seeds(pool, arm, "grpo")]
        results = [study.difference(pool, arm, "grpo", partial(study.accuracy, pool)) for arm in arms]
        errors = tuple(None if math.isinf(d.low) else d.high - d.mean for d in results)
        gains.append(Bars(pool, tuple(arms), tuple(d.mean for d in results), errors))
    return [
        Figure("study_curves", "The four probes", "", tuple(curves), columns=3),
        Figure(
            "study_gains",
            "Final accuracy minus GRPO's",
            "",
            (Panel("final accuracy minus the same seed's GRPO, 95 % interval", "difference", bars=tuple(gains)),),
            columns=1,
        ),
    ]


def _mean_curve(run: Run) -> list[Point]:
    return mean_of([policy.accuracy() for policy in run.policies.values()])


def collect(work: Path, out: Path, seeds: Sequence[int]) -> str:
    """Write the results of all pieces that are there."""
    all_items = [Piece(pool, arm, seed) for pool in POOLS for arm in (*ARMS, *DISTILLED) for seed in seeds]
    there = [piece for piece in all_items if piece.done(work)]
    results = [distilled(piece, work) if piece.arm in DISTILLED else measured(piece, work) for piece in there]
    study = Study(results)
    if not study.pools:
        raise SystemExit(f"{work} has no run of plain GRPO yet; every other arm is compared with it")
    if len({piece["steps"] for piece in results if "steps" in piece}) > 1:
        raise SystemExit(f"{work} holds runs of different numbers of steps; they cannot be compared")
    runs = {
        (piece.pool, piece.arm, piece.seed): read_run(piece.directory(work))
        for piece in there
        if piece.arm not in DISTILLED
    }
    text = tables(study)
    directory_for(out, "--out")
    for figure in figures(study, runs):
        draw_figure(figure, out)
    versions = next(iter(runs.values())).info["versions"]
    summaries = [{**vars_of(claim), "verdict": verdict(claim.answers)} for claim in claims(study)]
    result = {
        "command": "python benchmarks/study.py",
        "versions": versions,
        "claims": summaries,
        "effects": effects(study),
        "gates": gates(study),
        "pieces": results,
    }
    (out / "study.json").write_text(json.dumps(result) + "\n")
    (out / "study.md").write_text(text + "\n")
    return text


def vars_of(claim: Claim) -> dict[str, Any]:
    """Return a claim as plain values."""
    return {"claim": claim.text, "pool": claim.pool, "measured": claim.measured}


def main() -> None:
    """Make what is missing, and collect."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--pools", nargs="+", default=list(POOLS), choices=POOLS)
    parser.add_argument("--arms", nargs="+", default=[*ARMS, *DISTILLED], choices=[*ARMS, *DISTILLED])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--work", type=Path, default=Path("runs/study"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--collect", action="store_true", help="make nothing")
    given = parser.parse_args()
    pieces = [Piece(pool, arm, seed) for seed in given.seeds for pool in given.pools for arm in given.arms]
    if not given.collect:
        make(pieces, given.work, given.steps)
    print(collect(given.work, given.out, given.seeds))


if __name__ == "__main__":
    main()
