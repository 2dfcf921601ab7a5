"""A custom regime that only changes advantages: a rollout that all policies got right counts half.

mutualrl train --regime examples/own_advantages.py:Rare --pool tiny
"""

from mutualrl.regimes import Needs, Plan, Regime, RoundView, peer_rewards


class Rare(Regime):
    name = "rare"
    summary = "advantages of prompts that every rollout of every policy solves count half"

    def needs(self) -> Needs:
        return Needs(advantages="adjusts")

    def plan(self, view: RoundView) -> Plan:
        rewards, own = peer_rewards(view), view.own_groups()
        solved = {prompt_id for prompt_id in own if min(*own[prompt_id], *rewards.get(prompt_id, ())) > 0}
        factors = [0.5 if prompt_id in solved else 1.0 for prompt_id in view.prompt_ids]
        return Plan(tuple(f * advantage for f, advantage in zip(factors, view.advantages, strict=True)))
