"""Arguments of layers that are not supported: each raises an error that says what was expected."""

from typing import Any

import pytest

from fleet.errors import ConfigurationError
from fleet.fluid import clip, layers, unique_name
from fleet.fluid.program import Program, program_guard


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda x, _: layers.fc(x, 2, param_attr=False), "param_attr is False; expected a weight"),
        (lambda _, i: layers.embedding(i, [3, 2], param_attr=False), "param_attr is False; expected a table"),
        (
            lambda x, _: layers.fc(x, 2, param_attr=3),
            "param_attr or bias_attr is 3; expected a fluid.ParamAttr",
        ),
        (lambda x, _: layers.conv2d(x, 2, 3, padding="EVEN"), "padding is 'EVEN'; expected numbers, 'SAME'"),
        (
            lambda x, _: layers.conv2d(x, 2, 3, padding=[[1, 1], [0, 0], [0, 0], [0, 0]]),
            "expected no padding of the batch and the channels",
        ),
        (lambda x, _: layers.pool2d(x, 2, pool_padding=[1, 2, 3]), "expected one, two or four numbers"),
        (
            lambda *_: clip.set_gradient_clip(clip.GradientClipByValue(1.0), program=Program()),
            "has no parameters yet",
        ),
    ],
)
def test_an_argument_that_cannot_be_honoured_is_an_error(build: Any, message: str) -> None:
    with unique_name.guard(), program_guard(Program(), Program()):
        x = layers.data("x", [2, 5, 5])
        ids = layers.data("i", [1], dtype="int64")
        with pytest.raises(ConfigurationError, match=message):
            build(x, ids)
