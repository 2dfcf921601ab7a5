"""A custom regime: the shortest success of any peer, with a weight that decays from round to round.

mutualrl regimes check examples/own_regime.py:SPEC
mutualrl train --regime examples/own_regime.py:SPEC --pool tiny --set regime.weight=0.2
"""

from pydantic import Field

from mutualrl.regimes import ExtraRow, Metric, Plan, PublishSchema, RegimeSettings, RegimeSpec, RoundView, RowSource


class Settings(RegimeSettings):
    weight: float = Field(0.1, ge=0, description="weight of the NLL in the first round")
    half_life: float = Field(50.0, gt=0, description="rounds in which the weight halves")


def plan(view: RoundView, settings: Settings) -> Plan:
    """Learn the shortest success for each prompt on which every own rollout failed. The state counts the rounds."""
    rounds = view.state.get("rounds", 0)
    weight = settings.weight * 0.5 ** (rounds / settings.half_life)
    failed = [prompt_id for prompt_id, rewards in view.own_groups().items() if max(rewards) <= 0.0]
    shortest: dict[str, ExtraRow] = {}
    for name, peer in sorted(view.peers.items()):
        prompts, ended, rollouts = peer.column("prompt_id"), peer.column("ended"), peer.column("rollout")
        solved = [row for row, reward in enumerate(peer.column("reward")) if reward > 0.0 and prompts[row] in failed]
        for row, text in zip(solved, peer.texts(solved), strict=True):
            ids = view.transfer.to_learner_ids(text, ended[row])  # THL: None if the learner cannot encode it
            best = shortest.get(prompts[row])
            if ids is not None and (best is None or len(ids) < len(best.token_ids)):
                source = RowSource(name, rollouts[row], view.round)
                shortest[prompts[row]] = ExtraRow(prompts[row], source, ids, "nll", weight=weight, text=text)
    rows = tuple(shortest[prompt_id] for prompt_id in sorted(shortest))
    metrics = {"shortest/rows": float(len(rows)), "shortest/weight": weight}
    return Plan(rows=rows, metrics=metrics, state={"rounds": rounds + 1})


SPEC = RegimeSpec(
    name="shortest",
    summary="where the learner fails entirely, the shortest success of any peer joins the loss",
    settings=Settings,
    publishes=lambda settings: PublishSchema.of("text", text_above=0.0),
    plan=plan,
    metrics=(
        Metric("shortest/rows", "rows", "successes that joined the loss", role="rescues"),
        Metric("shortest/weight", "weight", "weight of the NLL", panel="weight"),
        Metric("shortest/nll", "nats per token", "mean NLL of the successes", panel="NLL of the successes"),
    ),
    row_metrics=lambda statistics: {} if statistics.nll is None else {"shortest/nll": statistics.nll},
    level="outcome",
)
