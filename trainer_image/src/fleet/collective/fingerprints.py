"""A number that travels beside gradients, to learn whether all trainers have the same.

A sum is all that a bucket brings back. So each bit of the number is an element, 0 or 1, and where all
trainers have the same number each sum is 0 or the number of trainers. Every trainer reads the same sums, and
so comes to the same answer.
"""

from collections import deque
from typing import Final

import torch

__all__ = ["BITS", "Fingerprints", "can_count"]

BITS: Final = 32
_LATER: Final = 4
"""After so many further exchanges a GPU's sums are read: it has them by then, and keeps nobody waiting."""


def can_count(dtype: torch.dtype, size: int) -> bool:
    """Whether a sum of as many ones as there are trainers is exact."""
    return size <= 2 / torch.finfo(dtype).eps


class Fingerprints:
    """Writes numbers to a part of a bucket, and tells from the sums whether they were all the same.

    Parameters
    ----------
    place : Tensor, shape (BITS,)
        Part of a bucket.
    size : int
        The number of trainers.
    later : int, optional
        After how many further exchanges the sums are read; as it suits the device otherwise.
    """

    def __init__(self, place: torch.Tensor, size: int, later: int | None = None) -> None:
        self._place = place
        self._size = size
        self._on_gpu = place.device.type == "cuda"
        self._later = later if later is not None else _LATER * self._on_gpu
        self._powers = 2 ** torch.arange(BITS, device=place.device)
        self._sums: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()

    def put(self, number: int) -> None:
        """Write this trainer's number, before the bucket leaves."""
        self._place.copy_((self._powers & number).ne_(0))

    def all_alike(self) -> bool:
        """Whether all trainers had the same number, by the sums that have come long enough ago."""
        self._sums.append(self._copied())
        if len(self._sums) <= self._later:
            return True
        sums, reached = self._sums.popleft()
        if reached is not None:
            reached.synchronize()
        return all(each in (0, self._size) for each in sums.tolist())

    def _copied(self) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        if not self._on_gpu:
            return (self._place.clone() if self._later else self._place), None
        sums = torch.empty(BITS, dtype=self._place.dtype, pin_memory=True)
        sums.copy_(self._place, non_blocking=True)
        reached = torch.cuda.Event()  # type: ignore[no-untyped-call]
        reached.record(torch.cuda.current_stream(self._place.device))
        return sums, reached
