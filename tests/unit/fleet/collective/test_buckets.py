"""Which gradients travel together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.collective.buckets import Extent, is_dense, plan_buckets

CASES = [
    pytest.param([], [], id="nothing"),
    pytest.param([10, 10, 10], [[2], [1, 0]], id="last-first-and-the-first-bucket-is-small"),
    pytest.param([50, 1, 1, 1], [[3, 2, 1, 0]], id="a-bucket-is-closed-once-it-holds-enough"),
    pytest.param([10, 30, 30, 1, 9], [[4, 3], [2], [1], [0]], id="large-ones-alone-and-the-rest"),
]


@pytest.mark.parametrize(("sizes", "expected"), CASES)
def test_plan(sizes, expected):
    extents = [Extent("float32", size) for size in sizes]
    assert plan_buckets(extents, bucket_bytes=20, first_bucket_bytes=10) == expected


def test_kinds_never_share_a_bucket():
    extents = [Extent("float32", 4), Extent("bfloat16", 2), Extent("float32", 4)]
    assert plan_buckets(extents, bucket_bytes=100, first_bucket_bytes=100) == [[2, 0], [1]]


@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), st.integers(1, 50))))
def test_every_parameter_travels_exactly_once(parameters):
    extents = [Extent(kind, size) for kind, size in parameters]
    buckets = plan_buckets(extents, bucket_bytes=40, first_bucket_bytes=10)
    assert sorted(position for bucket in buckets for position in bucket) == list(range(len(extents)))
    assert all(len({extents[position].kind for position in bucket}) == 1 for bucket in buckets)


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        pytest.param((2, 3), (3, 1), True, id="by-rows"),
        pytest.param((2, 3), (1, 2), True, id="by-columns"),
        pytest.param((2, 1, 3), (3, 99, 1), True, id="the-stride-of-one-element-says-nothing"),
        pytest.param((), (), True, id="a-number"),
        pytest.param((4, 3), (5, 1), False, id="with-gaps"),
        pytest.param((4, 3), (0, 1), False, id="several-in-one-place"),
    ],
)
def test_which_layouts_fill_their_memory(shape, strides, expected):
    assert is_dense(shape, strides) is expected
