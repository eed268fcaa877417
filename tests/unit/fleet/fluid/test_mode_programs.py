"""The programs of each mode, operator by operator; trainers and servers compute the same plan."""

from typing import Any

import pytest

from fleet.fluid import DistributeTranspiler, Program
from fleet.fluid.render import server_plan, trainer_plan
from fleet.plan import DistributeTranspilerConfig
from tests.support.programs import captured

ONE, TWO = "10.0.0.1:6174", "10.0.0.2:6174"
ASYNC: dict[str, Any] = {"sync_mode": False, "runtime_split_send_recv": True}
FIELDS: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": ASYNC,
    "dc-asgd": ASYNC | {"enable_dc_asgd": True},
    "dc-asgd-without-a-named-mode": {"sync_mode": False, "enable_dc_asgd": True},
    "half-async": {"sync_mode": False},
    "half-async-cut-by-the-sender": ASYNC | {"half_async": True},
    "geo": {"geo_sgd_mode": True, "geo_sgd_need_push_nums": 7},
}

ALIKE = ("half-async-cut-by-the-sender", "dc-asgd-without-a-named-mode")
"""Those that speak with their servers as the one before does."""
every_mode = pytest.mark.parametrize("name", FIELDS)


def transpiled(name: str, optimizer: str = "SGD", **options: Any) -> DistributeTranspiler:
    transpiler = DistributeTranspiler(DistributeTranspilerConfig(**FIELDS[name]))
    transpiler.transpile(0, program=captured(optimizer=optimizer, **options), pservers=[ONE, TWO], trainers=2)
    return transpiler


def types(program: Program, block: int = 0) -> list[str]:
    return [op.type for op in program.block(block).ops]


@every_mode
def test_trainers_and_servers_come_to_the_same_blocks(name):
    transpiler = transpiled(name)
    trainer = trainer_plan(transpiler.get_trainer_program())
    servers = [server_plan(transpiler.get_pserver_program(endpoint)) for endpoint in (ONE, TWO)]
    held = sorted((block for plan in servers for block in plan.blocks), key=lambda block: block.id)
    assert tuple(held) == trainer.blocks
    assert [block.shape for block in held] == [(100,), (200, 100), (200, 100)]
    assert all(plan.fingerprint == trainer.fingerprint for plan in servers)
    started = trainer_plan(transpiler.get_trainer_program().startup_program or Program())
    assert started.blocks == trainer.blocks
    assert (started.push_nums, started.merge_add) == (trainer.push_nums, trainer.merge_add)


@every_mode
def test_only_sync_has_barriers_in_its_steps(name):
    ops = types(transpiled(name).get_trainer_program())
    assert {"send_barrier", "fetch_barrier"} <= set(ops) or name != "sync"
    assert not any("barrier" in each for each in ops) or name == "sync"


@pytest.mark.parametrize("name", ["async", "half-async-cut-by-the-sender"])
def test_a_sender_that_cuts_gets_gradients_whole(name):
    program = transpiled(name).get_trainer_program()
    assert "split_byref" not in types(program)
    (send,) = (op for op in program.global_block().ops if op.type == "send" and op.input("X") == ["w@GRAD"])
    assert send.attr("send_varnames") == ["w@GRAD.block0", "w@GRAD.block1"]
    assert send.attr("sections") == [200, 200]


def test_a_trainer_of_geo_keeps_its_optimizer_and_sends_what_has_changed_behind_it():
    program = transpiled("geo", momentum=0.9).get_trainer_program()
    assert types(program) == [
        *("forward", "backward", "accumulate_grad", "accumulate_grad"),
        *("momentum", "momentum", "send", "send", "recv", "recv", "concat"),
    ]
    bias, weight = (op for op in program.global_block().ops if op.type == "send")
    assert (bias.input("X"), weight.input("X")) == (["b"], ["w"])
    assert weight.attr("send_varnames") == ["w.block0.delta", "w.block1.delta"]
    assert (weight.attr("epmap"), weight.attr("push_nums")) == ([TWO, ONE], 7)
    assert trainer_plan(program).push_nums == 7
    startup = program.startup_program
    assert startup is not None
    assert types(startup).count("init_state") == 3  # two velocities and the learning rate


def test_a_server_of_geo_adds_and_has_no_optimizer():
    transpiler = transpiled("geo", momentum=0.9)
    program = transpiler.get_pserver_program(ONE)
    (listen,) = program.global_block().ops
    assert (listen.attr("distributed_mode"), listen.attr("Fanin")) == (3, 2)
    assert listen.input("X") == ["b.delta", "w.block1.delta"]
    assert listen.attr("grad_to_block_id") == ["b.delta:1", "w.block1.delta:2"]
    (addition,) = program.block(2).ops
    assert (addition.type, addition.input("X"), addition.output("Out")) == (
        "sum",
        ["w.block1", "w.block1.delta"],
        ["w.block1"],
    )
    assert types(transpiler.get_startup_program(ONE)) == ["init_parameter", "init_parameter"]
    assert server_plan(program).groups == {}


def test_delay_is_compensated_by_operators_before_everything_else():
    transpiler = transpiled("dc-asgd", weight_decay=0.01)
    program = transpiler.get_pserver_program(ONE)
    assert types(program, 1) == [
        "ref_by_trainer_id",
        *("elementwise_sub", "elementwise_mul", "elementwise_mul", "elementwise_add"),
        *("scale", "sum", "sgd"),
    ]
    reference = program.block(1).ops[0]
    assert reference.input("X") == ["b.trainer_0_bak", "b.trainer_1_bak"]
    assert types(transpiler.get_startup_program(ONE)).count("assign") == 4
    plan = server_plan(program)
    assert plan.dc_asgd
    assert plan.groups[0].hyper_parameters["weight_decay"] == 0.01
    assert not server_plan(transpiled("async").get_pserver_program(ONE)).dc_asgd


@pytest.mark.parametrize(
    ("options", "merged"),
    [
        pytest.param({}, {0}, id="plain-sgd-is-summed"),
        pytest.param({"weight_decay": 0.1}, {0}, id="with-weight-decay-too"),
        pytest.param({"momentum": 0.9}, set(), id="momentum-is-averaged"),
        pytest.param({"optimizer": "Adam"}, set(), id="so-is-adam"),
    ],
)
def test_how_gradients_of_several_steps_are_merged(options, merged):
    assert trainer_plan(transpiled("half-async", **options).get_trainer_program()).merge_add == merged


@every_mode
def test_every_variable_that_an_operator_names_is_declared(name):
    transpiler = transpiled(name, momentum=0.9)
    programs = [transpiler.get_trainer_program()]
    for endpoint in (ONE, TWO):
        programs += transpiler.get_pserver_programs(endpoint)
    for program in programs:
        for block in program.blocks:
            for op in block.ops:
                for variable in (*op.input_arg_names, *op.output_arg_names):
                    assert block.var(variable).name == variable


def test_processes_of_different_modes_do_not_agree():
    agreements = {
        name: trainer_plan(transpiled(name).get_trainer_program()).fingerprint
        for name in FIELDS
        if name not in ALIKE
    }
    assert len(set(agreements.values())) == len(agreements)
