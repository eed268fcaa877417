"""Indexes of rows, beside dictionaries."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fleet.tables import Constant, Table, TableConfig
from fleet.tables.index import MISSING, DirectIndex, RowIndex, RowNumbers, find_among
from fleet.tables.rules import SGD
from tests.support.tables import Servers, assert_equal, updates

ENDS = (-(2**63), 2**63 - 1, -1, 0)
# Few distinct ids, so that they meet again, and some that share their first place whatever the size.
IDS = st.one_of(st.sampled_from(ENDS), st.integers(-300, 300), st.integers(-300, 300).map(lambda i: i << 54))


def of(ids):
    return np.array(sorted(ids), dtype=np.int64)


class LikeADictionary(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.index = RowIndex()
        self.known: dict[int, int] = {}

    @rule(ids=st.sets(IDS, max_size=200))
    def add(self, ids):
        rows, new = self.index.find_or_add(of(ids))
        for number, row, is_new in zip(of(ids).tolist(), rows.tolist(), new.tolist(), strict=True):
            assert is_new == (number not in self.known)
            assert self.known.setdefault(number, row) == row

    @rule(others=st.sets(IDS, max_size=5), data=st.data())
    def remove(self, others, data):
        chosen = data.draw(st.sets(st.sampled_from(sorted(self.known)))) if self.known else set()
        ids = chosen | others
        rows = self.index.remove(of(ids))
        gone = [self.known.pop(number) for number in of(ids).tolist() if number in self.known]
        assert sorted(rows.tolist()) == sorted(gone)

    @rule(ids=st.lists(IDS, max_size=200))
    def find(self, ids):
        expected = [self.known.get(number, MISSING) for number in ids]
        assert self.index.find(np.array(ids, dtype=np.int64)).tolist() == expected
        assert self.index.find_by_numpy(np.array(ids, dtype=np.int64)).tolist() == expected

    @invariant()
    def rows_are_distinct_and_within_the_end(self):
        assert len(self.index.numbers) == len(self.known)
        assert len(set(self.known.values())) == len(self.known)
        assert all(0 <= row < self.index.numbers.end for row in self.known.values())
        ids, rows = self.index.numbers.items()
        assert dict(zip(ids.tolist(), rows.tolist(), strict=True)) == self.known


TestLikeADictionary = LikeADictionary.TestCase
TestLikeADictionary.settings = hypothesis_settings(deadline=None, max_examples=60, stateful_step_count=20)


@given(st.integers(0, 2**63 - 1), st.integers(1, 2**40))
def test_ids_at_any_distance_are_found_again(start, distance):
    ids = (np.arange(2000, dtype=np.uint64) * np.uint64(distance) + np.uint64(start)).view(np.int64)
    index = RowIndex()
    rows, new = index.find_or_add(ids)
    assert new.all()
    assert np.array_equal(index.find(ids), rows)
    assert len(set(rows.tolist())) == 2000


def test_ids_of_one_mark_are_told_apart():
    inverse = pow(0x9E3779B97F4A7C15, -1, 2**64)  # ids whose hashes differ in their lower half alone
    ids = (np.arange(7 << 40, (7 << 40) + 300, dtype=np.uint64) * np.uint64(inverse)).view(np.int64)
    index = RowIndex()
    assert len(set(index._hash(ids)[1].tolist())) == 1
    rows = index.add(ids[:200])
    assert np.array_equal(index.find(ids), [*rows, *[MISSING] * 100])
    assert sorted(index.remove(ids[50:250]).tolist()) == sorted(rows[50:].tolist())
    assert np.array_equal(index.find(ids), [*rows[:50], *[MISSING] * 250])


def test_most_ids_are_in_their_first_bucket_even_when_an_index_is_about_to_grow():
    index = RowIndex()
    ids = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, int(0.7 * 2**16))
    index.add(ids[: 2**15])
    index.add(ids[2**15 :])
    assert index._used > 0.69 * index._entries.size
    buckets, marks = index._hash(ids)
    _, found = index._candidates(index._read(buckets), marks)
    assert found.mean() > 0.8


def test_ids_that_lie_apart_in_memory_are_found():
    index = RowIndex()
    ids = np.arange(1000)
    rows = index.add(ids)
    assert np.array_equal(index.find(ids[::3]), rows[::3])


def test_a_removed_id_of_a_full_bucket_is_passed_by():
    """Ids of one first bucket, more than it has places for; then each of them gone in turn."""
    ids = (np.arange(40) + 1) << 54
    for gone in range(40):
        index = RowIndex()
        rows = index.add(ids)
        index.remove(ids[gone : gone + 1])
        rows[gone] = MISSING
        assert np.array_equal(index.find(ids), rows)
        assert np.array_equal(index.find_by_numpy(ids), rows)


def test_ids_that_come_and_go_take_no_more_memory():
    index = RowIndex()
    for start in range(0, 200_000, 500):
        index.find_or_add(np.arange(start, start + 500))
        if start:
            index.remove(np.arange(start - 500, start))
    assert len(index.numbers) == 500
    assert index.nbytes < 40_000


def test_an_index_takes_at_most_24_bytes_a_row():
    index = RowIndex()
    for start in range(0, 1_000_000, 50_000):
        index.find_or_add(np.arange(start, start + 50_000) * 7)
        assert start < 100_000 or index.nbytes <= 24 * len(index.numbers)


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 90)), max_size=20))
def test_numbers_are_given_as_by_a_dictionary_of_rows(changes):
    known: dict[int, int] = {}
    numbers, next_id, most = RowNumbers(), 0, 0
    for gives, count in changes:
        if gives:
            ids = np.arange(next_id, next_id + count)
            next_id += count
            rows = numbers.allocate(ids).tolist()
            assert not set(rows) & set(known)
            known |= dict(zip(rows, ids.tolist(), strict=True))
        else:
            rows = sorted(known)[:count]
            numbers.release(np.array(rows, dtype=np.int64))
            for row in rows:
                del known[row]
        most = max(most, len(known))
        assert len(numbers) == len(known)
        assert numbers.end <= most
        ids, rows = numbers.items()
        assert ids.tolist() == sorted(known.values())
        assert dict(zip(rows.tolist(), ids.tolist(), strict=True)) == known


CHANGES = st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, 99))), max_size=15)


@settings(deadline=None)
@given(CHANGES, CHANGES)
def test_a_direct_index_answers_as_the_hash_index_from_any_moment_on(before, after):
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
        assert np.array_equal(direct.numbers.ids[direct.find(known)], known)


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


@pytest.mark.parametrize("ascending", [[], [5], [-9, -1, 0, 5, 2**62]], ids=["none", "one", "of-both-signs"])
@pytest.mark.parametrize("ids", [[], [5], [2**63 - 1, -1, 4, 5, -(2**63), 5]], ids=["none", "one", "many"])
def test_ids_are_found_among_those_that_ascend(ids, ascending):
    asked, known = np.array(ids, dtype=np.int64), np.array(ascending, dtype=np.int64)
    found, places = find_among(asked, known)
    assert found.tolist() == [each in ascending for each in ids]
    assert known[places].tolist() == asked[found].tolist()
