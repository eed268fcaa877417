"""A generator runs ahead of its reader up to a bound, passes its errors on, and can be closed."""

import threading
from collections.abc import Iterator

import pytest

from fleet.errors import ConfigurationError
from fleet.fluid.prefetcher import Prefetcher


def test_items_come_in_order_and_end():
    items = Prefetcher(lambda: range(100), 3, "numbers")
    assert list(items) == list(range(100))
    with pytest.raises(StopIteration):
        next(items)


def test_no_more_than_the_capacity_waits():
    made: list[int] = []
    third = threading.Event()

    def numbers() -> Iterator[int]:
        for number in range(10):
            made.append(number)
            if number == 2:
                third.set()
            yield number

    items = Prefetcher(numbers, 2, "numbers")
    assert third.wait(60)
    assert made == [0, 1, 2]  # two wait, and one could not be added
    assert next(items) == 0
    items.close()
    assert len(made) <= 4


def test_an_error_comes_in_the_place_of_its_item():
    def numbers() -> Iterator[int]:
        yield 1
        raise KeyError("two")

    items = Prefetcher(numbers, 5, "numbers")
    assert next(items) == 1
    with pytest.raises(KeyError, match="two"):
        next(items)
    with pytest.raises(StopIteration):
        next(items)


def test_closing_ends_the_thread_and_the_generator():
    ended = threading.Event()

    def numbers() -> Iterator[int]:
        try:
            while True:
                yield 1
        finally:
            ended.set()

    items = Prefetcher(numbers, 2, "endless numbers")
    assert next(items) == 1
    items.close()
    assert ended.wait(60)
    assert not [each for each in threading.enumerate() if each.name == "endless numbers"]
    with pytest.raises(StopIteration):
        next(items)


def test_a_capacity_of_none_is_refused():
    with pytest.raises(ConfigurationError, match="capacity is 0"):
        Prefetcher(list, 0, "nothing")
