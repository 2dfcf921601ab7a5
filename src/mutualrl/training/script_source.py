"""A served source over users' own scripts: one of them asks for all learners.

Each script has a thread for it. The first to hold the source's lock asks, as a new attempt of the source; the others
wait for the lock, which the operating system frees when a process ends, and go on from what is published.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

from mutualrl.console.lines import notify
from mutualrl.errors import MachineError, MutualRLError, RoundAbortedError, RunDirectoryError, SourceLostError
from mutualrl.records import Rollout
from mutualrl.regimes import Regime
from mutualrl.see import Exchange, Heartbeat
from mutualrl.see.exchange import claimed_attempt
from mutualrl.see.liveness import Phase
from mutualrl.sources.questions import Budget
from mutualrl.sources.script import ServedRows
from mutualrl.sources.section import ServedSource
from mutualrl.storage.accounts import Account
from mutualrl.storage.files import try_read_json, write_json
from mutualrl.storage.rundir import RunDirectory, hold
from mutualrl.training.member import Member
from mutualrl.training.peers import PeerLink
from mutualrl.training.source_member import Answering, Served, SourceMember, budget_left

RETRY_SECONDS = 0.5  # between two attempts to hold the lock


@dataclass
class ScriptSource:
    """The thread of one script for one source. `own`: the exchange of the script's policy; `learners`: all policies;
    `regime`: theirs."""

    rows: ServedRows
    run: RunDirectory
    own: Exchange
    learners: Sequence[str]
    regime: Regime
    run_seed: int
    failure: Exception | None = None
    _ended: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    @property
    def name(self) -> str:
        """Return the source's name."""
        return self.rows.name

    def settle(self, longest: int | None) -> ServedSource:
        """Return the source with what it leaves open; `longest`: tokens of an answer, if it names none."""
        section = self.rows.section
        settled = {"samples": section.samples or 1, "max_tokens": section.max_tokens or longest}
        self.rows = replace(self.rows, section=section.model_copy(update=settled))
        return self.rows.section

    def start(self) -> None:
        """Begin to ask, or to wait for the lock."""
        self._ended.clear()
        self._thread = threading.Thread(target=self._run, name=f"mutualrl source {self.name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread: another script goes on."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def failed(self) -> bool:
        """Raise what ended the thread: a question without an answer under `on_source_loss: fail`, or an error of its
        own. A server that is away ends nothing under `continue`. Return false otherwise."""
        if isinstance(self.failure, MutualRLError):
            raise self.failure
        if self.failure is not None:
            name = type(self.failure).__name__
            raise SourceLostError(f"source {self.name!r}: {name}: {self.failure}") from self.failure
        return False

    def _run(self) -> None:
        directory = self.run.asked_source(self.name)
        directory.mkdir(parents=True, exist_ok=True)
        while not self._ended.is_set():
            try:
                with hold(directory / "lock", str(directory)):
                    self._answer()
            except RoundAbortedError:
                return
            except RunDirectoryError:  # another script holds it
                self._ended.wait(RETRY_SECONDS)
            except Exception as error:  # noqa: BLE001  (whatever it is, the training that waits for it must know)
                self.failure = error
                return

    def _answer(self) -> None:
        """Answer one round after the other until the script ends."""
        own, store = self.own, self.own.store
        claimed = claimed_attempt(store, self.name)
        attempt = 0 if claimed is None else claimed + 1
        exchange = Exchange(store, self.name, own.run_id, attempt=attempt, timeouts=own.timeouts)
        exchange.claim()
        heartbeat = Heartbeat(store, self.name)
        heartbeat.set(Phase.LOADING)
        heartbeat.start()
        member = Member(run=self.run, exchange=exchange, heartbeat=heartbeat, stopping=self._ended.is_set)
        first, link = max(exchange.rounds(self.name), default=-1) + 1, member.link(self.learners)
        link.missing_peers.readmit_all(first)
        section = self._settled()
        budget = Budget(section.budget_tokens, budget_left(exchange, section, {first}).used)
        regimes = dict.fromkeys(self.learners, self.regime)
        source = SourceMember(section, link, regimes, self.rows.prompts, Unreachable(), self.run_seed)
        try:
            for number in count(first):
                if isinstance(source.answering, Unreachable):
                    source.answering = self._opened(section, link, budget)
                source.run_round(number)
        finally:
            source.answering.close()
            heartbeat.stop(Phase.FINISHED)

    def _opened(self, section: ServedSource, link: PeerLink, budget: Budget) -> Answering:
        """Return the served model; a stand-in while its server is away, so that no round waits for it. Raises
        MachineError in place of that under `on_source_loss: fail`."""
        try:
            answering = Served(section, link, self.rows.prompts, budget, self.run_seed)
        except MachineError as error:
            if section.on_source_loss == "fail":
                raise
            notify(f"source {self.name!r}: {error}; tried again in the next round (on_source_loss: continue)")
            return Unreachable()
        if section.model is None:
            write_json(self._model_file, {"model": answering.model})
        return answering

    def _settled(self) -> ServedSource:
        """Return the source with the server's name of the model that the run began with."""
        known = try_read_json(self._model_file) or {}
        model = self.rows.section.model or known.get("model")
        return self.rows.section.model_copy(update={"model": model if isinstance(model, str) else None})

    @property
    def _model_file(self) -> Path:
        return self.run.asked_source(self.name) / "model.json"


class Unreachable(Answering):
    """Stands in for a served model that cannot be reached: no question is asked."""

    def answer(self, round_index: int, prompt_ids: Sequence[str]) -> tuple[list[Rollout], Account]:
        """Return nothing, and what was left out."""
        count = len(prompt_ids)
        return [], Account(prompts=count, questions=count, left_out=count)
