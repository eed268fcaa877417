"""Tables that a trainer steps by itself: its own copies of rows, and the servers' of all others."""

from typing import Any
from unittest.mock import Mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleet.parameter_server.trainer.local_steps import LocalTables
from fleet.plan.tables import TablePlan
from fleet.tables import TableConfig
from fleet.tables.first_values import FirstValues
from fleet.tables.rules import SGD


class Made(FirstValues):
    """Remembers whose first values were made; all are 0."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def of(self, ids: NDArray[np.int64], dimension: int, key: Any) -> NDArray[np.float32]:
        self.ids += ids.tolist()
        return np.zeros((ids.size, dimension), np.float32)


def served(_: str, ids: NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(ids.astype(np.float32))[:, None]


def test_rows_are_the_trainers_copies_where_there_are_any_and_else_the_servers():
    made = Made()
    plan = TablePlan(0, TableConfig("clicks", 1, SGD(), first_values=made, options={"lr": 1.0}), None)
    rows = Mock(fetch=Mock(side_effect=served))
    rows.values_seen = served
    tables = LocalTables([plan], 2, rows)
    tables.step({"clicks": (np.array([3, 5]), torch.ones(2, 1))}, ())
    made.ids.clear()
    for ids, expected, asked in (
        ([3, 4, 5, 6], [2.0, 4.0, 4.0, 6.0], [4, 6]),
        ([3, 5], [2.0, 4.0], None),
        ([4], [4.0], [4]),
    ):
        rows.fetch.reset_mock()
        assert tables.fetch("clicks", np.array(ids))[:, 0].tolist() == expected
        assert [each.args[1].tolist() for each in rows.fetch.call_args_list] == ([asked] if asked else [])
    assert made.ids == []
