"""Rounds of a source: published into the exchange by the first learner that reaches them, and read back by all."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from mutualrl.errors import ExchangeDamagedError, FencedError, PlanMismatchError
from mutualrl.records import PublishSchema
from mutualrl.regimes.round import Response, Results
from mutualrl.rollouts import Rollouts
from mutualrl.see import Exchange, Shard
from mutualrl.see.schema import encode
from mutualrl.sources.source import Source
from mutualrl.storage.metrics import of_source


@dataclass(frozen=True)
class SourceRounds:
    """Rounds of one source in the exchange of a learner."""

    source: Source
    exchange: Exchange

    @classmethod
    def of(cls, source: Source, learner: Exchange) -> SourceRounds:
        """Return the rounds of a source in a learner's exchange."""
        return cls(source, Exchange(learner.store, source.name, learner.run_id))

    def read(self, number: int, prompt_ids: Collection[str], schema: PublishSchema | None, step: int) -> Shard:
        """Return the round's rollouts on these prompts, published if no learner has yet: from then on they are what the
        exchange has, and a lost or damaged part is written again. Raises PlanMismatchError if it has others."""
        name, exchange = self.source.name, self.exchange
        rollouts = self.source.rollouts(number, sorted(set(prompt_ids))).published(self._published(schema))
        data = encode(name, number, rollouts)
        if exchange.marker_of(name, number) is None:
            # its content is in the part's name: learners with other texts would not write over each other
            part = exchange.write_part(number, rollouts, part=int(hashlib.sha256(data).hexdigest()[:8], 16))
            with suppress(FencedError):  # published meanwhile, with other texts
                exchange.commit(number, [part], step)
        marker = exchange.marker_of(name, number)
        if marker is None:
            raise ExchangeDamagedError(f"{exchange.location(name)}: round {number} was published and no longer exists")
        (part,) = marker.parts
        if part.sha256 != hashlib.sha256(data).hexdigest():
            raise PlanMismatchError(
                f"round {number} of source {name!r} is in the exchange with other prompts or texts: all learners of a "
                "run need the same prompts in a round, and a resumed run the same texts"
            )
        try:
            shard = exchange.read(name, number)
        except ExchangeDamagedError:
            exchange.store.put(name, part.file, data)
            shard = exchange.read(name, number)
        if shard is None:
            raise ExchangeDamagedError(f"{exchange.location(name)}: round {number} was published and no longer exists")
        return shard

    def _published(self, schema: PublishSchema | None) -> PublishSchema:
        """Return the fields that a source publishes: texts, of successes only if policies publish only those."""
        if schema is None or "text" not in schema.fields or not self.source.verified:
            return PublishSchema.of("text")
        return PublishSchema.of("text", text_above=schema.text_above)


def unverified(peers: Mapping[str, Rollouts], names: Collection[str]) -> list[Response]:
    """Return the distinct texts without a reward, which the learner computes itself."""
    responses: dict[Response, None] = {}
    for name in sorted(set(names) & set(peers)):
        for rollout in peers[name].rows("text"):
            if rollout.text is not None and math.isnan(rollout.reward):
                responses[rollout.prompt_id, rollout.text, rollout.ended] = None
    return list(responses)


def with_rewards(peers: Mapping[str, Rollouts], names: Collection[str], results: Results) -> dict[str, Rollouts]:
    """Return the peers with the learner's rewards of the texts of some sources that have none."""
    scored = dict(peers)
    for name in sorted(set(names) & set(peers)):
        rewards = []
        for rollout in peers[name].rows("text"):
            response = (rollout.prompt_id, rollout.text or "", rollout.ended)
            known = not math.isnan(rollout.reward)
            rewards.append(rollout.reward if known else results.rewards.get(response, math.nan))
        scored[name] = peers[name].with_rewards(rewards)
    return scored


def source_metrics(peers: Mapping[str, Rollouts], names: Sequence[str], success_above: float) -> dict[str, float]:
    """Return for each source the number of texts on the round's prompts, and of the complete ones that earn a reward
    above `success_above`."""
    metrics = {}
    for name in sorted(set(names) & set(peers)):
        rewards, ended = peers[name].rewards, peers[name].ended
        confirmed = sum(bool(done) and reward > success_above for reward, done in zip(rewards, ended, strict=True))
        metrics[of_source(name, "texts")] = float(len(rewards))
        metrics[of_source(name, "confirmed")] = float(confirmed)
    return metrics
