"""Recipe: pool + regime + task + trainer + run, as one pydantic tree that rejects unknown keys. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from mutualrl.process.plugins import FORM as IMPORT_FORM
from mutualrl.process.plugins import absolute_path, is_import_path
from mutualrl.recipes.trainer_table import Settings
from mutualrl.records import PublishSchema
from mutualrl.references import POLICY_NAME, data_path, free_name, model_path
from mutualrl.regimes import Regime, baseline, get_regime
from mutualrl.regimes.regime import merged
from mutualrl.section import FACTOR, MACHINES, PATHS, UPKEEP, Free, Section, as_tuple
from mutualrl.sources.section import AskedSource, FrozenSource, RecordedSource, ServedSource, SourceSection
from mutualrl.storage.bucket_url import require_url
from mutualrl.tasks import TASKS, TaskSource
from mutualrl.tasks.base import HELD_OUT, MixtureMember
from mutualrl.tasks.rewards import FORM

POOL_NAME = r"^[A-Za-z0-9._-]{1,64}$"


class LoraSection(Section):
    """Low-rank adapters (LoRA, `peft`), trained in place of the weights. The KL reference is the model with the adapter
    disabled, so no second copy is loaded."""

    r: int = Field(16, ge=1, description="rank")
    alpha: float = Field(32.0, gt=0, description="scale: the adapter's output is multiplied by alpha / r")
    dropout: float = Field(0.0, ge=0, lt=1)
    target_modules: Annotated[tuple[str, ...], Field(min_length=1, strict=False)] | Literal["all-linear"] = "all-linear"


class Policy(Section):
    """One language model of the pool. `trainer` and `regime` override the run's keys for this policy."""

    name: Annotated[str, Field(pattern=POLICY_NAME, max_length=64), AfterValidator(free_name)]
    model: Annotated[str, AfterValidator(model_path), PATHS]
    revision: Annotated[str | None, PATHS] = None
    trust_remote_code: bool = False
    parameters: Annotated[float | None, UPKEEP] = Field(
        None, gt=0, description="number of parameters, a hint for placement"
    )
    lora: LoraSection | None = None
    trainer: Settings = Field({})
    regime: Annotated[Settings, FACTOR] = Field({})


UserPath = Annotated[str, AfterValidator(lambda value: data_path(Path(value)))]


def _reward(value: str) -> str:
    """Return `boxed`, or an import path; a path to a file is made absolute."""
    if value == "boxed":
        return value
    if not is_import_path(value):
        raise ValueError(f"found {value!r}, {FORM}")
    return absolute_path(value)


def _importable(value: str) -> str:
    """Return an import path; a path to a file is made absolute."""
    if not is_import_path(value):
        raise ValueError(f"found {value!r}, expected {IMPORT_FORM}")
    return absolute_path(value)


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


RewardPath = Annotated[str, AfterValidator(_reward)]
CodePath = Annotated[str, AfterValidator(_importable)]
Rewards = Annotated[tuple[RewardPath, ...], BeforeValidator(as_tuple), Field(strict=False)]
Tools = Annotated[tuple[CodePath, ...], BeforeValidator(as_tuple), Field(strict=False)]


class MemberSection(Section):
    """One task of a mixture. Omitted keys default to the mixture's."""

    data: Annotated[UserPath | None, PATHS] = None
    validation_data: Annotated[UserPath | None, PATHS] = None
    template: str | None = None
    answer: str = "answer"
    weight: float | None = Field(None, ge=0, description="relative weight in the training prompts; null: by size")


def _hold_out(value: object) -> object:
    """Return whether, or which fraction of, the training rows are held out. Raises ValueError for another value."""
    if isinstance(value, bool) or (isinstance(value, float) and 0 < value < 1):
        return value
    raise ValueError(f"found {value!r:.80}, expected true, false, or a fraction between 0 and 1, such as 0.25")


class TaskSection(Section):
    """Section `task`: prompts and rewards. `data` and `validation_data`, for tasks that read data: a file, a directory
    or `hub:OWNER/NAME`. `reward`: `boxed`, a TRL reward function by import path, or several (weighted by
    `trainer.reward_weights`). `template` and `answer` apply to task `dataset`, `members` to task `mixture`.
    `hold_out`: without an evaluation split, hold out this fraction of the training rows for validation (true: 1 in
    16); false refuses such data.
    `environment` and `tools`: TRL's `environment_factory` (a class) and `tools` (functions), by import path; rollouts
    then have several turns. With an environment, `reward` defaults to empty: the environment's `get_reward` is the
    reward."""

    name: str = "arithmetic"
    data: Annotated[UserPath | None, PATHS] = None
    validation_data: Annotated[UserPath | None, PATHS] = None
    hold_out: Annotated[bool | float, BeforeValidator(_hold_out)] = Field(
        True, description="without an evaluation split, validate on a fraction of the training rows; true: 1 in 16"
    )
    template: str | None = Field(None, description="prompt template, with {field} for a field of the row")
    answer: str = Field("answer", description="field of the row with the answer")
    members: dict[str, MemberSection] = Field({}, description="tasks of the mixture by name; empty: the paper's seven")
    max_prompt_tokens: int = Field(
        1024, ge=1, description="longer prompts, under any policy's tokenizer, are dropped for all"
    )
    reward: Rewards = ("boxed",)
    environment: CodePath | None = Field(None, description="class of TRL's environment_factory, by import path")
    tools: Tools = Field((), description="functions that the model may call, by import path")

    @model_validator(mode="before")
    @classmethod
    def _default_environment_reward(cls, value: object) -> object:
        if isinstance(value, dict) and value.get("environment") is not None:
            return {"reward": (), **value}
        return value

    @model_validator(mode="after")
    def _keys_match_task(self) -> TaskSection:
        if not self.reward and self.environment is None:
            raise ValueError(f"reward: found none; {FORM}")
        if self.name != "mixture" and self.members:
            raise ValueError(f"members: only task 'mixture' has members; this is {self.name!r}")
        if self.name != "dataset" and (self.template is not None or self.answer != "answer"):
            raise ValueError(
                f"template, answer: only task 'dataset' has these keys; {self.name!r} has its own template"
            )
        for name, member in self.members.items():
            if name not in TASKS or name == self.name:
                known = ", ".join(task for task in TASKS if task != self.name)
                raise ValueError(f"members: found {name!r}, expected one of: {known}")
            if name != "dataset" and (member.template is not None or member.answer != "answer"):
                raise ValueError(f"members.{name}: only task 'dataset' has template and answer")
        return self

    @property
    def has_turns(self) -> bool:
        """Return whether a rollout may have several turns: tools or an environment are set."""
        return self.environment is not None or bool(self.tools)

    def source(self, seed: int) -> TaskSource:
        """Return the task's data source."""
        fraction = HELD_OUT if isinstance(self.hold_out, bool) else self.hold_out
        members = {
            name: MixtureMember(
                TaskSource(_path(m.data), _path(m.validation_data), seed, m.template, m.answer, hold_out=fraction),
                m.weight,
            )
            for name, m in self.members.items()
        }
        data, validation = _path(self.data), _path(self.validation_data)
        return TaskSource(data, validation, seed, self.template, self.answer, members, fraction)


class RoundSection(Section):
    """Section `round`: one generation batch. `prompts` and the devices determine gradient accumulation."""

    prompts: int | None = Field(None, ge=1, description="prompts per round, the same for every policy")
    optimizer_steps: int = Field(1, ge=1, description="optimizer steps per round")
    whiten_advantages: bool = Field(
        False, description="normalise advantages to mean 0 and variance 1 over the round, after trainer.scale_rewards"
    )


class RunSection(Section):
    """Section `run`: the run as a whole. Times are in seconds."""

    steps: int = Field(100, ge=1, le=10**9, description="optimizer steps")
    epochs: int | None = Field(
        None,
        ge=1,
        description="passes over the training prompts, in place of steps, which are derived from it",
    )
    seed: Annotated[int, Free.to("comparison")] = Field(0, ge=0, le=2**31 - 1)  # a sweep sets its own
    dir: Annotated[UserPath | None, UPKEEP] = None
    validate_every: Annotated[int, Free.to("resume", "machines")] = Field(
        5, ge=0, description="optimizer steps between validations; 0: only before and after training"
    )
    validation_limit: int = Field(64, ge=1, description="maximum number of validation prompts")
    publish: Annotated[Literal["regime", "full"], FACTOR] = Field(
        "regime", description="fields published to the exchange"
    )
    keep_rounds: Annotated[int | None, UPKEEP] = Field(
        None, ge=1, description="rounds per policy kept in the exchange; null: all"
    )
    save_every: Annotated[int, UPKEEP] = Field(
        20, ge=0, description="optimizer steps between checkpoints; 0: only at the last step"
    )
    keep_checkpoints: Annotated[int, UPKEEP] = Field(2, ge=1, description="newest complete checkpoints kept per policy")
    max_restarts: Annotated[int, UPKEEP] = Field(2, ge=0, description="maximum restarts of a policy that died")
    on_peer_loss: Annotated[Literal["fail", "wait", "continue"], UPKEEP] = Field(
        "fail", description="action of the other policies when one is permanently lost"
    )
    peer_timeout: Annotated[float, UPKEEP] = Field(
        60.0, gt=0, description="a peer without a heartbeat for this long is dead"
    )
    report_to: Annotated[tuple[Literal["trackio", "wandb", "tensorboard"], ...], Field(strict=False), UPKEEP] = Field(
        (), description="trackers in addition to metrics.jsonl, through TRL's integrations"
    )
    round_timeout: Annotated[float, UPKEEP] = Field(3600.0, gt=0, description="maximum wait for a peer that is alive")
    step_timeout: Annotated[float, UPKEEP] = Field(
        1800.0, gt=0, description="a live policy without progress for this long (e.g. a hanging reward) is dead"
    )


class HardwareSection(Section):
    """Section `hardware`: the target machine of the recipe; `--dry-run` plans for it and lists what this machine lacks.

    `gpus`: number of GPUs to use, 0 for the CPU; by default all of the machine's.
    """

    gpus: Annotated[int | None, UPKEEP] = Field(None, ge=0, le=1024)


class LaunchSection(Section):
    """Section `launch`: process group of a policy. `auto`: ZeRO-3 on GPUs; one process, or DDP, on CPU."""

    strategy: Literal["auto", "ddp", "zero2", "zero3"] = "auto"
    share_gpus: bool | None = Field(
        None,
        description="every policy runs on all GPUs, shared with the others; null: where there are fewer GPUs than "
        "policies and frozen sources, and they fit",
    )
    processes: int | None = Field(None, ge=1, description="processes per policy and node, CPU only")
    weights: dict[str, Annotated[float, Field(gt=0)]] = Field(
        {}, description="relative number of GPUs by policy (default 1); empty: as even as the batch allows"
    )


class Bucket(NamedTuple):
    """Bucket of a run's exchange. `checkpoints`: whether each policy's newest checkpoint is copied to it."""

    url: str
    heartbeat_seconds: float
    checkpoints: bool = False


class ExchangeSection(Section):
    """Section `exchange`: location of the exchange, and the staleness allowed between policies.

    `url`: a bucket in place of the run directory; one run per URL. Credentials come from the environment.
    `staleness`: rounds that a peer may be behind before the learner waits for it.
    """

    url: Annotated[Annotated[str, AfterValidator(require_url)] | None, MACHINES] = None
    heartbeat_seconds: Annotated[float, UPKEEP] = Field(
        10.0, ge=1, description="seconds between a policy's heartbeats in the bucket"
    )
    checkpoints: Annotated[bool, UPKEEP] = Field(
        False, description="copy each policy's newest checkpoint to the bucket, so that another machine can resume"
    )
    staleness: int = Field(0, ge=0, description="rounds that a peer may be behind before the learner waits for it")

    @model_validator(mode="after")
    def _bucket_keys(self) -> ExchangeSection:
        for key in ("heartbeat_seconds", "checkpoints"):
            if self.url is None and getattr(self, key) != ExchangeSection.model_fields[key].default:
                raise ValueError(f"{key} requires an exchange in a bucket; set url or omit {key}")
        return self


class Recipe(Section):
    """Complete, resolved configuration of a run."""

    pool: Annotated[Annotated[str, Field(pattern=POOL_NAME)] | None, UPKEEP] = None
    policies: tuple[Policy, ...] = Field(min_length=1, strict=False)
    sources: Annotated[tuple[SourceSection, ...], Field(strict=False), FACTOR] = ()
    regime: Annotated[Settings, FACTOR] = Field({})
    task: TaskSection = TaskSection()
    trainer: Settings = Field({})
    round: RoundSection = RoundSection()
    run: RunSection = RunSection()
    hardware: Annotated[HardwareSection, MACHINES] = HardwareSection()
    launch: Annotated[LaunchSection, MACHINES] = LaunchSection()
    lora: LoraSection | None = None
    exchange: ExchangeSection = ExchangeSection()

    @model_validator(mode="after")
    def _sources_fit_together(self) -> Recipe:
        """Refuse sources that would wait for each other, or with prompts that nobody is asked about."""
        by_name = {source.name: source for source in self.sources}
        asked = [source for source in self.sources if isinstance(source, AskedSource)]
        after = {source.name: source.after for source in asked}
        for source in asked:
            chain = [source.name]
            while (before := after.get(chain[-1])) in by_name:
                if before in chain:
                    raise ValueError(
                        f"sources {' and '.join(map(repr, chain))} are each asked after another one of them; leave one "
                        "`after` out"
                    )
                chain.append(str(before))
            first = by_name.get(source.after or "")
            if first is not None and set(self.readers_of(source)) - set(self.readers_of(first)):
                raise ValueError(
                    f"sources.{source.name}.after: {first.name!r} is read by {', '.join(self.readers_of(first))}, "
                    f"this one by {', '.join(self.readers_of(source))}; expected a source that all of these read"
                )
        weighted = [source for source in asked if source.weight is not None]
        for source in weighted:
            if source.column is not None or source.learners != weighted[0].learners:
                raise ValueError(
                    f"sources.{source.name}.weight: sources with a weight divide the prompts of the same learners; "
                    "leave column and differing learners out"
                )
        return self

    @model_validator(mode="after")
    def _unique_names(self) -> Recipe:
        names = [p.name for p in self.policies]
        members = [*names, *(source.name for source in self.sources)]
        duplicates = sorted({n for n in members if members.count(n) > 1})
        if duplicates:
            kind = "members" if self.sources else "policies"
            raise ValueError(f"two {kind} are named {', '.join(map(repr, duplicates))}; names must be unique")
        for source in self.sources:
            others = [other.name for other in self.sources if other is not source]
            if isinstance(source, AskedSource) and source.after is not None and source.after not in others:
                raise ValueError(
                    f"sources.{source.name}.after: found {source.after!r}, expected another source"
                    + (f": {', '.join(others)}" if others else "; there is none")
                )
            if unknown := sorted(set(source.learners) - set(names)):
                raise ValueError(
                    f"sources.{source.name}.learners names {', '.join(map(repr, unknown))}; the policies are "
                    f"{', '.join(names)}"
                )
        if unknown := sorted(set(self.launch.weights) - set(names)):
            raise ValueError(
                f"launch.weights names {', '.join(map(repr, unknown))}; the policies are {', '.join(names)}"
            )
        return self

    @property
    def bucket(self) -> Bucket | None:
        """Return the bucket of the exchange; None for the run directory."""
        url = self.exchange.url
        return None if url is None else Bucket(url, self.exchange.heartbeat_seconds, self.exchange.checkpoints)

    @property
    def regime_name(self) -> str:
        """Return the name, import path or entry point of the regime."""
        return str(self.regime.get("name", baseline().name))

    @property
    def regime_class(self) -> type[Regime]:
        """Return the class of the regime. Raises RegimeError for one that cannot be imported."""
        return get_regime(self.regime_name)

    def steps_per_round(self, optimizer_steps: int) -> int:
        """Return the optimizer steps of a round that is cut into `optimizer_steps` and used `num_iterations` times."""
        return optimizer_steps * int(self.trainer_settings(self.policies[0].name).get("num_iterations", 1))

    def rounds(self, optimizer_steps: int) -> int:
        """Return the rounds of a run whose rounds are cut into `optimizer_steps`."""
        return -(-self.run.steps // self.steps_per_round(optimizer_steps))

    def with_steps(self, prompts: int, prompts_per_round: int, steps_per_round: int) -> Recipe:
        """Return the recipe with `run.epochs` converted: `run.steps = epochs * (prompts // prompts_per_round) *
        steps_per_round`. A recipe without epochs is returned unchanged."""
        if self.run.epochs is None:
            return self
        steps = self.run.epochs * (prompts // prompts_per_round) * steps_per_round
        return self.model_copy(update={"run": self.run.model_copy(update={"steps": max(steps, 1), "epochs": None})})

    @property
    def members(self) -> list[str]:
        """Return the names of all that publish: the policies, then the sources."""
        return [*(policy.name for policy in self.policies), *(source.name for source in self.sources)]

    @property
    def active_sources(self) -> list[SourceSection]:
        """Return the sources that any policy reads: none under a regime that reads nobody's rollouts."""
        return list(self.sources) if self.sources and self.regime_class.traits.reads_peers else []

    @property
    def recorded_sources(self) -> list[RecordedSource]:
        """Return the sources that any policy reads whose texts are known before training."""
        return [source for source in self.active_sources if isinstance(source, RecordedSource)]

    @property
    def asked_sources(self) -> list[ServedSource | FrozenSource]:
        """Return the sources that any policy reads that answer during training."""
        return [source for source in self.active_sources if not isinstance(source, RecordedSource)]

    @property
    def frozen_sources(self) -> list[FrozenSource]:
        """Return the sources that any policy reads that are sampled on this machine."""
        return [source for source in self.active_sources if isinstance(source, FrozenSource)]

    def sources_of(self, policy: str) -> list[SourceSection]:
        """Return the sources that a policy reads."""
        return [source for source in self.active_sources if not source.learners or policy in source.learners]

    def readers_of(self, source: SourceSection) -> list[str]:
        """Return the policies that read a source."""
        return list(source.learners) or [policy.name for policy in self.policies]

    def policy(self, name: str) -> Policy:
        """Return the policy of that name. Raises KeyError when there is none."""
        return {p.name: p for p in self.policies}[name]

    def regime_of(self, policy: str) -> Regime:
        """Return the regime with its effective settings for one policy."""
        settings = merged(self.regime, self.policy(policy).regime)
        settings.pop("name", None)
        return self.regime_class(**settings)

    def lora_settings(self, policy: str) -> LoraSection | None:
        """Return the adapter of one policy, or None if it trains its weights; `lora: null` on a policy disables the
        run's adapter for it."""
        section = self.policy(policy)
        return section.lora if "lora" in section.model_fields_set else self.lora

    @property
    def published(self) -> PublishSchema:
        """Return the fields that any policy's regime reads; all policies publish them."""
        return PublishSchema.union(self.regime_of(p.name).publishes() for p in self.policies)

    def trainer_settings(self, policy: str) -> Settings:
        """Return the effective GRPOConfig keys of one policy, without those set by the run."""
        return {**self.trainer, **self.policy(policy).trainer}
