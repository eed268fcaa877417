"""LoD tensors: lengths and offsets, and errors for those that do not match the values."""

import numpy as np
import pytest

from fleet.errors import ConfigurationError
from fleet.fluid.lod import LoDTensor, create_lod_tensor, create_random_int_lodtensor, flattened


def test_offsets_are_the_sums_of_lengths():
    tensor = LoDTensor()
    tensor.set(np.arange(6).reshape(6, 1), None)
    tensor.set_lod([[0, 2, 3], [0, 3, 4, 6]])
    assert tensor.recursive_sequence_lengths() == [[2, 1], [3, 1, 2]]
    assert tensor.lengths == ((2, 1), (3, 1, 2))
    assert tensor.lod() == [[0, 2, 3], [0, 3, 4, 6]]
    assert tensor.shape() == [6, 1]
    assert np.array(tensor).tolist() == [[0], [1], [2], [3], [4], [5]]


@pytest.mark.parametrize(
    ("lengths", "found"),
    [
        pytest.param([[2, 3]], r"\[2, 3\] counts 5 entries, but there are 6", id="the-values-are-more"),
        pytest.param([[1], [3, 3]], r"\[1\] counts 1 entries, but there are 2", id="a-level-is-short"),
        pytest.param([[7, -1]], "negative", id="a-length-is-negative"),
    ],
)
def test_lengths_that_do_not_add_up_are_refused(lengths: list[list[int]], found: str):
    with pytest.raises(ConfigurationError, match=found):
        LoDTensor(np.zeros((6, 1)), lengths)


def test_offsets_begin_with_0():
    with pytest.raises(ConfigurationError, match=r"\[1, 3\]; expected offsets that begin with 0"):
        LoDTensor(np.zeros(3)).set_lod([[1, 3]])


def test_new_values_are_checked_where_they_are_used():
    tensor = LoDTensor(np.zeros((3, 1)), [[3]])
    tensor.set(np.zeros((4, 1)), None)
    assert not tensor.has_valid_recursive_sequence_lengths()
    with pytest.raises(ConfigurationError, match="counts 3 entries, but there are 4"):
        _ = tensor.lengths


def test_a_tensor_without_values_says_what_to_call():
    with pytest.raises(ConfigurationError, match=r"set\(array, place\)"):
        np.array(LoDTensor())


def test_lists_of_sequences_become_rows():
    tensor = create_lod_tensor([[1, 2], [3]], [[2, 1]], None)
    assert np.array(tensor).tolist() == [[1], [2], [3]]
    assert tensor.recursive_sequence_lengths() == [[2, 1]]
    with pytest.raises(ConfigurationError, match=r"lengths \[2, 1\]"):
        create_lod_tensor([[1, 2], [3]], [[1, 2]], None)


def test_arrays_keep_their_shape():
    values = np.arange(6, dtype=np.float32).reshape(3, 2)
    assert np.array(create_lod_tensor(values, [[1, 2]], None)).tolist() == values.tolist()


def test_random_integers_repeat_with_numpys_seed():
    drawn = []
    for _ in range(2):
        np.random.seed(5)  # noqa: NPY002 - what scripts of Paddle call
        drawn.append(create_random_int_lodtensor([[2, 3]], [4], None, 1, 3))
    assert np.array(drawn[0]).tolist() == np.array(drawn[1]).tolist()
    assert drawn[0].shape() == [5, 4]
    assert set(np.unique(drawn[0])) == {1, 2, 3}


def test_nested_lists_are_flattened_level_by_level():
    assert flattened([[[1, 2], [3]], [[4]]], 2) == ([1, 2, 3, 4], [[2, 1], [2, 1, 1]])
    assert flattened([7, 8], 0) == ([7, 8], [])
