"""Admission rules, which decide when an id gets a row. A custom rule implements `Admission`."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, log, log2
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from fleet.errors import ConfigurationError
from fleet.tables.ids import SHARDS, shard_of
from fleet.tables.index import IdMap
from fleet.tables.philox import ADMISSION, random_words

__all__ = ["Admission", "BloomFilter", "Candidates", "CountFilter", "Probability"]

_MAX_COUNT: Final = 255
"""The value at which the counters of a `BloomFilter`, which are bytes, saturate."""


class Candidates(Protocol):
    """The state of an admission rule for one table: its records of ids that have no row.

    The state and the decision for an id depend only on updates of that id's virtual shard.
    """

    @property
    def nbytes(self) -> int:
        """The memory in use, in bytes."""

    def admit(self, ids: NDArray[np.int64], step: int) -> NDArray[np.bool_]:
        """Count an update of ids that have no row; return which of these ids get a row now.

        Parameters
        ----------
        ids : int64[n]
            Distinct.
        step : int
            Number of updates of the table, including this one.

        Returns
        -------
        bool[n]
        """

    def saved(self) -> Mapping[str, NDArray[Any]]:
        """Return copies of the state, or an empty mapping if the rule has no state.

        All arrays have the same length. One of them identifies the owner of each entry: ``ids``, or
        ``shards`` if entries belong to virtual shards.
        """

    def load(self, saved: Mapping[str, NDArray[Any]]) -> None:
        """Replace the state of the ids or shards that `saved` contains."""


class Admission(Protocol):
    """Decides when an id gets a row. Until then, it has its initial values and its gradients are dropped."""

    def candidates(self, key: tuple[int, int]) -> Candidates:
        """Return the rule's initial state for a table.

        Parameters
        ----------
        key : two int
            The table's `generator_key`.
        """


@dataclass(frozen=True)
class CountFilter:
    """Gives an id a row at its `count`-th update; the updates are counted exactly.

    A counted id uses 14 to 22 bytes until it has a row; the memory of a `BloomFilter` is bounded.

    Attributes
    ----------
    count : int
        With 1, every id gets a row at its first update.
    """

    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigurationError(f"CountFilter: count is {self.count}, expected at least 1")

    def candidates(self, key: tuple[int, int]) -> "_Counts":
        """Return the rule's initial state; see `Admission.candidates`."""
        del key
        return _Counts(self.count)


class _Counts:
    """Exact numbers of updates by id; implements `Candidates`."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._seen = IdMap()

    @property
    def nbytes(self) -> int:
        return self._seen.nbytes

    def admit(self, ids: NDArray[np.int64], step: int) -> NDArray[np.bool_]:
        del step
        admitted = self._seen.add(ids, 1) >= self._count
        self._seen.remove(ids[admitted])
        return admitted

    def saved(self) -> Mapping[str, NDArray[Any]]:
        ids, counts = self._seen.items()
        return {"ids": ids, "counts": counts}

    def load(self, saved: Mapping[str, NDArray[Any]]) -> None:
        self._seen.put(saved["ids"], saved["counts"])


@dataclass(frozen=True)
class BloomFilter:
    """Gives an id a row at its `count`-th update, or earlier with a probability of about `error`.

    Each virtual shard has a counting Bloom filter. It uses about 1.44 log2(1 / error) bytes for each of
    `num_ids`: 10 with an error of .01. The filter still counts an id whose row was evicted, so the id gets a
    row at its next update.

    Attributes
    ----------
    count : int
        1 to 255.
    num_ids : int
        Expected number of distinct ids in updates; the error grows if there are more.
    error : float
    """

    count: int
    num_ids: int
    error: float = 0.01

    def __post_init__(self) -> None:
        if not 1 <= self.count <= _MAX_COUNT:
            raise ConfigurationError(f"BloomFilter: count is {self.count}, expected 1 to {_MAX_COUNT}")
        if self.num_ids < 1:
            raise ConfigurationError(f"BloomFilter: num_ids is {self.num_ids}, expected at least 1")
        if not 1e-6 <= self.error < 1.0:
            raise ConfigurationError(f"BloomFilter: error is {self.error}, expected 1e-6 to 1")

    def candidates(self, key: tuple[int, int]) -> "_Filters":
        """Return the rule's initial state; see `Admission.candidates`."""
        hashes = max(1, round(log2(1.0 / self.error)))
        # A filter errs least when half of it is in use: with 1 / ln 2 counters per id and hash function.
        width = max(8, ceil(self.num_ids / SHARDS / log(2)))
        return _Filters(self.count, hashes, width, key)


class _Filters:
    """Counting Bloom filters, with counters for each shard and hash function; implements `Candidates`."""

    def __init__(self, count: int, hashes: int, width: int, key: tuple[int, int]) -> None:
        self._count = count
        self._key = key
        # The operating system allocates the memory of a shard when the shard is first written.
        self._seen = np.zeros((SHARDS, hashes, width), dtype=np.uint8)
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
        # Two ids in one update may share a counter; both are counted.
        distinct, times = np.unique(counters, return_counts=True)
        flat[distinct] = np.minimum(flat[distinct] + times, _MAX_COUNT)
        admitted: NDArray[np.bool_] = flat[counters].min(axis=1) >= self._count
        return admitted

    def saved(self) -> Mapping[str, NDArray[Any]]:
        shards = np.flatnonzero(self._used)
        return {"shards": shards, "counts": self._seen[shards]}

    def load(self, saved: Mapping[str, NDArray[Any]]) -> None:
        counts = saved["counts"]
        if counts.shape[1:] != self._seen.shape[1:]:
            raise ConfigurationError(
                f"BloomFilter: the saved counters have shape {list(counts.shape[1:])}, expected "
                f"{list(self._seen.shape[1:])}: use the num_ids and error of the table that was saved"
            )
        self._seen[saved["shards"]] = counts
        self._used[saved["shards"]] = True

    def _counters(self, ids: NDArray[np.int64], shards: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions of each id's counters in the flattened filters; int64[n, hashes].

        Notes
        -----
        All hashes are computed from two: Kirsch and Mitzenmacher, "Less hashing, same performance", ESA 2006.
        """
        _, hashes, width = self._seen.shape
        words = random_words(ids, 2, self._key, ADMISSION)
        numbers = np.arange(hashes, dtype=np.uint64)
        # The step is odd and so never zero; with zero, every hash function would take the same position.
        mixed = words[:, :1] + numbers * (words[:, 1:2] | np.uint64(1))
        within = (mixed % np.uint64(width)).view(np.int64)
        counters: NDArray[np.int64] = (shards[:, None] * hashes + np.arange(hashes)) * width + within
        return counters


@dataclass(frozen=True)
class Probability:
    """Gives an id a row with a fixed `probability` at each update. The rule has no state.

    The draw is a function of the table, the id and the step.

    Attributes
    ----------
    probability : float
        Above 0, up to 1.
    """

    probability: float

    def __post_init__(self) -> None:
        if not 0.0 < self.probability <= 1.0:
            raise ConfigurationError(
                f"Probability: probability is {self.probability}, expected a number above 0, up to 1"
            )

    def candidates(self, key: tuple[int, int]) -> "_Draws":
        """Return the rule's initial state; see `Admission.candidates`."""
        return _Draws(self.probability, key)


class _Draws:
    """Random decisions without state; implements `Candidates`."""

    nbytes = 0

    def __init__(self, probability: float, key: tuple[int, int]) -> None:
        self._below = np.uint64(round(probability * 2**32))
        self._key = key

    def admit(self, ids: NDArray[np.int64], step: int) -> NDArray[np.bool_]:
        drawn: NDArray[np.bool_] = random_words(ids, 1, self._key, ADMISSION, step)[:, 0] < self._below
        return drawn

    def saved(self) -> Mapping[str, NDArray[Any]]:
        return {}

    def load(self, saved: Mapping[str, NDArray[Any]]) -> None:
        del saved
