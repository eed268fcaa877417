"""Merged row gradients beside sums that are made one by one."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fleet.tables import Constant, Table, TableConfig
from fleet.tables.gradients import RowGradients, merge
from fleet.tables.ids import Placement
from fleet.tables.rules import SGD

IDS = st.lists(st.integers(-5, 5), max_size=20)


def gradients(ids, seed):
    values = torch.randn(len(ids), 3, generator=torch.Generator().manual_seed(seed)) * 1e3
    return RowGradients(np.array(ids, dtype=np.int64), values)


@given(st.lists(IDS, min_size=1, max_size=4))
def test_a_row_s_sum_is_that_of_its_gradients_in_their_order(parts):
    given_ = [gradients(ids, seed) for seed, ids in enumerate(parts)]
    merged = merge(given_)
    assert merged.ids.tolist() == sorted({number for ids in parts for number in ids})
    for number, found in zip(merged.ids, merged.values, strict=True):
        total = torch.zeros(3)
        for part in given_:
            for value in part.values[torch.from_numpy(part.ids == number)]:
                total = total + value
        assert torch.equal(found, total)


def test_what_is_merged_is_not_changed():
    part = gradients([1, 1, 2], 0)
    before = part.values.clone()
    merge([part]).values.fill_(0.0)
    assert torch.equal(part.values, before)


@pytest.mark.parametrize("servers", [2, 3, 7])
def test_any_number_of_servers_holds_the_same_table(servers):
    random = np.random.default_rng(0)
    config = TableConfig("t", 3, SGD(), first_values=Constant(0.1), options={"lr": 0.1})
    whole, parts = Table(config), [Table(config) for _ in range(servers)]
    placement = Placement.over(servers)
    for step in range(1, 20):
        sent = [gradients(random.integers(-50, 50, 40), 7 * step + trainer) for trainer in range(3)]
        together = merge(sent)
        whole.update(together.ids, together.values, step)
        for server, table in enumerate(parts):
            mine = []
            for each in sent:
                places = placement.positions(each.ids).get(server, np.zeros(0, dtype=np.int64))
                mine.append(RowGradients(each.ids[places], each.values[torch.from_numpy(places)]))
            of_server = merge(mine)
            table.update(of_server.ids, of_server.values, step)
    rows = [table.rows() for table in parts]
    order = np.argsort(np.concatenate([each.ids for each in rows]))
    values = torch.cat([each.values for each in rows])[torch.from_numpy(order)]
    assert np.array_equal(np.sort(np.concatenate([each.ids for each in rows])), whole.rows().ids)
    assert torch.equal(values, whole.rows().values)
