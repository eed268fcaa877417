"""Metrics over the samples of all trainers: each trainer counts its own, and the counts are added."""

from fleet.metrics.auc import AUC, BUCKETS
from fleet.metrics.interface import Reduce
from fleet.metrics.mean import Accuracy, Mean, Sum

__all__ = ["AUC", "Accuracy", "Mean", "Metrics", "Sum"]


class Metrics:
    """The metrics of one job: ``fleet.metrics``.

    Parameters
    ----------
    reduce : callable
        Sums an array over the trainers.
    """

    def __init__(self, reduce: Reduce) -> None:
        self._reduce = reduce

    def auc(self, buckets: int = BUCKETS) -> AUC:
        """Return an `AUC` over all trainers.

        Parameters
        ----------
        buckets : int
            Into how many equal parts 0 to 1 is cut; samples are counted by the part of their score.

        Returns
        -------
        AUC
            Without any sample yet.

        Raises
        ------
        ConfigurationError
            There is no bucket.
        """
        return AUC(self._reduce, buckets)

    def accuracy(self) -> Accuracy:
        """Return an `Accuracy` over all trainers."""
        return Accuracy(self._reduce)

    def mean(self) -> Mean:
        """Return a `Mean` over all trainers."""
        return Mean(self._reduce)

    def sum(self) -> Sum:
        """Return a `Sum` over all trainers."""
        return Sum(self._reduce)
