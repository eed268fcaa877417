"""A generator of files in the format of Criteo's click logs, with a known ground truth.

Categories are Zipf distributed. Each category and each count has a weight, and the weights of a line add up
to the logit of its click. The quality of a perfect model is therefore known: `write` returns its area under
the ROC curve.
"""

import argparse
import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

import numpy as np
from numpy.typing import NDArray

from fleet.datasets.criteo import CATEGORIES, COUNTS
from fleet.metrics import AUC
from fleet.tables import Normal
from fleet.tables.first_values import generator_key

__all__ = ["write"]

_LINES_AT_ONCE: Final = 10_000
_MISSING: Final = 0.05
_WEIGHT: Final = 0.3
"""Standard deviation of a category's weight; 26 of them make logits of about 1.5."""
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)


def write(path: Path, lines: int, *, vocabulary: int = 10_000, skew: float = 1.05, seed: int = 0) -> float:
    """Write a file of random lines; return the AUC of a perfect model.

    Parameters
    ----------
    path : Path
        Gzipped if the name ends in ``.gz``.
    lines : int
    vocabulary : int
        Categories of each of the 26 columns.
    skew : float
        The r-th category has a frequency proportional to ``r ** -skew``.
    seed : int
        Seed of the lines. The weights do not depend on it, so files with different seeds have the same ground
        truth.

    Returns
    -------
    float
        The area under the ROC curve of the true probabilities on these lines.
    """
    random = np.random.default_rng(seed)
    shares = np.cumsum(np.arange(1, vocabulary + 1) ** -skew)
    auc = AUC(lambda counts: counts)
    with _opened(path) as file:
        for begin in range(0, lines, _LINES_AT_ONCE):
            many = min(_LINES_AT_ONCE, lines - begin)
            ranks = np.searchsorted(shares, random.random((many, CATEGORIES)) * shares[-1])
            ranks[random.random(ranks.shape) < _MISSING] = -1
            counts = np.floor(np.exp(random.normal(size=(many, COUNTS)) * 1.5)).astype(np.int64)
            counts[random.random(counts.shape) < _MISSING] = -1
            clicks = 1.0 / (1.0 + np.exp(-_logits(ranks, counts)))
            labels = (random.random(many) < clicks).astype(np.int64)
            auc.update(clicks, labels)
            file.writelines(_text(labels, counts, ranks))
    return auc.compute()


def _logits(ranks: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the click logit of each line; missing fields contribute nothing."""
    key = generator_key(0, "criteo")
    ids = (np.arange(CATEGORIES, dtype=np.int64) << 32) + ranks
    weights = Normal(0.0, _WEIGHT).of(ids.reshape(-1), 1, key).reshape(ids.shape)
    of_counts = Normal(0.0, _WEIGHT / 2).of(np.arange(-COUNTS, 0), 1, key)[:, 0]
    present = np.log1p(np.maximum(counts, 0))
    return np.asarray(np.where(ranks < 0, 0.0, weights).sum(axis=1) + (present - 0.9) @ of_counts - 1.0)


def _text(labels: NDArray[np.int64], counts: NDArray[np.int64], ranks: NDArray[np.int64]) -> Iterator[bytes]:
    places = np.arange(CATEGORIES, dtype=np.uint64) << np.uint64(32)
    numbers = ((places + ranks.view(np.uint64)) * _GOLDEN) >> np.uint64(32)
    for label, of_counts, of_ranks, of_numbers in zip(labels, counts, ranks, numbers, strict=True):
        fields = [str(label)]
        fields += ["" if count < 0 else str(count) for count in of_counts]
        fields += [
            "" if rank < 0 else f"{number:08x}" for rank, number in zip(of_ranks, of_numbers, strict=True)
        ]
        yield "\t".join(fields).encode() + b"\n"


def _opened(path: Path) -> IO[bytes] | gzip.GzipFile:
    return gzip.open(path, "wb", compresslevel=1) if path.suffix == ".gz" else path.open("wb")


def main() -> None:
    """Write the files named on the command line; print a perfect model's AUC on each."""
    parser = argparse.ArgumentParser(description="Generate files in the format of Criteo's click logs.")
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--lines", type=int, default=100_000, help="lines of each file")
    parser.add_argument("--vocabulary", type=int, default=10_000, help="categories of each of 26 columns")
    parser.add_argument("--skew", type=float, default=1.05, help="of the Zipf distribution")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first file; each next file has the next seed"
    )
    options = parser.parse_args()
    for number, path in enumerate(options.files):
        path.parent.mkdir(parents=True, exist_ok=True)
        auc = write(
            path,
            options.lines,
            vocabulary=options.vocabulary,
            skew=options.skew,
            seed=options.seed + number,
        )
        print(f"{path}: {options.lines} lines, AUC of a perfect model {auc:.4f}")


if __name__ == "__main__":
    main()
