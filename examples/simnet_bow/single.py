"""Learn which of two titles answers a query, from clicks: bags of words, and a hinge on each pair."""

import argparse
import tempfile
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from fleet.tables import Table, TableConfig
from fleet.tables.export import dense
from fleet.tables.first_values import Uniform
from fleet.tables.rules import SGD

WIDTH, HIDDEN, MARGIN = 128, 128, 0.1
LONGEST = 16
TOPICS, OF_TOPIC, MIXED = 50, 100, 0.4


class Simnet(nn.Module):
    """The cosines of queries and titles, each a sum of the vectors of its words and a layer."""

    def __init__(self, words: int) -> None:
        super().__init__()
        first_values = Uniform(-0.1, 0.1)
        table = TableConfig("words", WIDTH, SGD(), words, first_values)
        vectors = dense(table, Table(table).rows())
        self.words = nn.EmbeddingBag.from_pretrained(vectors, False, mode="sum", sparse=True, padding_idx=0)
        self.of_query = nn.Linear(WIDTH, HIDDEN)
        self.of_title = nn.Linear(WIDTH, HIDDEN)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return how near each query is to either title; `ids` has the shape (queries, 3, words)."""
        bags = nn.functional.softsign(self.words(ids.flatten(0, 1))).unflatten(0, ids.shape[:2])
        return torch.cosine_similarity(self.of_query(bags[:, :1]), self.of_title(bags[:, 1:]), dim=2)


class Clicks(IterableDataset[torch.Tensor]):
    """Lines of a file: a query, the title that was clicked and one that was not, parted by tabs.

    Words are hashed to ids from 1 on; texts are filled up with 0, or cut.
    """

    def __init__(self, file: Path, words: int, share: tuple[int, int] = (0, 1)) -> None:
        super().__init__()
        self.file, self.words, self.share = file, words, share

    def __iter__(self) -> Iterator[torch.Tensor]:
        with self.file.open("rb") as lines:
            for number, line in islice(enumerate(lines, start=1), self.share[0], None, self.share[1]):
                texts = line.split(b"\t")
                if len(texts) != 3:
                    raise ValueError(
                        f"{self.file}, line {number} has {len(texts)} texts, expected a query and two titles"
                    )
                ids = torch.zeros(3, LONGEST, dtype=torch.int64)
                for row, text in zip(ids, texts, strict=True):
                    words = [1 + zlib.crc32(word) % (self.words - 1) for word in text.split()][:LONGEST]
                    row[: len(words)] = torch.tensor(words, dtype=torch.int64)
                yield ids


def generate(file: Path, lines: int, seed: int) -> None:
    """Write such a file; the words of a query and of the title that was clicked are mostly of one topic."""
    random = np.random.default_rng(seed)
    shares = np.cumsum(1 / np.arange(1, OF_TOPIC + 1))

    def text(topic: int) -> str:
        topics = np.full(random.integers(3, 11), topic)
        other = random.random(topics.size) < MIXED
        topics[other] = random.integers(TOPICS, size=other.sum())
        ranks = np.searchsorted(shares, random.random(topics.size) * shares[-1])
        return " ".join(f"t{topic}w{rank}" for topic, rank in zip(topics, ranks, strict=True))

    with file.open("w") as written:
        for _ in range(lines):
            topic, other = random.choice(TOPICS, 2, replace=False)
            print(text(topic), text(topic), text(other), sep="\t", file=written)


@torch.no_grad()
def accuracy(model: nn.Module, file: Path, words: int) -> float:
    """Return for how many queries the title that was clicked is the nearer one."""
    cosines = torch.cat([model(ids) for ids in DataLoader(Clicks(file, words), batch_size=128)])
    return float((cosines[:, 0] > cosines[:, 1]).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="one to train on and one to test on")
    parser.add_argument("--generate", type=int, default=50_000, help="lines, where no file is given")
    parser.add_argument("--words", type=int, default=1_451_594, help="how many rows the table has")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument(
        "--lr", type=float, default=0.2, help="learning rate of the layers; of words, 3 times"
    )
    options = parser.parse_args()

    torch.manual_seed(0)
    model = Simnet(options.words)
    layers = [*model.of_query.parameters(), *model.of_title.parameters()]
    groups = [{"params": layers}, {"params": model.words.parameters(), "lr": 3 * options.lr}]
    optimizer = torch.optim.SGD(groups, lr=options.lr)
    files = options.files
    if not files:
        files = [Path(tempfile.mkdtemp(), name) for name in ("train.tsv", "test.tsv")]
        generate(files[0], options.generate, seed=0)
        generate(files[1], options.generate // 5, seed=1)
    data = Clicks(files[0], options.words)
    for step, ids in enumerate(DataLoader(data, options.batch_size, drop_last=True), start=1):
        optimizer.zero_grad()
        clicked, other = model(ids).unbind(dim=1)
        loss = torch.relu(MARGIN - clicked + other).mean()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.7f}")
    print(f"test accuracy: {accuracy(model, files[-1], options.words):.4f}")


if __name__ == "__main__":
    main()
