"""The programs of collective training, and errors that name arguments which it does not support."""

from typing import Any

import pytest

from fleet import DistributeTranspiler, DistributeTranspilerConfig, TranspileError
from fleet.fluid import Program
from tests.support.programs import captured

TRAINERS = "10.0.0.1:6174,10.0.0.2:6174"
TWO = "10.0.0.2:6174"


def transpiler_of(mode: str, main: Program, **fields: Any) -> DistributeTranspiler:
    transpiler = DistributeTranspiler(DistributeTranspilerConfig(mode=mode, **fields))
    startup = main.startup_program
    transpiler.transpile(1, main, trainers=TRAINERS, startup_program=startup, current_endpoint=TWO)
    return transpiler


def transpiled(mode: str, main: Program, **fields: Any) -> Program:
    return transpiler_of(mode, main, **fields).get_trainer_program()


def types(program: Program) -> list[str]:
    return [op.type for op in program.global_block().ops]


def test_in_mode_nccl2_trainers_find_each_other_in_the_startup_program_alone():
    main = captured()
    before = types(main)
    program = transpiled("nccl2", main)
    assert types(program) == before
    assert program.startup_program is not None
    meet = program.startup_program.global_block().ops[-1]
    assert (meet.type, meet.output("NCCLID")) == ("gen_nccl_id", ["NCCLID"])
    assert meet.attr("endpoint_list") == ["10.0.0.1:6174"]
    assert (meet.attr("endpoint"), meet.attr("trainer_id")) == (TWO, 1)
    assert (main.attrs["trainers"], main.attrs["trainer_id"]) == (2, 1)


def test_in_mode_collective_each_gradient_is_averaged_behind_what_gives_it():
    main = captured()
    parameters = [parameter.name for parameter in main.global_block().all_parameters()]
    program = transpiled("collective", main)
    ops = program.global_block().ops
    sums = [op for op in ops if op.type == "c_allreduce_sum"]
    assert sorted(op.input("X")[0] for op in sums) == sorted(f"{name}@GRAD" for name in parameters)
    for op in sums:
        scale = ops[ops.index(op) - 1]
        assert (scale.type, scale.attr("scale"), scale.input("X")) == ("scale", 0.5, op.input("X"))
    kinds = types(program)
    assert kinds.index("c_sync_comm_stream") > max(ops.index(op) for op in sums)
    assert program.startup_program is not None
    startup = program.startup_program.global_block().ops
    assert [op.input("X")[0] for op in startup if op.type == "c_broadcast"] == parameters
    assert [op.type for op in startup if op.type.startswith("c_")][:2] == ["c_gen_nccl_id", "c_comm_init"]


def test_local_sgd_averages_parameters_behind_the_optimizer():
    program = transpiled("collective", captured(), collective_mode="local_sgd")
    ops = program.global_block().ops
    names = {parameter.name for parameter in program.global_block().all_parameters()}
    assert {op.input("X")[0] for op in ops if op.type == "c_allreduce_sum"} == names
    assert ops[-1].type == "c_allreduce_sum"


@pytest.mark.parametrize("mode", ["nccl2", "collective"])
@pytest.mark.parametrize("name", ["get_pserver_program", "get_pserver_programs", "get_startup_program"])
def test_programs_of_servers_are_refused_with_what_a_trainer_runs(name, mode):
    main = captured()
    transpiler = transpiler_of(mode, main)
    message = rf"mode is '{mode}', .* no parameter servers: .* get_trainer_program\(\).startup_program"
    with pytest.raises(TranspileError, match=message):
        getattr(transpiler, name)(TWO)
    assert transpiler.get_trainer_program().startup_program is main.startup_program


@pytest.mark.parametrize(
    ("arguments", "fields", "message"),
    [
        (
            {"trainers": 2},
            {},
            "then every trainer's endpoint as trainers, host:port, comma separated: trainers is 2",
        ),
        ({"trainers": "a:1,a:1"}, {}, "expected host:port, comma separated, each trainer once"),
        ({"current_endpoint": "c:1"}, {}, "trainer_id is 1 and current_endpoint 'c:1'; expected the number"),
        ({"trainer_id": 2}, {}, "trainer_id is 2 and current_endpoint"),
        ({"trainer_id": 0}, {}, "trainer_id is 0 and current_endpoint '10.0.0.2:6174'"),
        ({}, {"nccl_comm_num": 2}, "config.nccl_comm_num = 2 is not supported"),
        ({}, {"use_hierarchical_allreduce": True}, "config.use_hierarchical_allreduce = True is not"),
        ({}, {"collective_mode": "single_process_multi_thread"}, "config.collective_mode = 'single_"),
    ],
)
def test_what_cannot_be_honoured_is_named_before_anything_changes(arguments, fields, message):
    main = captured()
    transpiler = DistributeTranspiler(DistributeTranspilerConfig(mode="nccl2", **fields))
    given: dict[str, Any] = {"trainer_id": 1, "trainers": TRAINERS, "current_endpoint": TWO} | arguments
    with pytest.raises(TranspileError) as error:
        transpiler.transpile(program=main, startup_program=main.startup_program, **given)
    assert message in str(error.value)
    assert "transpiled" not in main.attrs
    assert main.startup_program is not None
    assert "role" not in main.startup_program.attrs
