"""An id gets a row with about its n-th update: counted in a Bloom filter, whose memory is bounded."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, log, log2
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fleet.errors import ConfigurationError
from fleet.tables.philox import ADMISSION, random_words
from fleet.tables.shards import SHARDS, shard_of

__all__ = ["BloomFilter"]

_MOST: Final = 255
"""A counter is a byte, and stays at its highest value."""


@dataclass(frozen=True)
class BloomFilter:
    """An id gets a row with its `count`-th update, or an earlier one in a share of `error` of all cases.

    Each virtual shard has a counting filter. It takes about 1.44 log2(1 / error) bytes for each id that it is
    made for: 10 with an error of .01. An id whose row was evicted is still known, and gets one again at once.

    Attributes
    ----------
    count : int
        1 to 255.
    num_ids : int
        How many distinct ids a table is expected to see. With more the error grows.
    error : float
    """

    count: int
    num_ids: int
    error: float = 0.01

    def __post_init__(self) -> None:
        if not 1 <= self.count <= _MOST:
            raise ConfigurationError(f"BloomFilter: count is {self.count}, expected 1 to {_MOST}")
        if self.num_ids < 1:
            raise ConfigurationError(f"BloomFilter: num_ids is {self.num_ids}, expected at least 1")
        if not 1e-6 <= self.error < 1.0:
            raise ConfigurationError(f"BloomFilter: error is {self.error}, expected 1e-6 to 1")

    def candidates(self, key: tuple[int, int]) -> "_Filters":
        """See `Admission`."""
        hashes = max(1, round(log2(1.0 / self.error)))
        width = max(8, ceil(self.num_ids / SHARDS / log(2)))
        return _Filters(self.count, hashes, width, key)


class _Filters:
    """By shard and hash function, a row of counters: hash functions never share one."""

    def __init__(self, count: int, hashes: int, width: int, key: tuple[int, int]) -> None:
        self._count = count
        self._key = key
        self._seen = np.zeros((SHARDS, hashes, width), dtype=np.uint8)
        """The operating system gives memory to a shard when it is first written."""
        self._used = np.zeros(SHARDS, dtype=np.bool_)

    @property
    def nbytes(self) -> int:
        return int(np.count_nonzero(self._used) * self._seen[0].nbytes)

    def admit(self, ids: NDArray[np.int64], step: int) -> NDArray[np.bool_]:
        del step
        shards = shard_of(ids)
        self._used[shards] = True
        counters = self._counters(ids, shards)
        flat = self._seen.reshape(-1)
        # Two ids of one update may share a counter, and both count.
        distinct, times = np.unique(counters, return_counts=True)
        flat[distinct] = np.minimum(flat[distinct] + times, _MOST)
        admitted: NDArray[np.bool_] = flat[counters].min(axis=1) >= self._count
        return admitted

    def saved(self) -> Mapping[str, NDArray[Any]]:
        shards = np.flatnonzero(self._used)
        return {"shards": shards, "counts": self._seen[shards]}

    def load(self, saved: Mapping[str, NDArray[Any]]) -> None:
        counts = saved["counts"]
        if counts.shape[1:] != self._seen.shape[1:]:
            raise ConfigurationError(
                f"BloomFilter: counters of shape {list(counts.shape[1:])} were saved, expected "
                f"{list(self._seen.shape[1:])}: give the num_ids and the error of the table that was saved"
            )
        self._seen[saved["shards"]] = counts
        self._used[saved["shards"]] = True

    def _counters(self, ids: NDArray[np.int64], shards: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return each id's counters, as positions in all of them; int64[n, hashes].

        Notes
        -----
        Two hashes make all others: Kirsch and Mitzenmacher, "Less hashing, same performance", ESA 2006.
        """
        _, hashes, width = self._seen.shape
        words = random_words(ids, 2, self._key, ADMISSION)
        numbers = np.arange(hashes, dtype=np.uint64)
        mixed = words[:, :1] + numbers * (words[:, 1:2] | np.uint64(1))
        within = (mixed % np.uint64(width)).view(np.int64)
        counters: NDArray[np.int64] = (shards[:, None] * hashes + np.arange(hashes)) * width + within
        return counters
