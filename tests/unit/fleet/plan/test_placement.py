"""What servers tell of their blocks becomes a trainer's plan, if it is all that the trainer trains."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.errors import ConfigurationError
from fleet.fluid import DistributeTranspiler
from fleet.fluid.render import server_plan, trainer_plan
from fleet.plan import DistributeTranspilerConfig, HashName, Placement, RoundRobin
from tests.support.programs import captured

ENDPOINTS = ["10.0.0.1:6174", "10.0.0.2:6174"]
SHAPES = {"w": (400, 100), "b": (100,), "empty": (0, 3)}


def plans(*, geo=False, **fields):
    """Return a trainer's plan and the servers'."""
    config = DistributeTranspilerConfig(sync_mode=not geo, geo_sgd_mode=geo, **fields)
    transpiler = DistributeTranspiler(config)
    transpiler.transpile(0, program=captured(SHAPES), pservers=ENDPOINTS, trainers=2)
    servers = [server_plan(transpiler.get_pserver_program(endpoint)) for endpoint in ENDPOINTS]
    return trainer_plan(transpiler.get_trainer_program()), servers


def told(servers=None):
    return [plan.placement for plan in servers or plans()[1]]


layouts = st.fixed_dictionaries(
    {
        "slice_var_up": st.booleans(),
        "min_block_size": st.sampled_from([8192, 20000]),
        "split_method": st.sampled_from([RoundRobin, HashName]),
    }
)


@settings(deadline=None, max_examples=20)
@given(layouts, layouts, st.booleans())
def test_a_trainer_has_the_blocks_of_the_servers_however_its_own_program_cuts(own, theirs, geo):
    trainer, (alike, servers) = plans(geo=geo, **own)[0], plans(geo=geo, **theirs)
    placed = trainer.placed(told(servers))
    assert placed.blocks == alike.blocks
    names = {block.id: block.param for block in placed.blocks}
    before = {block.id: block.param for block in trainer.blocks}
    assert list(dict.fromkeys(names[each] for each in placed.send_order)) == list(
        dict.fromkeys(before[each] for each in trainer.send_order)
    )


def of_w(change):
    """Return what servers tell, with the second part of w changed."""
    first, second = told()
    (part,) = (each for each in second.parts if each.param == "w")
    rest = tuple(each for each in second.parts if each is not part)
    return [first, Placement((*rest, *change(part)))]


@pytest.mark.parametrize(
    ("placements", "sentence"),
    [
        pytest.param(
            of_w(lambda _: ()),
            r"hold these elements of w: 0 to 20000 on 10\.0\.0\.1:6174; expected each from 0 to 40000 once",
            id="nobody-has-the-end",
        ),
        pytest.param(
            of_w(lambda part: (replace(part, begin=20100, shape=(199, 100)),)),
            r"elements of w: 0 to 20000 on .*, 20100 to 40000 on .*; expected each",
            id="nobody-has-the-middle",
        ),
        pytest.param(
            of_w(lambda part: (part, replace(part, block=9))),
            r"elements of w: .*, 20000 to 40000 on .*, 20000 to 40000 on .*; expected each",
            id="two-have-the-end",
        ),
        pytest.param(
            of_w(lambda part: (replace(part, dtype="float64"),)),
            r"holds w\.block1 as float64, expected float32",
            id="another-dtype",
        ),
        pytest.param(
            of_w(lambda part: (part, replace(part, name="v", param="v", block=9))),
            r"holds v as float32, which this trainer does not train",
            id="another-parameter",
        ),
        pytest.param(
            of_w(lambda part: (replace(part, block=0),)),
            "announce two blocks with the same id",
            id="a-number-that-is-taken",
        ),
        pytest.param(
            [told()[0], replace(told()[1], version=3)],
            r"different placement versions: 10\.0\.0\.1:6174 of 0, 10\.0\.0\.2:6174 of 3; expected the same",
            id="two-versions",
        ),
        pytest.param([Placement(()), Placement(())], "hold these elements of .*: none", id="nothing"),
    ],
)
def test_what_is_not_each_element_once_is_refused_with_what_is_held(placements, sentence):
    with pytest.raises(ConfigurationError, match=sentence):
        plans()[0].placed(placements)
