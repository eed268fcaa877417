"""Rows that are made of given vectors."""

import numpy as np
import pytest
import torch

from fleet.errors import ConfigurationError
from fleet.tables import Constant, CountFilter, Table, TableConfig
from fleet.tables.ids import shard_of
from fleet.tables.rows import part, warm_start
from fleet.tables.rules import Adagrad

CONFIG = TableConfig(
    "t",
    2,
    Adagrad(),
    first_values=Constant(0.5),
    options={"initial_accumulator_value": 0.25},
    admission=CountFilter(100),
)


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_ids_begin_with_their_vectors_and_others_as_ever(kind):
    table = Table(CONFIG)
    table.load(warm_start(CONFIG, kind([7, -3]), kind([[1.0, 2.0], [3.0, 4.0]])))
    assert table.look_up(np.array([7, 8, -3])).tolist() == [[1.0, 2.0], [0.5, 0.5], [3.0, 4.0]]
    assert table.rows().state["sum"].tolist() == [[0.25, 0.25]] * 2


def test_a_server_takes_its_own():
    ids = np.arange(100)
    rows = part(warm_start(CONFIG, ids, torch.ones(100, 2)), range(128))
    assert np.array_equal(rows.ids, ids[shard_of(ids) < 128])


@pytest.mark.parametrize(
    ("ids", "vectors", "said"),
    [
        ([1, 2], [[1.0, 2.0]], r"vectors of shape \[1, 2\], expected \[2, 2\]"),
        ([1, 1], [[1.0, 2.0]] * 2, r"id 1 is given twice"),
        (
            [1.5],
            [[1.0, 2.0]],
            r"ids of type float64 and shape \[1\], expected one dimension of whole numbers",
        ),
        ([3, 9], [[1.0, 2.0], [0.0, float("nan")]], r"the vector of id 9 at position 1 is not finite"),
    ],
)
def test_what_cannot_be_is_refused(ids, vectors, said):
    with pytest.raises(ConfigurationError, match=f"^table t: {said}"):
        warm_start(CONFIG, ids, vectors)
