"""Base classes for ``dataset.set_pipe_command`` programs, which convert the lines of a file to samples.

A generator's program reads lines from stdin and writes one line per sample: for each variable the number of
its values, and the values, all separated by spaces: ``3 1926 8 17 1 0`` has three values of the first
variable and one of the second.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, TypeAlias

from fleet.errors import ConfigurationError

__all__ = ["DataGenerator", "MultiSlotDataGenerator", "MultiSlotStringDataGenerator"]

Sample: TypeAlias = Sequence[tuple[str, Sequence[Any]]]


class DataGenerator:
    """The base class of data generators, which convert lines to samples.

    Notes
    -----
    Paddle's ``fluid.incubate.data_generator.DataGenerator``.
    """

    def __init__(self) -> None:
        self.batch_size_ = 32

    def set_batch(self, batch_size: int) -> None:
        """Set the number of samples passed to each call of `generate_batch` (default 32)."""
        self.batch_size_ = batch_size

    def generate_sample(self, line: str | None) -> Callable[[], Iterable[Sample | None]]:
        """Return a function that yields the samples of a line; to be overridden.

        Parameters
        ----------
        line : str or None
            A line of the file, including the line break; None in `run_from_memory`.

        Returns
        -------
        callable
            Yields lists of pairs, each of a variable's name and the list of its values, in the order of
            ``dataset.set_use_var``. None is skipped.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no generate_sample(line); expected a method that returns a function "
            "that yields samples such as [('words', [1926, 8, 17]), ('label', [1])]"
        )

    def generate_batch(self, samples: list[Sample]) -> Callable[[], Iterable[Sample]]:
        """Return a function that yields a batch's samples, for example padded to equal length.

        Parameters
        ----------
        samples : list of samples
            The samples that `generate_sample` yielded.
        """
        return lambda: iter(samples)

    def run_from_stdin(self) -> None:
        """Convert the lines on stdin to samples on stdout."""
        self._write(chain.from_iterable(self.generate_sample(line)() for line in sys.stdin))

    def run_from_memory(self) -> None:
        """Write the samples of a single call ``generate_sample(None)`` to stdout."""
        self._write(self.generate_sample(None)())

    def _write(self, samples: Iterable[Sample | None]) -> None:
        for batch in self._batches(samples):
            sys.stdout.writelines(f"{self._gen_str(sample)}\n" for sample in self.generate_batch(batch)())
        sys.stdout.flush()

    def _batches(self, samples: Iterable[Sample | None]) -> Iterator[list[Sample]]:
        batch: list[Sample] = []
        for sample in samples:
            if sample is None:
                continue
            batch.append(sample)
            if len(batch) == self.batch_size_:
                yield batch
                batch = []
        if batch:
            yield batch

    def _gen_str(self, sample: Sample) -> str:
        raise NotImplementedError(
            "expected a subclass of MultiSlotDataGenerator or MultiSlotStringDataGenerator"
        )


class MultiSlotStringDataGenerator(DataGenerator):
    """A data generator for string values, which are written unchanged.

    Notes
    -----
    Paddle's ``fluid.incubate.data_generator.MultiSlotStringDataGenerator``.
    """

    def _gen_str(self, sample: Sample) -> str:
        return " ".join(" ".join((str(len(values)), *values)) for _, values in _checked(sample))


class MultiSlotDataGenerator(DataGenerator):
    """A data generator for integer and float values.

    Notes
    -----
    Paddle's ``fluid.incubate.data_generator.MultiSlotDataGenerator``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._names: list[str] = []

    def _gen_str(self, sample: Sample) -> str:
        names = [name for name, _ in _checked(sample)]
        self._names = self._names or names
        if names != self._names:
            raise ConfigurationError(
                f"a sample has {', '.join(names)}; expected those of the first one, {', '.join(self._names)}"
            )
        return " ".join(f"{len(values)} {' '.join(_numbers(name, values))}" for name, values in sample)


def _numbers(name: str, values: Sequence[Any]) -> list[str]:
    """Format numbers as strings; raise ConfigurationError if there are none, or for other values."""
    if not values:
        raise ConfigurationError(f"{name} has no values; expected one or more: pad it in generate_sample")
    for value in values:
        if not isinstance(value, int | float):
            raise ConfigurationError(f"{name} has the value {value!r}; expected integers or floats")
    return list(map(str, values))


def _checked(sample: Sample) -> Sample:
    if isinstance(sample, list | tuple) and all(
        isinstance(each, list | tuple) and len(each) == 2 and isinstance(each[1], list | tuple)
        for each in sample
    ):
        return sample
    raise ConfigurationError(
        f"generate_sample yielded {sample!r}; expected a list of pairs such as "
        "[('words', [1926, 8, 17]), ('label', [1])]"
    )
