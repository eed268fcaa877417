"""The generator against the published known answers of Random123 (kat_vectors, philox4x32 10)."""

import numpy as np
import pytest

from fleet.tables.philox import philox

ALL = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ALL, ALL, ALL, ALL), (ALL, ALL), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter, key, expected):
    words = tuple(np.array([word], dtype=np.uint64) for word in counter)
    assert tuple(int(word[0]) for word in philox(words, key)) == expected


def test_a_counter_s_words_do_not_depend_on_its_neighbours():
    counters = np.arange(1000, dtype=np.uint64)
    zeros = np.zeros(1000, dtype=np.uint64)
    whole = philox((counters, zeros, zeros, zeros), (1, 2))
    for at in (0, 1, 7, 999):
        alone = philox(tuple(part[at : at + 1] for part in (counters, zeros, zeros, zeros)), (1, 2))
        assert [int(word[0]) for word in alone] == [int(word[at]) for word in whole]
