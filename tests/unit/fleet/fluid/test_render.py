"""A program contains its plan, and does not run if its operators differ from the plan's."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import fleet
from fleet.errors import TranspileError
from fleet.fluid import DistributeTranspiler, OpRole, Program, Variable
from fleet.fluid.render import check_unedited, server_plan, trainer_plan
from fleet.plan import DistributeTranspilerConfig
from tests.support.programs import captured

ONE, TWO = "10.0.0.1:6174", "10.0.0.2:6174"


def transpiled(program: Program | None = None, **fields: Any) -> DistributeTranspiler:
    transpiler = DistributeTranspiler(DistributeTranspilerConfig(**fields))
    made = program if program is not None else captured({"b": (3,), "w": (400, 100)})
    transpiler.transpile(0, program=made, pservers=[ONE, TWO], trainers=2)
    return transpiler


@pytest.mark.parametrize("geo", [False, True], ids=["sync", "geo"])
def test_the_plans_of_replicas_are_those_of_the_programs_plan(geo):
    transpiler = transpiled(geo_sgd_mode=geo)
    trainer, plan = transpiler.get_trainer_program(), transpiler.plan
    assert trainer.plan is plan
    assert trainer.startup_program is not None
    assert trainer_plan(trainer) == trainer_plan(trainer.startup_program)
    blocks = trainer_plan(trainer).blocks
    for endpoint in (ONE, TWO):
        program, startup = transpiler.get_pserver_programs(endpoint)
        assert server_plan(program) == server_plan(startup)
        assert server_plan(program).blocks == tuple(each for each in blocks if each.endpoint == endpoint)


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
    transpiler = transpiled(main.clone())
    programs = {
        "main": main,
        "trainer": transpiler.get_trainer_program(),
        "server": transpiler.get_pserver_program(ONE),
    }
    with pytest.raises(TranspileError, match=message):
        lower(programs[program])


def change_op(kind: str, **attrs: Any) -> Callable[[Program], None]:
    """Return what changes attributes of the first operator of a type."""

    def change(program: Program) -> None:
        for block in program.blocks:
            for index, op in enumerate(block.ops):
                if op.type == kind:
                    block.ops[index] = dataclasses.replace(op, attrs={**op.attrs, **attrs})
                    return
        raise AssertionError(kind)

    return change


def append(program: Program) -> None:
    program.global_block().append_op("print", {"X": [next(iter(program.global_block().vars))]})


def remove(kind: str) -> Callable[[Program], None]:
    def change(program: Program) -> None:
        block = next(block for block in program.blocks if any(op.type == kind for op in block.ops))
        del block.ops[next(index for index, op in enumerate(block.ops) if op.type == kind)]

    return change


def rename(program: Program) -> None:
    program.global_block().rename_vars({"b": "c"})


def set_attr(name: str, value: Any) -> Callable[[Program], None]:
    return lambda program: program.attrs.__setitem__(name, value)


def declare(program: Program) -> None:
    program.global_block().create_var(Variable("mine", (1,)))


OF_TRAINERS = [
    pytest.param(
        change_op("send", epmap=[ONE, ONE]),
        r"operator send of w at position 4 of block 0 has epmap = \['10.*, expected \['10\.0\.0\.2",
        id="another-server",
    ),
    pytest.param(append, "operator print stands at position .* where no operator is planned", id="appended"),
    pytest.param(
        remove("fetch_barrier"),
        "operator concat of|operator concat stands at .*, expected operator fetch_barrier",
        id="removed",
    ),
    pytest.param(rename, "reads or writes other variables", id="renamed"),
    pytest.param(declare, r"variable mine of block 0 is Variable\(name='mine'", id="declared"),
    pytest.param(set_attr("trainers", 3), "attribute trainers is 3, expected 2", id="attribute"),
    pytest.param(
        set_attr("trainer_id", 1),
        "operator split_byref .* reads or writes other variables",
        id="another-trainer",
    ),
    pytest.param(set_attr("trainer_id", 7), "trainer_id is 7; expected a .* 0 to 1", id="no-trainer"),
]


@pytest.mark.parametrize(("edit", "message"), OF_TRAINERS)
def test_an_edited_trainers_program_is_refused_with_what_differs(edit, message):
    program = transpiled().get_trainer_program()
    edit(program)
    with pytest.raises(TranspileError, match=message):
        trainer_plan(program)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        pytest.param(
            change_op("scale", scale=1.0),
            r"operator scale of b at position 1 of block 1 has scale = 1\.0, expected 0\.5; .* before trans",
            id="no-mean",
        ),
        pytest.param(change_op("sgd", lr=0.5), r"sgd of b .* has lr = 0\.5, expected 0\.1", id="a-rate"),
        pytest.param(lambda p: p.blocks.pop(), "it has 2 blocks, expected 3", id="a-block"),
        pytest.param(set_attr("endpoint", TWO), "the program was edited: ", id="another-server"),
        pytest.param(set_attr("endpoint", "a:1"), "endpoint is 'a:1'; expected one of", id="no-server"),
    ],
)
def test_an_edited_servers_program_is_refused_with_what_differs(edit, message):
    program = transpiled().get_pserver_program(ONE)
    edit(program)
    with pytest.raises(TranspileError, match=message):
        server_plan(program)


def test_a_startup_program_that_was_edited_does_not_run():
    program = captured()
    transpiled(program)
    assert program.startup_program is not None
    append(program.startup_program)
    with pytest.raises(TranspileError, match="operator print stands"):
        fleet.Executor().run(program.startup_program)


@pytest.mark.parametrize(
    ("kind", "attrs"),
    [
        pytest.param(
            "lars", {"op_role": int(OpRole.OPTIMIZE), "op_role_var": ["w", "w@GRAD"]}, id="optimize"
        ),
        pytest.param("lookup_table", {"is_distributed": True}, id="distributed"),
    ],
)
def test_a_captured_program_that_was_edited_is_not_transpiled(kind, attrs):
    program = captured()
    program.global_block().append_op(kind, {"X": ["w@GRAD"]}, {"Out": ["w@GRAD"]}, attrs)
    with pytest.raises(TranspileError, match=f"was edited: operator {kind}.* stands at .*change the"):
        transpiled(program)
    with pytest.raises(TranspileError, match=f"the program was edited: operator {kind}"):
        fleet.Executor().run(program)


def test_a_program_is_checked_again_after_it_has_run():
    model = torch.nn.Linear(2, 1)
    program = Program.capture(
        model, lambda model, x: model(x).sum(), torch.optim.SGD(model.parameters(), lr=0.1)
    )
    executor, feed = fleet.Executor(), {"x": np.ones((1, 2), np.float32)}
    executor.run(program, feed)
    executor.run(program, feed)
    change_op("sgd", lr=0.5)(program)
    with pytest.raises(TranspileError, match=r"operator sgd of bias .* has lr = 0\.5, expected 0\.1"):
        executor.run(program, feed)


def test_a_program_is_checked_again_when_its_plan_is_replaced():
    program = transpiled().get_trainer_program()
    check_unedited(program)
    program.plan = None
    with pytest.raises(TranspileError):
        check_unedited(program)


def test_a_startup_program_of_another_program_is_refused():
    other = captured({"v": (3,)}).startup_program
    with pytest.raises(TranspileError, match="startup_program is not that of the program"):
        DistributeTranspiler().transpile(0, program=captured(), pservers=ONE, startup_program=other)
