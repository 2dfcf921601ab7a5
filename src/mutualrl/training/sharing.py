"""One policy's side of the exchange: publish a round, read the peers', let the regime plan."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from accelerate.utils import broadcast_object_list, gather_object

from mutualrl.errors import PlanMismatchError, RoundAbortedError, UsageError
from mutualrl.records import Record
from mutualrl.regimes import RegimeSettings, get_regime
from mutualrl.regimes.base import Aligned, Aligner, RoundPlan, RoundView, Trace
from mutualrl.see import OPTIONAL_FIELDS, Absences, Exchange, Heartbeat, Listener, Shard
from mutualrl.thl import align_logprobs, retokenize
from mutualrl.training.rescues import RescueLog


@dataclass(frozen=True, slots=True)
class OwnRound:
    """A rank's share of the learner's rollouts in a round: records, TRL's advantages, lengths, prompts' token ids."""

    records: Sequence[Record]
    advantages: Sequence[float]
    lengths: Sequence[int]
    prompt_tokens: dict[str, tuple[int, ...]]


class OwnRow(NamedTuple):
    """What a regime may look at of one own rollout."""

    prompt_id: str
    reward: float
    advantage: float
    length: float


@dataclass(frozen=True, slots=True)
class SharedRound:
    """The regime's plan for the round, and the learner's prompt tokens of what joins it. Equal on all ranks."""

    plan: RoundPlan
    prompt_tokens: dict[str, tuple[int, ...]]


@dataclass
class Sharing:
    """Everything a trainer needs to share: exchange, peers, regime, and the learner's tokenizer and limit.

    `run_seed` seeds the regime's draws. `max_length` bounds a peer's text in the learner's tokens; None takes the
    trainer's `max_completion_length`. `publish` is `"regime"` (what the regime asks for) or `"full"`. `tokenizers` are
    the peers', by name, for regimes that align traces. `demands` are the settings of all policies of the pool where
    they differ: what any of them reads is published. `stopping` is asked while it waits; a true answer ends the round
    with RoundAbortedError, on all ranks, before the policy has changed. `absences` are the rounds in which it went on
    without a peer; `waited_for` are the seconds that each peer was waited for. `solutions` are the right completions
    that come with the prompts, by prompt id. `rescues` writes down what is learnt from whom.
    """

    exchange: Exchange
    peers: Sequence[str]
    regime: str
    settings: RegimeSettings
    run_seed: int
    max_length: int | None
    publish: str = "regime"
    heartbeat: Heartbeat | None = None
    tokenizers: Mapping[str, Any] = field(default_factory=dict)
    demands: Sequence[RegimeSettings] = ()
    resume: bool = False
    stopping: Callable[[], bool] = lambda: False
    absences: Absences = field(default_factory=Absences)
    uses: Counter[str] = field(default_factory=Counter)
    wait_seconds: float = 0.0
    waited_for: Counter[str] = field(default_factory=Counter)
    solutions: Mapping[str, str] = field(default_factory=dict)
    rescues: RescueLog | None = None

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
        tokenizers: Mapping[str, Any] | None = None,
        resume: bool = False,
        solutions: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> Sharing:
        """Sharing over a directory, for use with `MutualGRPOTrainer` in one's own script.

        All policies of a run give the same `root` and `run_id`. Regime `prp` needs the peers' `tokenizers` by name;
        SGT's `teacher="gold"` needs the data's `solutions` by prompt id. A script that goes on from a checkpoint
        (`train(resume_from_checkpoint=...)`) gives `resume=True`, and is a new attempt of its policy: the one before it
        can publish nothing any more.
        Raises UsageError when this policy has already published there (rounds of an earlier run must not be taken for
        this one's), and when a tokenizer is missing.
        """
        exchange = Exchange(root, policy, run_id)
        if not resume and any(exchange.directory.glob("*.parquet")):
            raise UsageError(
                f"{exchange.directory} holds rounds of an earlier run; give every run a directory of its own"
            )
        chosen = get_regime(regime).settings(**settings)
        heartbeat = Heartbeat(exchange.directory, policy)
        given = dict(tokenizers or {})
        lacking = sorted(set(peers) - set(given))
        if "logprobs" in get_regime(regime).publishes(chosen) and lacking:
            raise UsageError(
                f"regime {regime!r} aligns the peers' traces and needs their tokenizers: none given for "
                f"{', '.join(lacking)} (Sharing.over(..., tokenizers={{{lacking[0]!r}: ...}}))"
            )
        if get_regime(regime).needs_solutions(chosen) and not solutions:
            raise UsageError("teacher='gold' learns the data's solutions: give solutions={prompt_id: text}")
        return cls(
            exchange,
            peers,
            regime,
            chosen,
            run_seed,
            max_length,
            heartbeat=heartbeat,
            tokenizers=given,
            resume=resume,
            solutions=dict(solutions or {}),
        )

    def take_over(self, accelerator: Any) -> None:
        """Of a script that goes on: claim the policy as a new attempt, on all ranks the same. Once, when training
        begins."""
        if not self.resume:
            return
        attempt = [self.exchange.newest_attempt() + 1 if accelerator.is_main_process else 0]
        self.exchange.attempt = broadcast_object_list(attempt, from_process=0)[0]
        if accelerator.is_main_process:
            self.exchange.claim()
        self.resume = False

    @property
    def reads_peers(self) -> bool:
        """Whether the regime waits for the peers."""
        return get_regime(self.regime).reads_peers

    @property
    def fields(self) -> frozenset[str]:
        """Optional record fields that this policy publishes: what any policy of the pool reads."""
        return OPTIONAL_FIELDS if self.publish == "full" else self._demanded_fields

    @property
    def text_above(self) -> float:
        """Rollouts rewarded above this have their text published."""
        return min(get_regime(self.regime).text_above(settings) for settings in self._demanded)

    def publishes_text(self, reward: float) -> bool:
        """Whether the text of a rollout with this reward (NaN: unscorable) is published."""
        everything = self.publish == "full" or self.text_above == -math.inf
        return "y_text" in self.fields and (everything or reward > self.text_above)

    @property
    def wants_trace(self) -> bool:
        """Whether some policy's regime reads the behaviour policy's log-probs, so that a pass for them is due."""
        return "logprobs" in self._demanded_fields

    @property
    def _demanded(self) -> Sequence[RegimeSettings]:
        return (self.settings, *self.demands)

    @property
    def _demanded_fields(self) -> frozenset[str]:
        publishes = get_regime(self.regime).publishes
        return frozenset().union(*(publishes(settings) for settings in self._demanded))

    @property
    def _writes(self) -> bool:
        return self.reads_peers or self.publish == "full"

    @property
    def silent(self) -> bool:
        """Whether a round neither publishes nor changes anything."""
        return not self._writes and get_regime(self.regime).plan is None

    def trim(self, record: Record) -> Record:
        """The record with the fields that are not published taken out."""
        kept = {name: getattr(record, name) for name in self.fields}
        if not self.publishes_text(record.reward):
            kept.pop("y_text", None)
        return Record(record.prompt_id, record.rollout, record.reward, record.ended, **kept)

    def share(self, round_: int, step: int, own: OwnRound, trainer: Any) -> SharedRound:
        """Publish the round, wait for the peers' and plan: SEE -> THL -> regime. All ranks return the same."""
        accelerator = trainer.accelerator
        part = None
        if self._writes:
            records = [self.trim(record) for record in own.records]
            part = self.exchange.write_part(round_, records, accelerator.process_index)
        rows = [
            OwnRow(record.prompt_id, record.reward, advantage, length)
            for record, advantage, length in zip(own.records, own.advantages, own.lengths, strict=True)
        ]
        everyone = gather_object([(part, rows, own.prompt_tokens)])
        answer: list[SharedRound | None] = [None]
        if accelerator.is_main_process:
            if self._writes:
                self.exchange.commit(round_, [entry[0] for entry in everyone], step)
            every_row = [row for entry in everyone for row in entry[1]]
            tokens: dict[str, tuple[int, ...]] = {}
            for key, ids in (pair for entry in everyone for pair in entry[2].items()):
                remember(tokens, key, ids)
            try:
                answer = [self._plan(round_, every_row, tokens, trainer)]
            except RoundAbortedError as error:
                print(f"mutualrl: {error}", file=sys.stderr)
        shared = broadcast_object_list(answer, from_process=0)[0]
        if shared is None:  # said by the main rank, heard by all: every rank leaves the round together
            raise RoundAbortedError(f"asked to stop in round {round_}")
        self.uses.update(pair.prompt_id for pair in shared.plan.pairs)
        return shared

    def _plan(
        self, round_: int, rows: Sequence[OwnRow], tokens: dict[str, tuple[int, ...]], trainer: Any
    ) -> SharedRound:
        make = get_regime(self.regime).plan
        if make is None:
            return SharedRound(RoundPlan(), {})
        shards, waited = self._read(round_)
        own_prompts = {row.prompt_id for row in rows}
        for name, shard in shards.items():
            _same_prompts(self.exchange.policy, name, round_, own_prompts, set(shard.column("prompt_id")))
        view = RoundView(
            round=round_,
            learner=self.exchange.policy,
            run_seed=self.run_seed,
            prompt_ids=[row.prompt_id for row in rows],
            rewards=[row.reward for row in rows],
            advantages=[row.advantage for row in rows],
            lengths=[row.length for row in rows],
            peers=shards,
            fit=fitter(trainer._tokenizer, self.max_length),
            uses=self.uses,
            scale=trainer.scale_rewards,
            mask_truncated=trainer.mask_truncated_completions,
            align=aligner(self.tokenizers, trainer._tokenizer),
            solutions=self.solutions,
        )
        plan = make(view, self.settings)
        if self.reads_peers:
            size = float(sum(shard.bytes for shard in shards.values()))
            seen = {"see/round": float(round_), "see/peers": float(len(shards)), "see/bytes": size}
            plan = replace(plan, metrics={**plan.metrics, **seen, "see/wait_seconds": waited})
        joining = {pair.prompt_id for pair in plan.pairs} | {row.prompt_id for row in plan.rows}
        return SharedRound(plan, {prompt_id: tokens[prompt_id] for prompt_id in sorted(joining)})

    def _read(self, round_: int) -> tuple[dict[str, Shard], float]:
        if not self.reads_peers:
            return {}, 0.0
        began = time.monotonic()
        expected = [peer for peer in self.peers if not self.absences.absent(peer, round_)]
        listener = Listener(self._say, self._arrived, self._slow, self.stopping)
        shards = self.exchange.wait(expected, round_, listener)
        for peer in set(expected) - set(shards):
            self.absences.lose(peer, round_)
            self._warn(f"peer {peer!r} is lost; from round {round_} on the pool does without it")
        waited = time.monotonic() - began
        self._say("training")
        self.wait_seconds += waited
        return shards, waited

    def _arrived(self, peer: str, seconds: float) -> None:
        self.waited_for[peer] += seconds  # type: ignore[assignment]  # a Counter adds what it is given

    def _slow(self, words: str) -> None:
        self._say(words)  # where the supervisor shows it
        self._warn(words)

    def _warn(self, words: str) -> None:
        print(f"mutualrl: policy {self.exchange.policy!r}: {words}", file=sys.stderr, flush=True)

    def _say(self, phase: str) -> None:
        if self.heartbeat is not None:
            self.heartbeat.set(phase)


def remember(tokens: dict[str, tuple[int, ...]], prompt_id: str, ids: tuple[int, ...]) -> None:
    """Note a prompt's token ids under its id. Raises UsageError when another prompt has that id."""
    if tokens.setdefault(prompt_id, ids) != ids:
        raise UsageError(f"two different prompts have the id {prompt_id!r}; give every prompt an id of its own")


def fitter(tokenizer: Any, max_length: int | None) -> Callable[[str, bool], tuple[int, ...] | None]:
    """A function from a peer's text to the learner's ids; None when too long, empty or not carried exactly."""

    def fit(text: str, ended: bool) -> tuple[int, ...] | None:
        carried = retokenize(text, tokenizer, ended=ended, max_length=max_length)
        return carried.ids if carried.exact and carried.fits and carried.ids else None

    return fit


def aligner(peers: Mapping[str, Any], learner: Any) -> Aligner:
    """A function that puts a peer's trace on the tokens that `fitter` gives the learner."""

    def align(trace: Trace, ids: Sequence[int], anchor: str) -> Aligned:
        """See `Aligner`. Raises UsageError for a peer whose tokenizer was not given."""
        if trace.policy not in peers:
            raise UsageError(f"no tokenizer of peer {trace.policy!r} was given; regime prp aligns traces with it")
        source_eos, target_eos = (trace.token_ids[-1:], ids[-1:]) if trace.ended else ((), ())
        aligned = align_logprobs(
            trace.text, trace.token_ids, trace.logprobs, peers[trace.policy], learner, target_ids=ids,
            anchor=anchor, source_eos_ids=source_eos, target_eos_ids=target_eos,  # type: ignore[arg-type]
        )  # fmt: skip
        covered = np.asarray(aligned.covered, dtype=np.bool_)
        return np.where(covered, aligned.logprobs, 0.0), covered

    return align


def _same_prompts(learner: str, peer: str, round_: int, own: set[str], theirs: set[str]) -> None:
    if own != theirs:
        example = sorted(own ^ theirs)[0]
        raise PlanMismatchError(
            f"round {round_}: {learner!r} and {peer!r} did not see the same prompts ({len(own - theirs)} only here, "
            f"{len(theirs - own)} only there, such as {example!r}); give both the same data, seed and batch"
        )
