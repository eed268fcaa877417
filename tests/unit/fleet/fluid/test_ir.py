from typing import Any

import pytest
import torch

from fleet.errors import ConfigurationError
from fleet.fluid import Operator, Program, Variable


def small() -> Program:
    program = Program()
    block = program.global_block()
    block.create_var(Variable("w", (2, 3), persistable=True, is_parameter=True))
    block.create_var(Variable("w@GRAD", (2, 3)))
    block.create_var(Variable("x", (-1,), "any", is_data=True))
    block.append_op("forward", {"X": ["x"], "Param": ["w"]}, attrs={"op_role": 0})
    block.append_op(
        "sgd", {"Param": ["w"], "Grad": ["w@GRAD"]}, {"ParamOut": ["w"]}, {"lr": 0.5, "tags": ["a"]}
    )
    return program


def test_programs_read_as_the_original_s():
    program = small()
    block = program.global_block()
    op = block.ops[1]
    assert (program.num_blocks, program.blocks, program.block(0)) == (1, [block], block)
    assert block.var("w").shape == (2, 3)
    assert block.var("w").numel == 6
    assert block.all_parameters() == [block.var("w")]
    assert [variable.name for variable in program.list_vars()] == ["w", "w@GRAD", "x"]
    assert op.type == "sgd"
    assert (op.input_names, op.output_names, op.attr_names) == (
        ["Param", "Grad"],
        ["ParamOut"],
        ["lr", "tags"],
    )
    assert (op.input("Grad"), op.output("ParamOut")) == (["w@GRAD"], ["w"])
    assert (op.input_arg_names, op.output_arg_names) == (["w", "w@GRAD"], ["w"])
    assert (op.attr("lr"), op.has_attr("lr"), op.has_attr("mu")) == (0.5, True, False)


def test_a_block_looks_variables_up_in_its_parents():
    program = small()
    block = program.create_block()
    assert (block.idx, block.parent_idx) == (1, 0)
    assert block.var("w") is program.global_block().var("w")
    assert not block.has_var("w")


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda p: p.global_block().var("v"), "block 0 has no variable 'v'"),
        (
            lambda p: p.global_block().ops[1].input("Moment"),
            "sgd has no input slot 'Moment'; it has Param, Grad",
        ),
        (lambda p: p.global_block().ops[1].output("Out"), "sgd has no output slot 'Out'; it has ParamOut"),
        (lambda p: p.global_block().ops[1].attr("mu"), "sgd has no attribute 'mu'; it has lr, tags"),
        (lambda p: p.attr("role"), "the program has no attribute 'role'; it has none"),
        (lambda p: p.global_block().append_op("relu", {"X": ["v"]}), "no variable 'v'"),
        (lambda p: p.global_block().create_var(Variable("w", ())), "already has a variable 'w'"),
        (lambda p: p.global_block().rename_vars({"w": "x"}), "already has a variable 'x'"),
    ],
)
def test_asking_for_what_is_not_there_is_an_error(ask, message):
    with pytest.raises(ValueError, match=message):
        ask(small())


def test_equality_is_what_the_programs_say():
    one, other = small(), small()
    assert one == other
    other.startup_program = Program()
    assert one == other
    other.attrs["role"] = "trainer"
    assert one != other
    third = small()
    third.global_block().ops.pop()
    assert one != third
    assert one != "a program"


def test_what_is_equal_and_may_change_has_no_hash():
    with pytest.raises(TypeError, match="unhashable type: 'Program'"):
        hash(small())


def test_a_clone_is_independent():
    program = small()
    program.startup_program = small()
    clone: Any = program.clone()
    assert clone == program
    clone.global_block().rename_vars({"w": "v"})
    clone.startup_program.global_block().ops.clear()
    assert program == small()
    assert program.startup_program == small()
    assert clone.global_block().ops[1].output("ParamOut") == ["v"]


def test_the_original_s_clone_for_tests_is_refused_with_what_to_write_instead():
    assert small().clone(for_test=False) == small()
    for refused in (lambda: small().clone(for_test=True), lambda: small().clone(True)):
        with pytest.raises(ConfigurationError, match=r"a whole training step, .*model\.eval\(\)"):
            refused()


def test_a_seed_of_a_captured_program_is_refused_with_what_to_write_instead():
    model = torch.nn.Linear(2, 1)
    program = Program.capture(model, lambda model, x: model(x).mean(), torch.optim.SGD(model.parameters()))
    assert program.random_seed == 0
    program.random_seed = 0
    assert program.startup_program is not None
    for each in (program, program.startup_program):
        with pytest.raises(
            ConfigurationError, match=r"random_seed is 1, .*call torch\.manual_seed\(1\) before"
        ):
            each.random_seed = 1


def test_an_answer_s_list_is_the_asker_s():
    op = small().global_block().ops[1]
    op.input("Param").append("z")
    op.attr("tags").append("z")
    assert op.input("Param") == ["w"]
    assert op.attr("tags") == ["a"]


def test_renaming_reaches_every_slot():
    op = Operator("sum", {"X": ("a", "b", "a")}, {"Out": ("a",)})
    assert op.renamed({"a": "c"}) == Operator("sum", {"X": ("c", "b", "c")}, {"Out": ("c",)})


def test_text_reads_like_code():
    program = small()
    program.attrs["role"] = "trainer"
    assert str(program) == program.to_string()
    assert program.to_string().splitlines() == [
        '// role = "trainer"',
        "{ // block 0",
        "    param w : float32[2, 3]",
        "    var w@GRAD : float32[2, 3]",
        "    data x",
        "",
        "    forward(X=[x], Param=[w])",
        '    w = sgd(Param=[w], Grad=[w@GRAD], lr=0.5, tags=["a"])',
        "}",
    ]


def test_details_are_printed_when_asked_for():
    assert "ParamOut=[w] = sgd(" in small().to_string(with_details=True)
    assert "op_role=0" in small().to_string(with_details=True)
    assert repr(small()) == "<Program: 1 blocks, 2 operators in the first>"
