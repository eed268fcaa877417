"""A regression dataset with 13 normalized features: 80 % training samples, 20 % test samples.

Paddle's data, house prices in Boston, is neither shipped nor downloaded. If the folder ``FLEET_DATASET_DIR``
contains Paddle's file ``uci_housing/housing.data``, that file is read; Paddle downloads it to
``~/.cache/paddle/dataset``. Without the variable, the samples are the 442 patients of scikit-learn's
``load_diabetes``: its ten measurements, the squares of the body mass index, the blood pressure and s5 and,
instead of a price, a tenth of the disease progression, from 2.5 to 34.6.
"""

import logging
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fleet.errors import ConfigurationError

__all__ = ["test", "train"]

Sample = tuple[NDArray[np.float64], NDArray[np.float64]]

FOLDER_VARIABLE: Final = "FLEET_DATASET_DIR"
_FEATURES: Final = 13
_FILE: Final = Path("uci_housing", "housing.data")
_SQUARED: Final = (2, 3, 8)
_TRAIN_SHARE: Final = 0.8
_log = logging.getLogger(__name__)


def train(folder: str | os.PathLike[str] | None = None) -> Callable[[], Iterator[Sample]]:
    """Return a reader of the training samples.

    Parameters
    ----------
    folder : path, optional
        The folder that contains ``uci_housing/housing.data``; by default ``FLEET_DATASET_DIR``.

    Returns
    -------
    callable
        Each call starts an iterator over pairs of float64 arrays: features of shape (13,), with a range of 1
        and a mean of 0 over all samples, and the price of shape (1,).

    Raises
    ------
    ConfigurationError
        The folder has no such file, or the file is malformed; or there is no folder, and scikit-learn is not
        installed.

    Notes
    -----
    Paddle's ``paddle.dataset.uci_housing.train``.
    """
    samples = _samples(_named(folder))
    return _reader(samples[: int(len(samples) * _TRAIN_SHARE)])


def test(
    folder: str | os.PathLike[str] | None = None,  # noqa: PT028 - no test but the name in Paddle
) -> Callable[[], Iterator[Sample]]:
    """Return a reader of the test samples; see `train`.

    Parameters
    ----------
    folder : path, optional
        As for `train`.
    """
    samples = _samples(_named(folder))
    return _reader(samples[int(len(samples) * _TRAIN_SHARE) :])


def _named(folder: str | os.PathLike[str] | None) -> Path | None:
    named = folder if folder is not None else os.environ.get(FOLDER_VARIABLE)
    return Path(named) if named else None


def _reader(samples: NDArray[np.float64]) -> Callable[[], Iterator[Sample]]:
    def read() -> Iterator[Sample]:
        for sample in samples:
            yield sample[:-1], sample[-1:]

    return read


@cache
def _samples(folder: Path | None) -> NDArray[np.float64]:
    """Return all samples, float64[n, 14]; the last column is the price."""
    samples = _patients() if folder is None else _houses(folder / _FILE)
    features = samples[:, :_FEATURES]
    samples[:, :_FEATURES] = (features - features.mean(axis=0)) / np.ptp(features, axis=0)
    return samples


def _houses(path: Path) -> NDArray[np.float64]:
    try:
        numbers = np.array(path.read_text().split(), dtype=np.float64)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{path} cannot be read: {error}; expected the original's file, lines of {_FEATURES} features "
            f"and a price, or no {FOLDER_VARIABLE} for the data that ships with scikit-learn"
        ) from error
    if not numbers.size or numbers.size % (_FEATURES + 1):
        raise ConfigurationError(
            f"{path} has {numbers.size} numbers; expected a multiple of {_FEATURES + 1}: lines of "
            f"{_FEATURES} features and a price"
        )
    return numbers.reshape(-1, _FEATURES + 1)


def _patients() -> NDArray[np.float64]:
    try:
        from sklearn.datasets import load_diabetes  # imported here: only this data needs scikit-learn
    except ImportError as error:
        raise ConfigurationError(
            "paddle.dataset.uci_housing: scikit-learn is not installed; install it, or name the folder of "
            f"{_FILE} in {FOLDER_VARIABLE}"
        ) from error
    _log.info(
        "paddle.dataset.uci_housing reads scikit-learn's diabetes data; %s can name the folder of %s",
        FOLDER_VARIABLE,
        _FILE,
    )
    patients = load_diabetes(scaled=False)
    measured = np.asarray(patients.data, dtype=np.float64)
    return np.column_stack([measured, measured[:, _SQUARED] ** 2, np.asarray(patients.target) / 10])
