"""A served source over users' own scripts: one of them asks for all learners.

Each script has a thread for it. The first to hold the source's lock asks, as a new attempt of the source; the others
wait for the lock, which the operating system frees when a process ends, and go on from what is published.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from mutualrl.console.lines import notify
from mutualrl.errors import MutualRLError, RoundAbortedError, RunDirectoryError
from mutualrl.regimes import Regime
from mutualrl.see import Exchange, Heartbeat, MissingPeers
from mutualrl.see.exchange import claimed_attempt
from mutualrl.see.liveness import Phase
from mutualrl.sources.questions import Budget
from mutualrl.sources.script import ServedRows
from mutualrl.storage.rundir import RunDirectory, hold
from mutualrl.training.peers import PeerLink
from mutualrl.training.source_member import Served, SourceMember, budget_left

RETRY_SECONDS = 0.5  # between two attempts to hold the lock


@dataclass
class ScriptSource:
    """The thread of one script for one source. `link`: the script's own, with the run's exchange and its time-outs;
    `learners`: all policies; `regime`: theirs."""

    rows: ServedRows
    run: RunDirectory
    link: PeerLink
    learners: Sequence[str]
    regime: Regime
    run_seed: int
    failure: MutualRLError | None = None
    _ended: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    @property
    def name(self) -> str:
        """Return the source's name."""
        return self.rows.name

    def start(self, longest: int | None) -> None:
        """Begin to ask, or to wait for the lock. `longest`: tokens of an answer, if the source names none."""
        section = self.rows.section
        settled = {"samples": section.samples or 1, "max_tokens": section.max_tokens or longest}
        self.rows = replace(self.rows, section=section.model_copy(update=settled))
        self._ended.clear()
        self._thread = threading.Thread(target=self._run, name=f"mutualrl source {self.name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread: another script goes on."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def require(self) -> None:
        """Raise what ended the thread, under `on_source_loss: fail`."""
        if self.failure is not None and self.rows.section.on_source_loss == "fail":
            raise self.failure

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
            except MutualRLError as error:
                self.failure = error
                notify(f"source {self.name!r}: {error}")
                return

    def _answer(self) -> None:
        """Answer one round after the other until the script ends."""
        own = self.link.exchange
        store = own.store
        attempt = claimed_attempt(store, self.name)
        exchange = Exchange(
            store, self.name, own.run_id, attempt=0 if attempt is None else attempt + 1, timeouts=own.timeouts
        )
        exchange.claim()
        heartbeat = Heartbeat(store, self.name)
        heartbeat.set(Phase.LOADING)
        heartbeat.start()
        link = PeerLink(exchange, self.learners, heartbeat, self._ended.is_set, MissingPeers(store, self.name))
        section = self.rows.section
        used = budget_left(exchange, section, ()).used
        try:
            answering = Served(section, link, self.rows.prompts, Budget(section.budget_tokens, used), self.run_seed)
            try:
                regimes = dict.fromkeys(self.learners, self.regime)
                member = SourceMember(section, link, regimes, self.rows.prompts, answering, self.run_seed)
                for number in count(max(exchange.rounds(self.name), default=-1) + 1):
                    member.run_round(number)
            finally:
                answering.close()
        finally:
            heartbeat.stop(Phase.FINISHED)
