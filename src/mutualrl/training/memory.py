"""What one policy remembers between rounds, and its form in a checkpoint: plain values and tensors."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import torch

from mutualrl.records import Ids
from mutualrl.regimes.round import ExtraRow, State
from mutualrl.rollouts import Rollouts
from mutualrl.storage.files import JsonObject
from mutualrl.storage.metrics import DEAD, REVIVED, of_source


@dataclass(frozen=True, slots=True)
class PastRound:
    """Own round that peers may not have published yet: its rollouts, on the main rank only and without texts and
    log-probs, and the prompts that already have nll rows. `prompts`: their token ids, with what an environment showed;
    empty without an environment, where the data have them."""

    number: int
    rollouts: Rollouts
    prompts_with_nll_rows: tuple[str, ...] = ()
    prompts: Mapping[str, Ids] = field(default_factory=dict)


@dataclass
class Memory:
    """What one policy remembers between rounds.

    `state`: the regime's. `uses`: number of texts taught per prompt. `dead`: prompts whose last group had no reward
    above 0. `past`: own rounds that peers may not have reached. `end_tokens`: how often each token ended an own
    rollout. `texts`: number of rows per text of a source: (source, prompt id, index).
    """

    state: State = field(default_factory=dict)
    uses: Counter[str] = field(default_factory=Counter)
    dead: set[str] = field(default_factory=set)
    past: dict[int, PastRound] = field(default_factory=dict)
    end_tokens: Counter[int] = field(default_factory=Counter)
    texts: Counter[tuple[str, str, int]] = field(default_factory=Counter)

    def use(self, rows: Sequence[ExtraRow], sources: Sequence[str], asked: Collection[str] = ()) -> dict[str, float]:
        """Count the rows of a round by the text of a source. Return for each source its rows in this round
        (`source/NAME/rescues`), the distinct prompts that it gave rows on so far (`rescued_prompts`), and how often
        each text that was used was used on average (`uses_per_text`; not of sources that are `asked`, whose texts are
        new in each round)."""
        metrics = {}
        for name in sources:
            used = [row.source for row in rows if row.source.policy == name]
            prompts = [row.prompt_id for row in rows if row.source.policy == name]
            self.texts.update((name, key, source.rollout) for key, source in zip(prompts, used, strict=True))
            counts = {key: number for key, number in self.texts.items() if key[0] == name}
            metrics[of_source(name, "rescues")] = float(len(used))
            metrics[of_source(name, "rescued_prompts")] = float(len({prompt_id for _, prompt_id, _ in counts}))
            if counts and name not in asked:
                metrics[of_source(name, "uses_per_text")] = sum(counts.values()) / len(counts)
        return metrics

    def follow(self, rollouts: Rollouts) -> dict[str, float]:
        """Update `dead` from all ranks' own rollouts of a round. Return `prompts/dead`, the number of prompts whose
        last group had no reward above 0, and `prompts/revived`, the number that left that set in this round."""
        groups: dict[str, list[float]] = {}
        for prompt_id, reward, prefix in zip(rollouts.prompt_ids, rollouts.rewards, rollouts.prefixes, strict=True):
            if not math.isnan(reward) and not prefix:
                groups.setdefault(prompt_id, []).append(reward)
        alive = {prompt_id for prompt_id, rewards in groups.items() if max(rewards) > 0}
        revived = alive & self.dead
        self.dead = (self.dead - revived) | (set(groups) - alive)
        return {DEAD.key: float(len(self.dead)), REVIVED.key: float(len(revived))}

    def observed(self) -> dict[str, Ids]:
        """Return the token ids of the prompts of earlier rounds, where an environment has added to them."""
        return {key: ids for past in self.past.values() for key, ids in past.prompts.items()}

    def packed(self) -> JsonObject:
        """Return the memory as plain values and tensors."""
        return {
            "texts": [[*key, number] for key, number in self.texts.items()],
            "regime_state": json.dumps(dict(self.state), allow_nan=False),
            "uses": dict(self.uses),
            "dead": sorted(self.dead),
            "end_tokens": dict(self.end_tokens),
            "past": [
                {
                    "number": past.number,
                    "table": _packed(past.rollouts),
                    "taught": list(past.prompts_with_nll_rows),
                    "prompts": {key: torch.from_numpy(np.asarray(ids)) for key, ids in past.prompts.items()},
                }
                for past in self.past.values()
            ],
        }

    def restore(self, packed: JsonObject) -> None:
        """Take over a packed memory."""
        self.state = json.loads(packed["regime_state"])
        self.uses = Counter(packed["uses"])
        self.dead = set(packed["dead"])
        self.end_tokens = Counter(packed["end_tokens"])
        self.texts = Counter({(name, key, index): number for name, key, index, number in packed["texts"]})
        self.past = {}
        for past in packed["past"]:
            prompts = {key: np.asarray(ids, dtype=np.int32) for key, ids in past["prompts"].items()}
            rollouts = _unpacked(past["table"])
            self.past[past["number"]] = PastRound(past["number"], rollouts, tuple(past["taught"]), prompts)


def _packed(rollouts: Rollouts) -> torch.Tensor:
    """Return a table as the bytes of an Arrow stream."""
    sink = pa.BufferOutputStream()
    table = rollouts.table()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return torch.from_numpy(np.frombuffer(sink.getvalue(), dtype=np.uint8).copy())


def _unpacked(table: torch.Tensor) -> Rollouts:
    """Return the rollouts of a packed round."""
    return Rollouts(pa.ipc.open_stream(pa.py_buffer(table.numpy().tobytes())).read_all())
