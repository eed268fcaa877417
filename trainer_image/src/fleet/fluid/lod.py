"""LoD tensors: sequences of different lengths, stored as concatenated values and their lengths at each level.

The lengths of a level are the numbers of entries of the next level in each sequence; the lengths of the last
level count values. ``[[2, 1], [3, 1, 2]]`` describes two documents: one of two sentences, with three words
and one word, and one of a single sentence with two words. Paddle's older notation, `lod`, has offsets instead
of lengths.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from fleet.errors import ConfigurationError

__all__ = ["LoDTensor", "create_lod_tensor", "create_random_int_lodtensor", "flattened"]

Lengths = Sequence[Sequence[int]]


class LoDTensor:
    """Concatenated sequences and their lengths.

    Parameters
    ----------
    values : array, shape (n, ...), optional
        All values, concatenated.
    lengths : sequence of sequence of int
        The lengths at each level, outermost first; empty for an ordinary array.

    Raises
    ------
    ConfigurationError
        The lengths do not add up.

    Notes
    -----
    Paddle's ``fluid.LoDTensor``. As in Paddle, ``numpy.array(tensor)`` returns the values.
    """

    def __init__(self, values: npt.ArrayLike | None = None, lengths: Lengths = ()) -> None:
        self._values = None if values is None else np.asarray(values)
        self._lengths: tuple[tuple[int, ...], ...] = ()
        if lengths:
            self.set_recursive_sequence_lengths(lengths)

    @property
    def values(self) -> npt.NDArray[Any]:
        """The concatenated values, with shape (n, ...).

        Raises
        ------
        ConfigurationError
            No values have been set.
        """
        if self._values is None:
            raise ConfigurationError("the LoDTensor has no values; expected set(array, place) first")
        return self._values

    @property
    def lengths(self) -> tuple[tuple[int, ...], ...]:
        """The sequence lengths at each level; empty for an ordinary array.

        Raises
        ------
        ConfigurationError
            The lengths do not add up, for example after `set` with other values.
        """
        _check(self._lengths, len(self.values) if self.values.ndim else 1)
        return self._lengths

    def set(self, array: npt.ArrayLike, place: object = None) -> None:  # noqa: ARG002 - Paddle's signature
        """Set the values, and keep the lengths.

        Parameters
        ----------
        array : array, shape (n, ...)
        place : CPUPlace or CUDAPlace, optional
            Has no effect: an executor moves what it is fed to its own place.
        """
        self._values = np.asarray(array)

    def shape(self) -> list[int]:
        """Return the shape of the values."""
        return list(self.values.shape)

    def set_recursive_sequence_lengths(self, recursive_sequence_lengths: Lengths) -> None:
        """Set the sequence lengths at each level.

        Parameters
        ----------
        recursive_sequence_lengths : sequence of sequence of int
            The lengths at each level, outermost first.

        Raises
        ------
        ConfigurationError
            The lengths do not add up.
        """
        lengths = tuple(tuple(int(length) for length in level) for level in recursive_sequence_lengths)
        _check(lengths, None if self._values is None else len(self._values))
        self._lengths = lengths

    def recursive_sequence_lengths(self) -> list[list[int]]:
        """Return the sequence lengths at each level."""
        return [list(level) for level in self._lengths]

    def has_valid_recursive_sequence_lengths(self) -> bool:
        """Return whether the lengths match the number of values."""
        return not _problem(self._lengths, len(self.values))

    def set_lod(self, lod: Lengths) -> None:
        """Set the sequence lengths from offsets.

        Parameters
        ----------
        lod : sequence of sequence of int
            For each level, the start of each sequence and the end of the last one: the lengths 2 and 3 are
            ``[0, 2, 5]``.

        Raises
        ------
        ConfigurationError
            A level does not begin with 0, or decreases; or the offsets do not match the values.
        """
        for level in lod:
            if not len(level) or level[0] != 0:
                raise ConfigurationError(
                    f"lod has the level {list(level)}; expected offsets that begin with 0"
                )
        self.set_recursive_sequence_lengths(
            [[end - begin for begin, end in pairwise(level)] for level in lod]
        )

    def lod(self) -> list[list[int]]:
        """Return the sequence lengths at each level as offsets."""
        return [[0, *accumulate(level)] for level in self._lengths]

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """Return the values as an array."""
        return np.array(self.values, dtype=dtype, copy=copy)

    def __repr__(self) -> str:
        return f"LoDTensor({self._values!r}, lengths={self.recursive_sequence_lengths()})"


def _problem(lengths: Lengths, num_values: int | None) -> str:
    """Return a description of the first inconsistency in lengths, or an empty string."""
    counts: list[int | None] = [*map(len, lengths[1:]), num_values]
    for level, count in zip(lengths, counts, strict=False):
        if any(length < 0 for length in level):
            return f"the level {list(level)} has a negative length"
        if count is not None and sum(level) != count:
            return f"the level {list(level)} counts {sum(level)} entries, but there are {count} below it"
    return ""


def _check(lengths: Lengths, num_values: int | None) -> None:
    if problem := _problem(lengths, num_values):
        raise ConfigurationError(
            f"the lengths of a LoDTensor do not add up: {problem}; expected each level to count the entries "
            "of the next one, and the last level the values"
        )


def flattened(sequences: Iterable[Any], lod_level: int) -> tuple[list[Any], list[list[int]]]:
    """Concatenate nested sequences; return the values, and the lengths at each level.

    Parameters
    ----------
    sequences : iterable
        Nested to the depth `lod_level`: with 1, a list of sequences of values.
    lod_level : int
        The number of levels; with 0, the entries are returned unchanged.

    Returns
    -------
    values : list
    lengths : list of list of int
        Per level, the outermost first.
    """
    entries, lengths = list(sequences), []
    for _ in range(lod_level):
        lengths.append([len(each) for each in entries])
        entries = [entry for each in entries for entry in each]
    return entries, lengths


def create_lod_tensor(data: Any, recursive_seq_lens: Lengths, place: object = None) -> LoDTensor:
    """Create a LoDTensor from values and lengths.

    Parameters
    ----------
    data : array, LoDTensor or list of sequences
        The values of all sequences, shape (n, ...); or a list of the innermost sequences of numbers, which
        become shape (n, 1).
    recursive_seq_lens : sequence of sequence of int
        The lengths, per level.
    place : CPUPlace or CUDAPlace, optional
        Has no effect: an executor moves what it is fed to its own place.

    Raises
    ------
    ConfigurationError
        The lengths do not add up, or differ from those of the sequences.

    Notes
    -----
    Paddle's ``fluid.create_lod_tensor``.
    """
    if isinstance(data, list):
        data, (found,) = flattened(data, 1)
        if recursive_seq_lens and found != list(recursive_seq_lens[-1]):
            raise ConfigurationError(
                f"recursive_seq_lens ends with {list(recursive_seq_lens[-1])}, but the sequences in data "
                f"have the lengths {found}; expected the same"
            )
    values = np.asarray(data)
    tensor = LoDTensor()
    tensor.set(values.reshape(-1, 1) if values.ndim == 1 else values, place)
    tensor.set_recursive_sequence_lengths(recursive_seq_lens)
    return tensor


def create_random_int_lodtensor(
    recursive_seq_lens: Lengths, base_shape: Sequence[int], place: object, low: int, high: int
) -> LoDTensor:
    """Create a LoDTensor of random integers from NumPy's global generator, as Paddle does.

    Parameters
    ----------
    recursive_seq_lens : sequence of sequence of int
        The lengths, per level.
    base_shape : sequence of int
        The shape of one value.
    place : CPUPlace or CUDAPlace
        As for `create_lod_tensor`.
    low, high : int
        The smallest and the largest integer.

    Returns
    -------
    LoDTensor
        Values of int64, shape (n, *base_shape).
    """
    shape = (sum(recursive_seq_lens[-1]), *base_shape)
    # The global generator, so that a script's np.random.seed() makes the values reproducible.
    values = np.random.randint(low, high + 1, size=shape, dtype=np.int64)  # noqa: NPY002
    return create_lod_tensor(values, recursive_seq_lens, place)
