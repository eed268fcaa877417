"""Records that were read lately."""

import numpy as np

from fleet.tables.recent_reads import RecentReads

RECORD = np.dtype((np.void, 4))


def records(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32).view(RECORD)


def test_what_was_kept_is_found_until_it_is_forgotten_or_another_takes_its_place():
    subject = RecentReads(8, RECORD)
    assert not subject.find(np.array([0, 5]))[0].any()
    subject.keep(np.array([3, 5]), records(30, 50))
    kept, found = subject.find(np.array([5, 4, 3, 13]))
    assert kept.tolist() == [True, False, True, False]
    assert found.view(np.int32).tolist() == [50, 30]
    subject.forget(np.array([3, 13]))
    subject.keep(np.array([13]), records(130))
    kept, found = subject.find(np.array([3, 5, 13]))
    assert kept.tolist() == [False, False, True]
    assert found.view(np.int32).tolist() == [130]


def test_of_two_in_one_place_the_last_is_kept_whole():
    subject = RecentReads(4, RECORD)
    subject.keep(np.array([1, 5, 9]), records(10, 50, 90))
    kept, found = subject.find(np.array([1, 5, 9]))
    assert kept.tolist() == [False, False, True]
    assert found.view(np.int32).tolist() == [90]


def test_more_than_there_is_room_for_drives_nothing_out():
    subject = RecentReads(4, RECORD)
    subject.keep(np.array([2]), records(20))
    subject.keep(np.arange(5), records(*range(5)))
    assert subject.find(np.arange(5))[0].tolist() == [False, False, True, False, False]
