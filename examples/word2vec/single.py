"""Learn a vector for each word of a text from the words around it: skip-gram with negative sampling."""

import argparse
import re
from collections import Counter
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fleet.tables import Table, TableConfig
from fleet.tables.export import dense
from fleet.tables.first_values import Uniform
from fleet.tables.rules import SGD

WINDOW, NEGATIVES, TEST_PAIRS = 5, 5, 5000


class SkipGram(nn.Module):
    """Two vectors for each word: one as the word that is looked at, one as a word near it."""

    def __init__(self, words: int, dimension: int) -> None:
        super().__init__()
        first_values = Uniform(-0.5 / dimension, 0.5 / dimension)
        table = TableConfig("words", dimension, SGD(), words, first_values)
        self.words = nn.Embedding.from_pretrained(dense(table, Table(table).rows()), False, sparse=True)
        self.near = nn.Embedding.from_pretrained(torch.zeros(words, dimension), False, sparse=True)

    def forward(self, pairs: torch.Tensor) -> torch.Tensor:
        """Return the loss of pairs: int64[n, 2 + NEGATIVES], a word, one near it, and words of chance."""
        logits = (self.near(pairs[:, 1:]) @ self.words(pairs[:, 0]).unsqueeze(2)).squeeze(2)
        logits[:, 1:] *= -1
        return -nn.functional.logsigmoid(logits).sum(dim=1).mean()


def numbered(words: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return a number for each word, from 0 on by how often it comes, and how often each of them does."""
    counts = Counter(words).most_common()
    number = {word: number for number, (word, _) in enumerate(counts)}
    return np.array([number[word] for word in words]), np.array([count for _, count in counts])


def pairs_of(text: np.ndarray, counts: np.ndarray) -> torch.Tensor:
    """Return each word with one up to WINDOW words away, and NEGATIVES others, in an order of chance."""
    random = np.random.default_rng(0)
    near = [
        np.stack(pair, axis=1)
        for distance in range(1, WINDOW + 1)
        for pair in ((text[distance:], text[:-distance]), (text[:-distance], text[distance:]))
    ]
    pairs = random.permutation(np.concatenate(near))
    shares = np.cumsum(counts**0.75)
    negatives = np.searchsorted(shares, random.random((len(pairs), NEGATIVES)) * shares[-1])
    return torch.from_numpy(np.concatenate([pairs, negatives], axis=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, help="a text; without one, the manual of Python")
    parser.add_argument("--words", type=int, help="so many from the beginning of the text; without it, all")
    parser.add_argument("--dimension", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--lr", type=float, default=1.0, help="learning rate")
    options = parser.parse_args()

    words = re.findall(r"\w+", options.file.read_text() if options.file else " ".join(topics.values()))
    text, counts = numbered([word.lower() for word in words[: options.words]])
    model = SkipGram(len(counts), options.dimension)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
    pairs = pairs_of(text, counts)
    train, test = pairs[TEST_PAIRS:], pairs[:TEST_PAIRS]
    loader = DataLoader(TensorDataset(train), options.batch_size, drop_last=True)
    for step, (batch,) in enumerate(loader, start=1):
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.7f}")
    with torch.no_grad():
        print(f"test loss: {model(test):.4f}")


if __name__ == "__main__":
    main()
