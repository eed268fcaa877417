"""Tables without a barrier: gradients that come at once are counted one by one, as they step rows."""

import threading
from typing import Any, cast

import numpy as np
import pytest
import torch

from fleet.parameter_server.modes import immediate_tables
from fleet.parameter_server.modes.immediate_tables import ImmediateTables
from fleet.parameter_server.table_store import RowUpdate
from fleet.tables import RowGradients


class Store:
    """A store of one table that only notes how its updates are counted."""

    def __init__(self) -> None:
        self.names = {7: "users"}
        self.counts: list[int] = []

    def check(self, table: int, ids: Any) -> None:
        """Take any ids."""

    def apply(self, update: RowUpdate) -> None:
        self.counts.append(update.count)


def test_gradients_that_come_at_once_are_counted_one_by_one(monkeypatch: pytest.MonkeyPatch):
    store, others = Store(), list[threading.Thread]()
    tables = ImmediateTables(cast("Any", store), 2)
    gradient = RowGradients(np.zeros(1, dtype=np.int64), torch.ones(1, 2))
    for trainer in range(2):
        tables.begin(trainer, 0, ({"lr": 0.1},))

    def update_of(*arguments: Any) -> RowUpdate:
        """Let the other trainer's gradient come while an update is made, which waits if it must."""
        if not others:
            others.append(threading.Thread(target=tables.gradient, args=(1, 7, 0, gradient)))
            others[0].start()
            others[0].join(0.2)
        return RowUpdate(*arguments)

    monkeypatch.setattr(immediate_tables, "RowUpdate", update_of)
    tables.gradient(0, 7, 0, gradient)
    others[0].join(10)
    assert store.counts == [1, 2]
