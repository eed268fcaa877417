"""Numbers of rows: each given once until it is given back, and the lowest ones that there are."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.tables.numbers import RowNumbers


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 90)), max_size=20))
def test_as_a_dictionary_of_rows(changes):
    known: dict[int, int] = {}
    numbers, next_id, most = RowNumbers(), 0, 0
    for gives, count in changes:
        if gives:
            ids = np.arange(next_id, next_id + count)
            next_id += count
            rows = numbers.give(ids).tolist()
            assert not set(rows) & set(known)
            known |= dict(zip(rows, ids.tolist(), strict=True))
        else:
            rows = sorted(known)[:count]
            numbers.give_back(np.array(rows, dtype=np.int64))
            for row in rows:
                del known[row]
        most = max(most, len(known))
        assert len(numbers) == len(known)
        assert numbers.end <= most
        ids, rows = numbers.items()
        assert ids.tolist() == sorted(known.values())
        assert dict(zip(rows.tolist(), ids.tolist(), strict=True)) == known
