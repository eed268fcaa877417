"""Decorators of readers."""

import random
import threading
from collections.abc import Iterator

import pytest

import fleet.fluid.paddle as paddle
from fleet.errors import ConfigurationError
from fleet.fluid.paddle.reader import ComposeNotAligned


def numbers() -> Iterator[int]:
    return iter(range(7))


def test_batches_hold_samples_in_order():
    assert list(paddle.batch(numbers, batch_size=3)()) == [[0, 1, 2], [3, 4, 5], [6]]
    assert list(paddle.batch(numbers, 3, drop_last=True)()) == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(ConfigurationError, match="batch_size is 0"):
        paddle.batch(numbers, 0)


def test_a_reader_can_be_read_again():
    read = paddle.batch(numbers, 4)
    assert list(read()) == list(read())


def test_a_buffer_is_shuffled_by_the_module_random():
    read = paddle.reader.shuffle(numbers, buf_size=4)
    random.seed(3)
    first = list(read())
    expected = [[0, 1, 2, 3], [4, 5, 6]]
    random.seed(3)
    for buffer in expected:
        random.shuffle(buffer)
    assert first == expected[0] + expected[1]
    assert first != list(range(7))


def test_readers_are_mapped_chained_and_cut():
    assert list(paddle.reader.map_readers(lambda a, b: a * b, numbers, numbers)()) == [
        n * n for n in range(7)
    ]
    assert list(paddle.reader.chain(numbers, numbers)()) == [*range(7), *range(7)]
    assert list(paddle.reader.firstn(numbers, 2)()) == [0, 1]


def test_readers_are_composed_into_tuples():
    pairs = paddle.reader.map_readers(lambda n: (n, -n), numbers)
    assert list(paddle.reader.compose(numbers, pairs)())[2] == (2, 2, -2)
    short = paddle.reader.firstn(numbers, 3)
    with pytest.raises(ComposeNotAligned, match="different numbers of samples"):
        list(paddle.reader.compose(numbers, short)())
    assert len(list(paddle.reader.compose(numbers, short, check_alignment=False)())) == 3


def test_a_cache_reads_once():
    reads = []

    def counted() -> Iterator[int]:
        reads.append(1)
        return numbers()

    read = paddle.reader.cache(counted)
    assert list(read()) == list(read()) == list(range(7))
    assert len(reads) == 1


def test_a_buffer_is_read_by_another_thread():
    def names() -> Iterator[str]:
        yield threading.current_thread().name
        raise OSError("the disk is gone")

    read = paddle.reader.buffered(names, 2)()
    assert next(read) == "paddle.reader.buffered"
    with pytest.raises(OSError, match="the disk is gone"):
        next(read)


def test_threads_map_in_the_readers_order():
    both = threading.Barrier(2, timeout=10)

    def mapped(number: int) -> int:
        if number < 2:
            both.wait()  # two samples are in work at once
        return number * 10

    assert list(paddle.reader.xmap_readers(mapped, numbers, 2, 4)()) == [n * 10 for n in range(7)]


def test_an_error_of_a_mapping_thread_is_raised():
    read = paddle.reader.xmap_readers(lambda number: 6 // (3 - number), numbers, 2, 2)()
    assert [next(read), next(read), next(read)] == [2, 3, 6]
    with pytest.raises(ZeroDivisionError):
        next(read)
