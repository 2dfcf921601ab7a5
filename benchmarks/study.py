"""What sharing is worth on the embedded pools: every regime, its controls and sequential distillation, several seeds.

    python benchmarks/study.py                        # every piece that is not there yet, then the results
    python benchmarks/study.py --seeds 0 --pools tiny # some pieces
    python benchmarks/study.py --collect              # the results of the pieces that are there

A piece is one `mutualrl train` (pool, arm, seed) or one `mutualrl distill` of the seed's plain GRPO run. Pieces lie
under runs/study and are never made twice: stopped at any moment, the same command goes on. Prompts, rollouts, steps,
learning rate and decoding are the same in all arms; accuracy is greedy, on all 64 held-out problems. About half an hour
a seed on two cores. Writes benchmarks/results/study.{json,md} and the figures beside them."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

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
    "grpo-noise": ("grpo-noise",),
    "xgrpo shuffled": ("xgrpo", "regime.pool=shuffled"),
    "sgt 0.03": ("sgt", "regime.weight=0.03"),
    "sgt 0.3": ("sgt", "regime.weight=0.3"),
}
DISTILLED = "distillation"
COMMON = ("run.validation_limit=1000", "run.validate_every=10", "run.save_every=0")


@dataclass(frozen=True, slots=True)
class Piece:
    """One run of the study."""

    pool: str
    arm: str
    seed: int

    def directory(self, work: Path) -> Path:
        """Where it lies."""
        return work / self.pool / f"{self.arm.replace(' ', '-')}-{self.seed}"

    def train(self, work: Path, steps: int) -> list[str]:
        """The command that makes it."""
        regime, *assignments = ARMS[self.arm]
        command = ["train", "--regime", regime, "--pool", self.pool, "--seed", str(self.seed), "--steps", str(steps)]
        for assignment in (*COMMON, *assignments):
            command += ["--set", assignment]
        return [*command, "--run-dir", str(self.directory(work)), "--clean"]


def make(pieces: list[Piece], work: Path, steps: int) -> None:
    """Make the pieces that are not there, one after another."""
    for number, piece in enumerate(pieces, 1):
        directory = piece.directory(work)
        if (directory / "summary.json").is_file():
            continue
        directory.parent.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        command = [sys.executable, "-m", "mutualrl", *piece.train(work, steps)]
        with directory.with_suffix(".log").open("w") as log:
            subprocess.run(command, stdout=log, stderr=log, check=True)
        for checkpoints in directory.glob("policies/*/checkpoints"):
            shutil.rmtree(checkpoints)  # a finished run needs none
        said = f"{number}/{len(pieces)} {piece.pool}, {piece.arm}, seed {piece.seed}: {time.monotonic() - began:.0f} s"
        print(said, file=sys.stderr, flush=True)


def main() -> None:
    """Make what is missing, and collect."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--pools", nargs="+", default=list(POOLS), choices=POOLS)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--work", type=Path, default=Path("runs/study"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    pieces = [Piece(pool, arm, seed) for seed in given.seeds for pool in given.pools for arm in given.arms]
    make(pieces, given.work, given.steps)


if __name__ == "__main__":
    main()
