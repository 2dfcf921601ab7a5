"""Sweep files: a grid of pools, arms and seeds, checked as a whole before anything runs.

seeds: 10                             # 0 to 9; or a list
pools: [tiny, tiny-three]             # names, or recipe files of pools
set: {run.steps: 160}                 # keys of every arm's recipe
arms:
  grpo: {regime: grpo, set: {run.publish: full}}
  sgt gold: {regime: sgt, set: {regime.teacher: source, sources: [{name: gold, recorded: task}]}}
  grpo, twice the rollouts:
    regime: grpo
    set: {trainer.num_generations: 8, trainer.per_device_train_batch_size: 256}
    differs: [trainer]                # other keys than the regime that may differ from the reference
  chord: {regime: chord, pools: [tiny-recorded]}           # only on these of the sweep's pools
  distilled: {distill: grpo, set: {learning_rate: 5e-4}}   # `mutualrl paper distill` of that arm's run
reference: grpo                       # the arm that the others are compared with
evaluate: {samples: 16, limit: 192}   # pass@k of the trained policies: `mutualrl eval --run` after each run
claims: claims.yaml                   # relative to this file; see `study.claims`
budget: {minutes: 600, gigabytes: 20}
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

from mutualrl.errors import RecipeError
from mutualrl.recipes import Recipe, Request, resolve, yaml_file
from mutualrl.recipes.differences import changed_keys
from mutualrl.recipes.free import may_differ
from mutualrl.regimes import baseline
from mutualrl.study.claims import RegisteredClaims, StudySection, read_claims
from mutualrl.study.distill_settings import parse_settings
from mutualrl.tiny import resolve_path

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 .,+_'-]{0,63}")
SEEDS = 1000  # at most
_BATCH = 512  # completions per batch of an evaluation with transformers
#: recipe keys that the sweep sets, and their sources
OURS = {"run.seed": "seeds", "run.dir": "--out", "pool": "pools", "regime": "arms", "regime.name": "arms"}


class Arm(StudySection):
    """One arm: a regime with settings, or the distillation of another arm's run."""

    regime: str | None = None
    distill: str | None = None
    beside: tuple[str, ...] = ()
    settings: Mapping[str, Any] = Field({}, alias="set")
    differs: tuple[str, ...] = ()
    pools: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _one_kind(self) -> Arm:
        if (self.regime is None) == (self.distill is None):
            raise ValueError("expected either regime or distill")
        if self.beside and self.distill is None:
            raise ValueError("beside is for arms with distill")
        return self


class TokenBudget(StudySection):
    """Limits of a sweep. No piece starts after `minutes`; none at all if `gigabytes` would not be enough."""

    minutes: Annotated[float, Field(gt=0)] | None = None
    gigabytes: Annotated[float, Field(gt=0)] | None = None


class EvaluationSection(StudySection):
    """Sampling of `mutualrl eval --run` after each run: completions per prompt, and the maximum number of prompts."""

    samples: Annotated[int, Field(ge=2, le=1024)]
    limit: Annotated[int, Field(ge=1)] | None = None


class SweepFile(StudySection):
    """Content of a sweep file."""

    arms: Mapping[str, Arm] = Field(min_length=1)
    pools: tuple[str, ...] = Field(("tiny",), min_length=1)
    seeds: int | tuple[int, ...] = 3
    settings: Mapping[str, Any] = Field({}, alias="set")
    reference: str | None = None
    claims: str | None = None
    budget: TokenBudget = TokenBudget()
    evaluate: EvaluationSection | None = None

    @model_validator(mode="after")
    def _consistent(self) -> SweepFile:
        for name, arm in self.arms.items():
            if not _NAME.fullmatch(name):
                raise ValueError(f"arm {name!r}: expected letters, digits, spaces and . , + _ ' -, at most 64")
            for other in (arm.distill, *arm.beside):
                if other is not None and (other not in self.arms or self.arms[other].regime is None):
                    raise ValueError(f"arm {name!r}: found {other!r}, expected an arm with a regime")
        self._require_pools()
        if self.reference is not None and self.reference not in self.arms:
            raise ValueError(f"reference: found {self.reference!r}, expected one of {', '.join(self.arms)}")
        count = self.seeds if isinstance(self.seeds, int) else len(self.seeds)
        if count > SEEDS:
            raise ValueError(f"seeds: found {count}, expected at most {SEEDS}")
        if count < 1 or len(set(self.seed_list)) < count or min(self.seed_list) < 0:
            raise ValueError("seeds: expected a count, or different integers from 0")
        for name, settings in (("set", self.settings), *((f"arm {n!r}", arm.settings) for n, arm in self.arms.items())):
            if reserved := sorted(set(settings) & set(OURS)):
                raise ValueError(f"{name}: {', '.join(reserved)}: set by the sweep ({OURS[reserved[0]]})")
        return self

    def _require_pools(self) -> None:
        """Raise ValueError for an arm on pools that the sweep has not, or on which the arm that it needs is not run."""
        for name, arm in self.arms.items():
            if unknown := [pool for pool in arm.pools if pool not in self.pools]:
                raise ValueError(f"arm {name!r}: pools: found {unknown[0]!r}, expected some of {', '.join(self.pools)}")
            for other in (arm.distill, *arm.beside, self.reference_arm):
                missing = [pool for pool in self.pools_of(name) if other and pool not in self.pools_of(other)]
                if missing:
                    raise ValueError(f"arm {name!r}: is on the pool {missing[0]!r}, where {other!r} is not run")

    def pools_of(self, arm: str) -> tuple[str, ...]:
        """Return the pools that an arm is run on: those that it names, or all."""
        named = self.arms[arm].pools if arm in self.arms else ()
        return named or self.pools

    @property
    def seed_list(self) -> tuple[int, ...]:
        """Return the seeds."""
        return tuple(range(self.seeds)) if isinstance(self.seeds, int) else self.seeds

    @property
    def reference_arm(self) -> str:
        """Return the reference arm: the first if none is named."""
        return self.reference or next(iter(self.arms))


@dataclass(frozen=True, slots=True)
class Piece:
    """One run of a sweep."""

    pool: str
    arm: str
    seed: int

    @property
    def place(self) -> Path:
        """Return its directory, relative to the sweep's."""
        return Path("pieces", _slug(Path(self.pool).stem), f"{_slug(self.arm)}-{self.seed}")

    def __str__(self) -> str:
        return f"{self.pool}, {self.arm}, seed {self.seed}"


@dataclass(frozen=True, slots=True)
class Grid:
    """Pools, arms and seeds of a sweep, and the arm that the others are compared with. `only`: by arm, the pools of
    those that are not run on all."""

    pools: tuple[str, ...]
    arms: tuple[str, ...]
    seeds: tuple[int, ...]
    reference: str
    only: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def pieces(self) -> list[Piece]:
        """Return the pieces, arm by arm."""
        return [
            Piece(pool, arm, seed)
            for pool in self.pools
            for arm in self.arms
            if pool in self.only.get(arm, self.pools)
            for seed in self.seeds
        ]


@dataclass(frozen=True, slots=True)
class Sweep:
    """Sweep file, its pieces in order of execution, seed by seed, and the recipe of each pool and arm. `path`: the
    file; relative paths in it start from its directory."""

    file: SweepFile
    path: Path
    pieces: tuple[Piece, ...]
    recipes: Mapping[tuple[str, str], Recipe]
    claims: RegisteredClaims | None

    def recipe(self, piece: Piece) -> Recipe:
        """Return the recipe of a piece; for a distillation, that of its source run."""
        return self.recipes[piece.pool, self.file.arms[piece.arm].distill or piece.arm]

    def command(self, piece: Piece, root: Path) -> list[str]:
        """Return the arguments of `mutualrl` that run a piece from the start."""
        arm = self.file.arms[piece.arm]
        where = str(root / piece.place)
        if arm.distill is not None:
            source, *beside = (str(root / Piece(piece.pool, n, piece.seed).place) for n in (arm.distill, *arm.beside))
            extra = [word for run in beside for word in ("--beside", run)]
            return [
                "paper",
                "distill",
                source,
                *extra,
                "--seed",
                str(piece.seed),
                *assigned(arm.settings),
                "--out",
                where,
            ]
        regime = ["--regime", str(arm.regime), "--pool", piece.pool, "--seed", str(piece.seed)]
        settings = assigned({**self.file.settings, **arm.settings})
        return ["train", *regime, *settings, "--run-dir", where, "--no-report"]

    def evaluation(self, piece: Piece, root: Path) -> list[str]:
        """Return the arguments of `mutualrl` that evaluate a piece after its training; empty if there is nothing to
        do."""
        evaluate = self.file.evaluate
        if evaluate is None or self.file.arms[piece.arm].distill is not None:
            return []
        limit = [] if evaluate.limit is None else ["--limit", str(evaluate.limit)]
        samples = ["--samples", str(evaluate.samples), *limit]
        return ["eval", "--run", str(root / piece.place), *samples, "--batch-size", str(_BATCH)]

    @property
    def grid(self) -> Grid:
        """Return the grid of pools, arms and seeds."""
        only = {name: arm.pools for name, arm in self.file.arms.items() if arm.pools}
        return Grid(self.file.pools, tuple(self.file.arms), self.file.seed_list, self.file.reference_arm, only)


def read_sweep(path: Path) -> Sweep:
    """Read a sweep: parse its file and claims, resolve every arm's recipe. Raises RecipeError listing every problem: an
    unknown key, a setting that a recipe rejects, arms that differ in more than their regime."""
    tree = yaml_file.read(path)
    try:
        file = SweepFile.model_validate(tree)
    except ValidationError as error:
        problems = [f"{path}: {'.'.join(map(str, e['loc'])) or 'file'}: {e['msg']}" for e in error.errors()]
        raise RecipeError(problems) from None
    base = path.absolute().parent
    order = sorted(file.arms, key=lambda name: file.arms[name].distill is not None)  # sources before distillations
    pieces = tuple(
        Piece(pool, arm, seed)
        for seed in file.seed_list
        for pool in file.pools
        for arm in order
        if pool in file.pools_of(arm)
    )
    places = [piece.place for piece in pieces]
    if duplicates := sorted({str(place) for place in places if places.count(place) > 1}):
        raise RecipeError([f"{path}: two arms or pools have the directory {duplicates[0]}; rename one"])
    with contextlib.chdir(base):  # the pieces run in it: base of relative paths in settings
        recipes = _resolved(file, path.absolute())
    claims = None if file.claims is None else read_claims(base / file.claims)
    if claims is not None:
        _require_known(file, claims, recipes, path)
    return Sweep(file, path.absolute(), pieces, recipes, claims)


def _resolved(file: SweepFile, path: Path) -> dict[tuple[str, str], Recipe]:
    """Return the recipe of each pool and arm. Raises RecipeError."""
    recipes: dict[tuple[str, str], Recipe] = {}
    problems: list[str] = []
    for name, arm in file.arms.items():
        try:
            if arm.distill is not None:
                parse_settings("trained", 0, _assignments(arm.settings))
                continue
            for pool in file.pools_of(name):
                assignments = tuple(_assignments({**file.settings, **arm.settings}))
                recipes[pool, name] = resolve(Request(regime=arm.regime, pool=pool, assignments=assignments))
        except RecipeError as error:
            problems += [f"{path}: arm {name!r}: {problem}" for problem in error.problems]
    if problems:
        raise RecipeError(problems)
    reference = file.arms[file.reference_arm].distill or file.reference_arm
    for (pool, name), recipe in recipes.items():
        problems += _beyond_the_factor(file, name, recipe, recipes[pool, reference])
        problems += _not_to_distill(file, name, recipe)
    if problems:
        raise RecipeError([f"{path}: {problem}" for problem in dict.fromkeys(problems)])
    return recipes


def _not_to_distill(file: SweepFile, name: str, recipe: Recipe) -> list[str]:
    """Return why the runs of an arm cannot be distilled, if another arm distills them."""
    learners = [other for other, arm in file.arms.items() if arm.distill == name]
    if not learners or (recipe.regime_class.name == baseline().name and recipe.run.publish == "full"):
        return []
    return [
        f"arm {learners[0]!r} distills {name!r}, which must have regime {baseline().name} and publish everything: "
        f"{name}: {{regime: {baseline().name}, set: {{run.publish: full}}}}"
    ]


def _beyond_the_factor(file: SweepFile, name: str, recipe: Recipe, reference: Recipe) -> list[str]:
    declared = tuple(f"{prefix}." for prefix in file.arms[name].differs)
    changed = []
    for key in changed_keys(reference, recipe):
        if not may_differ(Recipe, key, "arms") and not f"{key}.".startswith(declared):
            changed.append(key)
    if not changed:
        return []
    return [
        f"arm {name!r} differs from {file.reference_arm!r} in more than its regime: {', '.join(changed)}; "
        f"if this is intended, write differs: [{', '.join(changed)}] under the arm"
    ]


def _require_known(
    file: SweepFile, claims: RegisteredClaims, recipes: Mapping[tuple[str, str], Recipe], path: Path
) -> None:
    """Raise RecipeError naming each arm, pool or policy in the claims that the sweep does not have."""
    policies = {policy.name for recipe in recipes.values() for policy in recipe.policies}
    known = {
        "arm": list(file.arms),
        "pool": list(file.pools),
        "policy": ["mean", "each", "weakest", "strongest", *sorted(policies)],
    }
    unknown = []
    for claim in claims.file.claims:
        pools = [*claim.pools, *([claim.minus_pool] if claim.minus_pool else [])]
        for kind, names in (("arm", claim.named_arms), ("pool", pools), ("policy", [claim.who])):
            unknown += [
                f"{path}: claims: {claim.text!r}: no {kind} {name!r}, expected one of {', '.join(known[kind])}"
                for name in names
                if name not in known[kind]
            ]
    if unknown:
        raise RecipeError(unknown)


def _assignments(settings: Mapping[str, object]) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in settings.items()]


def assigned(settings: Mapping[str, object]) -> list[str]:
    """Return settings as `--set` flags."""
    return [word for assignment in _assignments(settings) for word in ("--set", assignment)]


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.+_-]+", "-", text).strip("-.") or "pool"


def weights_of(recipe: Recipe) -> int | None:
    """Return the size in bytes of the weights of a recipe's policies; None if a model's files are not local."""
    total = 0
    for policy in recipe.policies:
        size = _weights(policy.model)
        if size is None:
            return None
        total += size
    return total


def _weights(model: str) -> int | None:
    directory = Path(resolve_path(model))
    sizes = [path.stat().st_size for path in directory.glob("*.safetensors")] if directory.is_dir() else []
    return sum(sizes) or None
