"""Marks of memory, of gradients that have left above all: they tell later that somebody has written to it.

``tensor.data`` and the kernels of torch's gradient scaler write without moving a version counter, so contents
are compared, bit by bit. All of them in the first rounds, where a mistake of a script shows; then a stretch
that moves on with each round, which costs about half a microsecond. Rounds are the same on every trainer, so
that none is slower than the others.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import Parameter

from fleet.parameter_server.transport.arena import Arena, Extent, bytes_of

__all__ = ["Mark", "Recorder", "SentGradient", "covers_all", "is_sampled", "version_of"]

_WHOLE_ROUNDS: Final = 3
_STRETCH_BYTES: Final = 1024
_SAMPLED_ROUNDS: Final = 4
_ROUNDINGS: Final = 8
"""By how many units in the last place a number may differ that something was added to and taken from."""


@dataclass(slots=True)
class Mark:
    """What some memory held: the bytes of a stretch, and in the first rounds the CRC-32 of all of it."""

    begin: int
    end: int
    held: bytes
    crc: int | None

    @classmethod
    def of(cls, content: memoryview, round_: int) -> "Mark":
        """Mark these bytes, or the stretch of them whose turn it is in a round; rounds count from 0."""
        begin = round_ % max(1, -(-len(content) // _STRETCH_BYTES)) * _STRETCH_BYTES
        end = min(begin + _STRETCH_BYTES, len(content))
        whole = covers_all(round_) and len(content) > _STRETCH_BYTES
        return cls(begin, end, bytes(content[begin:end]), zlib.crc32(content) if whole else None)

    def matches(self, content: memoryview) -> bool:
        """Whether the memory, of the same length, holds what it held."""
        if self.crc is not None:
            return zlib.crc32(content) == self.crc
        return bytes(content[self.begin : self.end]) == self.held  # views compare number by number

    def matches_but_for_rounding(self, content: memoryview, dtype: torch.dtype) -> bool:
        """Whether memory that does not match differs as numbers do from which a sum was subtracted again."""
        present = bytearray(content[self.begin : self.end])
        if len(present) != len(self.held) or present == self.held or not dtype.is_floating_point:
            return False
        before, now = (
            torch.frombuffer(each, dtype=dtype).double() for each in (bytearray(self.held), present)
        )
        largest = torch.maximum(before.abs(), now.abs()).max()
        return bool((now - before).abs().max() <= _ROUNDINGS * torch.finfo(dtype).eps * largest)


def version_of(tensor: Tensor) -> int:
    """Return the counter that moves with each change of a tensor in place."""
    return tensor._version  # noqa: SLF001 - torch documents it under this name, and has no other


def is_sampled(round_: int) -> bool:
    """Whether a round is one in which what a script does over and over is looked for."""
    return covers_all(round_) or round_ % _SAMPLED_ROUNDS == 0


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
        self._staging: Arena[str] | None = None

    def record(self, name: str, gradient: Tensor, *, marked: bool) -> SentGradient:
        """Describe the gradient of a parameter; with a mark of its bytes where `marked` and affordable."""
        carried = gradient
        if gradient.device.type != "cpu" or not gradient.is_contiguous():
            carried = self._stage(name, gradient)
        payload, mark = bytes_of(carried), None
        if marked and (is_sampled if carried is gradient else covers_all)(self.round):
            mark = Mark.of(payload, self.round)
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
