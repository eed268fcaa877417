"""The programs of a server: the operators of each slice."""

import fleet
from fleet.fluid import DistributeTranspiler
from tests.support.programs import captured

ONE, TWO, THREE = "10.0.0.1:6174", "10.0.0.2:6174", "10.0.0.3:6174"
SHAPES = {"b": (100,), "w": (300, 100)}  # b on ONE; w in three slices, on TWO, THREE and ONE


def transpiled(clip: fleet.ClipGradByNorm) -> DistributeTranspiler:
    transpiler = DistributeTranspiler()
    program = captured(SHAPES, grad_clip=clip, weight_decay=0.1)
    transpiler.transpile(0, program=program, pservers=[ONE, TWO, THREE], trainers=2)
    return transpiler


def test_a_slice_is_clipped_behind_the_mean_and_before_weight_decay():
    program = transpiled(fleet.ClipGradByNorm(5.0)).get_pserver_program(TWO)
    ops = program.block(1).ops
    assert [op.type for op in ops] == ["sum", "scale", "clip_by_norm", "scale", "sum", "sgd"]
    assert (ops[2].input("X"), ops[2].output("Out")) == (["w@GRAD.block0"], ["w@GRAD.block0"])
    assert ops[2].attr("max_norm") == 5.0
    assert ops[2].attr("epmap") == [ONE, TWO, THREE]
    assert 'clip_by_norm(X=[w@GRAD.block0], max_norm=5.0, epmap=["10.0.0.1:6174"' in str(program)


def test_a_trainer_s_program_does_not_clip():
    program = transpiled(fleet.ClipGradByNorm(1.0)).get_trainer_program()
    assert not any(op.type.startswith("clip") for op in program.global_block().ops)
