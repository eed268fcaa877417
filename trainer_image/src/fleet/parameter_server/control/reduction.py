"""Reductions of small arrays over all trainers, which a server computes in trainer order."""

from collections.abc import Collection
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fleet.errors import ConfigurationError
from fleet.metrics import check_operation, numbers_of

__all__ = ["MAX_BYTES", "Contribution", "Reductions"]

_COMBINE: Final = {"sum": np.add, "min": np.minimum, "max": np.maximum}
MAX_BYTES: Final = 16 << 20
"""The size limit of a contribution; control calls are not meant for large arrays."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """One trainer's input array for a reduction."""

    operation: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @property
    def form(self) -> str:
        """The operation, dtype and shape, which must be equal on all trainers."""
        return f"{self.operation} of {self.dtype}{list(self.shape)}"

    @classmethod
    def of(cls, values: Any, operation: str) -> "Contribution":
        """Build a contribution from numbers or an array.

        Raises
        ------
        ConfigurationError
            The values are not numbers, there are too many, or the operation is unknown.
        """
        array = np.ascontiguousarray(numbers_of(values))
        given = cls(operation, array.dtype.str, np.shape(values), array.tobytes())
        given.check()
        return given

    def check(self) -> None:
        """Raise ConfigurationError if a server cannot reduce this array."""
        check_operation(self.operation)
        if np.dtype(self.dtype).kind not in "iuf" or len(self.data) > MAX_BYTES:
            raise ConfigurationError(
                f"all_reduce_worker got {len(self.data)} bytes of {self.dtype}; expected numbers, at most "
                f"{MAX_BYTES} bytes: it is for counts and metrics, not for gradients"
            )
        if len(self.data) != (expected := np.dtype(self.dtype).itemsize * prod(self.shape)):
            raise ConfigurationError(
                f"{len(self.data)} bytes arrived for the {self.form}, expected {expected}"
            )

    def array(self) -> npt.NDArray[np.generic]:
        """Return the contribution as a NumPy array."""
        return np.frombuffer(self.data, dtype=self.dtype).reshape(self.shape)


@dataclass(slots=True)
class Reductions:
    """The reductions that a server performs, one at a time; the caller holds the server's lock.

    A trainer can be at most one reduction ahead of the others, so only the last result is kept.
    """

    passed: int = 0
    _bases: dict[int, int] = field(default_factory=dict)
    _given: dict[int, Contribution] = field(default_factory=dict)
    result: bytes = b""
    """The result of the last reduction, as the bytes of an array."""

    def admit(self, trainer: int) -> None:
        """Add a trainer that has joined; the reduction in progress is the trainer's first."""
        self._bases[trainer] = self.passed
        self._given.pop(trainer, None)

    def contribute(self, trainer: int, before: int, given: Contribution, live: Collection[int]) -> int:
        """Add a trainer's contribution to the reduction that follows the trainer's `before` earlier ones.

        Returns
        -------
        int
            The number of this reduction, which is complete once `passed` has reached this number.

        Raises
        ------
        ConfigurationError
            Another trainer's contribution has a different form.
        """
        given.check()
        number = self._bases.get(trainer, 0) + before + 1
        if self.passed >= number:
            return number
        for other, theirs in self._given.items():
            if theirs.form != given.form:
                raise ConfigurationError(
                    f"trainer {trainer} requests the {given.form}, and trainer {other} the {theirs.form}; "
                    "expected the same call of all_reduce_worker on every trainer"
                )
        self._given[trainer] = given
        self.release(live)
        return number

    def release(self, live: Collection[int]) -> None:
        """Complete the reduction in progress if every live trainer has contributed."""
        if not self._given or not self._given.keys() >= set(live):
            return
        first, *others = [self._given[trainer] for trainer in sorted(self._given)]
        total = first.array().copy()
        for other in others:
            _COMBINE[first.operation](total, other.array(), out=total)
        self.result = total.tobytes()
        self._given.clear()
        self.passed += 1

    def missing(self, live: Collection[int]) -> list[int]:
        """Return the live trainers that have not contributed yet."""
        return [trainer for trainer in live if trainer not in self._given]
