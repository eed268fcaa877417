"""``minimize`` appends the same clipping, regularization and updates as paddlepaddle 1.8.5."""

from typing import Any, cast

import pytest

from fleet.errors import ConfigurationError
from fleet.fluid import clip, layers, optimizer, regularizer, unique_name
from fleet.fluid.param_attr import ParamAttr
from fleet.fluid.program import Program, program_guard
from tests.support.paddle_steps import CASES, CONSTANTS

CLIPS = {
    "global_norm": lambda: clip.GradientClipByGlobalNorm(CONSTANTS["global_norm"]),
    "norm": lambda: clip.GradientClipByNorm(CONSTANTS["norm"]),
    "value": lambda: clip.GradientClipByValue(CONSTANTS["value"][1], CONSTANTS["value"][0]),
}
REGULARIZERS = {
    "l1": lambda: regularizer.L1Decay(CONSTANTS["l1"]),
    "l2": lambda: regularizer.L2Decay(CONSTANTS["l2"]),
    None: lambda: None,
}


def attr(name: str, given: dict[str, Any]) -> ParamAttr:
    chosen = {**given, "regularizer": REGULARIZERS[given.get("regularizer")]()}
    return ParamAttr(name, **chosen)


def minimized(case: dict[str, Any]) -> tuple[Program, Program, int]:
    """Return a recorded program, its startup program, and the number of its forward operators."""
    main, startup = Program(), Program()
    kind = case["clip"] or ""
    with unique_name.guard(), program_guard(main, startup):
        of = {
            name: attr(name, case["param_attr"].get(name, {}))
            for name in ("w", "b", "table_dense", "table_sparse")
        }
        w = layers.create_parameter([3, 4], "float32", attr=of["w"])
        b = layers.create_parameter([4], "float32", attr=of["b"])
        ids = layers.data("ids", [5, 1], append_batch_size=False, dtype="int64")
        tables = [
            layers.embedding(ids, [7, 2], is_sparse=name == "table_sparse", param_attr=of[name])
            for name in ("table_dense", "table_sparse")
        ]
        losses: list[Any] = []
        for each, shape in ((w, [3, 4]), (b, [4]), (tables[0], [5, 2]), (tables[1], [5, 2])):
            given = layers.data(f"g{len(losses)}", shape, append_batch_size=False)
            losses.append(layers.reduce_sum(layers.elementwise_mul(each, given)))
        loss = layers.sums(losses)
        arguments = dict(case["arguments"])
        if "decayed_rate" in kind:
            arguments["learning_rate"] = layers.exponential_decay(CONSTANTS["LR"], 4, 0.5, staircase=True)
        chosen = CLIPS.get(kind.removesuffix("_decayed_rate"))
        if kind == "set_gradient_clip":
            clip.set_gradient_clip(CLIPS["global_norm"]())
        count = len(main.global_block().ops)
        getattr(optimizer, case["optimizer"])(
            **arguments,
            regularization=REGULARIZERS[case["regularization"]](),
            grad_clip=chosen() if chosen else None,
        ).minimize(loss)
    return main, startup, count


@pytest.mark.parametrize("name", CASES)
def test_the_operators_are_paddles(name):
    main, _, count = minimized(CASES[name])
    appended = main.global_block().ops[count:]
    assert [[op.type, op.attr("op_role")] for op in appended] == CASES[name]["operators_of_minimize"]


@pytest.mark.parametrize("name", CASES)
def test_updates_have_paddles_slots_names_and_attributes(name):
    main, _, _ = minimized(CASES[name])
    updates = [op for op in main.global_block().ops if "ParamOut" in op.outputs]
    found = [
        {
            "type": op.type,
            "inputs": {slot: list(names) for slot, names in sorted(op.inputs.items())},
            "outputs": {slot: list(names) for slot, names in sorted(op.outputs.items())},
            "attrs": dict(sorted(op.attrs.items())),
        }
        for op in updates
    ]
    assert found == CASES[name]["update_operators"]


@pytest.mark.parametrize("name", CASES)
def test_state_and_its_first_values_are_paddles(name):
    main, startup, _ = minimized(CASES[name])
    found = {
        each.name: [list(each.shape), each.dtype]
        for each in main.list_vars()
        if each.persistable and not each.is_parameter
    }
    assert found == CASES[name]["state"]
    assert [op.type for op in startup.global_block().ops] == CASES[name]["startup_operators"]


def test_state_begins_with_the_optimizers_values():
    _, startup, _ = minimized(CASES["adam_betas"])
    values = {op.output("Out")[0]: op.attrs.get("value") for op in startup.global_block().ops}
    assert values["w_beta1_pow_acc_0"] == pytest.approx(0.8)
    assert values["w_beta2_pow_acc_0"] == pytest.approx(0.9)
    assert values["w_moment1_0"] == 0.0
    _, startup, _ = minimized(CASES["adagrad_initial"])
    values = {op.output("Out")[0]: op.attrs.get("value") for op in startup.global_block().ops}
    initial = CASES["adagrad_initial"]["arguments"]["initial_accumulator_value"]
    assert values["w_moment_0"] == pytest.approx(initial)


def test_clipping_is_about_the_new_gradients():
    main, _, count = minimized(CASES["sgd_norm"])
    clips = [op for op in main.global_block().ops[count:] if op.type == "clip_by_norm"]
    assert [op.attr("op_role_var") for op in clips] == [
        [name, f"clip_by_norm_{at}.tmp_0"]
        for at, name in enumerate(("b", "table_dense", "table_sparse", "w"))
    ]
    assert main.global_block().var("clip_by_norm_2.tmp_0").type == "SELECTED_ROWS"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: clip.GradientClipByNorm(1.0, need_clip=lambda _: True),
            "servers clip all gradients or none",
        ),
        (lambda: clip.GradientClipByGlobalNorm(1.0, group_name="other"), "all gradients are one group"),
        (lambda: clip.GradientClipByValue(-1.0), "min 1.0 is larger than max -1.0"),
        (lambda: clip.set_gradient_clip(cast("Any", 1.0)), r"clip is 1\.0; expected fluid\.clip"),
        (
            lambda: clip.set_gradient_clip(clip.GradientClipByNorm(1.0), param_list=["w"]),
            "param_list is given",
        ),
        (lambda: regularizer.L2Decay(cast("Any", "0.1")), "regularization_coeff is '0.1'; expected a number"),
        (lambda: optimizer.SGD("fast"), "learning_rate is 'fast'; expected a number"),
    ],
)
def test_what_is_not_there_is_refused_by_name(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()
