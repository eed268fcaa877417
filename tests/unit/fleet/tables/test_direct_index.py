"""The index of bounded ids answers as the hash index that it takes the place of."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.tables import Constant, Table, TableConfig
from fleet.tables.direct_index import DirectIndex
from fleet.tables.index import RowIndex
from fleet.tables.rules import SGD
from tests.support.tables import Servers, assert_equal, updates

CHANGES = st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, 99))), max_size=15)


@settings(deadline=None)
@given(CHANGES, CHANGES)
def test_as_the_hash_index_from_any_moment_on(before, after):
    hashed, other = RowIndex(), RowIndex()
    for index in (hashed, other):
        for _, ids in before:
            index.find_or_add(np.array(sorted(ids), dtype=np.int64))
    direct = DirectIndex(100, other.numbers)
    everything = np.arange(100)
    for adds, chosen in after:
        ids = np.array(sorted(chosen), dtype=np.int64)
        for each in (hashed, direct):
            if adds:
                each.add(ids[each.find(ids) < 0])
            else:
                each.remove(ids)
        assert np.array_equal(direct.find(everything) >= 0, hashed.find(everything) >= 0)
        assert len(direct.numbers) == len(hashed.numbers)
        known = np.flatnonzero(direct.find(everything) >= 0)
        assert np.array_equal(direct.numbers.of_rows[direct.find(known)], known)


def test_a_table_takes_it_once_enough_of_its_ids_have_a_row_and_nothing_else_changes():
    bounded, unbounded = (
        TableConfig("t", 2, SGD(), limit, Constant(0.5), options={"lr": 0.5}) for limit in (400, None)
    )
    one, other = Servers(bounded, 1), Servers(unbounded, 1)
    for ids, gradient, step in updates(np.arange(400), 12, 2):
        one.update(ids, gradient.clone(), step)
        other.update(ids, gradient, step)
    assert_equal(one.rows(), other.rows())
    assert isinstance(one.tables[0]._memory._index, DirectIndex)
    assert isinstance(other.tables[0]._memory._index, RowIndex)


def test_a_sparse_table_has_no_entry_for_every_id():
    table = Table(TableConfig("t", 2, SGD(), 10**9, Constant(0.0)))
    other = Servers(table.config, 1)
    for ids, gradient, step in updates(np.arange(0, 10**9, 10**6), 10, 2):
        other.update(ids, gradient, step)
    assert isinstance(other.tables[0]._memory._index, RowIndex)
