"""Initial values of parameters: operators, fans and ranges are those of paddlepaddle 1.8.5."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fleet.errors import ConfigurationError
from fleet.fluid import initializer
from fleet.fluid.building import start_with
from fleet.fluid.executor import Executor
from fleet.fluid.program import Program
from fleet.fluid.scope import Scope, global_scope, scope_guard

RECORD = json.loads((Path(__file__).parents[3] / "golden" / "fluid" / "initializers.json").read_text())
CASES = [
    pytest.param(
        getattr(initializer, case["class"])(**case["arguments"]), shape, id=f"{name}-{shape['shape']}"
    )
    for name, case in RECORD["initializers"].items()
    for shape in case["shapes"]
]


def draw(
    given: initializer.Initializer, shape: list[int], dtype: str = "float32", seed: int = 0
) -> torch.Tensor:
    """Return the initial values of a parameter from a startup program."""
    startup = Program()
    startup.random_seed = seed
    start_with(startup, "parameter", shape, dtype, given)
    with scope_guard(Scope()):
        Executor().run(startup)
        return global_scope().values["parameter"]


@pytest.mark.parametrize(("given", "expected"), CASES)
def test_the_operator_is_paddles(given, expected):
    operator = expected["operator"]
    assert given.operator(expected["shape"], "float32", seed=1) == (operator["type"], operator["attrs"])


@pytest.mark.parametrize(("given", "expected"), CASES)
def test_values_are_distributed_as_paddles_are(given, expected):
    values, measured = draw(given, expected["shape"], seed=3).double(), expected["measured"]
    count, std = values.numel(), measured["std"]
    assert values.mean().item() == pytest.approx(measured["mean"], abs=6 * std / count**0.5)
    assert values.std(correction=0).item() == pytest.approx(std, abs=6 * std / count**0.5)
    spread = measured["max"] - measured["min"]
    assert values.max().item() == pytest.approx(measured["max"], abs=0.25 * spread)
    assert values.min().item() == pytest.approx(measured["min"], abs=0.25 * spread)
    if expected["operator"]["type"] == "uniform_random":
        limit = expected["operator"]["attrs"]["max"]
        assert limit * 0.97 < values.abs().max().item() <= limit


def test_defaults_of_layers_are_paddles():
    defaults = RECORD["defaults_of_layers"]
    given = {
        "fc_0.w_0": initializer.default_weight(),
        "fc_0.b_0": initializer.default_bias(),
        "embedding_0.w_0": initializer.default_weight(),
        "conv2d_0.w_0": initializer.default_conv2d([3, 3], 8),
    }
    for layer in ("fc weight and bias", "embedding", "conv2d"):
        for operator in defaults[layer]:
            (name,) = operator["outputs"]["Out"]
            attrs = {key: value for key, value in operator["attrs"].items() if not key.startswith("op_role")}
            if name in given:
                assert given.pop(name).operator(attrs["shape"]) == (operator["type"], attrs)
    assert given == {}


def test_a_seed_repeats_and_0_does_not():
    given = initializer.Uniform()
    assert torch.equal(draw(given, [4], seed=7), draw(given, [4], seed=7))
    assert not torch.equal(draw(given, [4]), draw(given, [4]))


def test_its_own_seed_stands_before_the_programs():
    own = initializer.Normal(seed=5)
    assert torch.equal(draw(own, [4], seed=7), draw(initializer.Normal(), [4], seed=5))


def test_without_a_seed_torchs_global_generator_decides():
    torch.manual_seed(11)
    first = draw(initializer.Xavier(), [3, 4])
    torch.manual_seed(11)
    assert torch.equal(first, draw(initializer.Xavier(), [3, 4]))


def test_an_array_is_taken_as_it_is():
    array = np.arange(6, dtype=np.float64).reshape(2, 3)
    given = initializer.NumpyArrayInitializer(array)
    assert draw(given, [2, 3]).tolist() == array.tolist()
    kind, attrs = given.operator([2, 3])
    assert (kind, attrs["fp32_values"], attrs["shape"]) == (
        "assign_value",
        [0.0, 1.0, 2.0, 3.0, 4.0, 5.0],
        [2, 3],
    )


def test_whole_numbers_stay_whole():
    given = initializer.NumpyArrayInitializer(np.array([0, 3], dtype=np.int64))
    assert draw(given, [2], "int64").tolist() == [0, 3]
    assert draw(initializer.Constant(2), [2], "int64").dtype is torch.int64


def test_a_diagonal_gets_its_value():
    values = draw(initializer.Uniform(-0.1, 0.1, diag_num=3, diag_step=3, diag_val=9.0), [3, 3])
    assert (values == 9.0).flatten().nonzero().flatten().tolist() == [0, 4, 8]


def test_bilinear_weights_interpolate():
    """What a transposed convolution of a constant image gives is constant within."""
    weight = draw(initializer.Bilinear(), [1, 1, 4, 4])
    upsampled = torch.nn.functional.conv_transpose2d(torch.ones(1, 1, 5, 5), weight, stride=2, padding=1)
    assert torch.allclose(upsampled[..., 2:-2, 2:-2], torch.ones(1, 1, 6, 6))


@pytest.mark.parametrize(
    ("given", "shape", "message"),
    [
        (
            initializer.NumpyArrayInitializer(np.zeros(2)),
            [3],
            r"the array has the shape \[2\], and the parameter",
        ),
        (initializer.Bilinear(), [1, 1, 2, 3], "expected four dimensions"),
        (initializer.Uniform(diag_num=4, diag_step=3), [3, 3], "the last of 4 elements"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused(given: initializer.Initializer, shape: Any, message: str):
    with pytest.raises(ConfigurationError, match=message):
        given.operator(shape)


def test_a_range_of_which_low_is_the_larger_end_is_refused():
    with pytest.raises(ConfigurationError, match=r"low 1\.0 is larger than high 0\.0"):
        initializer.Uniform(1.0, 0.0)


def test_no_array_is_refused():
    with pytest.raises(TypeError, match=r"found a list, expected a numpy\.ndarray"):
        initializer.NumpyArrayInitializer([1.0])  # type: ignore[arg-type]
