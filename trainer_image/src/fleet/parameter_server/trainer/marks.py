"""Marks of memory, of gradients that have left above all: they tell later that somebody has written to it.

``tensor.data`` and the kernels of torch's gradient scaler write without moving a version counter, so bytes
are compared: all of them in the first rounds, where a mistake of a script shows, and all of a small model in
every round. Of a larger one each later round compares a stretch of each tensor, which moves on from round to
round. Rounds are the same on every trainer, so that none is slower than the others.
"""

import math
import mmap
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import Parameter

from fleet.parameter_server.transport.arena import Arena, Extent, bytes_of

__all__ = ["ROUND_BYTES", "Mark", "Recorder", "SentGradient", "covers_all", "part_of", "version_of"]

ROUND_BYTES: Final = 2 << 20
"""How many bytes of a model a round past the first covers at least, of parameters and of gradients each."""
_LEAST_PART: Final = 0.02
"""How much of a larger model it covers: with 25 million parameters `ROUND_BYTES`.

Copying and comparing these takes 1 ms, less than 2 % of the shortest steps of ``benchmarks.dense_sync``.
"""

_WHOLE_ROUNDS: Final = 3
_UNIT_BYTES: Final = 1024
"""What the length of a stretch is a multiple of, so that it cuts no number."""
_ROUNDINGS: Final = 8
"""By how many units in the last place a number may differ that something was added to and taken from."""
_SMALL: Final = 2.0**-7
"""The units are at least those of this number: what was added may be larger than all numbers of a tensor."""
_AT_ONCE_BYTES: Final = 1 << 18
"""How many are compared or judged at once, so that what is computed of them stays in the cache."""


class Mark:
    """What some memory held: a copy of its bytes, or of the stretch whose turn it was.

    Parameters
    ----------
    length : int
        How many bytes the memory has. What a stretch takes is allocated at once: among the gradients that
        come and go, it would cut up the heap.
    part : float
        How much of the memory a round past the first covers.
    copies : bool
        Whether the first rounds copy all bytes of memory that is not covered in every round. Otherwise they
        take its CRC-32, which takes no memory, and does not tell rounding from writing.
    """

    def __init__(self, length: int, part: float = 1.0, *, copies: bool = True) -> None:
        self._part = part
        self._copies = copies
        self._begin = 0
        self._stretch = bytearray(_stretch_of(length, part))
        self._whole: mmap.mmap | None = None
        """In a first round all of larger memory; it goes back to the kernel afterwards, unlike the heap."""
        self._crc: int | None = None

    def take(self, content: memoryview, round_: int) -> None:
        """Mark these bytes, or the stretch of them whose turn it is in a round; rounds count from 0."""
        length, self._crc = len(content), None
        stretch = _stretch_of(length, self._part)
        if stretch < length and covers_all(round_):
            if not self._copies:
                self._crc = zlib.crc32(content)
                return
            if self._whole is None or len(self._whole) != length:
                self._whole = mmap.mmap(-1, length)
            memoryview(self._whole)[:] = content
            return
        self._whole = None
        if len(self._stretch) != stretch:  # the script has put other memory in its place
            self._stretch = bytearray(stretch)
        if stretch < length:
            self._begin = min(round_ % math.ceil(length / stretch) * stretch, length - stretch)
            content = content[self._begin : self._begin + stretch]
        else:
            self._begin = 0
        memoryview(self._stretch)[:] = content

    def matches(self, content: memoryview) -> bool:
        """Whether the memory holds what it held."""
        if self._crc is not None:
            return zlib.crc32(content) == self._crc
        if self._whole is None:
            return self._stretch == self._covered(content)  # compares bytes; views would number by number
        held = memoryview(self._whole)
        return len(held) == len(content) and all(
            bytearray(held[begin : begin + _AT_ONCE_BYTES]) == content[begin : begin + _AT_ONCE_BYTES]
            for begin in range(0, len(held), _AT_ONCE_BYTES)
        )

    def matches_but_for_rounding(self, content: memoryview, dtype: torch.dtype) -> bool:
        """Whether memory that does not match differs as numbers do from which a sum was subtracted again.

        All that the mark covers is judged; False where it has no copy of that.
        """
        held = memoryview(self._stretch if self._whole is None else self._whole)
        present = content if self._whole is not None else self._covered(content)
        if self._crc is not None or len(present) != len(held) or not dtype.is_floating_point:
            return False
        off, largest = 0.0, _SMALL
        for begin in range(0, len(present), _AT_ONCE_BYTES):
            before, now = (
                torch.frombuffer(each[begin : begin + _AT_ONCE_BYTES], dtype=dtype).double()
                for each in (held, present)
            )
            differ = (now != before) & ~(now.isnan() & before.isnan())
            by = (now[differ] - before[differ]).abs()
            if not bool(by.isfinite().all()):
                return False
            off = max(off, float(by.max())) if by.numel() else off
            largest = max(largest, float(before.nan_to_num(0.0, 0.0, 0.0).abs().max()))
        return off <= _ROUNDINGS * torch.finfo(dtype).eps * largest

    def _covered(self, content: memoryview) -> memoryview:
        return content[self._begin : self._begin + len(self._stretch)]


def _stretch_of(length: int, part: float) -> int:
    """Return how many bytes of so many a round past the first covers."""
    return length if part >= 1.0 else min(length, math.ceil(length * part / _UNIT_BYTES) * _UNIT_BYTES)


def version_of(tensor: Tensor) -> int:
    """Return the counter that moves with each change of a tensor in place."""
    return tensor._version  # noqa: SLF001 - torch documents it under this name, and has no other


def part_of(tensors: Iterable[Tensor]) -> float:
    """Return how much of each of these tensors a round past the first covers: 1.0 where all of it."""
    total = sum(each.nbytes for each in tensors)
    return min(1.0, max(_LEAST_PART, ROUND_BYTES / total)) if total else 1.0


def covers_all(round_: int) -> bool:
    """Whether a round is one in which all bytes are marked, however many there are."""
    return round_ < _WHOLE_ROUNDS


@dataclass(slots=True)
class SentGradient:
    """A gradient that has left, or would have."""

    gradient: Tensor
    version: int
    address: int
    carried: Tensor
    """Whose memory is sent: the gradient itself, or its copy in memory that a socket can read."""
    payload: memoryview
    """The bytes of `carried`."""
    mark: Mark | None
    """Of the payload; None where a comparison would cost a copy or keep a device waiting."""

    @property
    def unchanged(self) -> bool:
        """Whether the gradient is still what it was, as far as its version, its address and the mark tell."""
        if version_of(self.gradient) != self.version or self.gradient.data_ptr() != self.address:
            return False
        if self.mark is None:
            return True
        present = self.payload
        if self.carried is not self.gradient:
            present = bytes_of(self.gradient.detach().cpu().contiguous())
        return self.mark.matches(present)


class Recorder:
    """Describes gradients as they are now, with their bytes where they can be sent from.

    Parameters
    ----------
    parameters : mapping of name to Parameter
        Whose gradients they are.
    """

    def __init__(self, parameters: Mapping[str, Parameter]) -> None:
        self.round = 0
        """How many steps have been made."""
        self._parameters = parameters
        self._part = part_of(parameters.values())
        self._marks = {name: Mark(each.nbytes, self._part, copies=False) for name, each in parameters.items()}
        self._staging: Arena[str] | None = None

    def record(self, name: str, gradient: Tensor, *, marked: bool) -> SentGradient:
        """Describe the gradient of a parameter; with a mark of its bytes where `marked` and affordable."""
        carried = gradient
        if gradient.device.type != "cpu" or not gradient.is_contiguous():
            carried = self._stage(name, gradient)
        payload, mark = bytes_of(carried), None
        small = self._part >= 1.0 and gradient.device.type == "cpu"
        if marked and (carried is gradient or small or covers_all(self.round)):
            mark = self._marks[name]
            mark.take(payload, self.round)
        return SentGradient(gradient, version_of(gradient), gradient.data_ptr(), carried, payload, mark)

    def _stage(self, name: str, gradient: Tensor) -> Tensor:
        """Copy a gradient that no socket can read into memory that it can."""
        if self._staging is None:
            self._staging = Arena(
                {
                    each: Extent(parameter.dtype, tuple(parameter.shape))
                    for each, parameter in self._parameters.items()
                },
                pinned=gradient.is_cuda,
            )
        return self._staging[name].copy_(gradient.detach())
