"""A custom regime that samples: where every own rollout fails, the best of n fresh samples joins the loss.

mutualrl regimes check examples/best_of_n.py:BestOfN
mutualrl train --regime examples/best_of_n.py:BestOfN --pool tiny --steps 40
"""

from mutualrl.regimes import (
    ExtraRow,
    Metric,
    Needs,
    Plan,
    Regime,
    Requests,
    RoundView,
    RowSource,
    Sample,
    setting,
)


class BestOfN(Regime):
    name = "best-of-n"
    summary = "where every own rollout fails, the best of n fresh samples joins the loss"
    metrics = (Metric("best-of-n/rows", "rows", "samples that joined the loss", role="rescues"),)
    n: int = setting(8, "fresh samples per prompt", ge=1)
    weight: float = setting(0.1, "weight of the NLL", ge=0)

    def needs(self) -> Needs:
        return Needs(peers=False, samples=True)

    def requests(self, view: RoundView) -> Requests:
        failed = sorted(
            prompt_id for prompt_id, rewards in view.own_groups().items() if not any(reward > 0.0 for reward in rewards)
        )
        return Requests(samples=tuple(Sample(prompt_id, number) for prompt_id in failed for number in range(self.n)))

    def plan(self, view: RoundView) -> Plan:
        rows: dict[str, ExtraRow] = {}
        best: dict[str, float] = {}
        for sample in self.requests(view).samples:
            drawn = view.results.samples.get(sample)
            if drawn is not None and drawn.reward > best.get(sample.prompt_id, 0.0):
                best[sample.prompt_id] = drawn.reward
                source = RowSource(view.learner, sample.number, view.round)
                rows[sample.prompt_id] = ExtraRow(sample.prompt_id, source, drawn.ids, "nll", self.weight)
        return Plan(rows=tuple(rows.values()), metrics={"best-of-n/rows": float(len(rows))})
