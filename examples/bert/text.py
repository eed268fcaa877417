"""A text as examples for BERT: two pieces each, some words of which are hidden."""

import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch.utils.data import Dataset

BEGIN, BETWEEN, HIDDEN, UNKNOWN = range(4)
SPECIAL = ("[CLS]", "[SEP]", "[MASK]", "[UNK]")
HIDDEN_SHARE = 0.15
NOT_HIDDEN = -100
"""Stands for a word that is not to be found, as `torch.nn.functional.cross_entropy` has it."""


def read(paths: Sequence[Path]) -> list[list[str]]:
    """Return the words of each file, signs among them; without a file, of the manual of Python."""
    texts = [path.read_text() for path in paths] or ["\n".join(topics[name] for name in sorted(topics))]
    return [re.findall(r"\w+|[^\w\s]", text.lower()) for text in texts]


def split(documents: Iterable[list[str]]) -> tuple[list[list[str]], list[list[str]]]:
    """Return the first nine tenths of each document, and what is left of each."""
    pairs = [
        (document[: len(document) * 9 // 10], document[len(document) * 9 // 10 :]) for document in documents
    ]
    return [first for first, _ in pairs], [rest for _, rest in pairs]


def vocabulary(documents: Iterable[Sequence[str]], size: int) -> dict[str, int]:
    """Return a number for each of the most frequent words, behind those of `SPECIAL`."""
    counts = Counter(word for document in documents for word in document)
    words = [*SPECIAL, *(word for word, _ in counts.most_common(size - len(SPECIAL)))]
    return {word: number for number, word in enumerate(words)}


class Pieces(Dataset[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]):
    """Each item is a piece of a document, and behind it the next one or, as often, any other one.

    An item is ``int64[length]`` words, ``int64[length]`` the words that are hidden there, `NOT_HIDDEN`
    elsewhere, and ``int64[]``: 1 where the second piece is the next one. It follows from the epoch and its
    number alone, so any number of processes sees the same ones.

    Parameters
    ----------
    documents : sequence of sequence of str
    numbers : mapping
        The vocabulary.
    length : int
        Words of an item, with one sign before and after each piece.
    """

    def __init__(self, documents: Sequence[Sequence[str]], numbers: dict[str, int], length: int) -> None:
        self.documents = [[numbers.get(word, UNKNOWN) for word in document] for document in documents]
        self.piece = (length - 3) // 2
        self.words = len(numbers)
        self.places = [
            (number, start)
            for number, document in enumerate(documents)
            for start in range(0, len(document) - 2 * self.piece + 1, self.piece)
        ]
        if not self.places:
            longest = max(map(len, documents), default=0)
            raise SystemExit(
                f"the longest document has {longest} words; expected {2 * self.piece} for two pieces"
            )
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        chance = random.Random(f"{self.epoch} {index}")  # noqa: S311 no secret
        document, start = self.places[index]
        first = self.documents[document][start : start + self.piece]
        is_next = chance.random() < 0.5
        if not is_next:
            document, start = chance.choice(self.places)
        start += self.piece
        second = self.documents[document][start : start + self.piece]
        words = [BEGIN, *first, BETWEEN, *second, BETWEEN]
        hidden = [NOT_HIDDEN] * len(words)
        places = [place for place, word in enumerate(words) if word not in (BEGIN, BETWEEN)]
        for place in chance.sample(places, max(1, round(HIDDEN_SHARE * len(places)))):
            hidden[place] = words[place]
            drawn = chance.random()
            if drawn < 0.8:
                words[place] = HIDDEN
            elif drawn < 0.9:
                words[place] = chance.randrange(len(SPECIAL), self.words)
        return torch.tensor(words), torch.tensor(hidden), torch.tensor(int(is_next))
