"""The area under the ROC curve, from counts in buckets."""

from math import nan
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fleet.errors import ConfigurationError
from fleet.metrics.interface import Reduce, flat

__all__ = ["AUC", "BUCKETS"]

BUCKETS: Final = 1 << 14


class AUC:
    """How often a positive sample scores higher than a negative one, over the samples of all trainers.

    Scores are counted by bucket, so that trainers exchange counts and not samples. A pair within one bucket
    counts a half: what that may be off by is in `error`.

    Parameters
    ----------
    reduce : callable
        Sums numbers over the trainers.
    buckets : int
        Into how many equal parts 0 to 1 is cut.

    Raises
    ------
    ConfigurationError
        There is no bucket.
    """

    def __init__(self, reduce: Reduce, buckets: int = BUCKETS) -> None:
        if buckets < 1:
            raise ConfigurationError(f"AUC: buckets is {buckets}, expected at least 1")
        self._reduce = reduce
        self._counts = np.zeros((2, buckets), dtype=np.int64)
        self.error = nan
        """By how much the last result may be off, at most: half the share of pairs within one bucket."""

    def update(self, scores: Any, labels: Any) -> None:
        """Count samples of this trainer.

        Parameters
        ----------
        scores : array or tensor of n numbers
            Probabilities, from 0 to 1.
        labels : array or tensor of n numbers
            0 or 1.

        Raises
        ------
        ConfigurationError
            The two are of different lengths, or one holds something else.
        """
        found, truth = flat("AUC", "scores", scores), flat("AUC", "labels", labels)
        if found.size != truth.size:
            raise ConfigurationError(
                f"AUC: {found.size} scores and {truth.size} labels, expected as many of each"
            )
        _check("scores", found, ~((found >= 0) & (found <= 1)), "probabilities from 0 to 1, as of a sigmoid")
        _check("labels", truth, (truth != 0) & (truth != 1), "0 or 1")
        buckets = self._counts.shape[1]
        places = np.minimum((found.astype(np.float64) * buckets).astype(np.int64), buckets - 1)
        for label, counts in enumerate(self._counts):
            counts += np.bincount(places[truth == label], minlength=buckets)

    def compute(self) -> float:
        """Return the area over all trainers, who all call this; nan where all samples are of one kind."""
        negative, positive = self._reduce(self._counts).astype(np.float64)
        pairs = negative.sum() * positive.sum()
        if pairs == 0:
            self.error = nan
            return nan
        below = np.cumsum(negative) - negative
        self.error = float((positive * negative).sum() / pairs / 2)
        return float((positive * (below + negative / 2)).sum() / pairs)

    def reset(self) -> None:
        """Forget the samples."""
        self._counts[:] = 0


def _check(what: str, numbers: npt.NDArray[Any], wrong: npt.NDArray[np.bool_], expected: str) -> None:
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        raise ConfigurationError(f"AUC: {what} holds {numbers[at]} at {at}, expected {expected}")
