"""One policy's part of a mutual round: publish, wait, read (SEE), then plan with the regime."""

from __future__ import annotations

import copy
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from accelerate.utils import broadcast_object_list, gather_object
from pydantic import ValidationError

from mutualrl.console.lines import notify
from mutualrl.errors import PlanMismatchError, RoundAbortedError, UsageError
from mutualrl.records import POLICY_NAME, PublishSchema, Rollout, name_problem
from mutualrl.regimes import (
    GuideView,
    Plan,
    Regime,
    Requests,
    RoundView,
    Transfer,
    check_plan,
    get_regime,
    plain_state,
)
from mutualrl.regimes.advantages import success_rate
from mutualrl.see import Exchange, Heartbeat, ReadLog, Shard, WaitTimeouts
from mutualrl.storage.rundir import RunDirectory
from mutualrl.training.peers import PeerLink, PeerRounds
from mutualrl.training.rescues import RescueLog
from mutualrl.training.script_run import ScriptRun

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedTokenizerBase

PromptTokens = dict[str, tuple[int, ...]]


class OwnBatch(NamedTuple):
    """One rank's part of the learner's rollouts in a round, and the token ids of their prompts."""

    rollouts: Sequence[Rollout]
    prompts: PromptTokens


@dataclass(frozen=True, slots=True)
class PastRound:
    """Own round that peers may not have published yet: its rollouts, on the main rank only and without log-probs, and
    the prompts that already have nll rows (`taught`)."""

    number: int
    rollouts: tuple[Rollout, ...]
    taught: tuple[str, ...] = ()


class SharedRound(NamedTuple):
    """Round after the exchange: all ranks' own rollouts and prompts; the peers' rounds, on the main rank only. `late`:
    own earlier rounds that peers have since published. `lags`: how many rounds each peer is behind."""

    number: int
    rollouts: Sequence[Rollout]
    prompts: PromptTokens
    peers: Mapping[str, Shard]
    waited: float
    late: tuple[SharedRound, ...] = ()
    lags: Mapping[str, int] = {}


@dataclass
class Sharing:
    """Settings and state of one policy's sharing.

    `link`: the exchange and the peers. `regime`: with its settings. `schema`: the published fields; None publishes
    nothing. `run_seed`: seed of the regime's draws. `max_length`: limit on a peer's text in the learner's tokens; None
    uses the trainer's `max_completion_length`. `tokenizers`: the peers', by name, for regimes that align traces.
    `solutions`: the data's correct completions, by prompt id. `rescues`: log of texts learnt from peers. `resume`: the
    next training claims the policy as a new attempt. `state`: of the regime. `uses`: number of nll rows per prompt.
    `dead`: prompts whose last group had no reward above 0. `past`: own rounds that peers may not have reached.
    `end_tokens`: how often each token ended an own rollout. These five are saved in checkpoints. `script`: the run that
    users' own scripts share; None under `mutualrl train`. `whiten`: advantages are whitened over the round.
    """

    link: PeerLink
    regime: Regime
    schema: PublishSchema | None
    run_seed: int = 0
    max_length: int | None = None
    tokenizers: Mapping[str, PreTrainedTokenizerBase] = field(default_factory=dict)
    solutions: Mapping[str, str] = field(default_factory=dict)
    rescues: RescueLog | None = None
    resume: bool = False
    state: dict[str, Any] = field(default_factory=dict)
    uses: Counter[str] = field(default_factory=Counter)
    dead: set[str] = field(default_factory=set)
    past: dict[int, PastRound] = field(default_factory=dict)
    end_tokens: Counter[int] = field(default_factory=Counter)
    script: ScriptRun | None = None
    whiten: bool = False

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
        solutions: Mapping[str, str] | None = None,
        staleness: int = 0,
        timeouts: WaitTimeouts | None = None,
        whiten_advantages: bool = False,
        **settings: object,
    ) -> Sharing:
        """Share over a run directory, for `MutualGRPOTrainer` in a user's script.

        All policies of a run use the same `root`, `run_id`, regime settings and number of steps. The exchange is in
        `root/exchange`, metrics and rescues in `root/policies/POLICY`, where `mutualrl report` and `watch` find them.
        `timeouts`: how long the policy waits; by default up to an hour per round, for a peer that starts later or was
        killed and is started again. `regime`: a name, an import path, or a class. A
        regime that aligns traces needs the peers' `tokenizers` by name; one that learns the data's solutions needs
        `solutions` by prompt id. A script that resumes from a checkpoint (`train(resume_from_checkpoint=...)`) passes
        `resume=True` and becomes a new attempt of its policy, which fences the previous one. A peer may be `staleness`
        rounds behind before the policy waits for it.
        `whiten_advantages`: normalise advantages over the round, after TRL's `scale_rewards`.
        Raises UsageError when this policy has already published in `root` (rounds of an earlier run must not be
        treated as this run's), for names or settings that are wrong, or when tokenizers or solutions are missing.
        """
        regime_class = get_regime(regime) if isinstance(regime, str) else regime
        _require_peers(policy, peers, regime_class)
        configured = _configured(regime_class, settings)
        run = RunDirectory(root)
        waits = timeouts or WaitTimeouts(on_peer_loss="wait", late_start=True)
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
        if configured.solution_column() and not solutions:
            text = configured.describe()
            raise UsageError(f"regime {text!r} learns the data's solutions: pass solutions={{prompt_id: text}}")
        return cls(
            link=PeerLink(
                exchange,
                peers,
                Heartbeat(exchange.store, policy),
                staleness=staleness,
                reads=ReadLog(exchange.store, policy),
                how_to_start=(
                    f"Start its script in another process, with the same data, order, seed and batch: Sharing.over("
                    f"Path({str(root)!r}), policy=ITS_NAME, peers=[{policy!r}, ...], regime={configured.name!r}, "
                    f"run_id={run_id!r})"
                ),
            ),
            regime=configured,
            schema=schema,
            run_seed=run_seed,
            max_length=max_length,
            tokenizers=peer_tokenizers,
            solutions=dict(solutions or {}),
            resume=resume,
            rescues=RescueLog(run.policy(policy).rescues),
            script=ScriptRun(run, run_id, tuple(sorted({policy, *peers})), configured, run_seed, whiten_advantages),
            whiten=whiten_advantages,
        )

    def claim_attempt(self, accelerator: Accelerator) -> None:
        """Claim the policy as a new attempt, identical on all ranks, if a script resumes. Runs once, when training
        starts."""
        if not self.resume:
            return
        exchange = self.link.exchange
        attempt = [exchange.newest_attempt() + 1 if accelerator.is_main_process else 0]
        exchange.attempt = broadcast_object_list(attempt, from_process=0)[0]
        if accelerator.is_main_process:
            exchange.claim()
        self.resume = False

    @property
    def active(self) -> bool:
        """Return whether a round publishes or changes anything."""
        return self.schema is not None or self.regime.shares

    @property
    def traced(self) -> bool:
        """Return whether the pool reads the behaviour policy's log-probs, which may then need a forward pass."""
        return self.schema is not None and self.schema.traced

    @property
    def requests_anything(self) -> bool:
        """Return whether the regime may request more than the exchange has before it plans."""
        return self.regime.requests_anything()

    @property
    def same_prompts(self) -> bool:
        """Return whether all policies must see the same prompts in a round."""
        return self.regime.same_prompts()

    def publishes(self, field_name: str) -> bool:
        """Return whether a field of rollouts is published."""
        return self.schema is not None and field_name in self.schema.fields

    def publisher_of(self, field_name: str) -> str:
        """Return the setting that publishes a field of rollouts: the regime, or the user's `publish: full`."""
        by_regime = field_name in self.regime.publishes().fields
        return f"regime {self.regime.name!r}" if by_regime else "publish: full"

    def publishes_text(self, reward: float) -> bool:
        """Return whether the text of a rollout with this reward (NaN: unscorable) is published."""
        return self.schema is not None and self.schema.publishes_text(reward)

    def sync(self, round_index: int, step: int, own: OwnBatch, accelerator: Accelerator) -> SharedRound:
        """Publish this rank's rollouts, wait for the peers' rounds, and read them.

        Every rank returns all own rollouts; only the main rank reads the peers'. On a stop request during the wait,
        every rank raises RoundAbortedError.
        """
        part = None
        if self.schema is not None:
            part = self.link.exchange.write_part(
                round_index, self.schema.select(own.rollouts), accelerator.process_index
            )
        by_rank = gather_object([(part, [replace(r, logprobs=None) for r in own.rollouts], own.prompts)])
        rollouts: list[Rollout] = []
        prompts: PromptTokens = {}
        for _, rank_rollouts, rank_prompts in by_rank:
            rollouts += rank_rollouts
            for prompt_id, ids in rank_prompts.items():
                remember(prompts, prompt_id, ids)
        require_one_group_per_id(rollouts)
        read = PeerRounds({}, {}, 0.0, {})
        aborted = [False]
        if accelerator.is_main_process:
            if self.schema is not None:
                self.link.exchange.commit(round_index, [entry[0] for entry in by_rank], step)
            if self.regime.reads_peers:
                try:
                    read = self.link.read(round_index)
                except RoundAbortedError as error:
                    notify(error)
                    aborted = [True]
        if broadcast_object_list(aborted, from_process=0)[0]:  # every rank leaves the round together
            raise RoundAbortedError(f"asked to stop in round {round_index}")
        if self.same_prompts:
            require_same_prompts(self.link.policy, round_index, prompts, read.current)
        late = self._late(round_index, read, rollouts if accelerator.is_main_process else ())
        return SharedRound(round_index, rollouts, prompts, read.current, read.waited, late, read.lags)

    def _late(self, round_index: int, read: PeerRounds, rollouts: Sequence[Rollout]) -> tuple[SharedRound, ...]:
        """Return own earlier rounds that peers have since published, the same on all ranks, without prompts that
        already have nll rows; store this round."""
        staleness = self.link.staleness
        if staleness == 0:
            return ()
        numbers: list[list[int]] = [sorted(read.late)]
        late = []
        for number in broadcast_object_list(numbers, from_process=0)[0]:
            if (past := self.past.get(number)) is None:  # from before this policy stored rounds
                continue
            peers = read.late.get(number, {})
            if self.same_prompts:
                seen = {rollout.prompt_id for rollout in past.rollouts}
                require_same_prompts(self.link.policy, number, seen, peers)
            untaught = [rollout for rollout in past.rollouts if rollout.prompt_id not in past.taught]
            late.append(SharedRound(number, untaught, {}, peers, 0.0))
        self.past[round_index] = PastRound(round_index, tuple(replace(r, text=None, logprobs=None) for r in rollouts))
        self.past = {number: past for number, past in self.past.items() if number > round_index - staleness}
        return tuple(late)

    def view(self, shared: SharedRound, transfer: Transfer, **facts: Any) -> RoundView:
        """Return the regime's view of the round; complete on the main rank, which has the peers. `facts`: fields of the
        view that the trainer provides."""
        return RoundView(
            round=shared.number,
            learner=self.link.policy,
            run_seed=self.run_seed,
            rollouts=shared.rollouts,
            peers=shared.peers,
            transfer=transfer,
            state=copy.deepcopy(self.state),
            solutions=self.solutions,
            whiten=self.whiten,
            **facts,
        )

    def prefixes(
        self, round_index: int, prompt_ids: Sequence[str], indices: Sequence[int], *, group: int, max_length: int
    ) -> list[tuple[int, ...]]:
        """Return the prefix token ids of each of this rank's next rollouts."""
        view = GuideView(
            round=round_index,
            learner=self.link.policy,
            run_seed=self.run_seed,
            prompt_ids=prompt_ids,
            indices=indices,
            group=group,
            max_length=max_length,
            state=copy.deepcopy(self.state),
        )
        return self.regime.prefixes(view)

    def requests(self, view: RoundView, accelerator: Accelerator) -> Requests:
        """Return the regime's requests that have no result in the view yet, identical on all ranks."""
        made: list[Requests | None] = [None]
        if accelerator.is_main_process:
            made = [self.regime.requests(view).without(view.results)]
        requests: Requests | None = broadcast_object_list(made, from_process=0)[0]
        assert requests is not None
        return requests

    def plan(self, view: RoundView, shared: SharedRound, accelerator: Accelerator) -> Plan:
        """Return the regime's plan for the round, identical on all ranks, and store its state."""
        plans: list[Plan | None] = [self._planned(view, shared) if accelerator.is_main_process else None]
        plan: Plan | None = broadcast_object_list(plans, from_process=0)[0]
        assert plan is not None
        if plan.state is not None:
            self.state = plain_state(plan.state, self.regime.name)
        if (past := self.past.get(shared.number)) is not None:
            taught = {row.prompt_id for row in plan.rows if row.loss == "nll"}
            self.past[shared.number] = replace(past, taught=tuple(sorted({*past.taught, *taught})))
        self.uses.update(row.prompt_id for row in plan.rows if row.loss == "nll")
        return plan

    def _planned(self, view: RoundView, shared: SharedRound) -> Plan:
        if not self.regime.shares:
            return Plan()
        plan = check_plan(self.regime.plan(view), view, self.regime.name)
        if not self.regime.reads_peers:
            return plan
        metrics = {
            **plan.metrics,
            "see/round": float(shared.number),
            "see/peers": float(len(shared.peers)),
            "see/bytes": float(sum(shard.bytes for shard in shared.peers.values())),
            "see/wait_seconds": shared.waited,
            **capabilities(view),
        }
        if self.link.staleness:
            metrics["see/lag"] = max(shared.lags.values(), default=0.0)
        return replace(plan, metrics=metrics)

    def follow(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Update `dead` from all ranks' own rollouts of a round. Return `prompts/dead`, the number of prompts whose
        last group had no reward above 0, and `prompts/revived`, the number that left that set in this round."""
        groups: dict[str, list[float]] = {}
        for rollout in rollouts:
            if not math.isnan(rollout.reward) and not rollout.prefix:
                groups.setdefault(rollout.prompt_id, []).append(rollout.reward)
        alive = {prompt_id for prompt_id, rewards in groups.items() if max(rewards) > 0}
        revived = alive & self.dead
        self.dead = (self.dead - revived) | (set(groups) - alive)
        return {"prompts/dead": float(len(self.dead)), "prompts/revived": float(len(revived))}


def _require_peers(policy: str, peers: Sequence[str], regime: type[Regime]) -> None:
    """Raise UsageError for names of policies that cannot form a pool."""
    for name in (policy, *peers):
        form = "expected lower-case letters, digits, '.', '_' or '-'"
        problem = name_problem(name) if re.match(POLICY_NAME, name) else form
        if problem is not None:
            raise UsageError(f"Sharing.over: found the policy name {name!r}; {problem}")
    if policy in peers:
        raise UsageError(f"Sharing.over: peers={list(peers)!r} has policy={policy!r} itself; name only the others")
    if repeated := [name for name, count in Counter(peers).items() if count > 1]:
        raise UsageError(f"Sharing.over: peers={list(peers)!r} names {repeated[0]!r} twice")
    if regime.reads_peers and not peers:
        raise UsageError(
            f"Sharing.over: regime {regime.name!r} shares between policies; expected at least one name in peers"
        )


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


def capabilities(view: RoundView) -> dict[str, float]:
    """Return `capability/POLICY` of each policy in the round: the fraction of its scored rollouts with reward above 0.
    Rollouts of the learner that start from a prefix are left out; if there are any, the peers were guided too, and are
    left out."""
    own = [rollout.reward for rollout in view.rollouts if not rollout.prefix]
    peers = {} if len(own) < len(view.rollouts) else view.peers
    rewards = {view.learner: own, **{name: peer.column("reward") for name, peer in sorted(peers.items())}}
    fractions = {name: success_rate(values) for name, values in rewards.items()}
    return {f"capability/{name}": fraction for name, fraction in fractions.items() if fraction is not None}


def publish_schema(regimes: Sequence[Regime], publish: str = "regime") -> PublishSchema | None:
    """Return the fields that a policy publishes: those that the regime of any policy of the pool reads, or all
    (`publish: full`); None if no policy reads any."""
    schema = PublishSchema.union(regime.publishes() for regime in regimes)
    if publish == "full":
        return schema.complete()
    return schema if any(regime.reads_peers for regime in regimes) else None


def remember(prompts: PromptTokens, prompt_id: str, ids: tuple[int, ...]) -> None:
    """Store a prompt's token ids under its id. Raises UsageError when another prompt has the same id."""
    if prompts.setdefault(prompt_id, ids) != ids:
        raise UsageError(f"two different prompts have the id {prompt_id!r}; give every prompt a unique id")


def require_one_group_per_id(rollouts: Sequence[Rollout]) -> None:
    """Raise UsageError if two groups of a round have the same prompt id: they would be pooled as one."""
    counts = Counter((rollout.prompt_id, rollout.index) for rollout in rollouts)
    duplicates = sorted({prompt_id for (prompt_id, _), count in counts.items() if count > 1})
    if duplicates:
        raise UsageError(
            f"two rows of a round have the prompt id {duplicates[0]!r}: they would be pooled as one prompt; give every "
            "row a unique id (column prompt_id), and remove duplicate rows"
        )


def require_same_prompts(learner: str, round_index: int, prompts: Iterable[str], peers: Mapping[str, Shard]) -> None:
    """Raise PlanMismatchError naming the first peer that saw other prompts."""
    own = set(prompts)
    for peer, shard in peers.items():
        other = set(shard.column("prompt_id"))
        if own != other:
            example = sorted(own ^ other)[0]
            raise PlanMismatchError(
                f"round {round_index}: {learner!r} and {peer!r} did not see the same prompts ({len(own - other)} only "
                f"here, {len(other - own)} only there, such as {example!r}); give both the same data, seed and batch"
            )
