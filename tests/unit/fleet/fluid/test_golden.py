"""Eight transpiled programs, compared with those of the original's transpiler."""

import json
from pathlib import Path
from typing import Any

import pytest

from fleet.fluid import DistributeTranspiler, Operator, Program
from fleet.plan import DistributeTranspilerConfig
from tests.support.programs import captured

CASES = json.loads((Path(__file__).parents[3] / "golden" / "transpile.json").read_text())
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "SGD"},
    "sgd_l2": {"optimizer": "SGD", "weight_decay": 0.01},
    "momentum": {"optimizer": "SGD", "momentum": 0.9},
    "adam": {"optimizer": "Adam"},
    "adagrad": {"optimizer": "Adagrad"},
}
COMMUNICATION = {"send", "recv", "split_byref", "concat", "send_barrier", "fetch_barrier"}

golden = pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])


def test_all_eight_cases_are_read():
    assert len(CASES) == 8


def transpiled(case: dict[str, Any]) -> DistributeTranspiler:
    program = captured(dict(case["parameters"]), **OPTIMIZERS[case["optimizer"]])
    config = DistributeTranspilerConfig(**case.get("config", {}))
    transpiler = DistributeTranspiler(config)
    transpiler.transpile(
        0,
        program=program,
        pservers=case["pservers"],
        trainers=case["trainers"],
        sync_mode=case.get("sync_mode", True),
    )
    return transpiler


def as_recorded(op: Operator) -> dict[str, Any]:
    endpoints = op.attrs.get("epmap", op.attrs.get("endpoints", []))
    return {"type": op.type, "in": op.input_arg_names, "out": op.output_arg_names, "endpoints": endpoints}


@golden
def test_trainer_communicates_as_the_original(case):
    block = transpiled(case).get_trainer_program().global_block()
    found = [as_recorded(op) for op in block.ops if op.type in COMMUNICATION]
    assert found == case["expected"]["trainer_communication"]


@golden
def test_trainer_sends_each_gradient_right_behind_its_producer(case):
    ops = transpiled(case).get_trainer_program().global_block().ops
    for position, op in enumerate(ops):
        if op.type == "send":
            behind = ops[position - 1]
            if behind.type == "split_byref":
                assert behind.output("Out") == op.input("X")
                behind = ops[position - 2]
                assert behind.output("Grad") == ops[position - 1].input("X")
            else:
                assert behind.output("Grad") == op.input("X")


@golden
def test_trainer_keeps_no_optimizer(case):
    ops = transpiled(case).get_trainer_program().global_block().ops
    assert {op.type for op in ops} - COMMUNICATION == {"forward", "backward", "accumulate_grad"}


def server_as_recorded(program: Program) -> dict[str, Any]:
    (listen,) = program.global_block().ops
    blocks = [program.block(index) for index in listen.attr("optimize_blocks")]
    return {
        "fanin": listen.attr("Fanin"),
        "distributed_mode": listen.attr("distributed_mode"),
        "optimize_blocks": [
            {
                "param": block.ops[-1].input("Param")[0],
                "shape": list(block.var(block.ops[-1].input("Param")[0]).shape),
                "ops": [op.type for op in block.ops],
            }
            for block in blocks
        ],
    }


@golden
def test_servers_step_what_the_original_steps(case):
    transpiler = transpiled(case)
    expected = case["expected"]["pservers"]
    found = {
        endpoint: server_as_recorded(transpiler.get_pserver_program(endpoint))
        for endpoint in case["pservers"].split(",")
    }
    assert found == expected


@golden
def test_every_variable_that_an_operator_names_is_declared(case):
    transpiler = transpiled(case)
    programs = [transpiler.get_trainer_program()]
    for endpoint in case["pservers"].split(","):
        programs += transpiler.get_pserver_programs(endpoint)
    for program in programs:
        for block in program.blocks:
            for op in block.ops:
                for name in (*op.input_arg_names, *op.output_arg_names):
                    assert block.var(name).name == name
