"""One type of block: what it is called, and where its elements lie."""

from dataclasses import replace

import pytest

from fleet.program import Variable
from fleet.transpiler.block import PlannedBlock, plan_block
from fleet.transpiler.slicing import Slice, slice_variable

WEIGHT = Variable("w", (10, 3), is_parameter=True)


def planned(piece: Slice, *, sliced: bool = True, geo: bool = False) -> PlannedBlock:
    return plan_block(
        WEIGHT,
        "w@GRAD",
        piece,
        sliced=sliced,
        geo=geo,
        number=4,
        group=0,
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
    first, second = (planned(piece) for piece in slice_variable(WEIGHT.shape, 2, 1))
    assert (first.begin, first.end, second.end) == (0, second.begin, 30)


def test_a_piece_keeps_the_names_of_its_block():
    block = planned(Slice(1, 15, 30, (5, 3)))
    piece = replace(block, id=9, begin=21, shape=(3, 3))
    assert (piece.end, piece.suffix, piece.sliced) == (30, ".block1", True)
