"""Typed records of a run: `run.json` and each policy's `result.json`. The fields are the keys on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from mutualrl.errors import FileDamagedError
from mutualrl.storage.accounts import SourceFacts
from mutualrl.storage.allocation import Allocation
from mutualrl.storage.files import LARGEST_NUMBER, JsonObject, read_checksummed
from mutualrl.storage.format import FORMAT

Fingerprint = dict[str, str | int]
Finite = Annotated[float, Field(ge=-LARGEST_NUMBER, le=LARGEST_NUMBER)]


class Stored(BaseModel):
    """Base of records stored as JSON; unknown keys of newer versions are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)

    def to_json(self) -> dict[str, object]:
        """Return the stored form."""
        return self.model_dump(mode="json", by_alias=True)


class RunInfo(Stored):
    """`run.json`: a run's start, the plan that its policies share, and their placement.

    `exchange`: URL of its exchange; empty if that is in the run's directory. `joined`: the member that joined it alone,
    a policy or a source that is asked; the others run elsewhere. `models`: digest of each policy's base model
    (`engines.model_files.model_digest`). `recipe`: the resolved recipe, of which recipe.yaml is a copy;
    `recipe_sha256`: its sha256; `recipe_before_sha256`: the sha256 before the newest session. `scripts`: users' own
    scripts train the policies, and `recipe` has only what these share. `data`: numbers and origins of the prompts by
    split (`recipes.agreement.DataSplits`). `sources`: by name, what was said of each source before training
    (`sources.prepare`), with the `digest` of its rollouts; `asked_sources`: what was predicted of those that answer
    during training.
    """

    format: int = FORMAT
    run_id: str
    created: str = ""
    command: list[str] = []
    versions: dict[str, str] = {}
    seed: int = 0
    regime: str = "unknown"
    regime_info: JsonObject = {}
    pool: str | None = None
    nodes: int = 1
    fingerprint: Fingerprint = {}
    models: dict[str, str] = {}
    placement: dict[str, Allocation] = {}
    exchange: str = ""
    joined: str = ""
    recipe: str = ""
    recipe_sha256: str = ""
    recipe_before_sha256: str = ""
    scripts: bool = False
    data: JsonObject = {}
    sources: dict[str, JsonObject] = {}
    asked_sources: dict[str, JsonObject] = {}

    @property
    def joined_source(self) -> str:
        """Return the source that joined alone; empty for any other run."""
        return "" if self.joined in self.placement else self.joined

    def to_json(self) -> dict[str, object]:
        """Return the stored form; without sources, that of versions that had none."""
        value = super().to_json()
        for key in ("sources", "asked_sources", "joined"):
            if not value[key]:
                del value[key]
        return value


def _without_unmeasured(by_group: object) -> object:
    """Return the groups without those that have no number."""
    if not isinstance(by_group, dict):
        return by_group
    return {group: value for group, value in by_group.items() if value is not None}


class Validation(Stored):
    """Validation: accuracy over `n` prompts and by group, with the `sizes` of the groups; `no_box`: fraction of
    completions without a boxed answer; `solved`: 1 or 0 for each prompt in order, 1 if its score is above 0.5;
    `unscorable`: completions without a reward, which count as 0."""

    n: int = 0
    accuracy: Finite
    by_group: Annotated[dict[str, Finite], BeforeValidator(_without_unmeasured)]
    sizes: dict[str, int] = {}
    no_box: Finite | None = 0.0
    solved: str = ""
    unscorable: int = 0


def is_accuracy(reward: object) -> bool:
    """Return whether `task.reward` makes a validation's mean an accuracy."""
    return reward in (None, "boxed", ["boxed"], ("boxed",))


def measured(validation: Validation | None) -> float | None:
    """Return the accuracy of a validation; None without one, or if no completion had a reward."""
    if validation is None or (validation.unscorable and validation.unscorable == validation.n):
        return None
    return validation.accuracy


class PolicyFacts(Stored):
    """What a policy's prompts and rounds came to. `dead`: prompts whose last group had no reward above 0, at the end;
    `first_dead`: after the first round; `most_dead`: the most in any round (None: not counted); `revived`: how often
    one of them had a success again. `taught`: rows whose text it was taught (None: its regime teaches none);
    `extra_rows`, `extra_tokens`: all that joined its loss beside its own rollouts."""

    dead: int | None = None
    first_dead: int | None = None
    most_dead: int | None = None
    revived: int = 0
    taught: int | None = None
    extra_rows: int = 0
    extra_tokens: int = 0


class PolicyResult(Stored):
    """`result.json`: a policy's final report. Times in seconds, over all its attempts. `validation`: None for a policy
    that its own script trained. `facts`: what its log comes to, in summary.json only."""

    initial_validation: Validation | None
    validation: Validation | None
    steps: int
    rescued_pairs: int = 0
    rescued_prompts: int = 0
    train_seconds: Finite = 0.0
    wait_seconds: Finite = 0.0
    waited_for_seconds: dict[str, Finite] = {}
    lost_peers: dict[str, int] = {}
    attempts: int = 1
    resumed_from: list[int] = []
    facts: PolicyFacts | None = None


class Summary(Stored):
    """`summary.json`: the results of a finished run. `shares`: whether its policies shared anything; `mean_reward`:
    whether validation measures a mean reward, no accuracy; `policies`: by name, without those in `lost`; `seconds`:
    from the start of its last session to its end; `resumed`: whether there was a session before."""

    regime: str
    shares: bool = True
    mean_reward: bool = False
    pool: str | None = None
    task: str
    seed: int
    steps: int
    seconds: Finite
    resumed: bool = False
    data: JsonObject = {}
    sources: dict[str, JsonObject] = {}
    source_facts: dict[str, SourceFacts] = {}
    policies: dict[str, PolicyResult]
    lost: list[str] = []
    notes: list[str] = []

    def to_json(self) -> dict[str, object]:
        """Return the stored form; without sources, that of versions that had none."""
        value = super().to_json()
        for key in ("sources", "source_facts"):
            if not value[key]:
                del value[key]
        return value


def policy_result(path: Path, run: Path) -> PolicyResult | None:
    """Return the final report of a policy of the run in `run`, or None if it has not finished. Raises FileDamagedError
    if the file was changed."""
    value = read_checksummed(path, root=run)
    if value is None:
        return None
    try:
        return PolicyResult.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        raise FileDamagedError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
