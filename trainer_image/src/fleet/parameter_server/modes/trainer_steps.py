"""Where each trainer stands in a mode without a barrier, in which each goes at its own pace."""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from fleet.parameter_server.store import Origin

if TYPE_CHECKING:
    from fleet.wire import HyperParameters

__all__ = ["TrainerSteps"]


class TrainerSteps:
    """The steps of trainers, part by part of what a server holds.

    Parameters
    ----------
    parts : collection of int
        The blocks, or the tables, of which each trainer sends a gradient a step.
    num_trainers : int
        How many trainers take part from the beginning; others may be admitted later.
    """

    def __init__(self, parts: Collection[int], num_trainers: int) -> None:
        self._parts = parts
        self._next = {trainer: dict.fromkeys(parts, 0) for trainer in range(num_trainers)}
        self._entered: dict[int, int] = {}
        """The step at which each trainer came that was not there from the beginning."""
        self._resumed: dict[int, int] = {}
        self._incarnations = dict.fromkeys(range(num_trainers), 0)
        self.hyper: dict[int, HyperParameters] = dict.fromkeys(range(num_trainers), ())
        """Of the step that each trainer has begun."""

    @property
    def ahead(self) -> int:
        """The number of steps that the trainer which is ahead has made."""
        return max((self.of(trainer) for trainer in list(self._next)), default=0)

    def of(self, trainer: int) -> int:
        """Return the step that a trainer makes next: the one after its last that is wholly here."""
        return max(self._entered.get(trainer, 0), min(self._next[trainer].values(), default=0))

    def parts(self, trainer: int) -> Mapping[int, int]:
        """Return of each part the step whose gradient a trainer sends next."""
        return self._next[trainer]

    def resume(self, step: int) -> None:
        """Go on at a step that a checkpoint holds: every trainer makes it next."""
        for trainer in list(self._next):
            self._next[trainer] = dict.fromkeys(self._parts, step)

    def resume_each(self, steps: Mapping[int, int]) -> None:
        """Go on with these trainers at these steps, also with one that joins late."""
        self._resumed = dict(steps)
        for trainer in steps.keys() & self._next.keys():
            self._next[trainer] = dict.fromkeys(self._parts, steps[trainer])

    def admit(self, trainer: int, incarnation: int) -> bool:
        """Begin anew with a trainer; return whether it was not there before.

        One that was not makes the step next that the one ahead of all makes next: it shares in what is left
        to do. Another server may have seen it come at another step, and it goes on at the lowest: nothing
        that it sends has come before.
        """
        self._incarnations[trainer] = incarnation
        if trainer in self._next:
            return False
        self.hyper[trainer] = ()
        self._entered[trainer] = self._resumed.get(trainer, self.ahead)
        self._next[trainer] = dict.fromkeys(self._parts, 0)
        return True

    def is_due(self, trainer: int, part: int, step: int) -> bool:
        """Return whether no earlier life of a trainer has brought the gradient of this step."""
        return step >= self._next[trainer][part]

    def advance(self, trainer: int, part: int, step: int) -> None:
        """Let a trainer have sent the gradient of a step, or have none."""
        self._next[trainer][part] = max(self._next[trainer][part], step + 1)

    def origin(self, trainer: int, step: int) -> Origin:
        """Return whose gradient it is that a trainer sends in a step."""
        return Origin(trainer, self._incarnations[trainer], step)
