"""Programs of the original's example models, against what paddlepaddle 1.8.5 makes of the same calls.

Numbers of control variables are random in the original, so they are counted by appearance in both. These
facts of the original depend on the order of a set or of calls, and are not compared:

- the order of `grad_to_block_id` and of `fake_init`, which is that of a set of texts;
- the shape of an initial operator in a trainer's startup program, and of a table there:
  ``get_startup_program`` of a server writes that of its own slice there, if the same process calls it first.
"""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from fleet import fluid
from tests.support import fluid_models
from tests.support.fluid import as_recorded, check_blocks

GOLDEN = Path(__file__).parents[3] / "golden" / "fluid" / "programs.json.gz"
RECORDED: dict[str, Any] = json.loads(gzip.decompress(GOLDEN.read_bytes()))
MODELS: dict[str, Any] = RECORDED["models"]
BUILT = {**fluid_models.MODELS, "mlp_adagrad": fluid_models.mlp}
MODES = ("sync", "sync_unsliced", "async", "async_unsliced")
JOBS = [
    (name, mode) for name, model in MODELS.items() for mode in MODES if "original_fails" not in model[mode]
]


def optimizer(name: str) -> Any:
    if name == "word2vec":
        rate = fluid.layers.exponential_decay(
            learning_rate=1.0, decay_steps=100000, decay_rate=0.999, staircase=True
        )
        return fluid.optimizer.SGD(learning_rate=rate)
    if name == "deepfm":
        decay = fluid.regularizer.L2DecayRegularizer(1e-4)
        return fluid.optimizer.SGD(1e-4, regularization=decay)
    if name == "mlp_adagrad":
        return fluid.optimizer.Adagrad(learning_rate=0.01)
    if name.startswith("distribute_ctr") and name != "distribute_ctr_one_slot":
        return fluid.optimizer.Adam(1e-4)
    return fluid.optimizer.SGD({"mlp": 0.01, "fit_a_line": 0.001, "simnet_bow": 0.2}.get(name, 1e-4))


def facts(variable: Any) -> list[Any]:
    return [variable.type, list(variable.shape), variable.dtype, variable.persistable]


def described(program: Any) -> list[dict[str, Any]]:
    return [
        {
            "parent": block.parent_idx,
            "ops": [
                {
                    "type": op.type,
                    "inputs": {slot: list(names) for slot, names in op.inputs.items() if names},
                    "outputs": {slot: list(names) for slot, names in op.outputs.items() if names},
                    "attrs": dict(op.attrs),
                }
                for op in block.ops
            ],
            "vars": {name: facts(each) for name, each in block.vars.items()},
        }
        for block in program.blocks
    ]


def comparable(blocks: list[dict[str, Any]], *, shapes: bool = True) -> Any:
    """Return blocks without what the original leaves open."""
    text = json.dumps(blocks, sort_keys=True)
    numbers: dict[str, str] = {}
    operators = json.dumps([block["ops"] for block in blocks])
    for found in re.findall(r"__control_var@\d+", operators + text):
        numbers.setdefault(found, f"control {len(numbers)}")
    for name, number in numbers.items():
        text = re.sub(rf"{re.escape(name)}(?!\d)", number, text)
    found_blocks = json.loads(text)
    for block in found_blocks:
        for op in block["ops"]:
            attrs = op["attrs"]
            if "grad_to_block_id" in attrs:
                attrs["grad_to_block_id"] = sorted(attrs["grad_to_block_id"])
            if not shapes and not op["inputs"] and op["type"] != "recv":
                attrs.pop("shape", None)
            if op["type"] == "fake_init":
                block["vars"].pop(*op["outputs"]["Out"])
        block["ops"].sort(key=lambda op: str(op["outputs"]) if op["type"] == "fake_init" else "")
    return found_blocks


@pytest.mark.usefixtures("own_programs")
@pytest.mark.parametrize("name", MODELS)
def test_building_and_minimizing_append_the_original_s_operators(name: str) -> None:
    main, startup = fluid.default_main_program(), fluid.default_startup_program()
    model = BUILT[name]()
    recorded = MODELS[name]
    for program, part in ((main, "main"), (startup, "startup")):
        check_blocks(as_recorded(program), recorded["before"][part])
    assert model.loss.name == recorded["before"]["loss"]
    _, pairs = optimizer(name).minimize(model.loss)
    assert [[each.name for each in pair] for pair in pairs] == recorded["after_minimize"]["params_grads"]
    for program, part in ((main, "main"), (startup, "startup")):
        check_blocks(as_recorded(program), recorded["after_minimize"][part])


@pytest.mark.usefixtures("own_programs")
@pytest.mark.parametrize(("name", "mode"), JOBS)
def test_transpiling_makes_the_original_s_programs(name: str, mode: str) -> None:
    recorded = MODELS[name][mode]
    loss = BUILT[name]().loss
    optimizer(name).minimize(loss)
    config = fluid.DistributeTranspilerConfig()
    config.slice_var_up = "unsliced" not in mode
    config.runtime_split_send_recv = False  # as recorded
    transpiler = fluid.DistributeTranspiler(config)
    transpiler.transpile(
        RECORDED["trainer_id"],
        pservers=RECORDED["pservers"],
        trainers=RECORDED["trainers"],
        sync_mode=mode.startswith("sync"),
    )
    for endpoint, expected in recorded["pservers"].items():
        programs = transpiler.get_pserver_programs(endpoint)
        for program, part in zip(programs, ("main", "startup"), strict=True):
            found, wanted = comparable(described(program)), comparable(expected[part])
            assert found == wanted
    trained = transpiler.get_trainer_program(wait_port=False)
    assert trained is fluid.default_main_program()
    programs = trained, fluid.default_startup_program()
    for program, part in zip(programs, ("main", "startup"), strict=True):
        found = comparable(described(program), shapes=part == "main")
        wanted = comparable(recorded["trainer"][part], shapes=part == "main")
        assert found == wanted


def transpiled(rate: Any, *, sync: bool, **arguments: Any) -> fluid.DistributeTranspiler:
    """Transpile a table and a dense layer for trainer 0 of 2, and one server."""
    ids = fluid.layers.data("ids", [1], dtype="int64")
    rows = fluid.layers.embedding(ids, [9, 2], is_sparse=True, param_attr="table")
    loss = fluid.layers.mean(fluid.layers.fc(rows, 1))
    fluid.optimizer.SGD(rate() if callable(rate) else rate, **arguments).minimize(loss)
    transpiler = fluid.DistributeTranspiler()
    transpiler.transpile(0, pservers="127.0.0.1:6174", trainers=2, sync_mode=sync)
    return transpiler


@pytest.mark.usefixtures("own_programs")
def test_a_server_has_the_conditional_blocks_of_its_schedule() -> None:
    rate = lambda: fluid.layers.piecewise_decay([2], [0.1, 0.01])  # noqa: E731 - built in the test's program
    program = transpiled(rate, sync=True).get_pserver_program("127.0.0.1:6174")
    (listen,) = program.global_block().ops
    rates: Any = program.blocks[1]
    inner = [op.attrs["sub_block"]["block"] for op in rates.ops if op.type == "conditional_block"]
    assert inner == [2, 3]
    for number in inner:
        (op,) = program.blocks[number].ops
        assert (op.type, op.outputs) == ("assign", {"Out": ("learning_rate",)})
        assert {*op.input_arg_names, "learning_rate"} == set(program.blocks[number].vars)
    assert listen.attrs["optimize_blocks"] == {"blocks": [1, 4, 5, 6]}
    assert {program.blocks[number].ops[-1].type for number in (4, 5, 6)} == {"sgd"}


@pytest.mark.usefixtures("own_programs")
def test_an_asynchronous_trainer_sends_its_step_before_it_receives() -> None:
    program = transpiled(
        lambda: fluid.layers.exponential_decay(0.1, 2, 0.5), sync=False
    ).get_trainer_program()
    ops = program.global_block().ops
    (count,) = (at for at, op in enumerate(ops) if op.inputs.get("X") == ("@LR_DECAY_COUNTER@.trainer_0",))
    assert {op.type for op in ops[count + 1 :]} == {"recv"}


@pytest.mark.usefixtures("own_programs")
def test_a_regularizer_makes_the_gradient_of_a_table_dense_on_servers() -> None:
    decay = fluid.regularizer.L2Decay(0.1)
    program = transpiled(0.1, sync=True, regularization=decay).get_pserver_program("127.0.0.1:6174")
    (listen,) = program.global_block().ops
    (update,) = (block.ops[-1] for block in program.blocks[1:] if block.ops[-1].input("Param") == ["table"])
    assert listen.attrs["sparse_grad_to_param"] == []
    assert update.attrs["op_role_var"] == ["table", "table@GRAD@NEWGRAD@"]
