"""Tables under Paddle's optimizers, of which most step every row in each update, on two servers."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fleet import optim
from fleet.errors import ConfigurationError
from fleet.parameter_server.store import FailedStep
from fleet.parameter_server.table_store import RowUpdate, TableStore
from fleet.plan.tables import TablePlan
from fleet.tables import CountFilter, RowGradients, TableConfig
from fleet.tables.geo import server_config
from fleet.tables.gradients import merge
from fleet.tables.ids import SHARDS, shard_of
from fleet.tables.rules import PaddleAdam, PaddleMomentum, PaddleSGD, rule_of
from tests.support.paddle_steps import ARRAYS, CASES, CLASSES, RECORD, TOLERANCE, decay, options_of

ROWS, DIMENSION = 7, 2
IDS = np.arange(ROWS)
ON_TABLES = {name: case for name, case in CASES.items() if not case["clip"] and not case["param_attr"]}


class Initial:
    """The first values of the recorded table."""

    def of(self, ids: np.ndarray, dimension: int, key: tuple[int, int]) -> np.ndarray:
        del dimension, key
        rows: np.ndarray = ARRAYS["initial/table_sparse"][ids]
        return rows


class Servers:
    """One table on two servers."""

    def __init__(self, optimizer_class: type, group: Mapping[str, Any]) -> None:
        rule, options = rule_of("t", optimizer_class, group)
        config = TableConfig("t", DIMENSION, rule, ROWS, Initial(), options=options)
        self.group = dict(group)
        halves = np.arange(SHARDS) % 2
        self._of = halves[shard_of(IDS)]
        self._stores = [
            TableStore([TablePlan(0, config, 0)], FailedStep("a:1"), np.flatnonzero(halves == each).tolist())
            for each in range(2)
        ]

    def step(self, ids: np.ndarray, gradient: Tensor) -> None:
        merged = merge([RowGradients(ids, gradient)])
        for server, store in enumerate(self._stores):
            mine = self._of[merged.ids] == server
            part = RowGradients(merged.ids[mine], merged.values[torch.from_numpy(mine)])
            store.apply(RowUpdate(0, part, (self.group,), ()))

    def rows(self) -> np.ndarray:
        values = np.empty((ROWS, DIMENSION), dtype=np.float32)
        for server, store in enumerate(self._stores):
            mine = IDS[self._of == server]
            assert mine.size, "each server has rows"
            values[mine] = store.read(0, mine).numpy()
        return values


def group_of(case: Mapping[str, Any]) -> tuple[type, dict[str, Any]]:
    kind = CLASSES[case["optimizer"]]
    options = options_of(case["arguments"]) | decay(case["regularization"])
    made = kind([torch.nn.Parameter(torch.zeros(1))], **options)
    return kind, {name: value for name, value in made.param_groups[0].items() if name != "params"}


@pytest.mark.parametrize("name", [each for each in ON_TABLES if each != "adam_lazy"])
def test_rows_on_servers_are_those_of_paddles_dense_table(name):
    """Also rows without a gradient in a batch: velocities, means and regularizers move them."""
    servers = Servers(*group_of(ON_TABLES[name]))
    for step in range(RECORD["steps"]):
        gradient = torch.from_numpy(ARRAYS["feed/ge"][step].copy())
        servers.step(ARRAYS["feed/ids"][step].ravel(), gradient)
        expected = ARRAYS[f"{name}/table_dense"][step]
        np.testing.assert_allclose(servers.rows(), expected, rtol=0, atol=TOLERANCE, err_msg=f"step {step}")


def test_lazy_adam_on_servers_is_that_of_one_process():
    kind, group = group_of(CASES["adam_lazy"])
    servers, table = (
        Servers(kind, group),
        torch.nn.Parameter(torch.from_numpy(ARRAYS["initial/table_sparse"].copy())),
    )
    optimizer = optim.Adam([table], lr=group["lr"], lazy_mode=True)
    for step in range(RECORD["steps"]):
        ids, gradient = ARRAYS["feed/ids"][step].ravel(), torch.from_numpy(ARRAYS["feed/ge"][step].copy())
        table.grad = torch.sparse_coo_tensor(
            torch.from_numpy(ids)[None], gradient, table.shape, check_invariants=True
        )
        optimizer.step()
        servers.step(ids, gradient)
        np.testing.assert_allclose(servers.rows(), table.detach(), rtol=0, atol=TOLERANCE)


def test_an_update_without_gradients_moves_rows_too():
    _, group = group_of(CASES["momentum"])
    servers = Servers(optim.Momentum, group)
    servers.step(np.array([3]), torch.ones(1, DIMENSION))
    before = servers.rows()
    servers.step(np.zeros(0, dtype=np.int64), torch.zeros(0, DIMENSION))
    moved = np.flatnonzero((servers.rows() != before).any(axis=1))
    assert moved.tolist() == [3]


def test_a_regularizer_moves_rows_that_were_never_looked_up():
    _, group = group_of(CASES["sgd_l2"])
    servers = Servers(optim.SGD, group)
    servers.step(np.array([3]), torch.zeros(1, DIMENSION))
    np.testing.assert_allclose(servers.rows(), ARRAYS["initial/table_sparse"] * (1 - 0.1 * 0.01), rtol=1e-6)


@pytest.mark.parametrize(
    "given",
    [
        {"rule": PaddleMomentum()},
        {"rule": PaddleAdam()},
        {"rule": PaddleSGD(), "options": {"l1_decay": 0.1}},
        {"rule": PaddleMomentum(), "num_embeddings": 7, "admission": CountFilter(2)},
    ],
    ids=["momentum", "adam", "regularized", "admission"],
)
def test_a_table_of_any_id_cannot_step_every_row(given):
    with pytest.raises(ConfigurationError, match="steps every row in each update"):
        TableConfig("t", DIMENSION, **given)


@pytest.mark.parametrize(
    "given", [{"rule": PaddleSGD()}, {"rule": PaddleAdam(), "options": {"lazy_mode": True}}]
)
def test_a_table_of_any_id_can_step_rows_with_a_gradient(given):
    assert not TableConfig("t", DIMENSION, **given).steps_every_row


def test_in_geo_mode_a_rule_that_steps_every_row_is_refused():
    with pytest.raises(ConfigurationError, match="in GEO mode a trainer has only rows that it has looked up"):
        server_config(TableConfig("t", DIMENSION, PaddleAdam(), 7))
