"""The Philox generator of random numbers: a stateless function of a key and a counter.

Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["ADMISSION", "FIRST_VALUES", "ROUNDING", "philox", "random_words"]

FIRST_VALUES: Final = 0
ADMISSION: Final = 1
ROUNDING: Final = 2
"""Purposes of random numbers; each has its own sequence."""

_ROUNDS: Final = 10
_MULTIPLIERS: Final = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL: Final = 0x9E3779B9, 0xBB67AE85
_LOW: Final = np.uint64(0xFFFFFFFF)
_32: Final = np.uint64(32)
_PURPOSE_BITS: Final = 24

Words = NDArray[np.uint64]


def philox(counter: Sequence[Words], key: tuple[int, int]) -> tuple[Words, ...]:
    """Return four random 32-bit words for each counter.

    Parameters
    ----------
    counter : four uint64[n]
        The words of the counters, each below 2**32; their shapes must broadcast.
    key : two int
        Below 2**32.

    Returns
    -------
    four uint64[n]
        Each below 2**32.
    """
    a, b, c, d = counter
    first, second = key
    for _ in range(_ROUNDS):
        low, high = _MULTIPLIERS[0] * a, _MULTIPLIERS[1] * c
        a, b, c, d = (
            (high >> _32) ^ b ^ np.uint64(first),
            high & _LOW,
            (low >> _32) ^ d ^ np.uint64(second),
            low & _LOW,
        )
        first, second = (first + _WEYL[0]) & 0xFFFFFFFF, (second + _WEYL[1]) & 0xFFFFFFFF
    return a, b, c, d


def random_words(
    ids: NDArray[np.int64], columns: int, key: tuple[int, int], purpose: int = FIRST_VALUES, step: int = 0
) -> Words:
    """Return a random 32-bit word for each id and column.

    Parameters
    ----------
    ids : int64[n]
    columns : int
        At most 2**26.
    key : two int
    purpose : int
        `FIRST_VALUES`, `ADMISSION` or `ROUNDING`.
    step : int
        Each step gives different words; used modulo 2**32.

    Returns
    -------
    uint64[n, columns]
        Each below 2**32.
    """
    unsigned = ids.view(np.uint64)[:, None]
    blocks = np.arange(-(-columns // 4), dtype=np.uint64)[None, :]
    steps = np.full_like(blocks, step & 0xFFFFFFFF)
    counter = (unsigned & _LOW, unsigned >> _32, blocks + np.uint64(purpose << _PURPOSE_BITS), steps)
    words = np.stack(np.broadcast_arrays(*philox(counter, key)), axis=-1)
    return words.reshape(ids.size, 4 * blocks.size)[:, :columns]
