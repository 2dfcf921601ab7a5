"""A run of users' own scripts, one per policy: its files, so that `report`, `watch` and `runs` read it as any run.

Scripts have no supervisor. The first that begins training writes run.json, and each further one compares what all must
share; each holds a lock while it trains, writes its metrics and rescues, and at its last step its result.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

from mutualrl.errors import RunDirectoryError, UsageError
from mutualrl.recipes import yaml_file
from mutualrl.recipes.differences import by_dotted_key
from mutualrl.recipes.free import may_differ
from mutualrl.regimes import Regime
from mutualrl.regimes.info import RegimeInfo
from mutualrl.regimes.resample import Resample
from mutualrl.sources.section import ServedSource
from mutualrl.storage.files import JsonObject, create_checksummed, write_atomic
from mutualrl.storage.run_info import RunInfo
from mutualrl.storage.rundir import command_line, versions
from mutualrl.training.member import Member


@dataclass(frozen=True, slots=True)
class ScriptRun:
    """What one script and the others of its run share: `member`, the policy that this one trains; all policies, the
    regime with its settings, the seed of the regime's draws, whether advantages are whitened."""

    member: Member
    policies: tuple[str, ...]
    regime: Regime
    seed: int
    whiten: bool = False

    def info(
        self,
        steps: int,
        rewards: Sequence[str],
        resample: Resample | None = None,
        served: Sequence[ServedSource] = (),
    ) -> RunInfo:
        """Return the content of run.json. Its recipe has what the scripts share, `served` sources too; each has its own
        model and trainer."""
        sources = [source.model_dump(mode="json") for source in served]
        recipe = yaml_file.dump(
            {
                **({"sources": sources} if sources else {}),
                "policies": [{"name": name} for name in self.policies],
                "regime": {"name": self.regime.name, **self.regime.model_dump(mode="json")},
                "task": {"name": "script", "reward": list(rewards)},
                "run": {"steps": steps, "seed": self.seed},
                "round": {
                    "whiten_advantages": self.whiten,
                    "resample": None if resample is None else resample.model_dump(mode="json"),
                },
            }
        )
        return RunInfo(
            run_id=self.member.exchange.run_id,
            created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            command=command_line(),
            versions=versions(),
            seed=self.seed,
            regime=self.regime.name,
            regime_info=RegimeInfo.of(type(self.regime)).model_dump(mode="json"),
            recipe=recipe,
            scripts=True,
        )

    def join(self, info: RunInfo) -> None:
        """Write run.json, or compare it with that of the script that began first. Raises UsageError naming the keys
        that differ, RunDirectoryError if the directory is a run of `mutualrl train`."""
        run = self.member.run
        run.root.mkdir(parents=True, exist_ok=True)
        if create_checksummed(run.run_json, info.to_json(), root=run.root):
            write_atomic(run.recipe, info.recipe.encode())
            return
        other = run.info()
        if not other.scripts:
            raise RunDirectoryError(
                f"{run.root} is a run of `mutualrl train`; give Sharing.over a directory of its own"
            )
        where = str(run.run_json)
        theirs = by_dotted_key({"run_id": other.run_id, **_decisive(yaml_file.parse_mapping(other.recipe, where))})
        ours = by_dotted_key({"run_id": info.run_id, **_decisive(yaml_file.parse_mapping(info.recipe, where))})
        differing = []
        for key in {**theirs, **ours}:
            if theirs.get(key) != ours.get(key):
                differing.append(f"{key}: found {json.dumps(theirs.get(key))}, here {json.dumps(ours.get(key))}")
        if differing:
            raise UsageError(
                f"the scripts of {run.root} must agree and differ: {'; '.join(differing)}. Settings of one policy "
                "alone need a recipe (mutualrl train)"
            )


def _decisive(recipe: JsonObject) -> JsonObject:
    """Return a recipe without what may change of its served sources when a script starts again, as in a recipe."""
    sources = [
        {key: value for key, value in source.items() if not may_differ(ServedSource, key, "resume")}
        for source in recipe.get("sources", ())
    ]
    return {**recipe, **({"sources": sources} if sources else {})}
