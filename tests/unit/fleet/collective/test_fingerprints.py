"""Numbers that travel beside gradients; here the sums are made up."""

import pytest
import torch

from fleet.collective.fingerprints import BITS, Fingerprints, can_count


def summed(numbers: list[int], dtype: torch.dtype = torch.float32, later: int = 0) -> Fingerprints:
    """Return the fingerprints of the first of these trainers, when the exchange has ended."""
    place = torch.zeros(BITS, dtype=dtype)
    mine = Fingerprints(place, len(numbers), later)
    add(mine, numbers, place)
    return mine


def add(mine: Fingerprints, numbers: list[int], place: torch.Tensor) -> None:
    total = torch.zeros_like(place)
    for number in numbers:
        mine.put(number)
        total += place
    place.copy_(total)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64])
def test_any_other_number_of_any_trainer_is_noticed(dtype):
    number = 0xDEADBEEF
    assert summed([number] * 256, dtype).all_alike()
    for bit in range(BITS):
        assert not summed([number] * 255 + [number ^ 1 << bit], dtype).all_alike()


def test_a_number_that_is_the_mean_of_the_others_is_noticed_too():
    assert not summed([2, 1, 3]).all_alike()


def test_what_is_read_later_is_that_of_its_own_exchange():
    place = torch.zeros(BITS)
    mine = Fingerprints(place, 2, later=2)
    answers = []
    for numbers in ([1, 1], [1, 2], [2, 2], [2, 2], [2, 2]):
        add(mine, numbers, place)
        answers.append(mine.all_alike())
    assert answers == [True, True, True, False, True]


def test_a_dtype_that_cannot_count_the_trainers_carries_nothing():
    assert can_count(torch.bfloat16, 256)
    assert not can_count(torch.bfloat16, 257)
    assert can_count(torch.float32, 100_000)
