"""Recipe: pool + regime + task + trainer + run, as one pydantic tree that rejects unknown keys. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from mutualrl.recipes.trainer_table import Settings
from mutualrl.records import PublishSchema
from mutualrl.references import POLICY_NAME, data_path, free_name, model_path
from mutualrl.regimes import Regime, baseline, get_regime
from mutualrl.regimes.regime import merged
from mutualrl.regimes.resample import Resample, resample_section
from mutualrl.section import FACTOR, MACHINES, PATHS, UPKEEP, Free, Section, UserFile
from mutualrl.see.section import Bucket, ExchangeSection
from mutualrl.sources.section import AskedSource, FrozenSource, RecordedSource, ServedSource, SourceSection
from mutualrl.storage.allocation import Strategy
from mutualrl.tasks.section import TaskSection

if TYPE_CHECKING:
    from peft import LoraConfig

POOL_NAME = r"^[A-Za-z0-9._-]{1,64}$"


UserPath = Annotated[str, AfterValidator(lambda value: data_path(Path(value)))]


class LoraSection(Section):
    """Low-rank adapters (LoRA, `peft`), trained in place of the weights. The KL reference is the model with the adapter
    disabled, so no second copy is loaded."""

    r: int = Field(16, ge=1, description="rank")
    alpha: float = Field(32.0, gt=0, description="scale: the adapter's output is multiplied by alpha / r")
    dropout: float = Field(0.0, ge=0, lt=1)
    target_modules: Annotated[tuple[str, ...], Field(min_length=1, strict=False)] | Literal["all-linear"] = "all-linear"

    def for_peft(self) -> LoraConfig:
        """Return `peft`'s configuration of the adapter."""
        from peft import LoraConfig

        targets = self.target_modules
        return LoraConfig(
            r=self.r,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            target_modules=targets if isinstance(targets, str) else list(targets),
            task_type="CAUSAL_LM",
        )


class Policy(Section):
    """One language model of the pool. `trainer` and `regime` override the run's keys for this policy."""

    name: Annotated[str, Field(pattern=POLICY_NAME, max_length=64), AfterValidator(free_name)]
    model: Annotated[str, AfterValidator(model_path), PATHS, UserFile()]
    revision: Annotated[str | None, PATHS] = None
    trust_remote_code: bool = False
    parameters: Annotated[float | None, UPKEEP] = Field(
        None, gt=0, description="number of parameters, a hint for placement"
    )
    config: Annotated[UserPath | None, UPKEEP, PATHS, UserFile()] = Field(
        None, description="its config.json, or a directory with it, from which memory is estimated where it is not here"
    )
    lora: LoraSection | None = None
    trainer: Settings = Field({})
    regime: Annotated[Settings, FACTOR] = Field({})


class RoundSection(Section):
    """Section `round`: one generation batch. `prompts` and the devices determine gradient accumulation."""

    prompts: int | None = Field(None, ge=1, description="prompts per round, the same for every policy")
    optimizer_steps: int = Field(1, ge=1, description="optimizer steps per round")
    whiten_advantages: bool = Field(
        False, description="normalise advantages to mean 0 and variance 1 over the round, after trainer.scale_rewards"
    )
    resample: Annotated[Resample | None, BeforeValidator(resample_section), FACTOR] = Field(
        None, description="true: drop groups whose rewards are all equal, and sample further prompts"
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

    `gpus`: number of GPUs to use, 0 for the CPU; by default all of the machine's. `gpu_memory`: GiB of each, with which
    `--dry-run` checks the memory; this machine's GPUs are asked.
    """

    gpus: Annotated[int | None, UPKEEP] = Field(None, ge=0, le=1024)
    gpu_memory: Annotated[float | None, UPKEEP] = Field(None, gt=0)


class LaunchSection(Section):
    """Section `launch`: process group of a policy. `auto`: one process is plain; several are ZeRO-3 on GPUs, DDP on
    CPU."""

    strategy: Literal["auto", Strategy] = "auto"
    share_gpus: bool | None = Field(
        None,
        description="every policy runs on all GPUs, shared with the others; null: where there are fewer GPUs than "
        "policies and frozen sources",
    )
    check_memory: Annotated[bool, UPKEEP] = Field(
        True, description="refuse a start whose estimated peak is more than 1.2 of a GPU's memory; false: only say it"
    )
    processes: int | None = Field(None, ge=1, description="processes per policy and node, CPU only")
    weights: dict[str, Annotated[float, Field(gt=0)]] = Field(
        {}, description="relative number of GPUs by policy (default 1); empty: as even as the batch allows"
    )


class ModelOf(NamedTuple):
    """A member's model: path or hub id, and revision."""

    path: str
    revision: str | None


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
        return self.exchange.bucket

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
        return list(self.sources) if self.sources and self.regime_class().needs().peers else []

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

    @property
    def models(self) -> dict[str, ModelOf]:
        """Return the model of each policy and frozen source, by name."""
        models = {each.name: ModelOf(each.model, each.revision) for each in self.policies}
        return models | {each.name: ModelOf(each.frozen, each.revision) for each in self.frozen_sources}

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
        return PublishSchema.union(self.regime_of(p.name).needs().reads for p in self.policies)

    def trainer_settings(self, policy: str) -> Settings:
        """Return the effective GRPOConfig keys of one policy, without those set by the run."""
        return {**self.trainer, **self.policy(policy).trainer}
