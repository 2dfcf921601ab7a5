"""The rounds of one policy: the data flow of the paper, executed on a TRL trainer.

`Rounds.run` is the whole of it: collect, publish, wait, read, request, plan, apply, log. It is the same for every
regime; the regime's plan is executed.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import broadcast_object_list, gather_object

from mutualrl.adapter.trl_compat import (
    GenerationBatch,
    HookedGRPOTrainer,
    Inputs,
    Turns,
    add_token_advantages,
    log_value,
    micro_step,
    micro_steps_per_round,
    of_rank,
    replace_advantages,
    tokenizer_of,
    total_rewards,
)
from mutualrl.adapter.trl_tools import environment_name, tool_schemas
from mutualrl.console.lines import notify
from mutualrl.errors import RegimeError, RoundAbortedError
from mutualrl.records import Ids, Rollout, row_id
from mutualrl.regimes import Plan, Requests, RoundView, check_plan, whitened_plan
from mutualrl.regimes.advantages import whiten
from mutualrl.regimes.losses import BY_ROWS
from mutualrl.regimes.round import PHASES
from mutualrl.rollouts import Rollouts
from mutualrl.see.liveness import Phase
from mutualrl.see.shard import Shard
from mutualrl.storage.metrics import LATE_ROWS, LEFT_OUT, REQUESTED, SAMPLE_SECONDS, of_source
from mutualrl.tasks.messages import ends_in_reasoning
from mutualrl.thl import Decoder, end_token, ended, last_tokens
from mutualrl.training.acted_runs import claimed_runs, earned_rewards, rewards_here
from mutualrl.training.extra_rows import ExtraRows
from mutualrl.training.guides import Guides
from mutualrl.training.memory import PastRound
from mutualrl.training.peers import PeerRounds
from mutualrl.training.requests import PromptRows, counts_of, results_of
from mutualrl.training.round_metrics import exchange_metrics, joined
from mutualrl.training.round_prompts import (
    Prompts,
    id_or_prompt,
    prompt_text,
    remember,
    require_one_group_per_id,
    require_same_prompts,
)
from mutualrl.training.run_rows import RunEncoder
from mutualrl.training.sharing import Sharing
from mutualrl.training.source_rounds import unverified, with_rewards
from mutualrl.training.split_transfer import SplitTransfer
from mutualrl.training.traces import behaviour_trace
from mutualrl.training.transfer import TokenTransfer
from mutualrl.trajectory import Trajectory

#: fields that only the main rank needs: it makes the plan
PROMPT_TAIL = 16  # tokens at the end of a prompt that may open a block of reasoning
HEAVY = ("prompt", "text", "messages", "tools", "token_ids", "mask", "logprobs")


class OwnRound(NamedTuple):
    """The learner's rollouts of a round, and the token ids of their prompts; with tools also these as messages."""

    number: int
    rollouts: Rollouts
    prompts: Prompts
    chats: Mapping[str, Any] = {}


class SharedRound(NamedTuple):
    """Round to plan: own rollouts of all ranks, with the heavy fields on the main rank only, and the peers', there
    only."""

    own: OwnRound
    peers: Mapping[str, Rollouts]


@dataclass
class Rounds:
    """The rounds of one policy. `transfer`: the THL of the current round; texts end as the policy ends its own.
    `counts`: what the regime requested in it, also for late rounds. `tools`: the schemas of each environment's.
    `runs`: encodes peers' runs with tools."""

    trainer: HookedGRPOTrainer
    sharing: Sharing
    extra_rows: ExtraRows
    prompt_rows: PromptRows
    transfer: TokenTransfer
    counts: Counter[str] = field(default_factory=Counter)
    tools: dict[str | None, str] = field(default_factory=dict)
    runs: RunEncoder | None = None

    @classmethod
    def of(cls, trainer: HookedGRPOTrainer, sharing: Sharing, extra_rows: ExtraRows) -> Rounds:
        """Build the rounds of a trainer."""
        limit = trainer.args.max_completion_length if sharing.max_length is None else sharing.max_length
        traced = "logprobs" in sharing.regime.needs().reads.fields
        transfer = TokenTransfer(tokenizer_of(trainer), limit, sharing.tokenizers, traced=traced)
        rounds = cls(trainer, sharing, extra_rows, PromptRows(trainer), transfer)
        if trainer.tools:
            rounds.runs = RunEncoder(trainer, rounds.prompt_rows, rounds.schemas_of)
            rounds.transfer = replace(transfer, runs=rounds.runs.encode)
        rounds._begin_transfer()
        return rounds

    @cached_property
    def decoder(self) -> Decoder:
        """Return the decoder of the policy's completions."""
        return Decoder.of(tokenizer_of(self.trainer))

    @cached_property
    def log_decoder(self) -> Decoder:
        """Return the one for the thread that writes logs."""
        return self.decoder.copied()

    @property
    def split(self) -> SplitTransfer:
        """Return the round's THL over all ranks."""
        return SplitTransfer(self.transfer, self.trainer.accelerator)

    @property
    def guides(self) -> Guides:
        """Return the beginnings of the next rollouts."""
        return Guides(self.trainer, self.sharing, self.runs)

    def run(self, batch: Inputs, generation: GenerationBatch) -> None:
        """Run a round on the batch that TRL has sampled and scored."""
        own = self.publish(self.collect(batch, generation))  # TRL's batch as rollouts; SEE
        peers = self.wait(own)  # SEE
        plans: list[Plan] = []
        self.counts.clear()
        for shared in self.read(own, peers):  # earlier rounds that peers have published since, then this one
            view = self.request(self.view(shared), shared)  # log-probs, NLL, rewards of given texts
            plans.append(self.plan(view, shared, peers))  # pure; THL through `view.transfer`
        self.apply(plans, own, batch)  # advantages, extra rows
        self.log(plans, own)

    # ---- collect, publish, wait, read

    def collect(self, batch: Inputs, generation: GenerationBatch) -> OwnRound:
        """Return this rank's rollouts, those of dropped groups included. Only texts to be published are decoded."""
        prompts: Prompts = {}
        parts = [self._rollouts(batch, generation, prompts)]
        for dropped in generation.dropped:  # all of a batch: the passes for its traces are collective
            rollouts = self._rollouts(dropped.batch, dropped.generation, prompts)
            parts.append([replace(rollouts[row], advantage=0.0) for row in dropped.rows])
        number = micro_step(self.trainer) // micro_steps_per_round(self.trainer)
        rows = [rollout for part in parts for rollout in part]
        of_round = Rollouts.of(rows, self.sharing.link.policy, number)
        return OwnRound(number, of_round, prompts, self._chats(generation))

    def _chats(self, generation: GenerationBatch) -> dict[str, Any]:
        """Return the prompts of this rank's rollouts as messages, by id, where peers' runs are rendered on them."""
        if not self.sharing.regime.needs().renders_runs:
            return {}
        chats: dict[str, Any] = {}
        for part in (generation, *(dropped.generation for dropped in generation.dropped)):
            chats |= {row_id(row): turns.prompt for row, turns in zip(part.inputs, part.turns, strict=False)}
        return chats

    def _rollouts(self, batch: Inputs, generation: GenerationBatch, prompts: Prompts) -> list[Rollout]:
        """Return this rank's rollouts of a batch; store their prompts' token ids in `prompts`."""
        trainer, sharing = self.trainer, self.sharing
        rows = len(generation.inputs)
        first = trainer.accelerator.process_index * rows
        rewards, advantages = self.own_rewards(generation), batch["advantages"].tolist()
        traces = behaviour_trace(trainer, batch, generation) if sharing.publishes("logprobs") else None
        # copied once: each read from a GPU waits until the GPU is idle
        prompt_ids, prompt_mask = (batch[key].cpu().numpy() for key in ("prompt_ids", "prompt_mask"))
        texts = self._published_texts(rewards, generation)
        rollouts: list[Rollout] = []
        for row, example in enumerate(generation.inputs):
            of_group = (first + row) % trainer.num_generations
            ids = np.array(generation.completion_ids[row], dtype=np.int32)
            prefix = 0 if trainer.prefixes is None else len(trainer.prefixes[row])
            key = row_id(example)
            shown = prompt_ids[row][prompt_mask[row] != 0].astype(np.int32)
            if given := generation.begun_with(row):
                shown, prefix = shown[: -len(given)], len(given)
                ids = np.array([*given, *ids], dtype=np.int32)
            remember(prompts, key, shown, environment_name(trainer, row))
            rollout = Rollout(
                prompt_id=key,
                index=of_group if generation.indices is None else generation.indices[row],
                reward=rewards[row],
                ended=ended(generation.completion_ids[row], trainer.eos_token_ids),
                length=len(ids) - prefix,
                advantage=advantages[row],
                prompt=prompt_text(example),
                trajectory=texts.get(row),
                token_ids=ids,
                logprobs=None if traces is None or prefix else traces[row][: len(ids)].float().numpy(),
                prefix=prefix,
            )
            rollouts.append(self._with_turns(rollout, generation.turns[row]) if generation.turns else rollout)
        return rollouts

    def _published_texts(self, rewards: Sequence[float], generation: GenerationBatch) -> dict[int, Trajectory]:
        """Return the texts to be published, by row; runs with tools are at hand."""
        if generation.turns:
            return {}
        rows = [row for row, reward in enumerate(rewards) if self.sharing.publishes_text(reward)]
        texts = self.decoder.decode(generation.completion_ids[row] for row in rows)
        return dict(zip(rows, map(Trajectory.of_text, texts), strict=True))

    def _with_turns(self, rollout: Rollout, turns: Turns) -> Rollout:
        """Return a rollout with its run; only sampled tokens count."""
        return replace(
            rollout,
            prompt=prompt_text({"prompt": turns.prompt}),
            trajectory=turns.run,
            tools=self.schemas_of(turns.environment),
            mask=np.array([*[0] * len(turns.replay.ids), *turns.mask], dtype=np.bool_),
            length=sum(turns.mask),
        )

    def schemas_of(self, environment: str | None) -> str:
        """Return the tools of an environment as JSON, made once."""
        if environment not in self.tools:
            self.tools[environment] = tool_schemas(self.trainer, environment)
        return self.tools[environment]

    def publish(self, mine: OwnRound) -> OwnRound:
        """Publish this rank's rollouts. Return those of all ranks; the heavy fields reach the main rank only, which
        makes the plan."""
        accelerator, exchange = self.trainer.accelerator, self.sharing.link.exchange
        part, schema = None, self.sharing.schema
        if schema is not None:
            part = exchange.write_part(mine.number, mine.rollouts.published(schema), accelerator.process_index)
        ends = last_tokens(zip(mine.rollouts.token_ids, mine.rollouts.ended, strict=True))
        by_rank = gather_object([(part, mine.rollouts.without(*HEAVY), mine.prompts, ends, mine.chats)])
        prompts: Prompts = {}
        chats: dict[str, Any] = {}
        for _, _, rank_prompts, rank_ends, rank_chats in by_rank:
            chats |= rank_chats
            self.sharing.memory.end_tokens.update(rank_ends)
            for prompt_id, ids in rank_prompts.items():
                remember(prompts, prompt_id, ids)
        rollouts = Rollouts.join([light for _, light, *_ in by_rank])
        require_one_group_per_id(rollouts)
        if schema is not None and accelerator.is_main_process:
            exchange.commit(mine.number, [entry[0] for entry in by_rank], self.trainer.state.global_step)
        complete = self._gathered_on_main_rank(mine.rollouts.without("logprobs"))
        self._begin_transfer(next(iter(prompts.values()), None))
        return OwnRound(mine.number, complete or rollouts, prompts, chats)

    def wait(self, own: OwnRound) -> PeerRounds:
        """Wait for the peers' rounds and read them, on the main rank. On a stop request, every rank raises
        RoundAbortedError."""
        read, aborted = PeerRounds({}, {}, 0.0, {}), [False]
        if self.trainer.accelerator.is_main_process and self.sharing.regime.needs().peers:
            try:
                peers = self.sharing.link.read(own.number, self._begin_work)
                sources = self._sources(own.number, own.prompts)
                read = PeerRounds(peers.current, peers.late, peers.waited, peers.lags, sources)
            except RoundAbortedError as error:
                notify(error)
                aborted = [True]
        if broadcast_object_list(aborted, from_process=0)[0]:  # every rank leaves the round together
            raise RoundAbortedError(f"asked to stop in round {own.number}")
        return read

    def read(self, own: OwnRound, peers: PeerRounds) -> list[SharedRound]:
        """Return the rounds to plan, the same on all ranks: own earlier rounds that peers have since published, without
        prompts that already have nll rows; then this one, which is remembered for peers that are behind."""
        policy, staleness, memory = self.sharing.link.policy, self.sharing.link.staleness, self.sharing.memory
        if self.sharing.same_prompts:
            require_same_prompts(policy, own.number, own.prompts, self._policies(peers.current))
        rounds: list[SharedRound] = []
        if staleness:
            numbers: list[list[int]] = [sorted(peers.late)]
            for number in broadcast_object_list(numbers, from_process=0)[0]:
                if (past := memory.past.get(number)) is None:  # from before this policy stored rounds
                    continue
                of_peers = peers.late.get(number, {})
                if self.sharing.same_prompts:
                    require_same_prompts(policy, number, past.rollouts.prompt_ids, self._policies(of_peers))
                if of_peers:  # on the main rank
                    of_peers = {**of_peers, **self._sources(number, past.rollouts.prompt_ids)}
                unused = [prompt_id not in past.prompts_with_nll_rows for prompt_id in past.rollouts.prompt_ids]
                own_round = OwnRound(number, past.rollouts.where(unused), dict(past.prompts))
                rounds.append(SharedRound(own_round, of_peers))
            main = self.trainer.accelerator.is_main_process
            stored = own.rollouts.without("text", "messages") if main else Rollouts.of(())
            observed = {} if self.trainer.environment_factories is None else own.prompts
            memory.past[own.number] = PastRound(own.number, stored, prompts=observed)
            memory.past = {n: past for n, past in memory.past.items() if n > own.number - staleness}
        return [*rounds, SharedRound(own, {**peers.current, **peers.sources})]

    # ---- request, plan

    def view(self, shared: SharedRound) -> RoundView:
        """Return the regime's view of a round; complete on the main rank, which has the peers."""
        trainer, sharing, needs = self.trainer, self.sharing, self.sharing.regime.needs()
        if self.runs is not None:
            self.runs.begin(shared.own.chats, shared.own.prompts)
        other: frozenset[str] = frozenset()
        if not sharing.same_prompts:
            seen = {prompt_id for peer in shared.peers.values() for prompt_id in peer.prompt_ids}
            unseen = seen - set(shared.own.prompts)
            other = frozenset(prompt_id for prompt_id in unseen if prompt_id in self.prompt_rows)
        return RoundView(
            round=shared.own.number,
            learner=sharing.link.policy,
            run_seed=sharing.run_seed,
            rollouts=shared.own.rollouts,
            peers=shared.peers,
            transfer=self.split,
            state=copy.deepcopy(sharing.memory.state),
            whiten=sharing.whiten,
            scale=trainer.scale_rewards,
            mask_truncated=trainer.mask_truncated_completions,
            mean_over="rows" if trainer.loss_type in BY_ROWS else "tokens",
            clip=(trainer.epsilon_low, trainer.epsilon_high),
            other_prompts=other,
            sources=sharing.traits,
            scores={name: peer.scores() for name, peer in shared.peers.items()} if needs.scores else {},
        )

    def request(self, view: RoundView, shared: SharedRound) -> RoundView:
        """Return the view with the results of the regime's requests: passages scored by this policy, responses by its
        rewards. Asked until it requests nothing new, at most `PHASES` times; every rank makes the same passes. Texts of
        sources that are not verified get this policy's rewards first."""
        if self.sharing.unverified:
            view = self._verified(view, shared)
        if not self.sharing.regime.requests_anything():
            return view
        trainer = self.trainer
        self.sharing.link.set_phase(f"{Phase.SCORING} passages")
        made: list[Requests] = []
        for _ in range(PHASES):
            requests = self._new_requests(view)
            if not any(requests):
                break
            made.append(requests)
            if requests.samples:
                self._require_declared()
                self.sharing.link.set_phase(f"{Phase.GENERATING} samples of the regime")
            end = self.transfer.end_token_id
            results = results_of(trainer, requests, self.prompt_rows, shared.own.prompts, end_token_id=end)
            view = replace(view, results=view.results.merged(results))
        self.counts.update(counts_of(made, view.results))
        return view

    def plan(self, view: RoundView, shared: SharedRound, peers: PeerRounds) -> Plan:
        """Return the regime's plan for a round, identical on all ranks, and remember what it leaves."""
        self.transfer.refused.clear()
        plan = self.split.on_main_rank(lambda: self._planned(view, peers))
        memory = self.sharing.memory
        learnt = [row.prompt_id for row in plan.rows if row.loss == "nll"]
        if plan.state is not None:
            memory.state = plan.state
        if (past := memory.past.get(shared.own.number)) is not None:
            prompts = tuple(sorted({*past.prompts_with_nll_rows, *learnt}))
            memory.past[shared.own.number] = replace(past, prompts_with_nll_rows=prompts)
        memory.uses.update(row.prompt_id for row in plan.rows if row.is_taught)
        if self.sharing.publishes("text") or self.sharing.publishes("token_ids"):
            for reason in ("too_long", "changed", *(("reasoning",) if self.transfer.opened else ())):
                log_value(self.trainer, LEFT_OUT[reason].key, float(self.transfer.refused[reason]))
        self._log_rescues(plan, shared.own)
        return plan

    # ---- apply, log

    def apply(self, plans: Sequence[Plan], own: OwnRound, batch: Inputs) -> None:
        """Replace TRL's advantages by those of this round's plan; load the extra rows of all plans."""
        if plans[-1].advantages is not None:
            replace_advantages(self.trainer, batch, plans[-1].advantages)
        if plans[-1].token_advantages:
            add_token_advantages(self.trainer, batch, plans[-1].token_advantages)
        rows = [row for plan in plans for row in plan.rows]
        known = {**self.sharing.memory.observed(), **own.prompts}
        prompts = {row.prompt_id: self.prompt_rows.tokens(row.prompt_id, known) for row in rows}
        self.extra_rows.load(rows, prompts, batch)

    def log(self, plans: Sequence[Plan], own: OwnRound) -> None:
        """Log the metrics of this round's plan, and of the prompts; some samples."""
        self._log_samples(plans[-1], own)
        for name, value in self._metrics_of(plans).items():
            log_value(self.trainer, name, value)
        rows = [row for plan in plans for row in plan.rows]
        memory = self.sharing.memory
        metrics = joined(rows) if rows or memory.uses else {}  # no keys for a regime that adds no rows
        for name, value in (metrics | memory.use(rows, self.sharing.source_names, self.sharing.asked)).items():
            log_value(self.trainer, name, value)
        if self.sharing.link.staleness:
            log_value(self.trainer, LATE_ROWS.key, float(sum(len(plan.rows) for plan in plans[:-1])))
        for metric in REQUESTED if self.sharing.regime.requests_anything() else ():
            log_value(self.trainer, metric.key, float(self.counts[metric.key]))
        self._follow(own.rollouts)

    def _metrics_of(self, plans: Sequence[Plan]) -> dict[str, float]:
        """Return the metrics of this round's plan; what late plans add to it, rows and their tokens, prompts whose gate
        a late member opened, and what asked sources answered late, are sums over all plans."""
        added = {
            metric.key
            for metric in self.sharing.regime.metrics
            if metric.unit in ("rows", "tokens") or metric.role == "gate_rate"
        }
        added |= {of_source(name, key) for name in self.sharing.asked for key in ("texts", "confirmed")}
        metrics = dict(plans[-1].metrics)
        for plan in plans[:-1]:
            for key in added & plan.metrics.keys():
                metrics[key] = metrics.get(key, 0.0) + plan.metrics[key]
        return metrics

    # ---- outside a shared round

    def whiten(self, batch: Inputs, generation: GenerationBatch) -> None:
        """Whiten TRL's advantages over the round's rollouts of all ranks (`round.whiten_advantages`)."""
        own = zip(batch["advantages"].tolist(), self.own_rewards(generation), strict=True)
        advantages, rewards = zip(*gather_object(list(own)), strict=True)
        whitened = whiten(advantages, [not math.isnan(reward) for reward in rewards])
        replace_advantages(self.trainer, batch, whitened.tolist())

    def follow(self, generation: GenerationBatch) -> None:
        """Follow the prompts of a round that shares nothing, under the ids that a shared round gives them."""
        parts = [(generation, list(range(len(generation.inputs))))]
        parts += [(each.generation, each.rows) for each in generation.dropped]
        rollouts = []
        for part, rows in parts:
            rewards = self.own_rewards(part)
            rollouts += [Rollout(id_or_prompt(part.inputs[row]), row, rewards[row], ended=True) for row in rows]
        self._follow(Rollouts.join(gather_object([Rollouts.of(rollouts)])))

    def unscorable(self, generation: GenerationBatch) -> int:
        """Return the number of rollouts without a reward that the round has sampled, of all ranks."""
        parts = [each.generation for each in generation.dropped] or [generation]
        return sum(int(torch.isnan(total_rewards(self.trainer, part.rewards)).sum()) for part in parts)

    def own_rewards(self, generation: GenerationBatch) -> list[float]:
        """Return the rewards of this rank's rollouts, summed over reward functions; NaN: unscorable."""
        return of_rank(self.trainer, total_rewards(self.trainer, generation.rewards).tolist())

    # ---- parts of the steps

    def _begin_transfer(self, prompt: Ids | None = None) -> None:
        """Begin a round's THL: texts that the policy learns end as it ends its own, by the end tokens of its
        rollouts, and begin where its prompts end."""
        end = end_token(tokenizer_of(self.trainer), self.trainer.eos_token_ids, self.sharing.memory.end_tokens)
        tail = "" if prompt is None else tokenizer_of(self.trainer).decode(prompt[-PROMPT_TAIL:].tolist())
        self.transfer = replace(self.transfer, end_token_id=end, opened=ends_in_reasoning(tail), encoded={})

    def _begin_work(self, arrived: Mapping[str, Shard]) -> None:
        """Encode the texts of peers that have published while others are awaited, if the regime will need all."""
        if self.sharing.regime.needs().all_texts:
            for shard in arrived.values():
                responses = zip(shard.texts(), shard.ended, strict=True)
                self.transfer.prepare((text, done) for text, done in responses if text is not None)

    def _gathered_on_main_rank(self, mine: Rollouts) -> Rollouts | None:
        """Return the rollouts of all ranks on the main rank, None on the others."""
        accelerator = self.trainer.accelerator
        if accelerator.num_processes == 1:
            return mine
        parts = [mine] * accelerator.num_processes if accelerator.is_main_process else None
        torch.distributed.gather_object(mine, parts, dst=0)
        return None if parts is None else Rollouts.join(parts)

    def _sources(self, number: int, prompt_ids: Iterable[str]) -> dict[str, Shard]:
        """Return the sources' rollouts on a round's prompts, published if no learner has yet."""
        step, prompts = self.trainer.state.global_step, set(prompt_ids)
        rounds = {each.source.name: each for each in self.sharing.sources}
        return {name: each.read(number, prompts, self.sharing.schema, step) for name, each in rounds.items()}

    def _policies(self, peers: Mapping[str, Shard]) -> dict[str, Shard]:
        """Return the peers that are policies."""
        return {name: shard for name, shard in peers.items() if name not in self.sharing.asked}

    def _verified(self, view: RoundView, shared: SharedRound) -> RoundView:
        """Return the view with this policy's rewards of the texts of sources that are not verified, and of those of
        their runs that may become its tokens."""
        names, with_environment = self.sharing.unverified, self.trainer.environment_factories is not None
        if not with_environment:  # which judges its own runs only
            requests = self.split.on_main_rank(lambda: Requests(rewards=tuple(unverified(view.peers, names))))
            end = self.transfer.end_token_id
            results = results_of(self.trainer, requests, self.prompt_rows, shared.own.prompts, end_token_id=end)
            view = replace(view, peers=with_rewards(view.peers, names, results))
        runs = self.runs
        if runs is None or not self.sharing.regime.needs().renders_runs:
            return view
        regime, peers = self.sharing.regime, view.peers
        self.sharing.link.set_phase(f"{Phase.SCORING} runs of a source")
        wanted = self.split.on_main_rank(lambda: claimed_runs(peers, names, regime.unsolved(view.rollouts)))
        rewards = rewards_here(self.trainer, wanted, runs)
        return replace(view, earned=earned_rewards(peers, names, rewards, texts=not with_environment))

    def _new_requests(self, view: RoundView) -> Requests:
        """Return the regime's requests that have no result in the view yet, identical on all ranks."""
        return self.split.on_main_rank(lambda: self.sharing.regime.requests(view).without(view.results))

    def _require_declared(self) -> None:
        """Raise RegimeError for a regime that requests samples without saying so: nobody has checked whether it may."""
        if not self.sharing.regime.needs().samples:
            name = self.sharing.regime.name
            raise RegimeError(f"regime {name!r} requests samples: its needs() must say samples=True")

    def _planned(self, view: RoundView, peers: PeerRounds) -> Plan:
        """Return the plan with the metrics of the exchange."""
        regime, needs = self.sharing.regime, self.sharing.regime.needs()
        if not needs.shares:
            return Plan()
        plan = check_plan(regime.plan(view), view, regime.name)
        if self.sharing.whiten:
            plan = whitened_plan(plan, view)
        if not needs.peers:
            return plan
        return replace(plan, metrics={**plan.metrics, **exchange_metrics(view, peers, self.sharing)})

    def _log_rescues(self, plan: Plan, own: OwnRound) -> None:
        if self.sharing.rescues is not None and self.trainer.accelerator.is_main_process:
            step = self.trainer.state.global_step + 1
            write, decode = self.sharing.rescues.write, self.log_decoder.decode
            self.sharing.background.run(partial(write, own.number, step, plan.rows, own.rollouts, decode))

    def _log_samples(self, plan: Plan, own: OwnRound) -> None:
        trainer, log = self.trainer, self.sharing.samples
        if log is not None and trainer.accelerator.is_main_process:
            steps = trainer.state.max_steps * trainer.args.gradient_accumulation_steps
            rounds = math.ceil(steps / micro_steps_per_round(trainer))
            step = trainer.state.global_step + 1
            seconds = log.write(own.number, rounds, step, plan.rows, own.rollouts, self.decoder.decode)
            log_value(trainer, SAMPLE_SECONDS.key, seconds)

    def _follow(self, rollouts: Rollouts) -> None:
        for name, value in self.sharing.memory.follow(rollouts).items():
            log_value(self.trainer, name, value)
