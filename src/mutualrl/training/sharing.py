"""One policy's side of the exchange: publish a round, read the peers', let the regime plan."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list, gather_object

from mutualrl.errors import PlanMismatchError, UsageError
from mutualrl.records import Record
from mutualrl.regimes import RegimeSettings, get_regime
from mutualrl.regimes.base import RoundPlan, RoundView
from mutualrl.see import OPTIONAL_FIELDS, Exchange, Heartbeat, Shard
from mutualrl.thl import retokenize


@dataclass(frozen=True, slots=True)
class OwnRound:
    """A rank's share of the learner's rollouts in a round, and its prompts' token ids."""

    records: Sequence[Record]
    prompt_tokens: dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class SharedRound:
    """The regime's plan for the round, and the learner's prompt tokens of every pair. Equal on all ranks."""

    plan: RoundPlan
    prompt_tokens: dict[str, tuple[int, ...]]


@dataclass
class Sharing:
    """Everything a trainer needs to share: exchange, peers, regime, and the learner's tokenizer and limit.

    `run_seed` seeds the regime's draws. `max_length` bounds a peer's text in the learner's tokens; None takes the
    trainer's `max_completion_length`. `publish` is `"regime"` (what the regime asks for) or `"full"`.
    """

    exchange: Exchange
    peers: Sequence[str]
    regime: str
    settings: RegimeSettings
    run_seed: int
    max_length: int | None
    publish: str = "regime"
    heartbeat: Heartbeat | None = None
    uses: Counter[str] = field(default_factory=Counter)
    wait_seconds: float = 0.0

    @classmethod
    def over(
        cls,
        root: Path,
        policy: str,
        peers: Sequence[str],
        regime: str,
        *,
        run_id: str = "script",
        run_seed: int = 0,
        max_length: int | None = None,
        **settings: Any,
    ) -> Sharing:
        """Sharing over a directory, for use with `MutualGRPOTrainer` in one's own script.

        All policies of a run give the same `root` and `run_id`. Raises UsageError when this policy has
        already published there: rounds of an earlier run must not be taken for this one's.
        """
        exchange = Exchange(root, policy, run_id)
        if any(exchange.directory.glob("*.parquet")):
            raise UsageError(
                f"{exchange.directory} holds rounds of an earlier run; give every run a directory of its own"
            )
        chosen = get_regime(regime).settings(**settings)
        heartbeat = Heartbeat(exchange.directory, policy)
        return cls(exchange, peers, regime, chosen, run_seed, max_length, heartbeat=heartbeat)

    @property
    def reads_peers(self) -> bool:
        """Whether the regime waits for the peers."""
        return get_regime(self.regime).reads_peers

    @property
    def fields(self) -> frozenset[str]:
        """Optional record fields that this policy publishes."""
        return OPTIONAL_FIELDS if self.publish == "full" else get_regime(self.regime).publishes(self.settings)

    @property
    def silent(self) -> bool:
        """Whether a round neither publishes nor reads anything."""
        return not self.reads_peers and self.publish != "full"

    def trim(self, record: Record) -> Record:
        """The record with the fields that are not published taken out."""
        kept = {name: getattr(record, name) for name in self.fields}
        if self.publish != "full" and record.reward <= get_regime(self.regime).text_above(self.settings):
            kept.pop("y_text", None)
        return Record(record.prompt_id, record.rollout, record.reward, record.ended, **kept)

    def share(self, round_: int, step: int, own: OwnRound, accelerator: Any, tokenizer: Any) -> SharedRound:
        """Publish the round, wait for the peers' and plan: SEE -> THL -> regime. All ranks return the same."""
        part = self.exchange.write_part(round_, [self.trim(r) for r in own.records], accelerator.process_index)
        everyone = gather_object([(part, [(r.prompt_id, r.reward) for r in own.records], own.prompt_tokens)])
        answer: list[SharedRound | None] = [None]
        if accelerator.is_main_process:
            self.exchange.commit(round_, [entry[0] for entry in everyone], step)
            rows = [row for entry in everyone for row in entry[1]]
            tokens = {key: ids for entry in everyone for key, ids in entry[2].items()}
            answer = [self._plan(round_, rows, tokens, tokenizer)]
        shared = broadcast_object_list(answer, from_process=0)[0]
        assert shared is not None
        self.uses.update(pair.prompt_id for pair in shared.plan.pairs)
        return shared

    def _plan(
        self, round_: int, rows: Sequence[tuple[str, float]], tokens: dict[str, tuple[int, ...]], tokenizer: Any
    ) -> SharedRound:
        shards, waited = self._read(round_)
        own_prompts = {prompt_id for prompt_id, _ in rows}
        for name, shard in shards.items():
            _same_prompts(self.exchange.policy, name, round_, own_prompts, set(shard.column("prompt_id")))
        view = RoundView(
            round=round_,
            learner=self.exchange.policy,
            run_seed=self.run_seed,
            prompt_ids=[prompt_id for prompt_id, _ in rows],
            rewards=[reward for _, reward in rows],
            peers=shards,
            fit=fitter(tokenizer, self.max_length),
            uses=self.uses,
        )
        plan = get_regime(self.regime).plan(view, self.settings)
        metrics = {
            **plan.metrics,
            "see/wait_seconds": waited,
            "see/bytes": float(sum(shard.bytes for shard in shards.values())),
        }
        plan = RoundPlan(plan.pairs, plan.weight, plan.normalize, metrics)
        return SharedRound(plan, {pair.prompt_id: tokens[pair.prompt_id] for pair in plan.pairs})

    def _read(self, round_: int) -> tuple[dict[str, Shard], float]:
        if not self.reads_peers:
            return {}, 0.0
        began = time.monotonic()
        shards = self.exchange.wait(self.peers, round_, self._say)
        waited = time.monotonic() - began
        self._say("training")
        self.wait_seconds += waited
        return shards, waited

    def _say(self, phase: str) -> None:
        if self.heartbeat is not None:
            self.heartbeat.set(phase)


def fitter(tokenizer: Any, max_length: int | None) -> Callable[[str, bool], tuple[int, ...] | None]:
    """A function from a peer's text to the learner's ids; None when too long, empty or not carried exactly."""

    def fit(text: str, ended: bool) -> tuple[int, ...] | None:
        carried = retokenize(text, tokenizer, ended=ended, max_length=max_length)
        return carried.ids if carried.exact and carried.fits and carried.ids else None

    return fit


def _same_prompts(learner: str, peer: str, round_: int, own: set[str], theirs: set[str]) -> None:
    if own != theirs:
        example = sorted(own ^ theirs)[0]
        raise PlanMismatchError(
            f"round {round_}: {learner!r} and {peer!r} did not see the same prompts ({len(own - theirs)} only here, "
            f"{len(theirs - own)} only there, such as {example!r}); give both the same data, seed and batch"
        )
