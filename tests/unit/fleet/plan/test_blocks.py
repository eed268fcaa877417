"""How parameters are sliced, and what the blocks are called."""

from dataclasses import replace
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.plan.blocks import PlannedBlock, Slice, plan_block, slice_variable
from fleet.plan.spec import ParameterSpec

SHAPE = (10, 3)
shapes = st.lists(st.integers(0, 40), min_size=0, max_size=4).map(tuple) | st.tuples(st.integers(1, 10**8))


def planned(piece: Slice, *, sliced: bool = True, geo: bool = False) -> PlannedBlock:
    return plan_block(
        ParameterSpec("w", SHAPE, "float32", group=0),
        piece,
        sliced=sliced,
        geo=geo,
        number=4,
        server=1,
        endpoint="10.0.0.2:6174",
    )


@pytest.mark.parametrize(
    ("sliced", "geo", "names"),
    [
        pytest.param(True, False, ("w.block1", "w@GRAD.block1", ".block1"), id="one-of-several"),
        pytest.param(False, False, ("w", "w@GRAD", ""), id="the-whole-parameter"),
        pytest.param(True, True, ("w.block1", "w.block1.delta", ".block1"), id="geo-sends-what-changed"),
    ],
)
def test_names(sliced, geo, names):
    block = planned(Slice(1, 15, 30, (5, 3)), sliced=sliced, geo=geo)
    assert (block.name, block.grad, block.suffix) == names
    assert block.sliced is sliced


def test_blocks_end_where_the_next_begins():
    first, second = (planned(piece) for piece in slice_variable(SHAPE, 2, 1))
    assert (first.begin, first.end, second.end) == (0, second.begin, 30)


def test_a_piece_keeps_the_names_of_its_block():
    block = planned(Slice(1, 15, 30, (5, 3)))
    piece = replace(block, id=9, begin=21, shape=(3, 3))
    assert (piece.end, piece.suffix, piece.sliced) == (30, ".block1", True)


@given(shapes, st.integers(1, 20), st.integers(1, 10**5))
def test_blocks_hold_each_element_once_and_whole_rows(shape, slice_count, min_block_size):
    blocks = slice_variable(shape, slice_count, min_block_size)
    assert 1 <= len(blocks) <= slice_count
    assert [block.index for block in blocks] == list(range(len(blocks)))
    assert [block.begin for block in blocks] == [0, *(block.end for block in blocks[:-1])]
    assert blocks[-1].end == prod(shape)
    for block in blocks:
        assert prod(block.shape) == block.end - block.begin
        assert block.shape[1:] == shape[1:]
    if len(blocks) == 1:
        assert blocks[0].shape == shape
    else:
        assert all(block.end > block.begin for block in blocks)


@given(st.integers(2, 20), st.integers(1, 10**6), st.integers(8192, 10**5))
def test_no_block_but_the_last_is_smaller_than_the_least(slice_count, numel, min_block_size):
    blocks = slice_variable((numel,), slice_count, min_block_size)
    assert all(block.end - block.begin >= min_block_size for block in blocks[:-1])


@pytest.mark.parametrize(
    ("shape", "slice_count", "expected"),
    [
        pytest.param((10001, 10), 2, [(5001, 10), (5000, 10)], id="rows-stay-whole"),
        pytest.param((23, 1000), 2, [(12, 1000), (11, 1000)], id="rounding-up-to-rows"),
        pytest.param((1000,), 2, [(1000,)], id="small-stays-whole"),
        pytest.param((8192,), 2, [(8192,)], id="one-least-block-stays-whole"),
        pytest.param((16384,), 2, [(8192,), (8192,)], id="two-least-blocks"),
        pytest.param((2, 100000), 5, [(1, 100000), (1, 100000)], id="no-more-blocks-than-rows"),
        pytest.param((), 3, [()], id="a-scalar"),
        pytest.param((0, 7), 3, [(0, 7)], id="nothing-at-all"),
        pytest.param((100000,), 1, [(100000,)], id="one-server"),
    ],
)
def test_shapes(shape, slice_count, expected):
    assert [block.shape for block in slice_variable(shape, slice_count, 8192)] == expected
