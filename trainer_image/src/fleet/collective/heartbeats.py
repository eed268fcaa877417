"""Heartbeats, which name the event that a trainer awaits, and reports that summarize all trainers.

Trainers wait for each other in two ways: in the exchange of a backward pass's gradients, and in calls that
all of them make (a barrier, the end of the job). Each kind uses separate connections, so their data never
mix. But if one trainer waits in a call while another waits in an exchange, both wait forever. Every heartbeat
therefore carries how many calls and exchanges its trainer has begun, so that the others can detect the
deadlock.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

__all__ = ["SHOWN", "Absence", "Cohort", "Heartbeat", "Report", "TrainerState", "WaitKind", "report_of"]

SHOWN: Final = 8
"""The maximum number of trainers that a message names."""
MAX_COHORTS: Final = 16


class WaitKind(StrEnum):
    """The reason for a wait: a call that all trainers make, a gradient exchange, or something else."""

    CALL = "call"
    EXCHANGE = "exchange"
    OTHER = ""
    """Any other wait, as in a call that all trainers have begun, or no wait; not checked for deadlocks."""


@dataclass(frozen=True)
class TrainerState:
    """A snapshot of one trainer: the numbers of calls and exchanges it has begun, and its current wait.

    Attributes
    ----------
    calls, exchanges : int
        The number of calls and exchanges that this trainer has begun.
    kind : WaitKind
    what : str
        The event that it waits for; empty while it does not wait.
    """

    calls: int = 0
    exchanges: int = 0
    kind: WaitKind = WaitKind.OTHER
    what: str = ""

    def begin(self, what: str, kind: WaitKind) -> "TrainerState":
        """Return the state of this trainer after it has started to wait."""
        calls, exchanges = self.calls + (kind is WaitKind.CALL), self.exchanges + (kind is WaitKind.EXCHANGE)
        return TrainerState(calls, exchanges, kind, what)

    def end(self) -> "TrainerState":
        """Return the state of this trainer after its wait has ended."""
        return replace(self, kind=WaitKind.OTHER, what="")

    def resume(self, outer: "TrainerState") -> "TrainerState":
        """Return the state of this trainer after a wait within an `outer` one has ended."""
        return replace(self, kind=outer.kind, what=outer.what)

    def to_text(self) -> str:
        """Return the state as JSON, which `from_text` reads."""
        return json.dumps([self.calls, self.exchanges, self.kind, self.what])

    @classmethod
    @functools.lru_cache(maxsize=4 * MAX_COHORTS)  # of thousands of trainers, most are in the same few states
    def from_text(cls, text: str) -> "TrainerState":
        """Parse the result of `to_text`."""
        calls, exchanges, kind, what = json.loads(text)
        return cls(calls, exchanges, WaitKind(kind), what)

    def deadlocks_with(self, other: "TrainerState") -> bool:
        """Return True if two trainers wait for each other: one in a call, the other in an exchange.

        The other's state may be older than this one, but not newer. If the other waited for a call or
        exchange that this trainer has not begun, it is still waiting.
        """
        if {self.kind, other.kind} != {WaitKind.CALL, WaitKind.EXCHANGE}:
            return False
        calling, exchanging = (self, other) if self.kind is WaitKind.CALL else (other, self)
        return calling.calls > exchanging.calls and exchanging.exchanges > calling.exchanges


@dataclass(frozen=True)
class Heartbeat:
    """A heartbeat: an increasing number and the state of its trainer."""

    number: int
    state: TrainerState

    def to_text(self) -> str:
        """Return the heartbeat as text, which `from_text` reads."""
        return f"{self.number} {self.state.to_text()}"

    @classmethod
    def from_text(cls, text: str) -> "Heartbeat":
        """Parse the result of `to_text`."""
        number, _, state = text.partition(" ")
        return cls(int(number), TrainerState.from_text(state))


@dataclass(frozen=True)
class Absence:
    """A trainer's absence: the number of its last heartbeat and the seconds since then."""

    rank: int
    number: int
    seconds: float


@dataclass(frozen=True)
class Cohort:
    """A group of trainers in the same state.

    Attributes
    ----------
    state : TrainerState
    alive : int
        The number of those trainers that are not silent.
    ranks : sequence of int
        The first ranks that are not silent, then the first silent ones.
    """

    state: TrainerState
    alive: int
    ranks: Sequence[int]


@dataclass(frozen=True)
class Report:
    """The state of all trainers, as one of them, the observer, saw it at one of its heartbeats.

    Attributes
    ----------
    observer, number : int
        The observer's rank, and the number of its heartbeat.
    ended : bool
        True if the observer has stopped observing.
    absences : sequence of Absence
        The longest absences.
    silent : int
        The number of silent trainers, of which `absences` has the first.
    cohorts : sequence of Cohort
        Empty before the first observation.
    """

    observer: int = -1
    number: int = 0
    ended: bool = True
    absences: Sequence[Absence] = ()
    silent: int = 0
    cohorts: Sequence[Cohort] = ()

    def aged(self, seconds: float) -> "Report":
        """Return the report with `seconds` added to every absence."""
        absences = [replace(each, seconds=each.seconds + seconds) for each in self.absences]
        return replace(self, absences=absences)

    def to_text(self) -> str:
        """Return the report as JSON, which `from_text` reads."""
        cohorts = [[each.state.to_text(), each.alive, each.ranks] for each in self.cohorts]
        absences = [[each.rank, each.number, round(each.seconds, 3)] for each in self.absences]
        return json.dumps([self.observer, self.number, self.ended, absences, self.silent, cohorts])

    @classmethod
    def from_text(cls, text: str) -> "Report":
        """Parse the result of `to_text`."""
        observer, number, ended, absences, silent, cohorts = json.loads(text)
        return cls(
            observer,
            number,
            ended,
            [Absence(*each) for each in absences],
            silent,
            [Cohort(TrainerState.from_text(state), *rest) for state, *rest in cohorts],
        )


def report_of(
    observer: int, heartbeats: Mapping[int, Heartbeat], absences: Mapping[int, float], silent_seconds: float
) -> Report:
    """Summarize the heartbeats of all trainers in a report whose size does not depend on their number.

    Parameters
    ----------
    observer : int
    heartbeats : mapping of int to Heartbeat
        The heartbeats of all trainers, in the order of their ranks.
    absences : mapping of int to float
        Seconds since the last heartbeat, by rank of each trainer that has missed one.
    silent_seconds : float
        A trainer that is absent for longer is silent.
    """
    silent = {rank for rank, seconds in absences.items() if seconds > silent_seconds}
    cohorts: dict[TrainerState, list[int]] = {}
    for rank, heartbeat in heartbeats.items():
        state = heartbeat.state
        if state.kind is WaitKind.OTHER:  # a deadlock does not depend on its counts: group by `what` alone
            state = TrainerState(what=state.what)
        cohorts.setdefault(state, []).append(rank)
    for state in sorted(cohorts, key=lambda each: -len(cohorts[each]))[MAX_COHORTS:]:
        cohorts.setdefault(TrainerState(what="something else"), []).extend(cohorts.pop(state))
    longest = sorted(absences, key=lambda rank: (-absences[rank], rank))[:SHOWN]
    return Report(
        observer,
        heartbeats[observer].number,
        ended=False,
        absences=[Absence(rank, heartbeats[rank].number, absences[rank]) for rank in sorted(longest)],
        silent=len(silent),
        cohorts=[
            Cohort(
                state,
                alive=sum(rank not in silent for rank in ranks),
                # One more than a message names, because each reader leaves itself out.
                ranks=sorted(ranks, key=lambda rank: (rank in silent, rank))[: SHOWN + 1],
            )
            for state, ranks in cohorts.items()
        ],
    )
