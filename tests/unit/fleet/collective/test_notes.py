"""What travels beside gradients; here the averages are made up."""

import pytest
import torch

from fleet.collective.notes import BITS, Notes

CPU = torch.device("cpu")


def exchanged(notes: Notes, trainers: list[tuple[list[int], int]]) -> Notes:
    """Return the notes of one of these trainers, when a reducer has averaged everybody's."""
    parts = [notes.gradient(absent, number) / len(trainers) for absent, number in trainers]
    notes.leaf.grad = torch.stack(parts).sum(0)
    return notes


@pytest.mark.parametrize("size", [2, 3, 255, 1000])
def test_any_other_number_of_any_trainer_is_noticed(size):
    number = 0xDEADBEEF
    alike: list[tuple[list[int], int]] = [([], number)] * (size - 1)
    assert exchanged(Notes(0, size, CPU), [*alike, ([], number)]).all_alike()
    for bit in range(BITS):
        assert not exchanged(Notes(0, size, CPU), [*alike, ([], number ^ 1 << bit)]).all_alike()


def test_a_number_that_is_the_mean_of_the_others_is_noticed_too():
    assert not exchanged(Notes(0, 3, CPU), [([], 2), ([], 1), ([], 3)]).all_alike()


def test_what_is_read_later_is_that_of_its_own_exchange():
    notes = Notes(0, 2, CPU, later=2)
    pairs = ([1, 1], [1, 2], [2, 2], [2, 2], [2, 2])
    answers = [exchanged(notes, [([], number) for number in pair]).all_alike() for pair in pairs]
    assert answers == [True, True, True, False, True]


def test_only_what_no_trainer_has_is_nobodys():
    notes = exchanged(Notes(3, 2, CPU), [([1, 2], 0), ([2], 0)])
    assert notes.nobodys([1, 2]) == {2}
    assert notes.nobodys([]) == set()


def test_many_trainers_notes_travel_in_longer_numbers():
    assert Notes(0, 1000, CPU).leaf.dtype is torch.float32
    assert Notes(0, 8000, CPU).leaf.dtype is torch.float64
