"""Sums and means over the samples of all trainers."""

from math import nan
from typing import Any

import numpy as np

from fleet.errors import ConfigurationError
from fleet.metrics.interface import Reduce, flat

__all__ = ["Accuracy", "Mean", "Sum"]


class Mean:
    """The mean of numbers, of a sample each, over the samples of all trainers: not of trainers' means.

    Parameters
    ----------
    reduce : callable
        Sums numbers over the trainers.
    """

    def __init__(self, reduce: Reduce) -> None:
        self._reduce = reduce
        self._total, self._count = 0.0, 0

    def update(self, values: Any, count: int = 1) -> None:
        """Add numbers of this trainer.

        Parameters
        ----------
        values : number, array or tensor
        count : int
            How many samples each number is the mean of, as a batch's loss is.
        """
        numbers = flat("Mean", "values", values)
        self._total += float(numbers.sum(dtype=np.float64)) * count
        self._count += numbers.size * count

    def compute(self) -> float:
        """Return the mean over all trainers, each of which calls this; nan where nobody has a sample."""
        total, count = self._reduce(np.array([self._total, self._count]))
        return float(total / count) if count else nan

    def reset(self) -> None:
        """Forget the samples."""
        self._total, self._count = 0.0, 0


class Sum:
    """The sum of numbers over all trainers.

    Parameters
    ----------
    reduce : callable
        Sums numbers over the trainers.
    """

    def __init__(self, reduce: Reduce) -> None:
        self._reduce = reduce
        self._total = 0.0

    def update(self, values: Any) -> None:
        """Add numbers of this trainer.

        Parameters
        ----------
        values : number, array or tensor of any shape
            What is added up, as float64.

        Raises
        ------
        ConfigurationError
            These are no numbers.
        """
        self._total += float(flat("Sum", "values", values).sum(dtype=np.float64))

    def compute(self) -> float:
        """Return the sum over all trainers, each of which calls this."""
        return float(self._reduce(np.array([self._total]))[0])

    def reset(self) -> None:
        """Forget the numbers."""
        self._total = 0.0


class Accuracy:
    """The share of samples whose label was found, over the samples of all trainers.

    Parameters
    ----------
    reduce : callable
        Sums numbers over the trainers.
    """

    def __init__(self, reduce: Reduce) -> None:
        self._mean = Mean(reduce)

    def update(self, outputs: Any, labels: Any) -> None:
        """Count samples of this trainer.

        Parameters
        ----------
        outputs : array or tensor of [n] or [n, classes]
            Probabilities of label 1, or a number for each class, of which the largest is chosen.
        labels : array or tensor of n integers

        Raises
        ------
        ConfigurationError
            There are not as many outputs as labels.
        """
        truth, found = flat("Accuracy", "labels", labels), flat("Accuracy", "outputs", outputs)
        if found.size % max(truth.size, 1) or (found.size > 0) != (truth.size > 0):
            raise ConfigurationError(
                f"Accuracy: {found.size} outputs for {truth.size} labels, expected one for each label, or "
                "one for each label and class"
            )
        classes = found.reshape(truth.size, -1) if truth.size else found.reshape(0, 1)
        chosen = classes.argmax(axis=1) if classes.shape[1] > 1 else classes[:, 0] > 0.5
        self._mean.update(chosen == truth)

    def compute(self) -> float:
        """Return the share over all trainers, each of which calls this; nan where nobody has a sample."""
        return self._mean.compute()

    def reset(self) -> None:
        """Forget the samples."""
        self._mean.reset()
