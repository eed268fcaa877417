"""Lowering: trainers and servers, each from its own program, come to the same blocks."""

import dataclasses
import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.errors import TranspileError
from fleet.fluid import DistributeTranspiler, Program
from fleet.fluid.layout import lay_out
from fleet.fluid.lowering import server_plan, trainer_plan
from fleet.plan import (
    DistributedMode,
    DistributeTranspilerConfig,
    HashName,
    RoundRobin,
    TrainerPlan,
    describe_difference,
)
from tests.support.programs import Parameters, captured

ONE, TWO = "10.0.0.1:6174", "10.0.0.2:6174"


def transpiled(
    program: Program, *, trainer_id: int = 0, servers: int = 2, trainers: int = 2, **fields: Any
) -> tuple[DistributeTranspiler, list[str]]:
    transpiler = DistributeTranspiler(DistributeTranspilerConfig(**fields))
    endpoints = [f"10.0.0.{i + 1}:6174" for i in range(servers)]
    transpiler.transpile(trainer_id, program=program, pservers=endpoints, trainers=trainers)
    return transpiler, endpoints


dims = st.lists(st.integers(1, 300), min_size=0, max_size=2).map(tuple)


@settings(deadline=None, max_examples=40)
@given(
    st.dictionaries(st.sampled_from("abcdefgh"), dims, min_size=1),
    st.integers(1, 5),
    st.integers(1, 4),
    st.data(),
)
def test_servers_hold_what_trainers_send(shapes, servers, trainers, data):
    trainer_id = data.draw(st.integers(0, trainers - 1))
    split_method = data.draw(st.sampled_from([RoundRobin, HashName]))
    transpiler, endpoints = transpiled(
        captured(shapes),
        trainer_id=trainer_id,
        servers=servers,
        trainers=trainers,
        split_method=split_method,
        slice_var_up=data.draw(st.booleans()),
    )
    trainer = trainer_plan(transpiler.get_trainer_program())
    plans = [server_plan(transpiler.get_pserver_program(endpoint)) for endpoint in endpoints]

    held = sorted((block for plan in plans for block in plan.blocks), key=lambda block: block.id)
    assert tuple(held) == trainer.blocks
    assert [block.id for block in held] == list(range(len(held)))
    assert sorted(trainer.send_order) == list(range(len(held)))
    for index, plan in enumerate(plans):
        assert plan.blocks == trainer.blocks_on(index)
        assert plan.fingerprint == trainer.fingerprint
        assert (plan.server, plan.endpoint, plan.trainers) == (index, endpoints[index], trainers)
        assert set(plan.groups) == {block.group for block in plan.blocks}
    for name, shape in shapes.items():
        blocks = trainer.blocks_of(name)
        assert blocks[0].begin == 0
        assert blocks[-1].end == torch.Size(shape).numel()
        assert all(block.param_shape == tuple(shape) for block in blocks)
        assert all(a.end == b.begin for a, b in pairwise(blocks))


@pytest.mark.parametrize("geo", [False, True], ids=["sync", "geo"])
def test_the_plan_has_the_blocks_of_the_layout(geo):
    program, endpoints = captured({"w": (300, 100), "b": (3,)}), [ONE, TWO]
    config = DistributeTranspilerConfig(geo_sgd_mode=geo, sync_mode=not geo)
    transpiler = DistributeTranspiler(config)
    transpiler.transpile(0, program=program, pservers=endpoints, trainers=2, sync_mode=not geo)
    mode = DistributedMode.GEO if geo else DistributedMode.SYNC
    layout = lay_out(program, config, mode, endpoints, 2)
    assert {block.sliced for block in layout.blocks} == {True, False}
    assert trainer_plan(transpiler.get_trainer_program()).blocks == layout.blocks
    held = [server_plan(transpiler.get_pserver_program(endpoint)).blocks for endpoint in endpoints]
    assert held == [layout.on(endpoint) for endpoint in endpoints]


def test_a_server_that_holds_nothing_has_an_empty_plan():
    transpiler, endpoints = transpiled(captured({"w": (3,)}), servers=3)
    plan = server_plan(transpiler.get_pserver_program(endpoints[2]))
    assert (plan.blocks, plan.groups) == ((), {})


def test_weight_decay_operators_become_the_option_again():
    transpiler, _ = transpiled(captured(weight_decay=0.01, momentum=0.9, nesterov=True))
    plan = server_plan(transpiler.get_pserver_program(ONE))
    assert plan.groups[0].optimizer_class is torch.optim.SGD
    options = plan.groups[0].hyper_parameters
    assert options == {
        "lr": 0.1,
        "momentum": 0.9,
        "dampening": 0,
        "weight_decay": 0.01,
        "nesterov": True,
        "maximize": False,
        "foreach": None,
        "differentiable": False,
        "fused": None,
    }


@pytest.mark.parametrize(
    "name",
    ["ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"],
)
def test_every_option_of_an_optimizer_comes_back(name):
    module = Parameters({"w": (3, 2)})
    optimizer = getattr(torch.optim, name)(module.parameters(), lr=torch.tensor(0.25))
    group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    program = Program.from_optimizer(optimizer, module)
    transpiler, _ = transpiled(program, servers=1)
    plan = server_plan(transpiler.get_pserver_program(ONE)).groups[0]
    assert plan.hyper_parameters == {**group, "lr": 0.25}
    assert plan.elementwise
    assert plan.tensors == {"lr": "float32"}


def test_param_groups_keep_their_options():
    module = Parameters({"w": (3, 2), "b": (2,)})
    optimizer = torch.optim.Adam(
        [{"params": [module.w], "weight_decay": 0.1}, {"params": [module.b], "lr": 0.5}], lr=0.01
    )
    transpiler, _ = transpiled(Program.from_optimizer(optimizer, module), servers=1)
    plan = server_plan(transpiler.get_pserver_program(ONE))
    assert {block.param: block.group for block in plan.blocks} == {"w": 0, "b": 1}
    found = [
        (plan.groups[i].hyper_parameters["lr"], plan.groups[i].hyper_parameters["weight_decay"])
        for i in (0, 1)
    ]
    assert found == [(0.01, 0.1), (0.5, 0.0)]


@pytest.mark.parametrize(
    ("lower", "program", "message"),
    [
        (trainer_plan, "main", r"not transpiled; run what DistributeTranspiler.get_trainer_program\(\)"),
        (
            server_plan,
            "main",
            r"not transpiled; run what DistributeTranspiler.get_pserver_program\(endpoint\)",
        ),
        (trainer_plan, "server", "expected a trainer's program, found one of a pserver"),
        (server_plan, "trainer", "expected a pserver's program, found one of a trainer"),
    ],
)
def test_another_role_s_program_is_an_error(lower, program, message):
    main = captured()
    transpiler, _ = transpiled(main.clone())
    programs = {
        "main": main,
        "trainer": transpiler.get_trainer_program(),
        "server": transpiler.get_pserver_program(ONE),
    }
    with pytest.raises(TranspileError, match=message):
        lower(programs[program])


def test_what_is_lowered_is_the_program_s_operators():
    """Moving a block in the program moves it in the plan; a program that contradicts itself is refused."""
    transpiler, _ = transpiled(captured({"b": (3,)}))
    program = transpiler.get_trainer_program()
    block = program.global_block()

    def redirect(kind: str) -> None:
        for index, op in enumerate(block.ops):
            if op.type == kind:
                block.ops[index] = dataclasses.replace(op, attrs={**op.attrs, "epmap": [TWO]})

    redirect("send")
    with pytest.raises(TranspileError, match=f"sends b@GRAD to {TWO} and receives b from {ONE}"):
        trainer_plan(program)
    redirect("recv")
    assert trainer_plan(program).blocks[0].endpoint == TWO


def test_a_server_s_program_that_does_not_average_over_the_trainers_is_refused():
    transpiler, _ = transpiled(captured({"b": (3,)}))
    program = transpiler.get_pserver_program(ONE)
    ops = program.block(1).ops
    ops[1] = dataclasses.replace(ops[1], attrs={**ops[1].attrs, "scale": 1.0})
    with pytest.raises(TranspileError, match=r"sums 2 gradients for b and scales them by 1\.0; expected 2"):
        server_plan(program)


def test_the_order_of_optimize_operators_does_not_move_blocks():
    """Blocks are numbered by name, whatever order a front end writes its operators in."""
    program = captured({"w": (400, 100), "a": (3,), "m": (5,)})
    turned = program.clone()
    ops = turned.global_block().ops
    ops[-3:] = reversed(ops[-3:])
    assert turned != program
    plans = [trainer_plan(transpiled(each)[0].get_trainer_program()) for each in (program, turned)]
    assert plans[0] == plans[1]
    assert [block.name for block in plans[0].blocks] == ["a", "m", "w.block0", "w.block1"]


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        pytest.param({"trainers": 3}, "trainers: 2 here, 3 there", id="trainers"),
        pytest.param({"servers": 3}, "endpoints: .* here, .* there", id="endpoints"),
        pytest.param({"shapes": {"w": (400, 101)}}, r"parameter w: float32\[400, 100\].*101\]", id="shape"),
        pytest.param(
            {"shapes": {"v": (400, 100)}},
            "parameter w: .* here, nothing there; parameter v: nothing",
            id="name",
        ),
        pytest.param({"optimizer": "Adam"}, r"sgd: torch.*SGD.* here, adam: torch.*Adam", id="optimizer"),
        pytest.param(
            {"options": {"maximize": True}}, "maximize=False.* here, .*maximize=True", id="structure"
        ),
    ],
)
def test_fingerprints_differ_and_say_in_what(change, difference):
    def plan(shapes: Any = None, optimizer: str = "SGD", options: Any = None, **rest: Any) -> TrainerPlan:
        program = captured(shapes or {"w": (400, 100)}, optimizer, **(options or {}))
        return trainer_plan(transpiled(program, **rest)[0].get_trainer_program())

    ours, theirs = plan(), plan(**change)
    assert ours.fingerprint != theirs.fingerprint
    assert re.search(difference, describe_difference(ours.agreement, theirs.agreement))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"trainer_id": 1}, id="trainer-id"),
        pytest.param({"options": {"lr": 0.5}}, id="learning-rate"),
        pytest.param({"options": {"foreach": True}}, id="kernel-flags"),
        pytest.param({"print_log": True}, id="logging"),
        pytest.param({"min_block_size": 10000}, id="where-blocks-lie-as-servers-tell-it"),
    ],
)
def test_fingerprints_ignore_what_may_differ(change):
    def plan(options: Any = None, **rest: Any) -> TrainerPlan:
        return trainer_plan(transpiled(captured(**(options or {})), **rest)[0].get_trainer_program())

    assert plan().fingerprint == plan(**change).fingerprint
    assert describe_difference(plan().agreement, plan(**change).agreement) == ""


def test_a_long_difference_is_cut_short():
    ours = {f"fact {i}": "a" for i in range(9)}
    assert describe_difference(ours, dict.fromkeys(ours, "b")).endswith("; and 6 more")
