"""How far the blocks of a server are in the sync mode, and whose gradient a sum takes next."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from fleet.parameter_server.receive_buffers import Buffer, Turn
from fleet.parameter_server.store import Origin
from fleet.wire import NO_STEP, HyperParameters

__all__ = ["Round", "Rounds"]


@dataclass(slots=True, eq=False)
class Round:
    """One block's progress through one step."""

    step: int = 0
    landed: dict[int, Buffer] = field(default_factory=dict)
    """Gradients that wait for others, which are summed before them."""
    summed: dict[int, Origin] = field(default_factory=dict)
    """Whose gradients are in the sum, in its order."""
    absent: set[int] = field(default_factory=set)
    adding: int | None = None
    """Whose gradient a thread is adding."""
    total: Buffer | None = None
    stepping: bool = False
    averaged: bool = False
    """Whether the block waits for the norm that clips it."""
    hyper: HyperParameters = NO_STEP
    """What the block is stepped with."""
    again: set[int] = field(default_factory=set)
    """Trainers that came back, and will send what is not needed any more."""
    before: Buffer | None = None
    """Where the value from before the last step is; None where the block has it still, or it is gone."""
    unchanged: bool = False
    """Whether the last step left the value as it was."""

    @property
    def settled(self) -> set[int]:
        """Trainers of whom nothing is awaited."""
        return self.landed.keys() | self.summed.keys() | self.absent

    @property
    def busy(self) -> bool:
        """Whether a thread changes the sum, or nothing may change it any more."""
        return self.adding is not None or self.stepping or self.averaged


class Rounds:
    """The rounds of a server's blocks. Who calls holds the lock.

    Parameters
    ----------
    blocks : iterable of int
    num_trainers : int
        How many trainers take part until they complete.
    """

    def __init__(self, blocks: Iterable[int], num_trainers: int) -> None:
        self.live = set(range(num_trainers))
        self.of = {block: Round() for block in blocks}
        self.returning: set[int] = set()
        """Trainers that have joined and begun no step yet: they may ask for values from before the last."""
        self.incarnations: dict[int, int] = {}
        """The attempt under which each trainer has joined last."""

    @property
    def lowest_step(self) -> int:
        """The number of steps that every block has made."""
        return min((round_.step for round_ in self.of.values()), default=0)

    def uses(self, trainer: int) -> bool:
        """Whether a thread does something to a block with a gradient of this trainer."""
        return any(
            round_.adding == trainer or (round_.stepping and trainer in round_.settled)
            for round_ in self.of.values()
        )

    def admit(self, trainer: int, incarnation: int, is_begun: Callable[[int], bool]) -> list[Buffer]:
        """Begin anew with a trainer; return the gradients of its earlier life that are in no sum with others.

        Parameters
        ----------
        trainer, incarnation : int
        is_begun : callable
            Whether the place of a block's sum is in use.
        """
        self.live.add(trainer)
        self.returning.add(trainer)
        self.incarnations[trainer] = incarnation
        dropped = []
        for block, round_ in self.of.items():
            if (landed := round_.landed.pop(trainer, None)) is not None:
                dropped.append(landed)
            if round_.summed.keys() == {trainer} and not round_.busy and round_.total is not None:
                dropped.append(round_.total)
                round_.total = None
                round_.summed.clear()
            landing = is_begun(block) and not (round_.before is not None and round_.before.in_place)
            passed = trainer in round_.absent and (bool(round_.summed) or landing)
            if round_.averaged or trainer in round_.summed or passed:
                round_.again.add(trainer)
            else:
                round_.absent.discard(trainer)
        return dropped

    def next_of(self, round_: Round) -> int | None:
        """Return whose gradient is summed next; None once nobody's is awaited."""
        return min((self.live | round_.landed.keys()) - round_.summed.keys() - round_.absent, default=None)

    def turn(self, trainer: int, block: int, step: int) -> Turn:
        """Return when a gradient is used; one that is not needed is dropped as soon as it has landed."""
        round_ = self.of[block]
        if step != round_.step or trainer in round_.settled:
            return Turn.NEXT
        earlier = self.next_of(round_)
        if earlier is not None and earlier < trainer:
            return Turn.LATER
        return Turn.FIRST if round_.total is None else Turn.NEXT

    def take_next(self, block: int) -> Buffer | None:
        """Claim the gradient whose turn has come, for the caller and nobody else to add."""
        round_ = self.of[block]
        trainer = self.next_of(round_)
        if round_.busy or trainer not in round_.landed:
            return None
        round_.adding = trainer
        return round_.landed[trainer]

    def take_last(self, block: int) -> bool:
        """Claim a block whose sum will be whole once the gradient is in it that is being added."""
        round_ = self.of[block]
        awaited = (self.live | round_.landed.keys()) - round_.summed.keys() - round_.absent
        round_.stepping = bool(self.live) and awaited == {round_.adding}
        return round_.stepping

    def added(self, block: int) -> None:
        """Note that the gradient is in the sum."""
        round_ = self.of[block]
        if round_.adding is not None:
            del round_.landed[round_.adding]
            origin = Origin(round_.adding, self.incarnations.get(round_.adding, 0), round_.step)
            round_.summed[round_.adding] = origin
        round_.adding = None

    def take_complete(self, block: int) -> bool:
        """Claim a block to whose sum nothing is missing, for the caller and nobody else to step."""
        round_ = self.of[block]
        ready = not round_.busy and bool(self.live) and self.next_of(round_) is None
        round_.stepping |= ready
        return ready

    def finish(self, block: int, before: Buffer | None) -> None:
        """Begin a block's next round.

        Parameters
        ----------
        block : int
        before : Buffer or None
            Where the value is from before the step; None where the step has left it as it was.
        """
        self.of[block] = Round(self.of[block].step + 1, before=before, unchanged=before is None)
