"""What travels beside the gradients of a pass: who has which, and what steps each trainer has made.

An average is all that a reducer brings back. So everything is said in elements that are 0 or 1: for each
parameter, whether this trainer has a gradient of it; and each bit of a number, which is the same everywhere
if its average is 0 or 1. All trainers read the same averages, and so come to the same answers.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, cast

import torch

__all__ = ["BITS", "Notes"]

BITS: Final = 32
_LATER: Final = 4
"""After so many further exchanges a GPU's averages are read: they are there by then."""
_MOST_IN_FLOAT32: Final = 1024
"""So many trainers' parts add up to 1 with errors that are small beside the part of one."""


class Notes:
    """A leaf whose gradient is averaged as a parameter's is.

    Parameters
    ----------
    num_parameters : int
    size : int
        The number of trainers.
    device : torch.device
    exactly : bool
        Whether it needs a dtype of its own, as no other gradients are to share its fate.
    later : int, optional
        After how many further exchanges the number's bits are read; as it suits the device otherwise.
    """

    def __init__(
        self,
        num_parameters: int,
        size: int,
        device: torch.device,
        *,
        exactly: bool = False,
        later: int | None = None,
    ) -> None:
        dtype = torch.float64 if exactly or size > _MOST_IN_FLOAT32 else torch.float32
        self.leaf = torch.zeros(num_parameters + BITS, dtype=dtype, device=device, requires_grad=True)
        self._num_parameters = num_parameters
        self._size = size
        self._later = later if later is not None else _LATER * (device.type == "cuda")
        self._given = self.leaf.detach()
        self._bits: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()

    def gradient(self, absent: Sequence[int], number: int) -> torch.Tensor:
        """Return what this trainer gives: of which parameters it has no gradient, and a number."""
        self.leaf.grad = None
        if not self._is_captured():  # a graph that is replayed says the same each time
            bits = [number >> bit & 1 for bit in range(BITS)]
            given = torch.ones(len(self.leaf), dtype=self.leaf.dtype)
            given[self._num_parameters :] = torch.tensor(bits)
            if absent:
                given[list(absent)] = 0
            self._given = given.to(self.leaf.device)
        return self._given.clone()

    def nobodys(self, positions: Iterable[int]) -> set[int]:
        """Return those of some parameters of which no trainer has a gradient."""
        some = list(positions)
        if not some:
            return set()
        averages = self._averages()[some].tolist()
        return {position for position, average in zip(some, averages, strict=True) if average == 0}

    def all_alike(self) -> bool:
        """Whether all trainers had the same number, by the averages that have come long enough ago."""
        if self._is_captured():
            return True
        self._bits.append(self._copied())
        if len(self._bits) <= self._later:
            return True
        bits, reached = self._bits.popleft()
        if reached is not None:
            reached.synchronize()
        return all(min(each, abs(1 - each)) < 0.5 / self._size for each in bits.tolist())

    def _averages(self) -> torch.Tensor:
        return cast("torch.Tensor", self.leaf.grad)  # what `gradient` gave has been averaged

    def _is_captured(self) -> bool:
        return self.leaf.is_cuda and torch.cuda.is_current_stream_capturing()

    def _copied(self) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        bits = self._averages()[self._num_parameters :]
        if not bits.is_cuda:
            return bits.clone(), None
        copy = torch.empty(BITS, dtype=bits.dtype, pin_memory=True)
        copy.copy_(bits, non_blocking=True)
        reached = torch.cuda.Event()  # type: ignore[no-untyped-call]
        reached.record(torch.cuda.current_stream(bits.device))
        return copy, reached
