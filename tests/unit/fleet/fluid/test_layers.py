"""Each layer against paddlepaddle 1.8.5: operators, names, outputs, gradients and state.

`layers` has the common arguments of each layer, `edges` the rare ones.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleet import fluid
from fleet.fluid import layers, unique_name
from fleet.fluid.backward import append_backward
from fleet.fluid.lod import LoDTensor
from fleet.fluid.program import Program, program_guard
from fleet.fluid.scope import Scope, global_scope, scope_guard
from tests.support.fluid import described, facts

GOLDEN = Path(__file__).parents[3] / "golden" / "fluid"
CASES: dict[str, dict[str, Any]] = {
    name: case
    for file in ("layers", "edges")
    for name, case in json.loads((GOLDEN / f"{file}.json").read_text())["cases"].items()
}
ARRAYS = dict(np.load(GOLDEN / "layers.npz")) | dict(np.load(GOLDEN / "edges.npz"))
TOLERANCE = 5e-7


def argument(value: Any, variables: dict[str, Any]) -> Any:
    if isinstance(value, str) and value.startswith("$"):
        return variables[value[1:]]
    if isinstance(value, list):
        return [argument(each, variables) for each in value]
    if isinstance(value, dict) and "ParamAttr" in value:
        return fluid.ParamAttr(**value["ParamAttr"])
    return value


def build(case: dict[str, Any]) -> dict[str, Any]:
    variables = {
        each["name"]: layers.data(**{name: each[name] for name in each if name != "lengths"})
        for each in case["data"]
    }
    for call in case["calls"]:
        if "method" in call:
            given = [argument(each, variables) for each in call["args"]]
            made = getattr(variables[call["self"][1:]], call["method"])(*given)
        else:
            named = {name: argument(each, variables) for name, each in call["kwargs"].items()}
            made = getattr(layers, call["layer"])(**named)
        variables.update(zip(call["out"], made if isinstance(made, tuple | list) else [made], strict=False))
    return variables


def with_loss(case: dict[str, Any], variables: dict[str, Any]) -> Any:
    """Append the loss of the recorded gradients, and its backward pass."""
    out = variables[case["calls"][-1]["out"][0]]
    weight = layers.data("loss_weight", out.shape, append_batch_size=False, dtype=out.dtype)
    loss = layers.reduce_sum(layers.elementwise_mul(out, weight))
    append_backward(loss)
    return loss


def close(found: Any, expected: Any, tolerance: float = TOLERANCE) -> None:
    found = np.asarray(found)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_allclose(found, expected, rtol=10 * tolerance, atol=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_a_layer_appends_the_original_s_operators_and_variables(name: str) -> None:
    case, main, startup = CASES[name], Program(), Program()
    with unique_name.guard(), program_guard(main, startup):
        variables = build(case)
        block = main.global_block()
        assert [described(op) for op in block.ops] == case["operators"]
        assert [described(op) for op in startup.global_block().ops] == case["startup_operators"]
        if name != "piecewise_decay":  # its blocks are not recorded; those of piecewise_decay_ints are
            inner = [[described(op) for op in each.ops] for each in main.blocks[1:]]
            assert inner == case.get("blocks", [])
        for out, expected in case["outputs"].items():
            known = {fact: value for fact, value in expected.items() if fact not in ("name", "lengths")}
            assert (variables[out].name, facts(variables[out])) == (expected["name"], known)
        for held, expected in (case["parameters"] | case["state"]).items():
            assert facts(block.var(held)) == expected
        if "backward_operators" in case:
            with_loss(case, variables)
            begin = next(at for at, op in enumerate(block.ops) if op.attr("op_role") == 257)
            assert [op.type for op in block.ops[begin:]] == case["backward_operators"]
            for gradient, kind in case["gradients"].items():
                assert block.var(f"{gradient}@GRAD").type == kind


def test_a_script_can_append_a_schedule_of_its_own() -> None:
    with unique_name.guard(), program_guard(main := Program(), Program()):
        with main._lr_schedule_guard():
            rate = layers.create_global_var([1], 0.5, "float32", persistable=True)
            with layers.control_flow.Switch() as switch, switch.case(rate < 1.0):
                layers.assign(rate * 2.0, rate)
        with main._lr_schedule_guard(is_with_opt=True):
            layers.mean(rate)
        layers.mean(rate)
    given, conditional = ([op.attr("op_role") for op in block.ops] for block in main.blocks)
    assert (set(given[:-2]), given[-2:], set(conditional)) == ({16}, [18, 0], {16})


def test_the_gradient_of_a_copy_is_a_copy() -> None:
    with unique_name.guard(), program_guard(Program(), Program()):
        x = layers.data("x", [2], stop_gradient=False)
        append_backward(layers.mean(layers.assign(x)))
        op = x.program.global_block().ops[-1]
    assert (op.type, op.inputs, op.outputs) == (
        "assign",
        {"X": ("assign_0.tmp_0@GRAD",)},
        {"Out": ("x@GRAD",)},
    )


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["calls"]])
def test_a_layer_computes_what_the_original_does(name: str) -> None:
    case, main, startup = CASES[name], Program(), Program()
    with unique_name.guard(), program_guard(main, startup), scope_guard(Scope()):
        variables = build(case)
        loss = with_loss(case, variables) if "loss" in case else None
        executor = fluid.Executor()
        if startup.global_block().ops:
            executor.run(startup)
        for held in case["parameters"]:
            variable = global_scope().find_var(held)
            assert variable is not None
            variable.get_tensor().set(ARRAYS[f"{name}/param/{held}"])
        outputs = [out for call in case["calls"] for out in call["out"]]
        gradients = list(case.get("gradients", {}))
        fetched = [variables[out].name for out in outputs] + [f"{each}@GRAD" for each in gradients]
        read = {each for op in main.global_block().ops for each in op.input_arg_names}
        for step in range(case["steps"]):

            def recorded(key: str, step: int = step) -> Any:
                return ARRAYS[f"{name}/{key}"][step] if case["steps"] > 1 else ARRAYS[f"{name}/{key}"]

            feed = {
                each["name"]: LoDTensor(recorded(f"in/{each['name']}"), each["lengths"] or ())
                if each["lengths"]
                else recorded(f"in/{each['name']}")
                for each in case["data"]
                if each["name"] in read
            }
            if loss is not None:
                feed["loss_weight"] = ARRAYS[f"{name}/in/loss_weight"]
            extra = [loss.name] if loss is not None else []
            found = executor.run(main, feed=feed, fetch_list=fetched + extra)
            for out, value in zip(outputs, found, strict=False):
                close(value, recorded(f"out/{out}"))
            for gradient, value in zip(gradients, found[len(outputs) :], strict=False):
                close(value, gradient_of(name, gradient, value))
            if loss is not None:
                close(found[-1], ARRAYS[f"{name}/loss"].reshape(1), 5e-6)
            for held in case["state"]:
                variable = global_scope().find_var(held)
                assert variable is not None
                close(np.array(variable.get_tensor()), recorded(f"state/{held}"))


def gradient_of(name: str, gradient: str, like: Any) -> Any:
    """Return a recorded gradient; one of rows as a dense array."""
    if CASES[name]["gradients"][gradient] == "LOD_TENSOR":
        return ARRAYS[f"{name}/grad/{gradient}"]
    dense = np.zeros_like(like)
    rows = ARRAYS[f"{name}/grad/{gradient}/rows"]
    np.add.at(dense, rows, ARRAYS[f"{name}/grad/{gradient}/values"])
    return dense


@pytest.mark.parametrize(("layer", "value"), [("reduce_max", np.inf), ("reduce_min", -np.inf)])
def test_an_infinite_extreme_is_the_result_and_gets_the_gradient(layer: str, value: float) -> None:
    with program_guard(Program(), Program()), scope_guard(Scope()), unique_name.guard():
        x = layers.data("x", [3], stop_gradient=False)
        out = getattr(layers, layer)(x, dim=1)
        append_backward(layers.reduce_sum(out))
        feed = {"x": np.array([[value, 1.0, value]], np.float32)}
        found, gradient = fluid.Executor().run(feed=feed, fetch_list=[out, "x@GRAD"])
    assert (found.tolist(), gradient.tolist()) == ([value], [[1.0, 0.0, 1.0]])
