"""The policies of a run as one node's supervisor sees them: started, watched, started again, given up."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rich.console import Console

from mutualrl.errors import MutualRLError, PeerLostError, exit_code_of
from mutualrl.mwra.group import Group, Launcher, Mark, end, failure_of, next_attempt, tail
from mutualrl.mwra.placement import Seat
from mutualrl.process.ports import free_port
from mutualrl.process.status import Standing, Voice, Word, node_file
from mutualrl.recipes import Recipe
from mutualrl.see.liveness import NOT_STARTED, PeerWatch, clear_heartbeats
from mutualrl.storage.checkpoints import Checkpoints
from mutualrl.storage.rundir import RunDirectory

#: a policy that ends because a peer ended is not the cause; the others get so long to be found.
CAUSE_SECONDS = 1.0
BACK_OFF_SECONDS = 1.0  # before the first restart; twice as long before each further one
LONGEST_BACK_OFF_SECONDS = 60.0
START_SECONDS = 300.0  # from the start of a process group to its first heartbeat, at most
#: a worker ends with these when a peer of its ended: consequences, not causes
_CONSEQUENCES = ("peer-lost", "wait-timeout", "interrupted")


@dataclass
class Member:
    """A policy with a part on this node. `due`: when it is started again, on the monotonic clock; `died`: when it last
    died; `reason`: why it was given up."""

    seat: Seat
    attempt: int = 0
    state: str = "starting"
    group: Group | None = None
    restarts: int = 0
    due: float | None = None
    died: float | None = None
    rendezvous: str = ""
    reason: str = ""

    @property
    def name(self) -> str:
        """The policy."""
        return self.seat.policy


class Crew:
    """The members on one node, and what becomes of them. A seat over several nodes is led by the first of them, whose
    word the others follow."""

    def __init__(
        self, run: RunDirectory, recipe: Recipe, seats: tuple[Seat, ...], node: int, address: str, voice: Voice,
        console: Console, launcher: Launcher,
    ) -> None:  # fmt: skip
        self.run = run
        self.recipe = recipe
        self.members = [Member(seat) for seat in seats]
        self.stopping = False
        self._node = node
        self._address = address
        self._voice = voice
        self._console = console
        self._launcher = launcher
        self._watch = PeerWatch(run.exchange)
        self._standing = Standing(run.root)

    @property
    def groups(self) -> list[Group]:
        """The process groups that were started and not ended."""
        return [m.group for m in self.members if m.group is not None]

    @property
    def active(self) -> bool:
        """Whether a member runs, or will."""
        return any(m.state in ("starting", "running", "restarting") for m in self.members)

    def leads(self, member: Member) -> bool:
        """Whether this node decides about a member."""
        return member.seat.nodes[0] == self._node

    def start(self) -> None:
        """Start every member that has not finished in an earlier session."""
        for member in self.members:
            if self.run.policy(member.name).result.exists():
                self._tell(member, "finished")
            elif self.leads(member):
                self._start(member)

    def look(self) -> None:
        """One look at everybody. Raises the error that ends the run."""
        self._voice.say()
        for policy in self.recipe.policies:
            self._standing.of(policy.name)  # a supervisor is believed once its counter was seen to move
        for member in self.members:
            if not self.leads(member):
                self._follow(member)
            elif member.state == "running":
                self._look_at(member)
            elif member.state == "restarting" and self.stopping:
                self._tell(member, "stopped")
            elif member.state == "restarting" and member.due is not None and time.monotonic() >= member.due:
                self._start(member)

    def lost(self) -> dict[str, str]:
        """The members that were given up, and why."""
        return {m.name: m.reason for m in self.members if m.state == "lost"}

    # ---- one member

    def _start(self, member: Member) -> None:
        if member.group is not None:  # its agent is dead; a worker below it may have a moment left
            end([member.group], self._mark(member), grace=0)
        member.attempt = next_attempt(self.run, member.name)
        self.run.policy(member.name).failure.unlink(missing_ok=True)
        if len(member.seat.nodes) > 1:
            member.rendezvous = f"{self._address}:{free_port()}"
        clear_heartbeats(self.run.exchange, member.name)
        self._watch.forget(member.name)
        member.group = self._launcher.start(self.run, member.seat, member.attempt, self._node, member.rendezvous)
        member.due = None
        self._tell(member, "running")

    def _mark(self, member: Member) -> Mark:
        return Mark(str(self.run.root), member.name, self._node)

    def _tell(self, member: Member, state: str) -> None:
        member.state = state
        self._voice.tell(member.name, Word(state, member.attempt, member.rendezvous))

    def _look_at(self, member: Member) -> None:
        assert member.group is not None
        code = member.group.exit_code()
        if code == 0:
            self._tell(member, "finished")
            return
        if code is not None:
            failure = failure_of(self.run, member.name)
            words = f"exit code {code}, no error of its own" if failure is None else f"exit code {code}: {failure[1]}"
            self._ended(member, f"died ({words})")
        elif (silent := self._silence(member)) is not None:
            self._ended(member, f"is frozen: no heartbeat for {silent}")
        elif self._died_elsewhere(member):
            self._ended(member, "died on another node")

    def _silence(self, member: Member) -> str | None:
        """How long a member that runs has been frozen, in words; None while it is not."""
        silent, phase = self._watch.silence(member.name)
        limit = self.recipe.run.peer_timeout
        if silent <= (max(limit, START_SECONDS) if phase.startswith(NOT_STARTED) else limit):
            return None
        return f"{silent:.0f} s (last seen: {phase})"

    def _died_elsewhere(self, member: Member) -> bool:
        words = (self._word_of(member, node) for node in member.seat.nodes[1:])
        return any(word.state == "died" and word.attempt == member.attempt for word in words)

    def _word_of(self, member: Member, node: int) -> Word:
        said = self._standing.read(node_file(self.run.root, node))
        policies = {} if said is None else said["policies"]
        return Word(**policies[member.name]) if member.name in policies else Word()

    def _ended(self, member: Member, what: str) -> None:
        """A member is no more: nothing to do when it was asked to stop, an error of the run, or a restart."""
        assert member.group is not None
        if self.stopping:
            end([member.group], self._mark(member), grace=0)
            self._tell(member, "stopped")
            return
        error = self._error_of(member)
        if error is not None:
            raise error
        text = f"policy {member.name!r} {what}; log: {member.group.log}\n{tail(member.group.log)}"
        end([member.group], self._mark(member), grace=0)  # what is left of it: a frozen worker, other ranks, an engine
        member.died = time.monotonic() if member.died is None or self._lived(member) else member.died
        self._again_or_lost(member, text)

    def _lived(self, member: Member) -> bool:
        """Whether its last attempt got further than its start: its trouble is new then."""
        return self._watch.silence(member.name)[1] not in (NOT_STARTED, "loading")

    def _again_or_lost(self, member: Member, text: str) -> None:
        section, now = self.recipe.run, time.monotonic()
        pause = min(BACK_OFF_SECONDS * 2.0 ** min(member.restarts, 10), LONGEST_BACK_OFF_SECONDS)
        patient = section.on_peer_loss == "wait"
        assert member.died is not None
        if member.restarts < section.max_restarts or (patient and now + pause < member.died + section.round_timeout):
            member.restarts += 1
            member.due = now + pause
            step = max(Checkpoints(self.run.policy(member.name).root).steps(), default=0)
            limit = "until run.round_timeout" if patient else f"{member.restarts} of {section.max_restarts}"
            self._say(f"{text}\nStarting it again in {pause:.0f} s from step {step} (restart {limit})")
            self._tell(member, "restarting")
            return
        member.reason = text.partition("\n")[0]
        self._tell(member, "lost")
        if section.on_peer_loss == "continue" and self._others_left(member):
            self._say(f"{text}\nIt is lost; the others go on without it (run.on_peer_loss: continue)")
            return
        spent = f"; {member.restarts} restart(s) spent" if section.max_restarts else ""
        raise PeerLostError(f"{text.partition(chr(10))[0]}{spent}\n{text.partition(chr(10))[2]}")

    def _others_left(self, member: Member) -> bool:
        """Whether a policy of the run, on whatever node, is still there to go on."""
        here = {m.name: m for m in self.members}
        return any(
            here[p.name].state in ("starting", "running", "restarting", "finished")
            if p.name in here
            else self.run.policy(p.name).result.exists() or self._standing.of(p.name).state in ("running", "restarting")
            for p in self.recipe.policies
            if p.name != member.name
        )

    def give_up_with(self, node: int) -> None:
        """The supervisor of `node` is gone: the seats that it led, and that have a part here, are lost."""
        for member in self.members:
            if member.seat.nodes[0] == node and member.state not in ("finished", "lost"):
                if member.group is not None:
                    end([member.group], self._mark(member), grace=0)
                member.reason = f"node {node}, which led it, is lost"
                self._tell(member, "lost")

    def _error_of(self, member: Member) -> MutualRLError | None:
        """The error that a member, or another that failed with it, left; None for a death that a restart may mend."""
        failure = failure_of(self.run, member.name)
        if failure is None or failure[0] == "died":
            return None
        kind, message = failure
        if kind in _CONSEQUENCES:
            time.sleep(CAUSE_SECONDS)  # whoever caused it is found first
            if self._another_died(member):
                return None
        assert member.group is not None
        code = exit_code_of(kind)
        error = MutualRLError(
            f"policy {member.name!r} failed (exit code {member.group.exit_code()}): {message}\nlog: {member.group.log}"
        )
        error.kind, error.exit_code = (
            (kind, code) if code is not None else (PeerLostError.kind, PeerLostError.exit_code)
        )
        return error

    def _another_died(self, member: Member) -> bool:
        for other in self.members:
            if other is not member and other.state == "running" and other.group is not None and other.group.exit_code():
                failure = failure_of(self.run, other.name)
                if failure is None or failure[0] not in _CONSEQUENCES:
                    return True
        return False

    # ---- a member that another node leads

    def _follow(self, member: Member) -> None:
        word = self._word_of(member, member.seat.nodes[0])
        if word.state == "running" and word.attempt >= member.attempt and member.rendezvous != word.rendezvous:
            if member.group is not None:
                end([member.group], self._mark(member), grace=0)
            member.attempt, member.rendezvous = word.attempt, word.rendezvous
            member.group = self._launcher.start(self.run, member.seat, member.attempt, self._node, member.rendezvous)
            self._tell(member, "running")
        elif member.state == "running" and member.group is not None and (code := member.group.exit_code()) is not None:
            self._tell(member, "finished" if code == 0 else "stopped" if self.stopping else "died")
        elif word.state in ("restarting", "lost", "finished", "stopped") and member.state != word.state:
            if member.group is not None and word.state != "finished":
                end([member.group], grace=0)
            if word.state != "finished" or member.group is None or member.group.exit_code() is not None:
                self._tell(member, word.state)

    def _say(self, words: str) -> None:
        self._console.print(words, markup=False, highlight=False, soft_wrap=True)
