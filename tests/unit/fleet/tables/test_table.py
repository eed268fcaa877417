"""A table's rows: what exists, what it takes, what it refuses."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fleet.errors import ConfigurationError
from fleet.tables import Constant, Normal, Table, TableConfig, TableRows, Uniform
from fleet.tables.rules import SGD, Adagrad, Adam, Momentum

RULES = [SGD(), Momentum(), Adagrad(), Adam()]


def table(rule=None, num_embeddings=None, first_values=None, **options):
    config = TableConfig(
        "clicks", 3, rule or SGD(), num_embeddings, first_values or Uniform(-1.0, 1.0), options=options
    )
    return Table(config)


def ids(*numbers):
    return np.array(numbers, dtype=np.int64)


def test_looking_up_changes_nothing():
    tried = table()
    before = tried.nbytes
    first = tried.look_up(np.arange(10_000))
    assert len(tried) == 0
    assert tried.nbytes == before
    tried.update(ids(7), torch.zeros(1, 3), 1)
    assert len(tried) == 1
    assert torch.equal(tried.look_up(np.arange(10_000)), first)


def test_what_is_looked_up_is_a_copy():
    tried = table(first_values=Constant(1.0), lr=1.0)
    tried.update(ids(5), torch.ones(1, 3), 1)
    found = tried.look_up(ids(5, 6, 5))
    assert found.tolist() == [[0.0] * 3, [1.0] * 3, [0.0] * 3]
    found.fill_(9.0)
    assert tried.look_up(ids(5, 6)).tolist() == [[0.0] * 3, [1.0] * 3]


def test_an_embedding_begins_as_torch_s_does_unless_told_otherwise():
    assert TableConfig("t", 3, SGD()).first_values == Normal(0.0, 1.0)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_rows_that_are_loaded_go_on_as_those_that_were_saved(rule):
    random = np.random.default_rng(0)
    saved = table(rule)
    for step in range(1, 6):
        chosen = np.unique(random.integers(-(2**63), 2**63 - 1, 200))
        saved.update(chosen, torch.from_numpy(random.normal(size=(chosen.size, 3)).astype(np.float32)), step)
    rows = saved.rows()
    assert len(rows.ids) == len(saved)
    assert np.all(np.diff(rows.ids) > 0)
    loaded = table(rule)
    loaded.load(rows)
    gradient = torch.ones(rows.ids.size, 3)
    for each in (saved, loaded):
        each.update(rows.ids, gradient.clone(), 6)
    assert torch.equal(saved.rows().values, loaded.rows().values)
    for name, entry in saved.rows().state.items():
        assert torch.equal(entry, loaded.rows().state[name])


def test_values_that_are_loaded_without_state_begin_anew():
    tried = table(Adagrad(), initial_accumulator_value=0.25)
    tried.update(ids(1), torch.full((1, 3), 5.0), 1)
    tried.load(TableRows(ids(1, 2), torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), {}))
    assert tried.look_up(ids(1, 2)).tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    assert tried.rows().state["sum"].tolist() == [[0.25] * 3] * 2


@given(st.lists(st.integers(-5, 15), min_size=1, max_size=30))
def test_an_id_out_of_range_is_named_with_its_position(numbers):
    tried = table(num_embeddings=10)
    bad = [at for at, number in enumerate(numbers) if not 0 <= number < 10]
    if not bad:
        assert tried.look_up(ids(*numbers)).shape == (len(numbers), 3)
        return
    expected = rf"^table clicks: id {numbers[bad[0]]} at position {bad[0]}, expected 0 to 9$"
    with pytest.raises(ConfigurationError, match=expected):
        tried.look_up(ids(*numbers))
    with pytest.raises(ConfigurationError, match=expected):
        tried.update(ids(*numbers), torch.zeros(len(numbers), 3), 1)
    with pytest.raises(ConfigurationError, match=expected):
        tried.remove(ids(*numbers))
    assert len(tried) == 0


def test_a_gradient_of_another_shape_is_refused():
    with pytest.raises(ConfigurationError, match=r"shape \[2, 4\], expected \[2, 3\]"):
        table().update(ids(1, 2), torch.zeros(2, 4), 1)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"dimension": 0}, r"dimension is 0, expected at least 1"),
        ({"num_embeddings": 0}, r"num_embeddings is 0, expected at least 1"),
        ({"options": {"momentum": 0.9}}, r"SGD has no option momentum; expected some of lr, weight_decay"),
    ],
)
def test_what_cannot_be_is_refused(changed, said):
    with pytest.raises(ConfigurationError, match=said):
        TableConfig(**{"name": "t", "dimension": 3, "rule": SGD()} | changed)


def test_options_of_a_step_stand_before_the_table_s():
    tried = table(first_values=Constant(0.0), lr=1.0)
    tried.update(ids(1), torch.ones(1, 3), 1, {"lr": 0.5})
    tried.update(ids(2), torch.ones(1, 3), 2)
    assert tried.look_up(ids(1, 2)).tolist() == [[-0.5] * 3, [-1.0] * 3]


def test_a_table_takes_what_its_rows_take():
    tried = Table(TableConfig("large", 16, Adagrad(), 10**9, Constant(0.0)))
    for start in range(0, 400_000, 20_000):
        chosen = np.arange(start, start + 20_000) * 2311
        tried.update(chosen, torch.ones(chosen.size, 16), 1)
    assert len(tried) == 400_000
    assert tried.nbytes <= 1.3 * len(tried) * (16 * 4 + 16 * 4 + 16)


def test_a_rule_that_fails_leaves_new_rows_as_they_begin(monkeypatch):
    def fails(*_):
        raise ConfigurationError("this rule knows no such rows")

    tried = table()
    tried.update(ids(5, 9), torch.ones(2, 3), 1)
    tried.remove(ids(5, 9))  # new rows may have the places of others
    monkeypatch.setattr(SGD, "step", fails)
    with pytest.raises(ConfigurationError, match="no such rows"):
        tried.update(ids(6, 7), torch.ones(2, 3), 2)
    assert torch.equal(tried.look_up(ids(6, 7)), table().look_up(ids(6, 7)))
