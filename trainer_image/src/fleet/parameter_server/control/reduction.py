"""Small arrays of all trainers, combined on one server in the order of the trainers."""

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
"""What a trainer may contribute: control goes beside the tensors' own path, and is not made for them."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one trainer gives."""

    operation: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @property
    def form(self) -> str:
        """What must be the same on every trainer."""
        return f"{self.operation} of {self.dtype}{list(self.shape)}"

    @classmethod
    def of(cls, values: Any, operation: str) -> "Contribution":
        """Return what a trainer's numbers contribute.

        Raises
        ------
        ConfigurationError
            They are no numbers, or too many; or there is no such operation.
        """
        array = np.ascontiguousarray(numbers_of(values))
        given = cls(operation, array.dtype.str, np.shape(values), array.tobytes())
        given.check()
        return given

    def check(self) -> None:
        """Check that a server can combine this; ConfigurationError otherwise."""
        check_operation(self.operation)
        if np.dtype(self.dtype).kind not in "iuf" or len(self.data) > MAX_BYTES:
            raise ConfigurationError(
                f"all_reduce_worker got {len(self.data)} bytes of {self.dtype}; expected numbers, at most "
                f"{MAX_BYTES} bytes: it is for counts and metrics, beside the gradients' own way"
            )
        if len(self.data) != (expected := np.dtype(self.dtype).itemsize * prod(self.shape)):
            raise ConfigurationError(f"{len(self.data)} bytes came for the {self.form}, expected {expected}")

    def array(self) -> npt.NDArray[np.generic]:
        """Return the numbers."""
        return np.frombuffer(self.data, dtype=self.dtype).reshape(self.shape)


@dataclass(slots=True)
class Reductions:
    """One reduction after the other, as one server counts them. Used under the server's lock.

    A trainer can be at most one ahead of the others: that one's result is kept until all have fetched it.
    """

    passed: int = 0
    _bases: dict[int, int] = field(default_factory=dict)
    _given: dict[int, Contribution] = field(default_factory=dict)
    result: bytes = b""
    """The last reduction's numbers."""

    def admit(self, trainer: int) -> None:
        """Begin anew with a trainer: its first reduction is the next one."""
        self._bases[trainer] = self.passed
        self._given.pop(trainer, None)

    def contribute(self, trainer: int, before: int, given: Contribution, live: Collection[int]) -> int:
        """Take what a trainer gives to the reduction that follows `before` others of its own.

        Returns
        -------
        int
            The number of that reduction: it is over once `passed` has reached it.

        Raises
        ------
        ConfigurationError
            Another trainer gives something else.
        """
        given.check()
        number = self._bases.get(trainer, 0) + before + 1
        if self.passed >= number:
            return number
        for other, theirs in self._given.items():
            if theirs.form != given.form:
                raise ConfigurationError(
                    f"trainer {trainer} asks for the {given.form}, and trainer {other} for the "
                    f"{theirs.form}; expected the same call of all_reduce_worker on every trainer"
                )
        self._given[trainer] = given
        self.release(live)
        return number

    def release(self, live: Collection[int]) -> None:
        """Finish the reduction if nobody is missing."""
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
        """Return the trainers that have not given anything yet."""
        return [trainer for trainer in live if trainer not in self._given]
