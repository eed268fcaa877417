"""Metrics over the samples of all trainers."""

from collections.abc import Callable
from math import nan
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fleet.errors import ConfigurationError

__all__ = ["AUC", "OPERATIONS", "Accuracy", "Mean", "Metrics", "Sum", "check_operation", "like", "numbers_of"]

_BUCKETS: Final = 1 << 14
OPERATIONS: Final = ("sum", "min", "max")

Reduce = Callable[[npt.NDArray[Any]], npt.NDArray[Any]]
"""A function that sums an array over the trainers."""


class AUC:
    """The area under the ROC curve, computed over the samples of all trainers.

    Scores are counted in buckets, so that trainers exchange counts instead of samples. A pair within one
    bucket counts one half; `error` bounds the effect.

    Parameters
    ----------
    reduce : callable
        Sums an array over the trainers.
    buckets : int
        Number of equal parts of the range 0 to 1.

    Raises
    ------
    ConfigurationError
        There is no bucket.
    """

    def __init__(self, reduce: Reduce, buckets: int = _BUCKETS) -> None:
        if buckets < 1:
            raise ConfigurationError(f"AUC: buckets is {buckets}, expected at least 1")
        self._reduce = reduce
        self._counts = np.zeros((2, buckets), dtype=np.int64)
        self.error = nan
        """The maximum error of the last result: half the share of pairs within one bucket."""

    def update(self, scores: Any, labels: Any) -> None:
        """Add this trainer's samples.

        Parameters
        ----------
        scores : array or tensor of n numbers
            Probabilities, from 0 to 1.
        labels : array or tensor of n numbers
            0 or 1.

        Raises
        ------
        ConfigurationError
            The lengths differ, or a score or label is out of range.
        """
        found, truth = _flat("AUC", "scores", scores), _flat("AUC", "labels", labels)
        if found.size != truth.size:
            raise ConfigurationError(
                f"AUC: {found.size} scores and {truth.size} labels, expected equal numbers"
            )
        for what, numbers, wrong, expected in (
            ("scores", found, ~((found >= 0) & (found <= 1)), "probabilities from 0 to 1, as of a sigmoid"),
            ("labels", truth, (truth != 0) & (truth != 1), "0 or 1"),
        ):
            if wrong.any():
                at = int(np.flatnonzero(wrong)[0])
                raise ConfigurationError(f"AUC: {what} holds {numbers[at]} at {at}, expected {expected}")
        buckets = self._counts.shape[1]
        # A score of 1 belongs to the last bucket.
        places = np.minimum((found.astype(np.float64) * buckets).astype(np.int64), buckets - 1)
        for label, counts in enumerate(self._counts):
            counts += np.bincount(places[truth == label], minlength=buckets)

    def compute(self) -> float:
        """Return the AUC over all trainers, or nan if all labels are equal; every trainer must call this."""
        negative, positive = self._reduce(self._counts).astype(np.float64)
        pairs = negative.sum() * positive.sum()
        if pairs == 0:
            self.error = nan
            return nan
        below = np.cumsum(negative) - negative
        self.error = float((positive * negative).sum() / pairs / 2)
        return float((positive * (below + negative / 2)).sum() / pairs)

    def reset(self) -> None:
        """Discard the samples added so far."""
        self._counts[:] = 0


class Mean:
    """The mean over the samples of all trainers, in which every sample has the same weight.

    Parameters
    ----------
    reduce : callable
        Sums an array over the trainers.
    """

    def __init__(self, reduce: Reduce) -> None:
        self._reduce = reduce
        self._total, self._count = 0.0, 0

    def update(self, values: Any, count: int = 1) -> None:
        """Add this trainer's values.

        Parameters
        ----------
        values : number, array or tensor
        count : int
            The number of samples over which each number is already a mean, such as the batch size for a
            batch's loss.
        """
        numbers = _flat("Mean", "values", values)
        self._total += float(numbers.sum(dtype=np.float64)) * count
        self._count += numbers.size * count

    def compute(self) -> float:
        """Return the mean over all trainers, or nan if there are no samples; every trainer must call this."""
        total, count = self._reduce(np.array([self._total, self._count]))
        return float(total / count) if count else nan

    def reset(self) -> None:
        """Discard the values added so far."""
        self._total, self._count = 0.0, 0


class Sum:
    """The sum of values over all trainers.

    Parameters
    ----------
    reduce : callable
        Sums an array over the trainers.
    """

    def __init__(self, reduce: Reduce) -> None:
        self._reduce = reduce
        self._total = 0.0

    def update(self, values: Any) -> None:
        """Add this trainer's values.

        Parameters
        ----------
        values : number, array or tensor of any shape
            Summed as float64.

        Raises
        ------
        ConfigurationError
            The values are not numbers.
        """
        self._total += float(_flat("Sum", "values", values).sum(dtype=np.float64))

    def compute(self) -> float:
        """Return the sum over all trainers; every trainer must call this."""
        return float(self._reduce(np.array([self._total]))[0])

    def reset(self) -> None:
        """Discard the values added so far."""
        self._total = 0.0


class Accuracy:
    """The fraction of correct predictions among the samples of all trainers.

    Parameters
    ----------
    reduce : callable
        Sums an array over the trainers.
    """

    def __init__(self, reduce: Reduce) -> None:
        self._mean = Mean(reduce)

    def update(self, outputs: Any, labels: Any) -> None:
        """Add this trainer's samples.

        Parameters
        ----------
        outputs : array or tensor of [n] or [n, classes]
            Probabilities of label 1, or a score for each class, of which the largest is chosen.
        labels : array or tensor of n integers

        Raises
        ------
        ConfigurationError
            The number of outputs does not match that of labels.
        """
        truth, found = _flat("Accuracy", "labels", labels), _flat("Accuracy", "outputs", outputs)
        if found.size % max(truth.size, 1) or (found.size > 0) != (truth.size > 0):
            raise ConfigurationError(
                f"Accuracy: {found.size} outputs for {truth.size} labels, expected one for each label, or "
                "one for each label and class"
            )
        classes = found.reshape(truth.size, -1) if truth.size else found.reshape(0, 1)
        chosen = classes.argmax(axis=1) if classes.shape[1] > 1 else classes[:, 0] > 0.5
        self._mean.update(chosen == truth)

    def compute(self) -> float:
        """Return the overall accuracy, or nan if there are no samples; every trainer must call this."""
        return self._mean.compute()

    def reset(self) -> None:
        """Discard the samples added so far."""
        self._mean.reset()


class Metrics:
    """A factory of metrics over all trainers, available as ``fleet.metrics``.

    Parameters
    ----------
    reduce : callable
        Sums an array over the trainers.
    """

    def __init__(self, reduce: Reduce) -> None:
        self._reduce = reduce

    def auc(self, buckets: int = _BUCKETS) -> AUC:
        """Return a new `AUC` over all trainers.

        Parameters
        ----------
        buckets : int
            Number of equal parts of the range 0 to 1; samples are counted by the part of their score.

        Returns
        -------
        AUC
            Without samples.

        Raises
        ------
        ConfigurationError
            There is no bucket.
        """
        return AUC(self._reduce, buckets)

    def accuracy(self) -> Accuracy:
        """Return a new `Accuracy` over all trainers."""
        return Accuracy(self._reduce)

    def mean(self) -> Mean:
        """Return a new `Mean` over all trainers."""
        return Mean(self._reduce)

    def sum(self) -> Sum:
        """Return a new `Sum` over all trainers."""
        return Sum(self._reduce)


def _flat(metric: str, what: str, values: Any) -> npt.NDArray[Any]:
    """Return a script's values as a one-dimensional array.

    Raises
    ------
    ConfigurationError
        The values are not numbers.
    """
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        if values.is_floating_point():  # NumPy has no bfloat16
            values = values.to(torch.promote_types(values.dtype, torch.float32))
        values = values.numpy()
    array = np.asarray(values)
    if array.dtype.kind not in "biuf":
        raise ConfigurationError(f"{metric}: {what} are of type {array.dtype}, expected numbers")
    return array.reshape(-1)


def check_operation(mode: object) -> None:
    """Raise an error unless a reduction with this name exists.

    Parameters
    ----------
    mode : object
        Should be one of `OPERATIONS`.

    Raises
    ------
    ConfigurationError
        It is not one of them.
    """
    if mode not in OPERATIONS:
        raise ConfigurationError(f"all_reduce_worker: mode is {mode!r}; expected {', '.join(OPERATIONS)}")


def numbers_of(values: Any) -> npt.NDArray[Any]:
    """Return the argument of ``all_reduce_worker`` as an array.

    Parameters
    ----------
    values : number, array or Tensor

    Returns
    -------
    numpy.ndarray
        Booleans as int64, everything else in its own type.

    Raises
    ------
    ConfigurationError
        The values are not numbers, have a type that numpy lacks, or do not form an array.
    """
    try:
        array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"all_reduce_worker: {error}; convert it, to float32 for instance"
        ) from error
    if array.dtype.kind not in "biufc":
        raise ConfigurationError(f"all_reduce_worker got {array.dtype}; expected numbers")
    return array.astype(np.int64) if array.dtype.kind == "b" else array


def like(values: Any, numbers: npt.NDArray[Any], output: npt.NDArray[Any] | None) -> Any:
    """Convert reduced numbers to the type and device of the trainer's own values.

    Parameters
    ----------
    values : number, array or Tensor
        The trainer's own values.
    numbers : numpy.ndarray
        The combined numbers.
    output : numpy.ndarray, optional
        Receives the combined numbers too.

    Returns
    -------
    numpy.ndarray or Tensor
        A tensor on the device of `values` if that is a tensor.
    """
    if output is not None:
        output[...] = numbers
    return torch.from_numpy(numbers.copy()).to(values.device) if isinstance(values, Tensor) else numbers
