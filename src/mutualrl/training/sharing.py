"""What one policy shares, with whom, and how: the configuration of its rounds (`mutualrl.training.round`)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate.utils import broadcast_object_list
from pydantic import ValidationError

from mutualrl.errors import UsageError
from mutualrl.process.script_errors import show_messages_only
from mutualrl.records import PublishSchema
from mutualrl.references import POLICY_NAME, name_problem
from mutualrl.regimes import Regime, get_regime
from mutualrl.regimes.regime import SELECTION, publish_schema
from mutualrl.regimes.run_problems import RunFacts, member_problems
from mutualrl.see import Exchange, Heartbeat, WaitTimeouts
from mutualrl.sources.script import ServedRows
from mutualrl.sources.source import Source
from mutualrl.storage.files import JsonObject
from mutualrl.storage.rundir import RunDirectory
from mutualrl.training.background import Background
from mutualrl.training.member import Member
from mutualrl.training.memory import Memory
from mutualrl.training.peers import PeerLink
from mutualrl.training.rescues import RescueLog
from mutualrl.training.sample_log import SampleLog
from mutualrl.training.script_run import ScriptRun
from mutualrl.training.script_source import ScriptSource
from mutualrl.training.source_rounds import SourceRounds
from mutualrl.traits import SourceTraits

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Sharing:
    """What one policy shares, with whom, and how.

    `link`: the exchange and the peers. `regime`: with its settings. `schema`: the published fields; None publishes
    nothing. `run_seed`: seed of the regime's draws. `max_length`: limit on a peer's text in the learner's tokens; None
    uses the trainer's `max_completion_length`. `tokenizers`: the peers', by name, for regimes that align traces.
    `sources`: members that publish texts and never learn; `asked`: those with a process of their own, for which the
    policy waits as for a peer, with what they have; `threads`: those of a script that ask them. `rescues`: log of texts
    learnt from peers; `samples`: log of some of its own rollouts (None: not written). `resume`: training claims the
    policy as a new attempt. `script`: the run that users' own scripts share; None under `mutualrl train`. `whiten`:
    advantages are whitened over the round. `background`: writes the log of rescues. `memory`: what the policy remembers
    between rounds, the only part that changes.
    """

    link: PeerLink
    regime: Regime
    schema: PublishSchema | None
    run_seed: int = 0
    max_length: int | None = None
    tokenizers: Mapping[str, PreTrainedTokenizerBase] = field(default_factory=dict)
    sources: Sequence[SourceRounds] = ()
    asked: Mapping[str, SourceTraits] = field(default_factory=dict)
    threads: Sequence[ScriptSource] = ()
    rescues: RescueLog | None = None
    samples: SampleLog | None = None
    resume: bool = False
    script: ScriptRun | None = None
    whiten: bool = False
    background: Background = field(default_factory=Background)
    memory: Memory = field(default_factory=Memory)

    @classmethod
    def over(
        cls,
        root: Path,
        policy: str,
        peers: Sequence[str],
        regime: str | type[Regime],
        *,
        run_id: str = "script",
        run_seed: int = 0,
        max_length: int | None = None,
        tokenizers: Mapping[str, PreTrainedTokenizerBase] | None = None,
        resume: bool = False,
        sources: Sequence[Source | ServedRows] = (),
        staleness: int = 0,
        timeouts: WaitTimeouts | None = None,
        whiten_advantages: bool = False,
        log_samples: bool = False,
        **settings: object,
    ) -> Sharing:
        """Share over a run directory, for `MutualGRPOTrainer` in a user's script.

        All policies of a run use the same `root`, `run_id`, regime settings and number of steps. The exchange is in
        `root/exchange`, metrics and rescues in `root/policies/POLICY`, where `mutualrl report` and `watch` find them.
        `timeouts`: how long the policy waits; by default up to an hour per round, for a peer that starts later or was
        killed and is started again. `regime`: a name, an import path, or a class. A
        regime that aligns traces needs the peers' `tokenizers` by name. `sources`: members that publish texts and never
        learn (`recorded_source` and `served_source` of `mutualrl.sources.script`); with one, `peers` may be empty. A
        script that resumes from a checkpoint (`train(resume_from_checkpoint=...)`) passes `resume=True` and becomes a
        new attempt of its policy, which fences the previous one. A peer may be `staleness` rounds behind before the
        policy waits for it. `whiten_advantages`: normalise advantages over the round, after TRL's `scale_rewards`.
        `log_samples`: log four rollouts per round in `samples.jsonl`, which the report shows behind its curves.
        Raises UsageError when this policy has already published in `root` (rounds of an earlier run must not be
        treated as this run's), for names or settings that are wrong, for a regime that cannot use sources, or when
        tokenizers are missing.
        """
        show_messages_only()
        regime_class = get_regime(regime) if isinstance(regime, str) else regime
        _require_names(policy, peers, [source.name for source in sources])
        configured = _configured(regime_class, settings)
        served = [source for source in sources if isinstance(source, ServedRows)]
        stored = [source for source in sources if not isinstance(source, ServedRows)]
        asked = {source.name: source.section.traits for source in served}
        facts = RunFacts(peers=len(peers), sources={**{source.name: SELECTION for source in stored}, **asked})
        for key, problem in member_problems(configured, facts):
            advice = "" if key.startswith("sources.") else "; expected at least one name in peers, or sources=[...]"
            raise UsageError(f"Sharing.over: {key}: {problem}{advice}")
        run = RunDirectory(root)
        waits = timeouts or WaitTimeouts(on_peer_loss="wait", late_start=True)
        optional = {source.name for source in served if source.section.on_source_loss == "continue"}
        waits = replace(waits, dispensable=waits.dispensable | optional)
        exchange = Exchange(run.exchange, policy, run_id, timeouts=waits)
        if not resume and exchange.rounds(policy):
            raise UsageError(
                f"{exchange.location(policy)} has rounds of an earlier run; use a separate directory per run, or "
                "continue that run with Sharing.over(..., resume=True) and train(resume_from_checkpoint=True)"
            )
        schema = publish_schema([configured])
        peer_tokenizers = dict(tokenizers or {})
        missing = sorted(set(peers) - set(peer_tokenizers))
        if schema is not None and "token_ids" in schema.fields and missing:
            raise UsageError(
                f"regime {configured.name!r} aligns the peers' traces and needs their tokenizers: none passed for "
                f"{', '.join(missing)} (Sharing.over(..., tokenizers={{{missing[0]!r}: ...}}))"
            )
        learners = tuple(sorted({policy, *peers}))
        threads = [ScriptSource(source, run, exchange, learners, configured, run_seed) for source in served]
        member = Member(
            run=run,
            exchange=exchange,
            heartbeat=Heartbeat(exchange.store, policy),
            stopping=lambda: any(thread.failed() for thread in threads),
        )
        link = member.link(
            peers,
            asked=asked,
            staleness=staleness,
            how_to_start=(
                f"Start its script in another process, with the same data, order, seed and batch: Sharing.over("
                f"Path({str(root)!r}), policy=ITS_NAME, peers=[{policy!r}, ...], regime={configured.name!r}, "
                f"{''.join(f'{key}={value!r}, ' for key, value in settings.items())}run_id={run_id!r})"
            ),
        )
        return cls(
            link=link,
            regime=configured,
            schema=schema,
            run_seed=run_seed,
            max_length=max_length,
            tokenizers=peer_tokenizers,
            sources=[SourceRounds.of(source, exchange) for source in stored],
            asked=asked,
            threads=threads,
            resume=resume,
            rescues=RescueLog(member.files.rescues),
            samples=SampleLog(member.files.samples) if log_samples else None,
            script=ScriptRun(member, learners, configured, run_seed, whiten_advantages),
            whiten=whiten_advantages,
        )

    def claim_attempt(self, accelerator: Accelerator) -> None:
        """Claim the policy as a new attempt, identical on all ranks, if a script resumes; only once."""
        exchange = self.link.exchange
        if not self.resume or exchange.attempt > 0:
            return
        attempt = [exchange.newest_attempt() + 1 if accelerator.is_main_process else 0]
        exchange.attempt = broadcast_object_list(attempt, from_process=0)[0]
        if accelerator.is_main_process:
            exchange.claim()

    @property
    def source_names(self) -> list[str]:
        """Return the names of the sources, sorted."""
        return sorted(self.traits)

    @property
    def traits(self) -> dict[str, SourceTraits]:
        """Return what each source has."""
        return {**{rounds.source.name: SELECTION for rounds in self.sources}, **self.asked}

    @property
    def unverified(self) -> list[str]:
        """Return the sources whose texts may have no reward yet, which this policy then computes itself."""
        stored = [rounds.source.name for rounds in self.sources if not rounds.source.verified]
        return sorted([*stored, *self.asked])

    @property
    def active(self) -> bool:
        """Return whether a round publishes or changes anything."""
        return self.schema is not None or self.regime.needs().shares

    @property
    def traced(self) -> bool:
        """Return whether the pool reads the behaviour policy's log-probs, which may then need a forward pass."""
        return self.schema is not None and self.schema.traced

    @property
    def same_prompts(self) -> bool:
        """Return whether all policies must see the same prompts in a round."""
        return self.regime.needs().same_prompts

    def publishes(self, field_name: str) -> bool:
        """Return whether a field of rollouts is published."""
        return self.schema is not None and field_name in self.schema.fields

    def publisher_of(self, field_name: str) -> str:
        """Return the setting that publishes a field of rollouts: the regime, or the user's `publish: full`."""
        by_regime = field_name in self.regime.needs().reads.fields
        return f"regime {self.regime.name!r}" if by_regime else "publish: full"

    def publishes_text(self, reward: float) -> bool:
        """Return whether the text of a rollout with this reward (NaN: unscorable) is published."""
        return self.schema is not None and self.schema.publishes_text(reward)

    def packed(self) -> JsonObject:
        """Return what the policy remembers, for a checkpoint: plain values and tensors."""
        waits = {"wait_seconds": self.link.wait_seconds, "waited_for": dict(self.link.waited_for)}
        return {**self.memory.packed(), **waits}

    def restore(self, packed: JsonObject) -> None:
        """Take over what a checkpoint remembers."""
        self.memory.restore(packed)
        self.link.wait_seconds = packed["wait_seconds"]
        self.link.waited_for = Counter(packed["waited_for"])


def _require_names(policy: str, peers: Sequence[str], sources: Sequence[str]) -> None:
    """Raise UsageError for names of policies and sources that cannot form a pool."""
    for name in (policy, *peers, *sources):
        form = "expected lower-case letters, digits, '.', '_' or '-'"
        problem = name_problem(name) if re.match(POLICY_NAME, name) else form
        if problem is not None:
            raise UsageError(f"Sharing.over: found the policy name {name!r}; {problem}")
    if policy in peers:
        raise UsageError(f"Sharing.over: peers={list(peers)!r} has policy={policy!r} itself; name only the others")
    if repeated := [name for name, count in Counter([policy, *peers, *sources]).items() if count > 1]:
        others = f" and sources={list(sources)!r}" if sources else ""
        raise UsageError(f"Sharing.over: peers={list(peers)!r}{others} names {repeated[0]!r} twice")


def _configured(regime: type[Regime], given: Mapping[str, object]) -> Regime:
    """Return a regime with settings. Raises UsageError naming those that are unknown or wrong."""
    try:
        return regime(**given)
    except ValidationError as error:
        lines = []
        for detail in error.errors(include_url=False):
            key = ".".join(map(str, detail["loc"]))
            unknown = detail["type"] == "extra_forbidden"
            problem = f"expected one of: {', '.join(regime.model_fields)}" if unknown else detail["msg"]
            lines.append(f"{key}: found {detail['input']!r:.80}; {problem}")
        raise UsageError(f"Sharing.over: regime {regime.name!r}: {'; '.join(lines)}") from None
