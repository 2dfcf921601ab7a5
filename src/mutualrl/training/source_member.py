"""A source that is asked, as a member of the pool: it waits for the policies' rounds, answers, and publishes.

Its process is a worker like a policy's, without a trainer. In each round it reads the rewards that its learners
published, chooses the prompts, asks once for all learners, lets the run's reward functions judge the answers, and
commits them to its own namespace, where the learners wait for them.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from mutualrl.console.lines import notify
from mutualrl.errors import PlanMismatchError
from mutualrl.recipes import Recipe
from mutualrl.recipes.agreement import all_prompts
from mutualrl.recipes.pool_tokenizers import load_tokenizers
from mutualrl.recipes.run_sources import learners_of, read, sampling_of, served_source
from mutualrl.records import Prompt, PublishSchema, Rollout, Score, content_digest
from mutualrl.regimes import Regime
from mutualrl.regimes.regime import publish_schema, success_above
from mutualrl.rollouts import Rollouts
from mutualrl.see import Exchange, Heartbeat
from mutualrl.see.liveness import Phase
from mutualrl.see.retention import published_need
from mutualrl.seeds import seed_of
from mutualrl.sources.answers import AnswerStore, read_account, stored_accounts, stored_first_account, write_account
from mutualrl.sources.asking import Asking
from mutualrl.sources.prepare import Verifier
from mutualrl.sources.questions import Budget, PromptShare, prompts_to_ask, questions_on
from mutualrl.sources.section import FrozenSource, ServedSource
from mutualrl.sources.served import ServedModel, key_of
from mutualrl.storage.accounts import Account
from mutualrl.storage.checkpoints import Checkpoints
from mutualrl.storage.run_info import RunInfo
from mutualrl.storage.rundir import RunDirectory
from mutualrl.thl import decode_completion
from mutualrl.thl.judged import loops
from mutualrl.tiny import resolve_path
from mutualrl.training.member import PlannedMember
from mutualrl.training.peers import PeerLink
from mutualrl.trajectory import NO_TEXT, Trajectory

if TYPE_CHECKING:
    from mutualrl.engines.base import Floats
    from mutualrl.engines.frozen import FrozenModel
    from mutualrl.see import Shard


class Answering(ABC):
    """How a source answers a round's prompts."""

    @abstractmethod
    def answer(self, round_index: int, prompt_ids: Sequence[str]) -> tuple[list[Rollout], Account]:
        """Return the rollouts on these prompts, without rewards, and what was done for them."""

    def scores(self, wanted: Sequence[tuple[str, str, int, str]]) -> list[Score]:
        """Return how it reads texts that ended: (policy, prompt id, index, text) each; only of sources that can."""
        return []

    def published(self, round_index: int) -> None:  # noqa: B027  (nothing to do by default)
        """Take note that a round is committed."""

    def close(self) -> None:  # noqa: B027  (nothing to do by default)
        """Free what it holds."""


class Served(Answering):
    """Answers of a served model, over one event loop."""

    def __init__(
        self, source: ServedSource, link: PeerLink, prompts: Mapping[str, Prompt], budget: Budget, run_seed: int
    ) -> None:
        self._source = source
        self._prompts = prompts
        self._run_seed = run_seed
        self._runner = asyncio.Runner()
        self._store = AnswerStore(link.exchange.store, source.name)
        self._model = self._runner.run(self._opened(link.advance))
        self._asking = Asking(
            self._model,
            self._store,
            budget,
            fail=source.on_source_loss == "fail",
            stopping=link.stopping,
            progress=link.advance,
        )

    @property
    def model(self) -> str | None:
        """Return the server's name of the model."""
        return self._model.model

    async def _opened(self, on_request: Callable[[], None]) -> ServedModel:
        model = ServedModel(self._source, key_of(self._source.api_key_env, self._source.name), on_request)
        await model.settle_model()
        return model

    def answer(self, round_index: int, prompt_ids: Sequence[str]) -> tuple[list[Rollout], Account]:
        """Return the answers that have a text; under `ask: gated` without those that were cut off."""
        source, samples = self._source, self._source.samples or 1
        questions = questions_on(prompt_ids, samples, source.name, run_seed=self._run_seed, round_index=round_index)
        answers, account = self._runner.run(self._asking.answers(round_index, questions, self._prompts))
        rollouts = []
        for question, answer in zip(questions, answers, strict=True):
            if answer.failure is None and (answer.ended or not source.gated):
                rollouts.append(
                    Rollout(
                        question.prompt_id,
                        question.sample,
                        math.nan,
                        answer.ended,
                        length=answer.completion_tokens,
                        trajectory=Trajectory.of_text(answer.text),
                    )
                )
        return rollouts, account

    def published(self, round_index: int) -> None:
        """Delete the answers of a round that is committed."""
        self._store.forget(round_index)

    def close(self) -> None:
        """Close the connections and the loop."""
        self._runner.run(self._model.close())
        self._runner.close()


class Frozen(Answering):
    """Answers of a model that stays as it is, at the run's sampling settings. A round that was not committed is sampled
    again, from the same seed."""

    def __init__(
        self,
        model: FrozenModel,
        section: FrozenSource,
        recipe: Recipe,
        prompts: Mapping[str, Prompt],
        schema: PublishSchema | None,
        heartbeat: Heartbeat,
    ) -> None:
        self._model = model
        self._section = section
        self._prompts = prompts
        self._run_seed = recipe.run.seed
        self._sampling = sampling_of(recipe, section)
        self._traced = schema is not None and "logprobs" in schema.fields
        self._heartbeat = heartbeat

    def answer(self, round_index: int, prompt_ids: Sequence[str]) -> tuple[list[Rollout], Account]:
        """Return its samples, with their tokens and, if a policy reads them, log-probs."""
        from mutualrl.engines.sampling import Sampling

        if not prompt_ids:
            return [], Account()
        name, settings = self._section.name, self._sampling
        seed = seed_of(self._run_seed, round_index, name)
        temperature = 1.0 if settings.temperature is None else settings.temperature
        sampling = Sampling(settings.max_tokens, temperature, settings.samples, seed)
        contents = [self._prompts[prompt_id].content for prompt_id in prompt_ids]
        groups, lengths = self._model.sample(contents, sampling, self._advance)
        traces: Sequence[Sequence[Floats | None]] = [[None] * len(group) for group in groups]
        if self._traced:
            traces = self._model.logprobs(contents, groups, temperature, self._advance)
        rollouts = []
        for prompt_id, group, group_traces in zip(prompt_ids, groups, traces, strict=True):
            for index, (completion, trace) in enumerate(zip(group, group_traces, strict=True)):
                ids = np.array(completion.token_ids, dtype=np.int32)
                rollouts.append(
                    Rollout(
                        prompt_id,
                        index,
                        math.nan,
                        completion.ended,
                        length=len(ids),
                        prompt=self._prompts[prompt_id].text,
                        trajectory=Trajectory.of_text(decode_completion(ids.tolist(), self._model.tokenizer)),
                        token_ids=ids,
                        logprobs=None if trace is None else trace.astype(np.float32),
                        prefix=0,
                    )
                )
        account = Account(
            prompts=len(prompt_ids),
            questions=len(rollouts),
            cut_off=sum(not rollout.ended for rollout in rollouts),
            prompt_tokens=sum(lengths),
            completion_tokens=sum(rollout.length or 0 for rollout in rollouts),
        )
        if self._section.gated:
            rollouts = [rollout for rollout in rollouts if rollout.ended]
        return rollouts, account

    def scores(self, wanted: Sequence[tuple[str, str, int, str]]) -> list[Score]:
        """Return how the model reads texts that ended; those that it would change, or that do not fit, are left out."""
        if not wanted:
            return []
        texts = [(self._prompts[prompt_id].content, text) for _, prompt_id, _, text in wanted]
        found = []
        for (policy, prompt_id, index, _), how in zip(wanted, self._model.read(texts, self._advance), strict=True):
            if how is not None:
                ends, logprobs = how.ends.astype(np.int32), how.logprobs.astype(np.float32)
                found.append(Score(policy, prompt_id, index, ends, logprobs))
        return found

    def _advance(self, rows: int) -> None:
        self._heartbeat.advance()


@dataclass
class SourceMember:
    """One asked source over a run. `link`: its view of the exchange, with its learners as peers; `regimes`: theirs;
    `verifier`: judges its answers, or leaves that to each learner, as none does; `weights`: of the sources that divide
    the prompts; `confirmed`: the prompts of a round on which no answer is wanted."""

    section: ServedSource | FrozenSource
    link: PeerLink
    regimes: Mapping[str, Regime]
    prompts: Mapping[str, Prompt]
    answering: Answering
    run_seed: int
    verifier: Verifier | None = None
    schema: PublishSchema | None = None
    weights: Mapping[str, float] | None = None
    confirmed: Callable[[int], set[str]] = lambda number: set()

    def run_round(self, number: int) -> None:
        """Answer one round: wait for the learners, choose the prompts, ask, judge, publish."""
        exchange = self.link.exchange
        shards = self.link.read(number).current
        prompt_ids = self.chosen(number, shards)
        self.link.set_phase(f"{Phase.GENERATING} answers on {len(prompt_ids)} prompts", number)
        rollouts, account = self.answering.answer(number, prompt_ids)
        self.link.set_phase(f"{Phase.SCORING} answers")
        answers = [(r.prompt_id, r.trajectory or NO_TEXT, r.ended) for r in rollouts]
        rewards = None if self.verifier is None else self.verifier.rewards(answers, self.link.advance)
        if rewards is not None:
            rollouts = [replace(rollout, reward=reward) for rollout, reward in zip(rollouts, rewards, strict=True)]
        table = Rollouts.of(rollouts, self.section.name, number).published(self.published_fields(rewards is not None))
        write_account(exchange.store, self.section.name, number, account)
        step = max((shard.marker.policy_step for shard in shards.values()), default=0)
        parts = [exchange.write_part(number, table)]
        if any(regime.needs().scores for regime in self.regimes.values()):
            self.link.set_phase(f"{Phase.SCORING} what learners wrote")
            parts.append(exchange.write_scores(number, self.answering.scores(self.judged(shards, rollouts))))
        exchange.commit(number, parts, step)
        self.answering.published(number)

    def judged(self, shards: Mapping[str, Shard], rollouts: Sequence[Rollout]) -> list[tuple[str, str, int, str]]:
        """Return the rollouts of learners that are to be scored, (policy, prompt id, index, text) each: those that
        ended, on prompts that the learner has not solved and on which this source has a success of its own."""
        wanted = []
        for learner, shard in shards.items():
            regime = self.regimes[learner]
            if not regime.needs().scores:
                continue
            above = success_above(regime)
            # one without a reward is judged by the learner
            solved = {each.prompt_id for each in rollouts if each.ended and not each.reward <= above}
            open_prompts = solved & set(regime.unsolved(shard))
            for rollout in shard.rows("text"):
                text = rollout.text
                if rollout.prompt_id in open_prompts and rollout.ended and text is not None and not loops(text):
                    wanted.append((learner, rollout.prompt_id, rollout.index, text))
        return wanted

    def chosen(self, number: int, shards: Mapping[str, Shard]) -> list[str]:
        """Return the prompts of a round to ask about."""
        wanted: list[Collection[str]] = []
        for learner, shard in shards.items():
            regime = self.regimes[learner]
            wanted.append(regime.unsolved(shard) if self.section.gated else set(shard.prompt_ids))
        if unknown := sorted(set().union(*wanted) - set(self.prompts)):
            raise PlanMismatchError(
                f"source {self.section.name!r} has no row of prompt {unknown[0]!r}, which a policy trains on; give it "
                "the training set of the policies"
            )
        mine = None if self.section.weight is None else self.weights
        share = PromptShare(self.section.name, self.section.column, mine)
        confirmed = self.confirmed(number)
        return prompts_to_ask(wanted, self.prompts, share, confirmed, run_seed=self.run_seed, round_index=number)

    def published_fields(self, verified: bool) -> PublishSchema:
        """Return the fields to publish: those that a policy reads, and the texts for learners that judge them."""
        schema = self.schema or PublishSchema()
        if self.section.kind == "served":
            return PublishSchema.of("text")
        return schema if verified else PublishSchema.union([schema, PublishSchema.of("text")])


@dataclass
class SourceBefore:
    """The source that is asked before another: what it has confirmed. `above`: a success has a greater reward."""

    run: RunDirectory
    recipe: Recipe
    link: PeerLink
    name: str
    above: float
    known: Rollouts | None = None

    def confirmed(self, number: int) -> set[str]:
        """Return the prompts of a round on which it has a text that every learner takes."""
        rollouts = self._rollouts(number)
        pairs = zip(rollouts.prompt_ids, rollouts.rewards, rollouts.ended, strict=True)
        return {prompt_id for prompt_id, reward, ended in pairs if reward > self.above and ended}

    def _rollouts(self, number: int) -> Rollouts:
        if any(each.name == self.name for each in self.recipe.asked_sources):
            link = self.link
            before = PeerLink(link.exchange, [self.name], link.heartbeat, link.stopping, link.missing_peers)
            return before.read(number).current.get(self.name) or Rollouts.of(())
        if self.known is None:
            self.known = Rollouts(read(self.run, self.name).table)
        return self.known


def answer_rounds(member: PlannedMember, section: ServedSource | FrozenSource) -> None:
    """Answer every round of a run that its learners still read and that is not published, and write the result."""
    run, recipe, info, exchange = member.run, member.recipe, member.info, member.exchange
    prompts = all_prompts(recipe, "train")
    if content_digest(prompts) != info.fingerprint.get("data_sha256"):
        raise PlanMismatchError(
            f"source {section.name!r} reads other training prompts than the run's; restore the data"
        )
    by_id = {prompt.id: prompt for prompt in prompts}
    schema = publish_schema([recipe.regime_of(policy.name) for policy in recipe.policies], recipe.run.publish)
    rounds, readers = remaining_rounds(run, recipe, section, info, exchange), recipe.readers_of(section)
    link = member.link(readers)
    answering: Answering
    if isinstance(section, ServedSource):
        model_name = info.asked_sources.get(section.name, {}).get("model")
        complete = served_source(recipe, section, model_name)
        budget = budget_left(exchange, section, set(rounds))
        budget.used += stored_first_account(info.asked_sources.get(section.name, {}), section.name).spent
        answering = Served(complete, link, by_id, budget, recipe.run.seed)
    else:
        from mutualrl.engines.frozen import FrozenModel

        template = recipe.trainer_settings(readers[0]).get("chat_template_kwargs") or {}
        model = FrozenModel.load(
            resolve_path(section.frozen),
            template,
            samples=sampling_of(recipe, section).samples,
            revision=section.revision,
            trust_remote_code=section.trust_remote_code,
        )
        answering = Frozen(model, section, recipe, by_id, schema, member.heartbeat)
    learners = [each for each in learners_of(recipe, load_tokenizers(recipe)) if each.name in readers]
    source = SourceMember(
        section,
        link,
        {name: recipe.regime_of(name) for name in readers},
        by_id,
        answering,
        recipe.run.seed,
        verifier=Verifier(by_id, recipe.task.reward, learners, recipe.run.step_timeout),
        schema=schema,
        weights={each.name: each.weight for each in recipe.asked_sources if each.weight is not None},
    )
    if section.after is not None:
        above = max(success_above(recipe.regime_of(name)) for name in readers)
        source.confirmed = SourceBefore(run, recipe, link, section.after, above).confirmed
    try:
        for number in rounds:
            source.run_round(number)
    finally:
        answering.close()
    member.finish({"rounds": len(rounds)})
    notify(f"source {section.name!r} has answered every round")


def remaining_rounds(
    run: RunDirectory, recipe: Recipe, section: ServedSource | FrozenSource, info: RunInfo, exchange: Exchange
) -> list[int]:
    """Return the rounds that a source still has to answer: not published, and not before the first that a learner may
    read, which policies that joined a bucket have published."""
    total = recipe.rounds(int(info.fingerprint.get("optimizer_steps_per_round", 1)))
    names = [policy.name for policy in recipe.policies]
    if info.joined:
        first = published_need(exchange.store, names, info.run_id)
    else:
        files = [run.policy(name) for name in recipe.readers_of(section)]
        cursors = [Checkpoints(each.root).newest_cursor() for each in files if not each.result.exists()]
        first = max(0, min(cursors, default=total) - recipe.exchange.staleness)
    published = set(exchange.rounds(section.name))
    return [number for number in range(first, total) if number not in published]


def budget_left(exchange: Exchange, section: ServedSource, remaining: Collection[int]) -> Budget:
    """Return a source's budget with what it has spent, without the rounds that it still has to answer."""
    budget = Budget(section.budget_tokens)
    for number in stored_accounts(exchange.store, section.name):
        account = None if number in remaining else read_account(exchange.store, section.name, number)
        if account is not None:
            budget.used += account.spent
    return budget
