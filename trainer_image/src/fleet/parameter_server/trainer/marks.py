"""Marks of memory: enough of its bytes to notice later that somebody has written to it.

``tensor.data`` and the kernels of torch's gradient scaler write without moving a version counter, so contents
are compared, bit by bit. All of them in the first rounds, where a mistake of a script shows; then a stretch
that moves on with each round, which costs about half a microsecond.
"""

import zlib
from dataclasses import dataclass
from typing import Final

__all__ = ["Mark", "covers_all"]

_WHOLE_ROUNDS: Final = 3
_STRETCH_BYTES: Final = 1024


@dataclass(slots=True)
class Mark:
    """What a stretch of some memory held: its bytes, or their CRC-32 where they are many."""

    begin: int
    end: int
    held: bytes | int

    @classmethod
    def of(cls, content: memoryview, round_: int) -> "Mark":
        """Mark the stretch of these bytes whose turn it is in a round; rounds count from 0."""
        begin, end = _stretch(len(content), round_)
        return cls(begin, end, _summary(content[begin:end]))

    def matches(self, content: memoryview) -> bool:
        """Whether the memory, of the same length, holds what it held."""
        return _summary(content[self.begin : self.end]) == self.held


def covers_all(round_: int) -> bool:
    """Whether a round is one in which all bytes are marked, however many there are."""
    return round_ < _WHOLE_ROUNDS


def _stretch(length: int, round_: int) -> tuple[int, int]:
    if covers_all(round_) or length <= _STRETCH_BYTES:
        return 0, length
    begin = round_ % -(-length // _STRETCH_BYTES) * _STRETCH_BYTES
    return begin, min(begin + _STRETCH_BYTES, length)


def _summary(stretch: memoryview) -> bytes | int:
    return bytes(stretch) if len(stretch) <= _STRETCH_BYTES else zlib.crc32(stretch)
