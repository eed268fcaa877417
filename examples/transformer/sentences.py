"""Pairs of sentences as numbers: a vocabulary of both languages' words."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

PAD, BEGIN, END, UNKNOWN = range(4)
SPECIAL = ("<pad>", "<begin>", "<end>", "<unknown>")


def read(path: Path) -> list[tuple[str, str]]:
    """Return the pairs of a file that has one in each line, and a tabulator between both sentences."""
    pairs = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        source, tab, target = line.partition("\t")
        if not (source.strip() and tab and target.strip()):
            raise SystemExit(
                f"{path}:{number}: found {line!r}; expected two sentences and a tabulator between"
            )
        pairs.append((source, target))
    return pairs


class Vocabulary:
    """A number for each of the most frequent words, signs among them, behind those of `SPECIAL`."""

    def __init__(self, sentences: Iterable[str], size: int) -> None:
        counts = Counter(word for sentence in sentences for word in words_of(sentence))
        self.words = [*SPECIAL, *(word for word, _ in counts.most_common(size - len(SPECIAL)))]
        self._number = {word: number for number, word in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, sentence: str) -> torch.Tensor:
        """Return int64[words + 2]: between BEGIN and END."""
        numbers = [self._number.get(word, UNKNOWN) for word in words_of(sentence)]
        return torch.tensor([BEGIN, *numbers, END])

    def decode(self, numbers: Sequence[int]) -> str:
        """Return the words up to END."""
        end = numbers.index(END) if END in numbers else len(numbers)
        return " ".join(self.words[number] for number in numbers[:end] if number != BEGIN)


class Pairs(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Each item is a sentence and its translation, int64[words + 2] each."""

    def __init__(self, pairs: Sequence[tuple[str, str]], vocabulary: Vocabulary) -> None:
        self.pairs, self.vocabulary = pairs, vocabulary

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        source, target = self.pairs[index]
        return self.vocabulary.encode(source), self.vocabulary.encode(target)


def words_of(sentence: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", sentence)


def padded(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sources and the targets of a batch, int64[n, longest] each."""
    sources, targets = (pad_sequence(list(column), True, PAD) for column in zip(*pairs, strict=True))
    return sources, targets
