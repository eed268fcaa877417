"""Mini-batches become arrays of the variables' shapes, and sequences become LoD tensors."""

from typing import Any

import numpy as np
import pytest

from fleet.errors import ConfigurationError
from fleet.fluid.data_feeder import DataFeeder
from fleet.fluid.lod import LoDTensor
from tests.support.fluid import data


def test_fields_fill_the_shapes_of_the_variables():
    feeder = DataFeeder([data("x", [2]), data("image", [1, 2, 2]), data("y", [1], "int64")], place=None)
    feed = feeder.feed([(np.array([1.0, 2.0]), np.arange(4), 5), ([3, 4], np.arange(4, 8), 6)])
    assert {name: (np.array(value).shape, str(np.array(value).dtype)) for name, value in feed.items()} == {
        "x": ((2, 2), "float32"),
        "image": ((2, 1, 2, 2), "float32"),
        "y": ((2, 1), "int64"),
    }
    assert np.array(feed["image"])[1].tolist() == [[[4, 5], [6, 7]]]
    assert np.array(feed["y"]).tolist() == [[5], [6]]


@pytest.mark.parametrize(
    ("lod_level", "sample", "values", "lengths"),
    [
        pytest.param(1, ([1, 2, 3],), [[1], [2], [3], [1], [2], [3]], [[3, 3]], id="one-level"),
        pytest.param(2, ([[1], [2, 3]],), [[1], [2], [3]] * 2, [[2, 2], [1, 2, 1, 2]], id="two-levels"),
        pytest.param(1, ([],), np.zeros((0, 1)).tolist(), [[0, 0]], id="empty-sequences"),
    ],
)
def test_sequences_stand_behind_one_another(lod_level: int, sample: Any, values: Any, lengths: Any):
    feed = DataFeeder([data("words", [1], "int64", lod_level)]).feed([sample, sample])
    tensor = feed["words"]
    assert isinstance(tensor, LoDTensor)
    assert tensor.values.dtype == np.int64
    assert tensor.values.tolist() == values
    assert tensor.recursive_sequence_lengths() == lengths


def test_sequences_of_vectors_keep_their_width():
    feed = DataFeeder([data("v", [2], lod_level=1)]).feed([([[1, 2]],), ([[3, 4], [5, 6]],)])
    assert np.array(feed["v"]).tolist() == [[1, 2], [3, 4], [5, 6]]


def test_names_are_of_the_programs_data():
    with pytest.raises(ConfigurationError, match="feed_list names 'z', which the program does not have"):
        DataFeeder(["z"])


@pytest.mark.parametrize(
    ("samples", "found"),
    [
        pytest.param([(1, 2)], r"2 fields, but feed_list has 1 variables \(x\)", id="too-many-fields"),
        pytest.param([([1, 2],), ([1],)], "x cannot be put into one array of float32", id="ragged"),
        pytest.param(
            [([[1], [2], [3]],)], r"shape \(-1, 2\), but its values in this batch have \(1, 3, 1\)", id="size"
        ),
        pytest.param([("a",)], "x cannot be put into one array", id="text"),
    ],
)
def test_what_does_not_fill_a_variable_is_refused(samples: Any, found: str):
    with pytest.raises(ConfigurationError, match=found):
        DataFeeder([data("x", [2])]).feed(samples)


def test_a_reader_of_batches_becomes_one_of_feeds():
    feeder = DataFeeder([data("y", [1])])
    read = feeder.decorate_reader(lambda: iter([[(1,), (2,)], [(3,)]]))
    assert [np.array(feed["y"]).tolist() for feed in read()] == [[[1], [2]], [[3]]]
    with pytest.raises(ConfigurationError, match="num_places is 2"):
        feeder.decorate_reader(read, multi_devices=True, num_places=2)
