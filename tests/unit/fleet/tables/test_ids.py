"""Virtual shards: of an id alone, even, and on every number of servers as near to even as can be."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.errors import ConfigurationError
from fleet.tables.ids import SHARDS, Placement, shard_of
from fleet.tables.index import RowIndex


@pytest.mark.parametrize("step", [1, 7, 256, 1 << 20, 1 << 40, -3])
def test_ids_are_spread_evenly_over_the_shards(step):
    counts = np.bincount(shard_of(np.arange(256_000, dtype=np.int64) * step), minlength=SHARDS)
    assert counts.size == SHARDS
    assert counts.min() > 0.85 * 1000
    assert counts.max() < 1.15 * 1000


def test_an_id_has_this_shard_for_ever():
    ids = np.array([0, 1, 2, -1, 2**63 - 1, -(2**63), 123_456_789], dtype=np.int64)
    assert shard_of(ids).tolist() == [0, 180, 58, 100, 171, 143, 143]


def test_the_ids_of_a_shard_do_not_meet_in_an_index():
    ids = np.arange(2_000_000)
    ids = ids[shard_of(ids) == 7]
    index = RowIndex()
    index.find_or_add(ids)
    buckets, _ = index._hash(ids)
    assert np.unique(buckets).size > 0.75 * index._buckets.size


@given(st.integers(1, SHARDS))
def test_servers_hold_as_many_shards_but_one(servers):
    held = np.bincount(Placement.over(servers).servers)
    assert held.size == servers
    assert held.max() - held.min() <= 1


@given(
    ids=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=60).map(
        lambda ids: np.array(ids, dtype=np.int64)
    ),
    servers=st.integers(1, 9),
)
def test_each_place_goes_to_the_server_of_its_shard_in_order(ids, servers):
    placement = Placement.over(servers)
    found = placement.positions(ids)
    assert sorted(np.concatenate([*found.values(), np.zeros(0)]).tolist()) == list(range(ids.size))
    for server, places in found.items():
        assert places.size
        assert np.all(np.diff(places) > 0)
        assert {placement.servers[shard] for shard in shard_of(ids[places]).tolist()} == {server}


@pytest.mark.parametrize("servers", [0, 257])
def test_more_servers_than_shards_are_refused(servers):
    with pytest.raises(ConfigurationError, match=rf"on {servers} parameter servers, expected 1 to 256"):
        Placement.over(servers)


def test_a_placement_is_of_all_shards():
    with pytest.raises(ConfigurationError, match=r"of 3 virtual shards, expected 256"):
        Placement((0, 0, 0))
