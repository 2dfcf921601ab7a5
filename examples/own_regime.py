"""A custom regime: the shortest success of any peer, with a weight that decays from round to round.

mutualrl regimes check examples/own_regime.py:Shortest
mutualrl train --regime examples/own_regime.py:Shortest --pool tiny --set regime.weight=0.2
"""

from collections.abc import Mapping

from mutualrl.regimes import (
    ExtraRow,
    Metric,
    Needs,
    Plan,
    PublishSchema,
    Regime,
    RoundView,
    RowSource,
    RowStatistics,
    peer_rollouts,
    setting,
)


class Shortest(Regime):
    name = "shortest"
    summary = "where the learner fails entirely, the shortest success of any peer joins the loss"
    level = "outcome"
    metrics = (
        Metric("shortest/rows", "rows", "successes that joined the loss", role="rescues"),
        Metric("shortest/weight", "weight", "weight of the NLL", panel="weight"),
        Metric("shortest/nll", "nats per token", "mean NLL of the successes", panel="NLL of the successes"),
    )
    weight: float = setting(0.1, "weight of the NLL in the first round", ge=0)
    half_life: float = setting(50.0, "rounds in which the weight halves", gt=0)

    def needs(self) -> Needs:
        return Needs(reads=PublishSchema.of("text", text_above=0.0))

    def plan(self, view: RoundView) -> Plan:
        """Learn the shortest success for each prompt on which every own rollout failed. The state counts the rounds."""
        rounds = view.state.get("rounds", 0)
        weight = self.weight * 0.5 ** (rounds / self.half_life)
        failed = [prompt_id for prompt_id, rewards in view.own_groups().items() if max(rewards) <= 0.0]
        shortest: dict[str, ExtraRow] = {}
        for peer in peer_rollouts(view):
            (found,) = view.peers[peer.policy].trajectories([peer.row]) if peer.prompt_id in failed else (None,)
            ids = found and view.transfer.to_learner_ids(found.text, peer.ended)  # THL: None if not encodable
            best = shortest.get(peer.prompt_id)
            if found is not None and ids is not None and (best is None or len(ids) < len(best.token_ids)):
                source = RowSource(peer.policy, peer.index, view.round)
                shortest[peer.prompt_id] = ExtraRow(peer.prompt_id, source, ids, "nll", weight=weight, trajectory=found)
        rows = tuple(shortest[prompt_id] for prompt_id in sorted(shortest))
        metrics = {"shortest/rows": float(len(rows)), "shortest/weight": weight}
        return Plan(rows=rows, metrics=metrics, state={"rounds": rounds + 1})

    def row_metrics(self, statistics: RowStatistics) -> Mapping[str, float]:
        return {} if statistics.nll is None else {"shortest/nll": statistics.nll}
