"""Rows in bfloat16: rounded to even, or stochastically, and computed in float32."""

import numpy as np
import pytest
import torch

from fleet.tables import BFloat16, Constant, Table, TableConfig, TableRows, Uniform
from fleet.tables.rules import SGD, Adagrad


def table(row_type, first_values=None, dimension=3, seed=0):
    config = TableConfig(
        "t",
        dimension,
        SGD(),
        first_values=first_values or Constant(1.0),
        options={"lr": 1.0},
        seed=seed,
        row_type=row_type,
    )
    return Table(config)


def test_rows_are_rounded_to_the_nearest_ties_to_even():
    tried = table(BFloat16(), Constant(0.0), 4)
    # Between 1 and 2 bfloat16 has steps of 1/128.
    added = torch.tensor([[1 + 1 / 256, 1 + 3 / 256, 1 + 1.1 / 256, -1 - 0.9 / 256]])
    tried.update(np.array([5]), -added, 1)
    assert tried.look_up(np.array([5])).tolist() == [[1.0, 1 + 4 / 256, 1 + 2 / 256, -1.0]]


@pytest.mark.parametrize("row_type", [BFloat16(), BFloat16(stochastic=True)])
def test_a_row_is_read_before_its_first_update_as_it_will_be_stored(row_type):
    tried, ids = table(row_type, Uniform(-1.0, 1.0)), np.arange(1000)
    before = tried.look_up(ids)
    assert torch.equal(before, before.bfloat16().float())
    tried.update(ids, torch.zeros(1000, 3), 1)
    assert torch.equal(tried.look_up(ids), before)


def test_stochastic_rounding_goes_up_as_often_as_its_mean_asks():
    tried, ids = table(BFloat16(stochastic=True), Constant(0.0), 8), np.arange(5000)
    tried.update(ids, torch.full((5000, 8), -(1 + 0.25 / 128)), 1)
    found = tried.look_up(ids)
    assert set(found.unique().tolist()) == {1.0, 1 + 1 / 128}
    ups = (found > 1.0).double()
    assert abs(ups.mean().item() - 0.25) < 0.01
    assert (ups.mean(dim=0) - 0.25).abs().max() < 0.03


def test_steps_below_the_precision_add_up_where_rounding_is_stochastic():
    found = {}
    for row_type in (BFloat16(), BFloat16(stochastic=True)):
        tried, ids = table(row_type), np.arange(200)
        for step in range(1, 257):
            tried.update(ids, torch.full((200, 3), -1 / 1024), step)
        found[row_type] = tried.look_up(ids).mean().item()
    assert found[BFloat16()] == 1.0
    assert abs(found[BFloat16(stochastic=True)] - 1.25) < 0.01


def test_a_draw_is_of_the_seed_the_id_the_column_and_the_step_alone():
    def found(parts, seed=0, first_step=1):
        tried = table(BFloat16(stochastic=True), seed=seed)
        for step in range(first_step, first_step + 3):
            for part in parts:
                tried.update(part, torch.full((part.size, 3), 0.3), step)
        return tried.look_up(np.arange(300))

    ids = np.arange(300)
    whole = found([ids])
    assert torch.equal(found([ids[ids % 3 == rest] for rest in range(3)]), whole)
    assert not torch.equal(found([ids], seed=1), whole)
    assert not torch.equal(found([ids], first_step=2), whole)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_stays_so(value):
    tried = table(BFloat16(stochastic=True), Constant(0.0))
    tried.update(np.array([1]), torch.full((1, 3), -value), 1)
    np.testing.assert_array_equal(tried.look_up(np.array([1])).numpy(), np.full((1, 3), value))


@pytest.mark.parametrize("dimension", [1, 7, 16])
def test_rows_take_half_the_memory_and_state_stays_exact(dimension):
    config = TableConfig("t", dimension, Adagrad(), first_values=Constant(0.0), row_type=BFloat16())
    half, whole = Table(config), Table(TableConfig("t", dimension, Adagrad(), first_values=Constant(0.0)))
    gradient = torch.randn(3000, dimension, generator=torch.Generator().manual_seed(0))
    for tried in (half, whole):
        tried.update(np.arange(3000), gradient.clone(), 1)
    assert torch.equal(half.rows().state["sum"], whole.rows().state["sum"])
    assert torch.equal(half.rows().values, whole.rows().values.bfloat16().float())
    assert whole.nbytes - half.nbytes >= 3000 * 4 * (dimension // 2)


def test_loaded_values_are_rounded_to_the_nearest():
    tried = table(BFloat16(stochastic=True))
    values = torch.full((100, 3), 1 + 1.5 / 256)
    tried.load(TableRows(np.arange(100), values, {}))
    assert torch.equal(tried.look_up(np.arange(100)), torch.full((100, 3), 1 + 2 / 256))
    again = table(BFloat16(stochastic=True))
    again.load(tried.rows())
    assert torch.equal(again.rows().values, tried.rows().values)
