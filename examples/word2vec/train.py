"""Learn a vector for each word of a text from the words around it: skip-gram with negative sampling."""

import argparse
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import count, islice
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from fleet.parameter_server import fleet
from fleet.tables.first_values import Uniform

WINDOW, NEGATIVES, TEST_PAIRS = 5, 5, 5000
STRETCH = 20_000
"""So many words are in memory at once."""


class SkipGram(nn.Module):
    """Two vectors for each word: one as the word that is looked at, one as a word near it."""

    def __init__(self, words: int, dimension: int) -> None:
        super().__init__()
        first_values = Uniform(-0.5 / dimension, 0.5 / dimension)
        self.words = fleet.nn.DistributedEmbedding(words, dimension, name="words", first_values=first_values)
        self.near = fleet.nn.DistributedEmbedding(words, dimension, name="near", first_values=0.0)

    def forward(self, pairs: torch.Tensor) -> torch.Tensor:
        """Return the loss of pairs: int64[n, 2 + NEGATIVES], a word, one near it, and words of chance."""
        logits = (self.near(pairs[:, 1:]) @ self.words(pairs[:, 0]).unsqueeze(2)).squeeze(2)
        logits[:, 1:] *= -1
        return -nn.functional.logsigmoid(logits).sum(dim=1).mean()


def words_of(file: Path | None, most: int | None) -> Iterator[str]:
    """Yield the words of a text, line by line; without one, of the manual that comes with Python."""
    with file.open() if file else nullcontext(topics.values()) as lines:
        yield from islice((word.lower() for line in lines for word in re.findall(r"\w+", line)), most)


class Batches(IterableDataset[torch.Tensor]):
    """Pairs of words, of one stretch of the text after the other.

    Parameters
    ----------
    words : callable
        Returns the words of the text from the beginning.
    counts : list of (str, int)
        How often each comes, the most frequent first.
    size : int
        Pairs in a batch.
    share : (int, int)
        Which of how many parts of the pairs.
    """

    def __init__(
        self,
        words: Callable[[], Iterator[str]],
        counts: list[tuple[str, int]],
        size: int,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        self._words, self._size, self._share = words, size, share
        self._number = {word: number for number, (word, _) in enumerate(counts)}
        self._chances = np.cumsum(np.array([count for _, count in counts]) ** 0.75)

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Yield pairs to train on: int64[size, 2 + NEGATIVES]."""
        index, num = self._share
        begin, pairs = TEST_PAIRS + index, torch.empty(0, 2 + NEGATIVES, dtype=torch.int64)
        for of_stretch in self._stretches():
            pairs = torch.cat([pairs, of_stretch[begin::num]])
            begin = (begin - len(of_stretch)) % num
            while len(pairs) >= self._size:
                yield pairs[: self._size]
                pairs = pairs[self._size :]

    def held_out(self) -> torch.Tensor:
        """Return the first pairs, on which nobody trains."""
        return next(self._stretches())[:TEST_PAIRS]

    def _stretches(self) -> Iterator[torch.Tensor]:
        words = self._words()
        for number in count():
            text = np.array([self._number[word] for word in islice(words, STRETCH)])
            if not text.size:
                return
            yield self._pairs(text, np.random.default_rng(number))

    def _pairs(self, text: np.ndarray, random: np.random.Generator) -> torch.Tensor:
        """Return each word with one up to WINDOW words away, and NEGATIVES others, in an order of chance."""
        near = [
            np.stack(pair, axis=1)
            for distance in range(1, WINDOW + 1)
            for pair in ((text[distance:], text[:-distance]), (text[:-distance], text[distance:]))
        ]
        pairs = random.permutation(np.concatenate(near))
        by_chance = random.random((len(pairs), NEGATIVES)) * self._chances[-1]
        negatives = np.searchsorted(self._chances, by_chance)
        return torch.from_numpy(np.concatenate([pairs, negatives], axis=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, help="a text; without one, the manual of Python")
    parser.add_argument("--words", type=int, help="so many from the beginning of the text; without it, all")
    parser.add_argument("--dimension", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--lr", type=float, default=1.0, help="learning rate")
    options = parser.parse_args()

    fleet.init()
    words = partial(words_of, options.file, options.words)
    counts = Counter(words()).most_common()
    model = SkipGram(len(counts), options.dimension)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=options.lr))
    if fleet.is_server():
        return fleet.run_server()
    fleet.init_worker()
    batches = Batches(words, counts, options.batch_size, share=(fleet.worker_index(), fleet.worker_num()))
    for step, batch in enumerate(DataLoader(batches, batch_size=None), start=1):
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.7f}")
    with torch.no_grad():
        print(f"test loss: {model(batches.held_out()):.4f}")
    fleet.stop_worker()


if __name__ == "__main__":
    main()
