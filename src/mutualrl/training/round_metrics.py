"""Metrics of a round that no regime declares: `see/*`, `capability/*`, `source/*`, and the rows of `plan/*`."""

from __future__ import annotations

from collections.abc import Sequence

from mutualrl.regimes import ExtraRow, RoundView
from mutualrl.regimes.advantages import success_rate
from mutualrl.regimes.regime import success_above
from mutualrl.sources.answers import read_account
from mutualrl.storage.metrics import BYTES, EXTRA_ROWS, EXTRA_TOKENS, LAG, PEERS, ROUND, TAUGHT, WAIT, of_source
from mutualrl.training.peers import PeerRounds
from mutualrl.training.sharing import Sharing
from mutualrl.training.source_rounds import source_metrics


def exchange_metrics(view: RoundView, peers: PeerRounds, sharing: Sharing) -> dict[str, float]:
    """Return the metrics of a round that was read: bytes and seconds of the exchange, each policy's rate of success,
    what sources gave."""
    shards = (*peers.current.values(), *peers.sources.values())
    metrics = {
        ROUND.key: float(view.round),
        PEERS.key: float(len(view.of_policies().peers)),
        BYTES.key: float(sum(shard.bytes for shard in shards)),
        WAIT.key: peers.waited,
        **capabilities(view.of_policies()),
        **source_metrics(view.confirmed().peers, sharing.source_names, success_above(sharing.regime)),
        **_accounts(peers, sharing),
    }
    if sharing.link.staleness:
        metrics[LAG.key] = max(peers.lags.values(), default=0.0)
    return metrics


def joined(rows: Sequence[ExtraRow]) -> dict[str, float]:
    """Return what joins the loss of a round beside the own rollouts, under any regime: `plan/extra_rows`,
    `plan/extra_tokens`, and `plan/taught`, the rows whose text the policy is taught."""
    tokens = sum(row.tokens for row in rows)
    return {
        EXTRA_ROWS.key: float(len(rows)),
        EXTRA_TOKENS.key: float(tokens),
        TAUGHT.key: float(sum(row.is_taught for row in rows)),
    }


def _accounts(peers: PeerRounds, sharing: Sharing) -> dict[str, float]:
    """Return what the asked sources did for the rounds that were read in this one, and the seconds for which only they
    were awaited."""
    link = sharing.link
    metrics: dict[str, float] = {}
    for name in sharing.asked:
        for shards in (*peers.late.values(), peers.current):
            if name in shards:
                account = read_account(link.exchange.store, name, shards[name].marker.round)
                for key, value in ({} if account is None else account.metrics(name)).items():
                    metrics[key] = metrics.get(key, 0.0) + value
        metrics[of_source(name, "wait_seconds")] = link.waited_only_for(name, sharing.asked)
    return metrics


def capabilities(view: RoundView) -> dict[str, float]:
    """Return `capability/POLICY` of each policy in the round: the fraction of its scored rollouts with reward above 0.
    Rollouts of the learner that start from a prefix are left out; if there are any, the peers were guided too, and are
    left out."""
    own = [reward for reward, prefix in zip(view.rewards, view.rollouts.prefixes, strict=True) if not prefix]
    peers = {} if len(own) < len(view.rollouts) else view.peers
    rewards = {view.learner: own, **{name: peer.rewards for name, peer in sorted(peers.items())}}
    fractions = {name: success_rate(values) for name, values in rewards.items()}
    return {f"capability/{name}": fraction for name, fraction in fractions.items() if fraction is not None}
