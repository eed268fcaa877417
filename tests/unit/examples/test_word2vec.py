"""word2vec's pairs come of one stretch of its text after the other, and trainers share them."""

import runpy
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

EXAMPLE = Path(__file__).resolve().parents[3] / "examples/word2vec/train.py"
WORDS = [f"w{number % 97}" for number in range(3000)]


@pytest.fixture
def word2vec() -> SimpleNamespace:
    """Return what the script has, with stretches of 1,000 words and 500 pairs to test on."""
    found = runpy.run_path(str(EXAMPLE))
    found["Batches"].__iter__.__globals__.update(STRETCH=1000, TEST_PAIRS=500)
    return SimpleNamespace(**found)


def test_a_stretch_is_trained_on_before_the_next_one_is_read(word2vec):
    read = []

    def words() -> Iterator[str]:
        for word in WORDS:
            read.append(word)
            yield word

    batches = iter(word2vec.Batches(words, Counter(WORDS).most_common(), 100))
    for of_stretch in (1000, 2000, 3000):
        next(batches)
        assert len(read) <= of_stretch
        for _ in range(90):
            next(batches)


@pytest.mark.parametrize("num", [2, 3])
def test_trainers_have_the_pairs_of_one_process_between_them_and_none_to_test_on(word2vec, num):
    counts = Counter(WORDS).most_common()

    def batches(size: int, *share: tuple[int, int]) -> Iterator[torch.Tensor]:
        return iter(word2vec.Batches(lambda: iter(WORDS), counts, size, *share))

    alone = batches(50 * num)
    for together in zip(*(batches(50, (index, num)) for index in range(num)), strict=False):
        assert torch.equal(torch.stack(together, dim=1).flatten(0, 1), next(alone))
    test = word2vec.Batches(lambda: iter(WORDS), counts, 50).held_out()
    assert test.shape == (500, 7)
    assert not torch.equal(test, torch.cat(list(islice(batches(50), 10))))


def test_the_words_of_a_text_are_those_of_its_lines(word2vec, tmp_path):
    (tmp_path / "text").write_text("One, two;\nTHREE four\n\nfive")
    assert list(word2vec.words_of(tmp_path / "text", None)) == ["one", "two", "three", "four", "five"]
    assert list(word2vec.words_of(tmp_path / "text", 3)) == ["one", "two", "three"]
    assert len(list(word2vec.words_of(None, 70_000))) > 60_000
