"""Data generators write the lines that the original's data feed reads."""

import io
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fleet.errors import ConfigurationError
from fleet.fluid.incubate import data_generator


class Words(data_generator.MultiSlotDataGenerator):
    """Yields the numbers of each line, and their count as the label."""

    def generate_sample(self, line: str | None) -> Callable[[], Iterator[Any]]:
        def samples() -> Iterator[Any]:
            words = [int(word) for word in (line or "4 5").split()]
            yield [("words", words), ("label", [len(words)])] if words != [0] else None

        return samples


def written(run: Callable[[], None], lines: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    monkeypatch.setattr(sys, "stdout", output := io.StringIO())
    run()
    return output.getvalue()


def test_each_value_follows_the_number_of_values(monkeypatch: pytest.MonkeyPatch):
    assert written(Words().run_from_stdin, "1926 8 17\n0\n7\n", monkeypatch) == "3 1926 8 17 1 3\n1 7 1 1\n"
    assert written(Words().run_from_memory, "", monkeypatch) == "2 4 5 1 2\n"


def test_batches_are_made_of_the_samples(monkeypatch: pytest.MonkeyPatch):
    class Padded(Words):
        def generate_batch(self, samples: list[Any]) -> Callable[[], Iterator[Any]]:
            longest = max(len(sample[0][1]) for sample in samples)

            def padded() -> Iterator[Any]:
                for (name, words), label in samples:
                    yield [(name, words + [0] * (longest - len(words))), label]

            return padded

    generator = Padded()
    generator.set_batch(2)
    lines = written(generator.run_from_stdin, "1\n2 3\n4\n", monkeypatch)
    assert lines == "2 1 0 1 1\n2 2 3 1 2\n1 4 1 1\n"


def test_floats_keep_their_digits(monkeypatch: pytest.MonkeyPatch):
    generator = Words()
    generator.generate_sample = lambda _: lambda: iter([(("x", [0.1, 2]),)])  # type: ignore[assignment,method-assign]
    assert written(generator.run_from_memory, "", monkeypatch) == "2 0.1 2\n"


def test_texts_are_written_as_they_are(monkeypatch: pytest.MonkeyPatch):
    class Texts(data_generator.MultiSlotStringDataGenerator):
        def generate_sample(self, line: str | None) -> Callable[[], Iterator[Any]]:
            return lambda: iter([[("words", str(line).split()), ("label", ["01"])]])

    assert written(Texts().run_from_stdin, "08 17\n", monkeypatch) == "2 08 17 1 01\n"


@pytest.mark.parametrize(
    ("samples", "found"),
    [
        pytest.param([[("words", [])]], "words has no values", id="no-values"),
        pytest.param([[("words", ["a"])]], "the value 'a'; expected integers", id="a-text"),
        pytest.param([["words", 1]], "expected a list of pairs", id="no-pairs"),
        pytest.param(
            [[("a", [1])], [("b", [1])]], "a sample has b; expected those of the first", id="other-names"
        ),
    ],
)
def test_samples_of_another_form_are_refused(samples: list[Any], found: str, monkeypatch: pytest.MonkeyPatch):
    generator = Words()
    generator.generate_sample = lambda _: lambda: iter(samples)  # type: ignore[assignment,method-assign]
    with pytest.raises(ConfigurationError, match=found):
        written(generator.run_from_memory, "", monkeypatch)


def test_a_generator_without_samples_says_what_to_write():
    with pytest.raises(NotImplementedError, match=r"has no generate_sample\(line\)"):
        data_generator.DataGenerator().run_from_memory()
