"""Gradient clipping as a user asks for it, and as a program shows it."""

import dataclasses
from typing import Any

import pytest

import fleet
from fleet.errors import ConfigurationError
from fleet.fluid import Program
from fleet.plan import describe_difference
from tests.support.programs import captured

CLIPS = [
    pytest.param(fleet.ClipGradByValue(2.0), "clip", {"min": -2.0, "max": 2.0}, id="by-value"),
    pytest.param(fleet.ClipGradByValue(max=2, min=0), "clip", {"min": 0.0, "max": 2.0}, id="by-range"),
    pytest.param(fleet.ClipGradByNorm(3.0), "clip_by_norm", {"max_norm": 3.0}, id="by-norm"),
    pytest.param(
        fleet.ClipGradByGlobalNorm(4.0), "clip_by_global_norm", {"max_norm": 4.0}, id="by-global-norm"
    ),
]


@pytest.mark.parametrize(("clip", "kind", "attrs"), CLIPS)
def test_clipping_comes_before_weight_decay_and_the_optimizer(clip, kind, attrs):
    program = captured({"a": (2,), "w": (3, 2)}, weight_decay=0.1, grad_clip=clip)
    ops = [op for op in program.global_block().ops if op.attr("op_role") == 2]
    assert [op.type for op in ops] == [kind, "scale", "sum", "sgd"] * 2
    for op, name in ((ops[0], "a"), (ops[4], "w")):
        assert (op.input("X"), op.output("Out")) == ([f"{name}@GRAD"], [f"{name}@GRAD"])
        assert op.attr("op_role_var") == [name, f"{name}@GRAD"]
        assert {key: op.attr(key) for key in attrs} == attrs


@pytest.mark.parametrize(("clip", "kind", "attrs"), CLIPS)
def test_what_was_asked_for_is_in_the_specification(clip, kind, attrs):
    spec = captured(grad_clip=clip).spec
    assert spec is not None
    assert spec.clip == clip


def facts(program: Program) -> dict[str, str]:
    assert program.spec is not None
    return program.spec.agreement()


def test_clipping_is_part_of_what_processes_must_have_in_common():
    plain, clipped = captured(), captured(grad_clip=fleet.ClipGradByNorm(1.0))
    assert plain.fingerprint() != clipped.fingerprint()
    assert describe_difference(facts(clipped), facts(plain)) == (
        "grad_clip: ClipGradByNorm(clip_norm=1.0) here, nothing there"
    )
    other = captured(grad_clip=fleet.ClipGradByNorm(2.0))
    assert "clip_norm=1.0) here, ClipGradByNorm(clip_norm=2.0) there" in describe_difference(
        facts(clipped), facts(other)
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: fleet.ClipGradByNorm(0), "ClipGradByNorm: clip_norm is 0; expected a positive number"),
        (lambda: fleet.ClipGradByNorm(-1.0), r"clip_norm is -1\.0"),
        (lambda: fleet.ClipGradByNorm(float("nan")), "clip_norm is nan"),
        (lambda: fleet.ClipGradByGlobalNorm(float("inf")), "ClipGradByGlobalNorm: clip_norm is inf"),
        (lambda: fleet.ClipGradByGlobalNorm("1"), "clip_norm is '1'"),  # type: ignore[arg-type]
        (lambda: fleet.ClipGradByGlobalNorm(True), "clip_norm is True"),
        (lambda: fleet.ClipGradByValue("1"), "ClipGradByValue: max is '1'"),  # type: ignore[arg-type]
        (lambda: fleet.ClipGradByValue(1.0, "0"), "min is '0'"),  # type: ignore[arg-type]
        (lambda: fleet.ClipGradByValue(-1.0, 1.0), r"min 1\.0 is larger than max -1\.0; the order"),
        (lambda: fleet.ClipGradByValue(-1.0), r"max alone must not be negative"),
        (lambda: captured(grad_clip=1.0), "grad_clip is 1.0; expected None, fleet.ClipGradByValue"),  # type: ignore[arg-type]
        (lambda: captured(grad_clip=fleet.ClipGradByNorm), "grad_clip is <class"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_way_to_clip_is_refused(make, words):
    with pytest.raises(ConfigurationError, match=words):
        make()


def test_a_way_to_clip_does_not_change():
    clip: Any = fleet.ClipGradByNorm(1.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        clip.clip_norm = 2.0
