"""First values: of the right distribution, and the same whoever asks, and in whatever order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.errors import ConfigurationError
from fleet.tables import Constant, Normal, Uniform
from fleet.tables.first_values import generator_key

KEY = generator_key(0, "table")
IDS = st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=50)


@pytest.mark.parametrize("distribution", [Uniform(-0.5, 2.0), Normal(1.0, 0.25), Constant(3.0)])
@given(ids=IDS, dimension=st.integers(1, 9), data=st.data())
def test_a_row_does_not_depend_on_the_others_that_are_asked_for(distribution, ids, dimension, data):
    asked = np.array(ids, dtype=np.int64)
    whole = distribution.of(asked, dimension, KEY)
    assert whole.shape == (len(ids), dimension)
    assert whole.dtype == np.float32
    some = np.array(data.draw(st.permutations(range(len(ids)))))[: data.draw(st.integers(1, len(ids)))]
    assert np.array_equal(distribution.of(asked[some], dimension, KEY), whole[some])


@pytest.mark.parametrize("dimension", [1, 3, 16])
def test_uniform_values_are_uniform(dimension):
    values = Uniform(-0.5, 2.0).of(np.arange(40_000), dimension, KEY)
    assert values.min() >= -0.5
    assert values.max() < 2.0
    counts, _ = np.histogram(values, bins=20, range=(-0.5, 2.0))
    assert np.abs(counts / values.size - 0.05).max() < 0.004


@pytest.mark.parametrize("dimension", [1, 3, 16])
def test_normal_values_are_normal(dimension):
    values = (Normal(1.0, 0.25).of(np.arange(40_000), dimension, KEY).astype(float) - 1.0) / 0.25
    assert abs(values.mean()) < 0.02
    assert abs(values.std() - 1.0) < 0.02
    assert abs((values**3).mean()) < 0.1
    assert abs((values**4).mean() - 3.0) < 0.2
    assert np.abs(np.corrcoef(values.T) - np.eye(dimension)).max() < 0.03


def test_another_id_column_seed_or_table_has_other_values():
    ids = np.concatenate([np.arange(500), np.arange(1, 501) << 32])
    values = Uniform(0.0, 1.0).of(ids, 8, KEY)
    assert np.unique(values).size > 0.999 * values.size
    for key in (generator_key(1, "table"), generator_key(0, "tables")):
        assert not np.isclose(Uniform(0.0, 1.0).of(ids, 8, key), values).any(axis=1).all()


@pytest.mark.parametrize("distribution", [(Constant, (float("nan"),)), (Uniform, (0.0, float("inf")))])
def test_a_number_that_is_not_finite_is_refused(distribution):
    kind, numbers = distribution
    with pytest.raises(ConfigurationError, match=r"expected a finite number"):
        kind(*numbers)
