"""What heartbeats say of all trainers, in a few words that one trainer puts down for the others. Pure."""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fleet.collective.rendezvous import SHOWN
from fleet.collective.standing import Standing, Way

__all__ = ["Beat", "Digest", "Missed", "Somewhere", "digest_of"]

MOST_PLACES = 16


@dataclass(frozen=True)
class Beat:
    """One heartbeat: a number that was not there before, and where its trainer stands."""

    number: int
    standing: Standing

    def to_text(self) -> str:
        """Return this as `from_text` reads it."""
        return f"{self.number} {self.standing.to_text()}"

    @classmethod
    def from_text(cls, text: str) -> "Beat":
        """Return what `to_text` wrote."""
        number, _, standing = text.partition(" ")
        return cls(int(number), _standing_of(standing))


@dataclass(frozen=True)
class Missed:
    """A trainer whose heartbeat has had the same number for some seconds."""

    rank: int
    number: int
    seconds: float


@dataclass(frozen=True)
class Somewhere:
    """Trainers that stand in one place.

    Attributes
    ----------
    standing : Standing
    alive : int
        How many of them are not silent.
    ranks : list of int
        The first of those that are not silent; then the first of the others.
    """

    standing: Standing
    alive: int
    ranks: Sequence[int]


@dataclass(frozen=True)
class Digest:
    """What one trainer, which looks for all, has found at one of its heartbeats.

    Attributes
    ----------
    looker, number : int
        Who looks, and the number of its heartbeat.
    ended : bool
        Whether it looks no longer.
    missed : list of Missed
        Those that were missed for longest.
    silent : int
        How many are silent, of which `missed` names the first.
    places : list of Somewhere
        Where trainers stand; none before the first look.
    """

    looker: int = -1
    number: int = 0
    ended: bool = True
    missed: Sequence[Missed] = ()
    silent: int = 0
    places: Sequence[Somewhere] = ()

    def aged(self, seconds: float) -> "Digest":
        """Return this as it is some seconds later, if nothing has been heard since."""
        return replace(self, missed=[replace(each, seconds=each.seconds + seconds) for each in self.missed])

    def to_text(self) -> str:
        """Return this as `from_text` reads it."""
        places = [[each.standing.to_text(), each.alive, each.ranks] for each in self.places]
        missed = [[each.rank, each.number, round(each.seconds, 3)] for each in self.missed]
        return json.dumps([self.looker, self.number, self.ended, missed, self.silent, places])

    @classmethod
    def from_text(cls, text: str) -> "Digest":
        """Return what `to_text` wrote."""
        looker, number, ended, missed, silent, places = json.loads(text)
        return cls(
            looker,
            number,
            ended,
            [Missed(*each) for each in missed],
            silent,
            [Somewhere(Standing.from_text(standing), *of_it) for standing, *of_it in places],
        )


def digest_of(
    looker: int, beats: Mapping[int, Beat], missed: Mapping[int, float], silent_seconds: float
) -> Digest:
    """Return what one trainer's look at everybody's heartbeats says to all.

    Parameters
    ----------
    looker : int
    beats : mapping of int to Beat
        Everybody's, in the order of their ranks.
    missed : mapping of int to float
        For how many seconds who has been missed.
    silent_seconds : float
        After how long who is missed counts as silent.
    """
    silent = {rank for rank, seconds in missed.items() if seconds > silent_seconds}
    places: dict[Standing, list[int]] = {}
    for rank, beat in beats.items():
        places.setdefault(_place(beat.standing), []).append(rank)
    largest = sorted(places, key=lambda standing: -len(places[standing]))
    for standing in largest[MOST_PLACES:]:
        places.setdefault(Standing(what="something else"), []).extend(places.pop(standing))
    longest = sorted(missed, key=lambda rank: (-missed[rank], rank))[:SHOWN]
    return Digest(
        looker,
        beats[looker].number,
        ended=False,
        missed=[Missed(rank, beats[rank].number, missed[rank]) for rank in sorted(longest)],
        silent=len(silent),
        places=[
            Somewhere(
                standing,
                alive=sum(rank not in silent for rank in ranks),
                ranks=sorted(ranks, key=lambda rank: (rank in silent, rank))[: SHOWN + 1],
            )
            for standing, ranks in places.items()
        ],
    )


@functools.lru_cache(maxsize=4 * MOST_PLACES)
def _standing_of(text: str) -> Standing:
    return Standing.from_text(text)  # of thousands of trainers, most stand in the same few places


def _place(standing: Standing) -> Standing:
    """Return what is worth telling: counts matter only of those that wait where others could be elsewhere."""
    return standing if standing.way is not Way.OTHER else Standing(what=standing.what)
