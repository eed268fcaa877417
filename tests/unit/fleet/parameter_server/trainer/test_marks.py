"""Marks of memory: which changes are noticed, and when."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.parameter_server.trainer.marks import ROUND_BYTES, Mark, covers_all, part_of
from fleet.parameter_server.transport.arena import bytes_of


def marked(content: memoryview, round_: int, part: float = 1.0, *, copies: bool = True) -> Mark:
    mark = Mark(len(content), part, copies=copies)
    mark.take(content, round_)
    return mark


@settings(deadline=None)
@given(st.integers(1, 6000), st.booleans(), st.data())
def test_a_changed_byte_of_much_memory_is_noticed_at_once_in_the_first_rounds_and_later_within_one_turn(
    length, copies, data
):
    content = bytearray(length)
    changed = data.draw(st.integers(0, length - 1))
    first = data.draw(st.integers(0, 20))
    mark = Mark(length, 0.001, copies=copies)  # which is 1 KiB a round
    noticed = []
    for round_ in range(first, first + -(-length // 1024)):
        mark.take(memoryview(content), round_)
        assert mark.matches(memoryview(content))
        content[changed] ^= 1
        noticed.append(not mark.matches(memoryview(content)))
    assert any(noticed)
    assert noticed[0] or not covers_all(first)


@settings(deadline=None)
@given(st.integers(1, 6000), st.data())
def test_a_changed_byte_of_little_memory_is_noticed_in_every_round(length, data):
    content = bytearray(length)
    changed = data.draw(st.integers(0, length - 1))
    mark = marked(memoryview(content), data.draw(st.integers(0, 20)))
    content[changed] ^= 1
    assert not mark.matches(memoryview(content))


def test_nothing_has_a_mark_too():
    for round_ in (0, 9):
        for part in (0.5, 1.0):
            assert marked(memoryview(b""), round_, part).matches(memoryview(b""))


def test_what_a_round_covers_of_a_large_model_is_what_it_may_cost():
    small = [torch.empty(ROUND_BYTES // 8), torch.empty(ROUND_BYTES // 8)]
    assert part_of(small) == 1.0
    assert part_of([]) == 1.0
    large = [*small, torch.empty(3 * ROUND_BYTES // 4, dtype=torch.int8).view(torch.float32)]
    assert part_of([torch.empty(1 << 40, device="meta")]) == 0.02
    part = part_of(large)
    covered = 0
    for each in large:
        content = bytes_of(each.zero_())
        mark = marked(content, 4, part)
        for begin in range(0, len(content), 1024):
            content[begin] = 1
            covered += 1024 * (not mark.matches(content))
            content[begin] = 0
    assert ROUND_BYTES <= covered <= ROUND_BYTES + 1024 * len(large)


def moved(count: int, by: float, size: float = 1.0) -> tuple[torch.Tensor, Any]:
    """Return numbers of a size, and how they come back from where something is added and subtracted."""
    numbers = size * torch.randn(count, generator=torch.Generator().manual_seed(3))
    ascent = by * torch.randn(count, generator=torch.Generator().manual_seed(4))
    return numbers, lambda: numbers.add_(ascent).sub_(ascent)


@pytest.mark.parametrize(
    ("by", "size"),
    [
        pytest.param(0.05, 0.1, id="less-than-the-numbers"),
        pytest.param(0.05, 1e-5, id="more-than-the-numbers"),
    ],
)
@pytest.mark.parametrize("round_", [0, 9])
def test_what_comes_back_but_for_rounding_beyond_the_first_kibibyte_has_not_changed(by, size, round_):
    numbers, move = moved(200_000, by, size)
    first = numbers[:256].clone()
    mark = marked(bytes_of(numbers), round_)
    move()
    numbers[:256] = first  # to the bit, as zeros come back
    assert not mark.matches(bytes_of(numbers))
    assert mark.matches_but_for_rounding(bytes_of(numbers), numbers.dtype)


@pytest.mark.parametrize("written", [5.0, float("nan"), float("inf")])
@pytest.mark.parametrize("at", [0, 300, 199_999])
@pytest.mark.parametrize("part", [0.01, 1.0])
def test_one_written_number_is_told_from_rounding_wherever_it_is(written, at, part):
    numbers, move = moved(200_000, 0.05, 0.1)
    mark = marked(bytes_of(numbers), 0, part)
    move()
    numbers[at] = written
    assert not mark.matches_but_for_rounding(bytes_of(numbers), numbers.dtype)


def test_numbers_that_are_none_come_back_too():
    numbers, move = moved(1000, 0.05, 0.1)
    numbers[:3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    mark = marked(bytes_of(numbers), 0)
    move()
    assert not mark.matches(bytes_of(numbers))
    assert mark.matches_but_for_rounding(bytes_of(numbers), numbers.dtype)


def test_a_checksum_tells_no_rounding_from_writing():
    numbers, move = moved(1000, 0.05, 0.1)
    mark = marked(bytes_of(numbers), 0, 0.1, copies=False)
    move()
    assert not mark.matches_but_for_rounding(bytes_of(numbers), numbers.dtype)
