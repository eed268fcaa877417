"""Parameter initializers with Paddle's fan-in rules, defaults and operators.

An initializer is data: `Initializer.operator` returns the operator of the startup program that creates the
values. The numbers among its attributes are float32, as in Paddle.

A seed of 0 stands for the program's seed (`Program.random_seed`). If the program's seed is also 0, each run
draws different numbers from torch's global generator, except for tables on parameter servers (see
`fleet.fluid.module.first_values`). Any other seed is reproducible: each operator then draws from its own
generator, so that two parameters with the same shape and initializer have the same initial values, as in
Paddle. The numbers themselves are PyTorch's and differ from Paddle's; means, standard deviations and ranges
are equal.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fleet.errors import ConfigurationError
from fleet.fluid.ir import Attribute

__all__ = [
    "MSRA",
    "Bilinear",
    "BilinearInitializer",
    "Constant",
    "ConstantInitializer",
    "Initializer",
    "MSRAInitializer",
    "Normal",
    "NormalInitializer",
    "NumpyArrayInitializer",
    "TruncatedNormal",
    "TruncatedNormalInitializer",
    "Uniform",
    "UniformInitializer",
    "Xavier",
    "XavierInitializer",
    "default_bias",
    "default_conv2d",
    "default_weight",
]

Shape = Sequence[int]
OperatorSpec = tuple[str, dict[str, Attribute]]
"""The type and the attributes of an operator, without its role."""


class Initializer(ABC):
    """The base class of parameter initializers.

    Attributes
    ----------
    seed : int
        0 for the program's seed.
    """

    seed: int = 0

    @abstractmethod
    def operator(self, shape: Shape, dtype: str = "float32", seed: int = 0) -> OperatorSpec:
        """Return the operator that computes a parameter's initial values.

        Parameters
        ----------
        shape : sequence of int
        dtype : str
            The torch dtype's name without its module, such as ``float32``.
        seed : int
            The program's seed.

        Returns
        -------
        str, dict of str to Attribute
            The operator's type and attributes, without its role.

        Raises
        ------
        ConfigurationError
            The initializer does not support this shape.
        """


@dataclass(frozen=True)
class ConstantInitializer(Initializer):
    """Sets all elements to one value: Paddle's ``fluid.initializer.Constant``.

    Attributes
    ----------
    value : float
    force_cpu : bool
        Only shown in the program; initial values are always created on the CPU.
    """

    value: float = 0.0
    force_cpu: bool = False

    def operator(self, shape: Shape, dtype: str = "float32", seed: int = 0) -> OperatorSpec:
        """Return the operator that fills a parameter with the value."""
        del seed
        attrs: dict[str, Attribute] = {"value": _float32(self.value), "str_value": ""}
        return "fill_constant", {**attrs, "force_cpu": self.force_cpu, **_of(shape, dtype)}


@dataclass(frozen=True)
class UniformInitializer(Initializer):
    """Draws from a uniform distribution: Paddle's ``fluid.initializer.Uniform``.

    Attributes
    ----------
    low, high : float
        The bounds.
    seed : int
        0 for the program's seed.
    diag_num, diag_step : int
        The first `diag_num` elements on a diagonal, `diag_step` + 1 elements apart, get the value `diag_val`.
    diag_val : float
    """

    low: float = -1.0
    high: float = 1.0
    seed: int = 0
    diag_num: int = 0
    diag_step: int = 0
    diag_val: float = 1.0

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ConfigurationError(f"Uniform: low {self.low} is larger than high {self.high}")

    def operator(self, shape: Shape, dtype: str = "float32", seed: int = 0) -> OperatorSpec:
        """Return the operator that draws a parameter's uniform values."""
        if self.diag_num and (self.diag_num - 1) * (self.diag_step + 1) >= math.prod(shape):
            raise ConfigurationError(
                f"Uniform: the last of {self.diag_num} elements, {self.diag_step + 1} apart, is not in a "
                f"parameter of shape {list(shape)}; expected a smaller diag_num or diag_step"
            )
        kind, attrs = _uniform(self.low, self.high, self.seed or seed, shape, dtype)
        diagonal = {"diag_num": self.diag_num, "diag_step": self.diag_step}
        return kind, {**attrs, **diagonal, "diag_val": _float32(self.diag_val)}


@dataclass(frozen=True)
class NormalInitializer(Initializer):
    """Draws from a normal distribution: Paddle's ``fluid.initializer.Normal``.

    Attributes
    ----------
    loc, scale : float
        Mean and standard deviation.
    seed : int
        0 for the program's seed.
    """

    _type: ClassVar[str] = "gaussian_random"
    loc: float = 0.0
    scale: float = 1.0
    seed: int = 0

    def operator(self, shape: Shape, dtype: str = "float32", seed: int = 0) -> OperatorSpec:
        """Return the operator that draws a parameter's normal values."""
        return _normal(self._type, self.loc, self.scale, self.seed or seed, shape, dtype)


@dataclass(frozen=True)
class TruncatedNormalInitializer(NormalInitializer):
    """Draws normal values within two standard deviations: ``fluid.initializer.TruncatedNormal``.

    Attributes
    ----------
    loc, scale : float
        Mean and standard deviation before truncation; the values' standard deviation is 0.88 times `scale`.
    seed : int
        0 for the program's seed.
    """

    _type: ClassVar[str] = "truncated_gaussian_random"


@dataclass(frozen=True)
class XavierInitializer(Initializer):
    """Xavier initialization, the default for weights: Paddle's ``fluid.initializer.Xavier``.

    Attributes
    ----------
    uniform : bool
        Uniformly distributed up to ``sqrt(6 / (fan_in + fan_out))``; otherwise normally, with the standard
        deviation ``sqrt(2 / (fan_in + fan_out))``.
    fan_in, fan_out : float, optional
        By default computed from the shape.
    seed : int
        0 for the program's seed.

    Notes
    -----
    Glorot and Bengio, "Understanding the difficulty of training deep feedforward neural networks", 2010.
    """

    uniform: bool = True
    fan_in: float | None = None
    fan_out: float | None = None
    seed: int = 0

    def operator(self, shape: Shape, dtype: str = "float32", seed: int = 0) -> OperatorSpec:
        """Return the operator that draws a parameter's values, scaled by fan-in and fan-out."""
        fan_in, fan_out = _fans(shape)
        fan_in = fan_in if self.fan_in is None else self.fan_in
        fan_out = fan_out if self.fan_out is None else self.fan_out
        if self.uniform:
            limit = math.sqrt(6.0 / (fan_in + fan_out))
            return _uniform(-limit, limit, self.seed or seed, shape, dtype)
        std = math.sqrt(2.0 / (fan_in + fan_out))
        return _normal("gaussian_random", 0.0, std, self.seed or seed, shape, dtype)


@dataclass(frozen=True)
class MSRAInitializer(Initializer):
    """Kaiming initialization: Paddle's ``fluid.initializer.MSRA``.

    Attributes
    ----------
    uniform : bool
        Uniformly distributed up to ``sqrt(6 / fan_in)``; otherwise normally, with the standard deviation
        ``sqrt(2 / fan_in)``.
    fan_in : float, optional
        By default computed from the shape.
    seed : int
        0 for the program's seed.

    Notes
    -----
    He et al., "Delving deep into rectifiers", 2015, arXiv:1502.01852.
    """

    uniform: bool = True
    fan_in: float | None = None
    seed: int = 0

    def operator(self, shape: Shape, dtype: str = "float32", seed: int = 0) -> OperatorSpec:
        """Return the operator that draws a parameter's values, scaled by fan-in."""
        fan_in = _fans(shape)[0] if self.fan_in is None else self.fan_in
        if self.uniform:
            limit = math.sqrt(6.0 / fan_in)
            return _uniform(-limit, limit, self.seed or seed, shape, dtype)
        return _normal("gaussian_random", 0.0, math.sqrt(2.0 / fan_in), self.seed or seed, shape, dtype)


@dataclass(frozen=True)
class BilinearInitializer(Initializer):
    """Bilinear weights for upsampling by transposed convolution: ``fluid.initializer.Bilinear``.

    The parameter has four dimensions, of which the last two are equal.
    """

    def operator(self, shape: Shape, dtype: str = "float32", seed: int = 0) -> OperatorSpec:
        """Return the operator that sets a filter to bilinear weights."""
        del seed
        if len(shape) != 4 or shape[2] != shape[3]:
            raise ConfigurationError(
                f"Bilinear: the shape is {list(shape)}; expected four dimensions, the last two of them equal"
            )
        factor = math.ceil(shape[3] / 2.0)
        center = (2 * factor - 1 - factor % 2) / (2.0 * factor)
        weight = 1 - np.abs(np.arange(shape[3]) / factor - center)
        return _values(np.broadcast_to(np.outer(weight, weight), tuple(shape)).astype(np.float32), dtype)


class NumpyArrayInitializer(Initializer):
    """Copies an array: Paddle's ``fluid.initializer.NumpyArrayInitializer``.

    Parameters
    ----------
    value : numpy.ndarray
        Of the parameter's shape.

    Raises
    ------
    TypeError
        `value` is not an array.
    """

    def __init__(self, value: NDArray[Any]) -> None:
        if not isinstance(value, np.ndarray):
            raise TypeError(
                f"NumpyArrayInitializer: found a {type(value).__name__}, expected a numpy.ndarray"
            )
        self.value = value.copy()

    def operator(self, shape: Shape, dtype: str = "float32", seed: int = 0) -> OperatorSpec:
        """Return the operator that sets a parameter to the array."""
        del seed
        if self.value.shape != tuple(shape):
            raise ConfigurationError(
                f"NumpyArrayInitializer: the array has the shape {list(self.value.shape)}, and the parameter "
                f"{list(shape)}; expected one shape"
            )
        return _values(self.value, dtype)


def default_weight() -> Initializer:
    """Return Paddle's default initializer for weights and embedding tables."""
    return XavierInitializer()


def default_bias() -> Initializer:
    """Return Paddle's default initializer for biases."""
    return ConstantInitializer(0.0)


def default_conv2d(filter_size: Sequence[int], num_channels: int) -> Initializer:
    """Return Paddle's default initializer for ``conv2d`` filters.

    Parameters
    ----------
    filter_size : sequence of int
        Height and width.
    num_channels : int
        The number of input channels, over all groups.

    Returns
    -------
    Initializer
        Normal, with the standard deviation ``sqrt(2 / (height * width * num_channels))``.
    """
    return NormalInitializer(0.0, math.sqrt(2.0 / (math.prod(filter_size) * num_channels)))


def _fans(shape: Shape) -> tuple[float, float]:
    """Return the fan-in and fan-out of a matrix [in, out] or a convolution filter [out, in, ...]."""
    if len(shape) < 2:
        only = float(shape[0]) if shape else 1.0
        return only, only
    if len(shape) == 2:
        return float(shape[0]), float(shape[1])
    field = math.prod(shape[2:])
    return float(shape[1] * field), float(shape[0] * field)


def _uniform(low: float, high: float, seed: int, shape: Shape, dtype: str) -> OperatorSpec:
    attrs: dict[str, Attribute] = {"min": _float32(low), "max": _float32(high), "seed": seed}
    return "uniform_random", {**attrs, "diag_num": 0, "diag_step": 0, "diag_val": 1.0, **_of(shape, dtype)}


def _normal(kind: str, mean: float, std: float, seed: int, shape: Shape, dtype: str) -> OperatorSpec:
    return kind, {"mean": _float32(mean), "std": _float32(std), "seed": seed, **_of(shape, dtype)}


def _values(array: NDArray[Any], dtype: str) -> OperatorSpec:
    name = {"bool": "bool_values", "int32": "int32_values", "int64": "int64_values"}.get(dtype, "fp32_values")
    values = array.astype(np.float32 if name == "fp32_values" else dtype).reshape(-1).tolist()
    return "assign_value", {name: values, **_of(array.shape, dtype)}


def _of(shape: Shape, dtype: str) -> dict[str, Attribute]:
    return {"shape": [int(size) for size in shape], "dtype": dtype}


def _float32(value: float) -> float:
    return float(np.float32(value))


Constant = ConstantInitializer
Uniform = UniformInitializer
Normal = NormalInitializer
TruncatedNormal = TruncatedNormalInitializer
Xavier = XavierInitializer
MSRA = MSRAInitializer
Bilinear = BilinearInitializer
