"""Where a training is in its loops, so that another number of trainers goes on at the same data. Pure.

A share of the data has fewer batches where more trainers share it, and the steps of a loop count for more.
So what is kept of a loop is how many steps were made of it beside how many an epoch has: whole epochs stay
whole, and of the one that has begun the same part is made.
"""

from dataclasses import dataclass

from fleet.errors import ConfigurationError

__all__ = ["Loops", "Place"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a training is.

    Attributes
    ----------
    loops : int
        How many of its loops came before the present one.
    steps : int
        How many were made of the present one.
    per_epoch : int
        How many an epoch of it has; at least 1.
    """

    loops: int
    steps: int
    per_epoch: int

    def steps_of(self, loop: int, per_epoch: int, epochs: int) -> int | None:
        """Return how many steps count as made of a loop; None where it comes after this place.

        Of an epoch that has begun the part is rounded down: a batch may be trained on twice, and none is left
        out where shares divide evenly.
        """
        if loop != self.loops:
            return epochs * per_epoch if loop < self.loops else None
        epoch, begun = divmod(self.steps, self.per_epoch)
        return epoch * per_epoch + begun * per_epoch // self.per_epoch


class Loops:
    """Knows which of a training's steps are which loop's: each covers those that follow the loop before."""

    def __init__(self) -> None:
        self._covered: int | None = 0
        """By the loops so far; None where that is not known."""
        self._begun = 0
        self._present: tuple[int, int, int | None] = (0, 0, None)
        """Of the loop that was begun last: its number, the step that it began at, and an epoch's steps."""
        self._resumed: Place | None = None

    def begin(self, call: str, made: int, per_epoch: int | None, epochs: int) -> int:
        """Begin a loop; return which step of the training is its first, which may be below 0.

        Parameters
        ----------
        call : str
            What began it.
        made : int
            The number of steps made, from the job's beginning.
        per_epoch, epochs : int or None, int
            How many steps an epoch has, None where that is not known; and how many epochs there are.

        Raises
        ------
        ConfigurationError
            The loop before this one did not come to its end.
        """
        base, self._covered = self._covered, None
        if base is None:
            raise ConfigurationError(
                f"{call}: an earlier loop has not come to its end, or has no length, so that nobody knows "
                "which steps are this one's; expected one loop after the other, each over something that has "
                "a len(), or fleet.epochs once instead of fleet.steps in each epoch"
            )
        if self._resumed is not None and per_epoch is not None:
            steps = self._resumed.steps_of(self._begun, per_epoch, epochs)
            base = base if steps is None else made - steps
        # The loops before may have made fewer steps than they have.
        self._present = (self._begun, min(base, made), per_epoch)
        self._begun += 1
        return base

    def end(self, base: int, steps: int | None) -> None:
        """End a loop that began at step `base` and has so many; None where that is not known."""
        self._covered = None if steps is None else base + steps

    def place(self, made: int) -> Place | None:
        """Return where a training is that has made so many steps; None where that is not known."""
        loop, base, per_epoch = self._present
        # A checkpoint that was loaded meanwhile may be older than the loop.
        return Place(loop, max(0, made - base), per_epoch) if per_epoch else None

    def resume(self, place: Place | None) -> None:
        """Let the loops to come go on at a place, as far as they come before it."""
        self._resumed = place
