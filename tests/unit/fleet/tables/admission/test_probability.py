"""Admission by probability: drawn anew for each update, and the same whoever draws."""

import numpy as np
import pytest
import torch

from fleet.errors import ConfigurationError
from fleet.tables import Constant, Probability, Table, TableConfig
from fleet.tables.rules import SGD


def table(probability, seed=0):
    config = TableConfig(
        "t", 1, SGD(), first_values=Constant(0.0), seed=seed, admission=Probability(probability)
    )
    return Table(config)


def test_each_update_admits_with_the_probability():
    tried, ids, left = table(0.25), np.arange(20_000), 20_000.0
    for step in range(1, 5):
        tried.update(ids, torch.zeros(ids.size, 1), step)
        left *= 0.75
        assert abs(len(tried) - (20_000 - left)) < 300


def test_a_draw_depends_on_the_seed_the_id_and_the_step_alone():
    together, apart, other = table(0.5), table(0.5), table(0.5, seed=1)
    ids = np.arange(-500, 500)
    for step in (1, 2):
        together.update(ids, torch.zeros(1000, 1), step)
        other.update(ids, torch.zeros(1000, 1), step)
        for third in (ids[ids % 3 == rest] for rest in range(3)):
            apart.update(third, torch.zeros(third.size, 1), step)
    assert np.array_equal(together.rows().ids, apart.rows().ids)
    assert not np.array_equal(together.rows().ids, other.rows().ids)


def test_with_probability_one_every_id_has_a_row():
    tried = table(1.0)
    tried.update(np.arange(10_000), torch.zeros(10_000, 1), 1)
    assert len(tried) == 10_000


@pytest.mark.parametrize("probability", [0.0, -0.1, 1.1, float("nan")])
def test_another_number_is_refused(probability):
    with pytest.raises(ConfigurationError, match=r"expected a number above 0, up to 1"):
        Probability(probability)
