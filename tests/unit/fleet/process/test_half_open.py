"""Of connections of whom nobody knows: which goes where there are too many."""

import pytest

from fleet.process.half_open import Unknown


@pytest.mark.parametrize(
    ("hosts", "goes"),
    [
        pytest.param("abc", 0, id="of-as-many-hosts-the-oldest"),
        pytest.param("abbc", 1, id="the-oldest-of-the-host-that-has-most"),
        pytest.param("abba", 0, id="of-two-such-hosts-the-oldest"),
        pytest.param("bccccca", 1, id="nobody-pays-for-another-host"),
    ],
)
def test_who_opens_most_gives_up_first(hosts: str, goes: int):
    unknown = Unknown[int](len(hosts) - 1)
    gone = [unknown.add(number, host) for number, host in enumerate(hosts)]
    assert gone == [None] * (len(hosts) - 1) + [goes]


def test_one_that_is_known_makes_room_once():
    unknown = Unknown[int](2)
    unknown.add(0, "a")
    unknown.add(1, "a")
    for _ in range(2):
        unknown.remove(0, "a")
    assert unknown.add(2, "b") is None
    assert unknown.add(3, "b") == 2
