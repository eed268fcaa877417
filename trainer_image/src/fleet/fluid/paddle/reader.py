"""Decorators for readers; a reader is a function that returns an iterator over samples.

`shuffle` uses Python's module `random`, as in Paddle, so ``random.seed`` makes an order reproducible.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain as chained
from itertools import islice
from typing import Any, TypeVar

from fleet.errors import ConfigurationError
from fleet.fluid.prefetcher import Prefetcher

__all__ = [
    "ComposeNotAligned",
    "batch",
    "buffered",
    "cache",
    "chain",
    "compose",
    "firstn",
    "map_readers",
    "shuffle",
    "xmap_readers",
]

T = TypeVar("T")
Reader = Callable[[], Iterator[T]]


class ComposeNotAligned(ConfigurationError, ValueError):  # noqa: N818 - Paddle's name
    """The readers passed to `compose` have different numbers of samples."""


def batch(reader: Reader[T], batch_size: int, drop_last: bool = False) -> Reader[list[T]]:
    """Return a reader that groups samples into lists.

    Parameters
    ----------
    reader : callable
    batch_size : int
        The number of samples of each list.
    drop_last : bool
        Whether to drop a last list that has fewer samples.

    Returns
    -------
    callable

    Raises
    ------
    ConfigurationError
        `batch_size` is below 1.
    """
    size = int(batch_size)
    if size < 1:
        raise ConfigurationError(f"batch_size is {batch_size!r}; expected 1 or more")

    def read() -> Iterator[list[T]]:
        samples = iter(reader())
        while len(entries := list(islice(samples, size))) == size:
            yield entries
        if entries and not drop_last:
            yield entries

    return read


def shuffle(reader: Reader[T], buf_size: int) -> Reader[T]:
    """Return a reader that shuffles samples within a buffer, reproducibly after ``random.seed``.

    Parameters
    ----------
    reader : callable
    buf_size : int
        The number of samples of a buffer.

    Returns
    -------
    callable
    """

    def read() -> Iterator[T]:
        for buffer in batch(reader, buf_size)():
            random.shuffle(buffer)
            yield from buffer

    return read


def map_readers(func: Callable[..., T], *readers: Reader[Any]) -> Reader[T]:
    """Return a reader that applies a function to one sample of each reader.

    Parameters
    ----------
    func : callable
        Takes as many arguments as there are readers.
    *readers : callable
        The shortest one determines the number of samples.

    Returns
    -------
    callable
    """
    return lambda: map(func, *(reader() for reader in readers))


def chain(*readers: Reader[T]) -> Reader[T]:
    """Return a reader that yields the samples of the given readers, one reader after another.

    Parameters
    ----------
    *readers : callable

    Returns
    -------
    callable
    """
    return lambda: chained.from_iterable(reader() for reader in readers)


def compose(*readers: Reader[Any], check_alignment: bool = True) -> Reader[tuple[Any, ...]]:
    """Return a reader that joins one sample of each reader into a tuple.

    Parameters
    ----------
    *readers : callable
        Samples that are not tuples count as tuples of one.
    check_alignment : bool
        Refuse readers with different numbers of samples; if False, the shortest one determines the number.

    Returns
    -------
    callable
        Raises `ComposeNotAligned` on reading if one reader ends before another.
    """

    def read() -> Iterator[tuple[Any, ...]]:
        try:
            for samples in zip(*(reader() for reader in readers), strict=check_alignment):
                yield tuple(
                    chained.from_iterable(each if isinstance(each, tuple) else (each,) for each in samples)
                )
        except ValueError as error:
            # zip() reports different lengths by a ValueError, which a reader may raise as well.
            if "zip()" not in str(error):
                raise
            raise ComposeNotAligned(
                f"compose: the readers have different numbers of samples: {error}"
            ) from None

    return read


def buffered(reader: Reader[T], size: int) -> Reader[T]:
    """Return a reader that prefetches samples in a thread.

    Parameters
    ----------
    reader : callable
    size : int
        The number of samples to read ahead.

    Returns
    -------
    callable
        An error of `reader` is raised in place of the sample that it prevented.
    """

    def read() -> Iterator[T]:
        samples = Prefetcher(reader, size, "paddle.reader.buffered")
        try:
            yield from samples
        finally:
            samples.close()

    return read


def firstn(reader: Reader[T], n: int) -> Reader[T]:
    """Return a reader that stops after the first `n` samples.

    Parameters
    ----------
    reader : callable
    n : int
        The maximum number of samples.

    Returns
    -------
    callable
    """
    return lambda: islice(reader(), n)


def cache(reader: Reader[T]) -> Reader[T]:
    """Read all samples now; return a reader that replays them from memory.

    Parameters
    ----------
    reader : callable

    Returns
    -------
    callable
    """
    samples = tuple(reader())
    return lambda: iter(samples)


def xmap_readers(
    mapper: Callable[[Any], T], reader: Reader[Any], process_num: int, buffer_size: int, order: bool = False
) -> Reader[T]:
    """Return a reader that applies a function to samples in several threads.

    Parameters
    ----------
    mapper : callable
        Called with a sample.
    reader : callable
    process_num : int
        The number of threads.
    buffer_size : int
        The number of samples that may be processed ahead.
    order : bool
        Has no effect: the order is always that of `reader`.

    Returns
    -------
    callable
        An error of `mapper` is raised in place of its value.
    """
    del order

    def read() -> Iterator[T]:
        with ThreadPoolExecutor(process_num, "paddle.reader.xmap_readers") as pool:
            waiting: deque[Future[T]] = deque()
            try:
                for sample in reader():
                    waiting.append(pool.submit(mapper, sample))
                    if len(waiting) >= buffer_size:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    return read
