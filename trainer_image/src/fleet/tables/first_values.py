"""Initial values of rows, computed from the seed, the table's name and the id.

Reading a row therefore stores nothing, and the values do not depend on the number of servers or threads.
"""

import hashlib
from dataclasses import dataclass
from math import isfinite
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fleet.errors import ConfigurationError
from fleet.tables.philox import random_words

__all__ = ["Constant", "FirstValues", "Normal", "Uniform", "generator_key"]


class FirstValues(Protocol):
    """A distribution of initial values."""

    def of(self, ids: NDArray[np.int64], dimension: int, key: tuple[int, int]) -> NDArray[np.float32]:
        """Return the initial values of each id's row.

        Parameters
        ----------
        ids : int64[n]
        dimension : int
        key : two int
            The table's `generator_key`.

        Returns
        -------
        float32[n, dimension]
        """


def generator_key(seed: int, table: str) -> tuple[int, int]:
    """Return the key of a table's random number generator, derived from the seed and the name."""
    digest = hashlib.sha256(f"{seed}/{table}".encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


@dataclass(frozen=True)
class Constant:
    """An initializer that sets every element to the same value.

    Attributes
    ----------
    value : float
        The value.

    Raises
    ------
    ConfigurationError
        The value is not finite.
    """

    value: float = 0.0

    def __post_init__(self) -> None:
        _check_finite(self)

    def of(self, ids: NDArray[np.int64], dimension: int, key: tuple[int, int]) -> NDArray[np.float32]:
        """Return the initial values of each id's row; see `FirstValues.of`."""
        del key
        return np.full((ids.size, dimension), self.value, dtype=np.float32)


@dataclass(frozen=True)
class Uniform:
    """A uniform distribution between `low` and `high`, with a resolution of 2**-24 of the range.

    Attributes
    ----------
    low, high : float
        The bounds.

    Raises
    ------
    ConfigurationError
        A bound is not finite.

    Notes
    -----
    Drawn with Philox (Salmon et al. 2011) by table, id and column, so the number of servers does not matter.
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        _check_finite(self)

    def of(self, ids: NDArray[np.int64], dimension: int, key: tuple[int, int]) -> NDArray[np.float32]:
        """Return the initial values of each id's row; see `FirstValues.of`."""
        unit = _unit(random_words(ids, dimension, key))
        return (self.low + (self.high - self.low) * unit).astype(np.float32)


@dataclass(frozen=True)
class Normal:
    """A normal distribution, the default for ``torch.nn.Embedding`` weights.

    Attributes
    ----------
    mean, std : float
        Mean and standard deviation.

    Raises
    ------
    ConfigurationError
        One of them is not finite.

    Notes
    -----
    Drawn with Philox (Salmon et al. 2011) and the Box-Muller transform by table, id and column, so the number
    of servers does not matter.
    """

    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        _check_finite(self)

    def of(self, ids: NDArray[np.int64], dimension: int, key: tuple[int, int]) -> NDArray[np.float32]:
        """Return the initial values of each id's row; see `FirstValues.of`."""
        unit = _unit(
            random_words(ids, dimension + dimension % 2, key)
        )  # each Box-Muller transform yields two numbers
        radius = np.sqrt(-2.0 * np.log1p(-unit[:, 0::2]))
        angle = 2.0 * np.pi * unit[:, 1::2]
        normal = np.empty_like(unit)
        normal[:, 0::2] = radius * np.cos(angle)
        normal[:, 1::2] = radius * np.sin(angle)
        return (self.mean + self.std * normal[:, :dimension]).astype(np.float32)


def _check_finite(distribution: "Constant | Uniform | Normal") -> None:
    for name, value in vars(distribution).items():
        if not isfinite(value):
            raise ConfigurationError(
                f"{type(distribution).__name__}: {name} is {value}, expected a finite number"
            )


def _unit(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Convert the upper 24 bits of each word to a number in [0, 1)."""
    return (words >> np.uint64(8)).astype(np.float64) * 2.0**-24
