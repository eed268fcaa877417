"""Tables on one server without sockets, with gradients that trainers send and rows that they receive."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.nn import Parameter

from fleet.parameter_server.modes import Answer, Mode
from fleet.parameter_server.shard import Shard
from fleet.plan.tables import TablePlan
from fleet.tables import Constant, RowGradients, TableConfig
from fleet.tables.rules import SGD
from fleet.wire import HyperParameters
from fleet.wire.rows import read_row_gradient
from tests.support.modes import plans as dense_plans

__all__ = ["RATE_OF_ONE", "Tables", "gradient"]

RATE_OF_ONE: HyperParameters = ({"lr": 1.0},)


def gradient(values: dict[int, float]) -> RowGradients:
    """Return a row gradient, given one number per row."""
    ids = np.array(sorted(values), dtype=np.int64)
    return RowGradients(ids, torch.tensor([[values[int(each)]] for each in ids]).reshape(len(ids), 1))


class Tables:
    """The server half of a mode with tables whose rows are single numbers that start at 0.

    Parameters
    ----------
    mode : Mode
    num_trainers : int
    held : bool
        True if trainers keep copies of the table, and therefore receive changed rows.
    number : int
        The number of equal tables; only the first is updated and read.
    """

    def __init__(self, mode: Mode, num_trainers: int = 2, *, held: bool = False, number: int = 1) -> None:
        own = Parameter(torch.zeros(10, 1)) if held else None
        configs = [
            TableConfig("clicks" + "+" * each, 1, SGD(), 10, first_values=Constant())
            for each in range(number)
        ]
        plans = [TablePlan(each, config, 0, own) for each, config in enumerate(configs)]
        plan, _, parameters = dense_plans(mode, num_trainers)
        shard = Shard(replace(plan, blocks=(), tables=tuple(plans)), parameters)
        self.store = shard.tables
        self.half: Any = mode.make_server(shard, num_trainers)

    def send(
        self, trainer: int, step: int, values: dict[int, float], hyper: HyperParameters = RATE_OF_ONE
    ) -> list[Answer]:
        """Send a trainer's gradient, beginning its step if necessary; return the answers."""
        self.half.begin(trainer, step, hyper)
        answers = self.half.row_gradient(trainer, 0, step, gradient(values))
        return [*answers, *self.half.advance(0, of_table=True)]

    def told(self, trainer: int, step: int, values: dict[int, float]) -> dict[int, float]:
        """Send a trainer's gradient; return the rows in the server's reply."""
        (answer,) = self.send(trainer, step, values)
        assert answer.value is not None
        ids, rows = read_row_gradient(memoryview(answer.value), 1)
        return dict(zip(ids.tolist(), rows[:, 0].tolist(), strict=True))

    def rows(self, trainer: int, step: int, *ids: int) -> list[float]:
        """Return the rows that a trainer's look-up returns at a step."""
        found: list[float] = self.half.look_up(trainer, 0, step, np.array(ids))[:, 0].tolist()
        return found
