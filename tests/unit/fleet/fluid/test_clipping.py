"""Clipping on the servers: the operators of each slice, and the norms that they are lowered to."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fleet
from fleet.errors import TranspileError
from fleet.fluid import DistributeTranspiler
from fleet.fluid.lowering import server_plan
from fleet.plan import DistributedMode, DistributeTranspilerConfig, HashName, NormPlan, RoundRobin
from tests.support.programs import captured

ONE, TWO, THREE = "10.0.0.1:6174", "10.0.0.2:6174", "10.0.0.3:6174"
SHAPES = {"b": (100,), "w": (300, 100)}  # b on ONE; w in three slices, on TWO, THREE and ONE


def transpiled(clip: Any, **arguments: Any) -> DistributeTranspiler:
    transpiler = DistributeTranspiler(DistributeTranspilerConfig(**arguments.pop("config", {})))
    program = captured(SHAPES, grad_clip=clip, weight_decay=0.1)
    transpiler.transpile(0, program=program, pservers=[ONE, TWO, THREE], trainers=2, **arguments)
    return transpiler


def test_a_slice_is_clipped_behind_the_mean_and_before_weight_decay():
    program = transpiled(fleet.ClipGradByNorm(5.0)).get_pserver_program(TWO)
    ops = program.block(1).ops
    assert [op.type for op in ops] == ["sum", "scale", "clip_by_norm", "scale", "sum", "sgd"]
    assert (ops[2].input("X"), ops[2].output("Out")) == (["w@GRAD.block0"], ["w@GRAD.block0"])
    assert ops[2].attr("max_norm") == 5.0
    assert ops[2].attr("epmap") == [ONE, TWO, THREE]
    assert 'clip_by_norm(X=[w@GRAD.block0], max_norm=5.0, epmap=["10.0.0.1:6174"' in str(program)


def test_the_norm_of_a_parameter_names_the_servers_that_hold_a_slice():
    plan = server_plan(transpiled(fleet.ClipGradByNorm(5.0)).get_pserver_program(ONE))
    assert plan.clipping.norms == (NormPlan("b", 5.0, (0,), (0,)), NormPlan("w", 5.0, (3,), (0, 1, 2)))
    assert plan.clipping.ranges == {}


def test_the_global_norm_is_one_over_every_server_that_holds_something():
    plan = server_plan(transpiled(fleet.ClipGradByGlobalNorm(5.0)).get_pserver_program(ONE))
    assert plan.clipping.norms == (NormPlan("", 5.0, (0, 3), (0, 1, 2)),)
    whole = transpiled(fleet.ClipGradByGlobalNorm(5.0), config={"slice_var_up": False})
    assert server_plan(whole.get_pserver_program(ONE)).clipping.norms == (NormPlan("", 5.0, (0,), (0, 1)),)
    assert server_plan(whole.get_pserver_program(THREE)).clipping.norms == ()


def test_a_range_concerns_each_block_alone():
    plan = server_plan(transpiled(fleet.ClipGradByValue(2.0, -1.0)).get_pserver_program(ONE))
    assert plan.clipping.ranges == {0: (-1.0, 2.0), 3: (-1.0, 2.0)}
    assert plan.clipping.norms == ()


dims = st.lists(st.integers(1, 300), max_size=2).map(tuple)


@settings(deadline=None, max_examples=30)
@given(
    st.dictionaries(st.sampled_from("abcdefgh"), dims, min_size=1),
    st.integers(1, 5),
    st.sampled_from([fleet.ClipGradByNorm(2.0), fleet.ClipGradByGlobalNorm(2.0)]),
    st.sampled_from([RoundRobin, HashName]),
)
def test_every_block_has_a_part_in_one_norm_that_all_its_servers_know(shapes, servers, clip, split_method):
    endpoints = [f"10.0.0.{number}:6174" for number in range(1, servers + 1)]
    transpiler = DistributeTranspiler(DistributeTranspilerConfig(split_method=split_method))
    transpiler.transpile(0, program=captured(shapes, grad_clip=clip), pservers=endpoints, trainers=2)
    plans = [server_plan(transpiler.get_pserver_program(endpoint)) for endpoint in endpoints]
    norms = [(plan.server, norm) for plan in plans for norm in plan.clipping.norms]
    assert sorted(block for _, norm in norms for block in norm.blocks) == list(
        range(sum(len(plan.blocks) for plan in plans))
    )
    for key in {norm.key for _, norm in norms}:
        holders = tuple(server for server, norm in norms if norm.key == key)
        assert {norm.servers for _, norm in norms if norm.key == key} == {holders}
    keys = {norm.key for _, norm in norms}
    assert keys == ({""} if isinstance(clip, fleet.ClipGradByGlobalNorm) else set(shapes))


def test_what_is_lowered_are_the_operators():
    """A block whose operator is taken away is not clipped; slices that disagree are refused."""
    program = transpiled(fleet.ClipGradByGlobalNorm(5.0)).get_pserver_program(ONE)
    ops = program.block(1).ops
    ops[2] = dataclasses.replace(ops[2], attrs={**ops[2].attrs, "max_norm": 6.0})
    with pytest.raises(TranspileError, match=r"clips all gradients by 5\.0 .* and by 6\.0 .* same for all"):
        server_plan(program)
    del ops[2]
    assert server_plan(program).clipping.norms == (NormPlan("", 5.0, (3,), (0, 1, 2)),)


@pytest.mark.parametrize(
    ("arguments", "mode"),
    [
        ({"sync_mode": False}, "half-async"),
        ({"sync_mode": False, "config": {"runtime_split_send_recv": True}}, "async"),
    ],
)
def test_other_modes_than_sync_are_refused_with_the_remedy(arguments, mode):
    with pytest.raises(TranspileError, match=f"the mode is {mode}; .*overlap=False"):
        transpiled(fleet.ClipGradByValue(1.0), **arguments)


def test_a_mode_of_the_user_s_own_is_refused_too():
    class Own:
        name = "sync"
        programs = DistributedMode.SYNC

        def agreement(self):
            return {}

    program = captured(SHAPES, grad_clip=fleet.ClipGradByValue(1.0))
    with pytest.raises(TranspileError, match=r"the mode is 'sync'; .*overlap=False"):
        DistributeTranspiler(mode=Own()).transpile(0, program=program, pservers=[ONE])


def test_a_trainer_s_program_does_not_clip():
    program = transpiled(fleet.ClipGradByNorm(1.0)).get_trainer_program()
    assert not any(op.type.startswith("clip") for op in program.global_block().ops)
