"""Rows that compiled loops read and step, beside a table that does without them."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import pytest
import torch

from fleet.errors import ConfigurationError
from fleet.tables import (
    BFloat16,
    Constant,
    CountFilter,
    LocalDisk,
    Memory,
    Table,
    TableConfig,
    TimeToLive,
    kernels,
)
from fleet.tables.rules import SGD, Adagrad, compiled_step

UNUSUAL = (0.0, -0.0, 1e-42, -1e-38, 3e38, float("inf"), 1.0 + 2.0**-23)


@contextmanager
def nothing_compiled() -> Iterator[None]:
    with patch.object(kernels, "_opened", lambda _: None):
        yield


def bits(values: torch.Tensor | None) -> list[int]:
    assert values is not None
    return values.contiguous().view(torch.int32).flatten().tolist()


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler to build it with")
def test_plain_sgd_is_compiled_and_its_bits_are_those_of_torch():
    assert compiled_step(SGD) in ("fleet_step_rows", "fleet_step_rows_fused")


def test_a_rule_of_its_own_is_never_replaced_by_a_loop():
    assert compiled_step(type("OwnSgd", (SGD,), {})) is None
    assert compiled_step(Adagrad) is None
    with nothing_compiled():
        assert compiled_step(SGD) is None


@pytest.mark.parametrize(
    ("num_embeddings", "dimension", "pool"),
    [(None, 16, 25), (None, 1, 700), (90, 3, 25), (4000, 37, 2000)],
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"options": {"weight_decay": 0.3, "lr": 0.7}},
        {"options": {"lr": lambda step: 0.5 / step}},
        {"row_type": BFloat16()},
        {"admission": CountFilter(2)},
        {"eviction": (TimeToLive(4),)},
        {"rule": Adagrad()},
    ],
    ids=["plain", "decay", "schedule", "bfloat16", "admission", "eviction", "adagrad"],
)
def test_look_ups_and_steps_have_the_bits_that_numpy_and_torch_give_them(
    num_embeddings, dimension, pool, options
):
    config = TableConfig(**{"name": "clicks", "dimension": dimension, "rule": SGD()} | options)
    config = TableConfig(**config.__dict__ | {"num_embeddings": num_embeddings})
    random = np.random.default_rng(0)
    tried = Table(config)
    with nothing_compiled():
        twin = Table(config)
    for step in range(1, 13):
        # After the first steps all ids have rows, until some are removed.
        ids = np.unique(random.integers(0, pool, 3 * pool)) * (1 if num_embeddings else 1 << 40)
        gradient = torch.from_numpy(random.normal(size=(ids.size, dimension)).astype(np.float32))
        gradient[0] = UNUSUAL[step % len(UNUSUAL)]
        looked_up, before = tried.look_up(ids), tried.update(ids, gradient.clone(), step, keeps=True)
        with nothing_compiled():
            assert bits(twin.look_up(ids)) == bits(looked_up)
            assert bits(twin.update(ids, gradient.clone(), step, keeps=True)) == bits(before)
        assert bits(before) == bits(looked_up)
        if step == 8:
            gone = ids[::3]
            tried.remove(gone)
            with nothing_compiled():
                twin.remove(gone)
        assert vars(tried.statistics)["found"] == vars(twin.statistics)["found"]
    one, other = tried.rows(), twin.rows()
    assert np.array_equal(one.ids, other.ids)
    for mine, its in [(one.values, other.values), (one.marks["last"], other.marks["last"])]:
        assert bits(mine) == bits(its)


def test_a_snapshot_has_the_rows_from_before_a_compiled_step():
    table, ids = Table(TableConfig("clicks", 2, SGD(), first_values=Constant(1.0))), np.arange(5)
    table.update(ids, torch.ones(5, 2), 1, {"lr": 0.5})
    snapshot = table.snapshot()
    table.update(ids, torch.ones(5, 2), 2, {"lr": 0.5})
    assert [part.values.tolist() for part in snapshot.parts()] == [[[0.5] * 2] * 5]
    assert table.look_up(ids).tolist() == [[0.0] * 2] * 5


def test_ids_and_gradients_that_lie_apart_and_of_other_types_are_taken(tmp_path):
    for storage in (Memory(), LocalDisk(1 << 20, str(tmp_path))):
        table = Table(
            TableConfig("clicks", 2, SGD(), first_values=Constant(0.0), options={"lr": 1.0}, storage=storage)
        )
        ids = np.arange(10)[::2]
        table.update(ids, torch.ones(5, 2), 1)
        table.update(ids, torch.arange(20.0).reshape(5, 4)[:, ::2], 2)
        table.update(ids, torch.ones(5, 2, dtype=torch.float64), 3)
        expected = [[-2.0 - 4 * row, -4.0 - 4 * row] for row in range(5)]
        assert table.look_up(ids).tolist() == expected
        assert table.look_up(np.arange(20)[::4][:3]).tolist() == [expected[0], expected[2], expected[4]]


@pytest.mark.parametrize("num_rows", [3, 3000])
def test_no_row_is_stepped_when_an_id_is_out_of_range(num_rows):
    table = Table(TableConfig("clicks", 2, SGD(), 10_000, Constant(1.0)))
    ids = np.arange(num_rows)
    table.update(ids, torch.ones(num_rows, 2), 1)  # so many that 3,000 are found without a hash
    before = table.look_up(ids)
    for wrong in (-1, 10_000, 2**62):
        ids[-1] = wrong
        with pytest.raises(ConfigurationError, match=f"id {wrong} at position {num_rows - 1}"):
            table.update(ids, torch.ones(num_rows, 2), 2)
        with pytest.raises(ConfigurationError, match=f"id {wrong} at position {num_rows - 1}"):
            table.look_up(ids)
    with nothing_compiled(), pytest.raises(ConfigurationError, match="at position"):
        table.look_up(ids)
    assert bits(table.look_up(np.arange(num_rows))) == bits(before)
