"""Seeing how far a GPU is, from any thread and without a call of CUDA.

Asking an event is such a call: it makes a context on the asking thread's device, and while a graph is being
captured, in whichever thread, it may end the capture. So the GPU itself writes a number to the host's memory
when it comes to the place, and the host reads it there.
"""

from typing import Final

import torch

__all__ = ["Mark", "Marks"]

_PLACES: Final = 64
"""Streams may reach their marks in another order; so many later, no mark is asked for any more."""


class Mark:
    """A place in a stream's work.

    Parameters
    ----------
    number : int
    there : torch.device
        Whose current stream reaches it.
    here : Tensor
        One element of the host's memory; another mark's number before.
    """

    def __init__(self, number: int, there: torch.device, here: torch.Tensor) -> None:
        self._number = number
        self._there = there
        self._here = here

    def put(self) -> None:
        """Let the stream reach the mark when it has done all that it was given before."""
        number = torch.full_like(self._here, self._number, device=self._there)
        self._here.copy_(number, non_blocking=True)

    def reached(self) -> bool:
        """Whether the stream has; for any thread."""
        return int(self._here.item()) >= self._number


class Marks:
    """The marks of one device, in memory that lasts as long as they may be asked for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.zeros(_PLACES, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._count = 0

    def next(self) -> Mark:
        """Return a mark that no stream has reached."""
        self._count += 1
        place = self._count % _PLACES
        return Mark(self._count, self._device, self._memory[place : place + 1])
