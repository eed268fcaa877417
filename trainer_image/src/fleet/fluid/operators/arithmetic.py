"""Operators for element-wise arithmetic, reductions and matrix products."""

import math
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fleet.fluid.ir import Attribute
from fleet.fluid.operators.kinds import Gradient, Shape, kind

_SMALLEST = math.exp(-64.0)
_COS_SIM: dict[str, Any] = {"@ALL_KERNELS_MUST_COMPUTE_RUNTIME_SHAPE@": True}


def _gradient_by(type: str, attrs: Any) -> Gradient:  # noqa: A002 - as in `Operator`
    """Return a `Gradient` that is computed by applying a forward operator to the output's gradient."""
    return Gradient(("X",), ("Out@GRAD",), type, attrs, slots={"Out@GRAD": "X", "X@GRAD": "Out"})


def _unary(type: str, reads: str, compute: Any, **attrs: Any) -> None:  # noqa: A002 - as in `Operator`
    """Register a function of one tensor; its gradient operator reads `reads` and the output's gradient."""
    gradient = Gradient(("X",), tuple(sorted((*reads.split(), "Out@GRAD"))), lod_from="Out")
    kind(type, "X", "Out", grad=gradient, **attrs)(compute)


_unary("relu", "Out", lambda x: functional.relu(x))
_unary("tanh", "Out", lambda x: torch.tanh(x))
_unary("sigmoid", "Out", lambda x: torch.sigmoid(x))
_unary("softsign", "X", lambda x: functional.softsign(x))
_unary("square", "X", lambda x: x * x)
_unary("log", "X", lambda x: torch.log(x))
_unary("cos", "X", lambda x: torch.cos(x))
_unary("sqrt", "Out", lambda x: torch.sqrt(x))
_unary("exp", "Out", lambda x: torch.exp(x))
_unary("abs", "X", lambda x: torch.abs(x))
_unary("gelu", "X", lambda x, approximate: _gelu(x, approximate), approximate=False)
_unary("ceil", "", lambda x: torch.ceil(x))
_unary("floor", "", lambda x: torch.floor(x))
_unary("sin", "X", lambda x: torch.sin(x))
_unary("reciprocal", "Out", lambda x: torch.reciprocal(x))
_unary("logsigmoid", "X", lambda x: functional.logsigmoid(x))
_unary("softplus", "X", lambda x: functional.softplus(x))
_unary("tanh_shrink", "X", lambda x: functional.tanhshrink(x))
_unary("relu6", "Out", lambda x, threshold: torch.clamp(x, 0.0, threshold), threshold=6.0)
_unary("elu", "X", lambda x, alpha: functional.elu(x, alpha), alpha=1.0)
_unary("leaky_relu", "Out", lambda x, alpha: functional.leaky_relu(x, alpha), alpha=0.02)
_unary("swish", "X", lambda x, beta: x * torch.sigmoid(beta * x), beta=1.0)
_unary(
    "hard_sigmoid",
    "Out",
    lambda x, slope, offset: torch.clamp(slope * x + offset, 0.0, 1.0),
    slope=0.2,
    offset=0.5,
)
kind("sign", "X", "Out", grad=_gradient_by("scale", lambda _: {"scale": 0.0}))(lambda x: torch.sign(x))
kind("logical_not", "X", "Out", dtypes={"Out": "bool"})(lambda x: torch.logical_not(x))
kind("increment", "X", "Out", step=1.0)(
    lambda x, step: x + int(step) if not x.is_floating_point() else x + step
)
kind("assign", "X", "Out", grad=_gradient_by("assign", lambda _: {}))(lambda x: x.clone())


def _gelu(x: Tensor, approximate: bool) -> Tensor:
    return functional.gelu(x, approximate="tanh" if approximate else "none")


def _scaled(attrs: Mapping[str, Attribute]) -> dict[str, Attribute]:
    return {"bias": 0.0, "bias_after_scale": True, "scale": attrs["scale"]}


@kind(
    "scale",
    "X",
    "Out",
    grad=_gradient_by("scale", _scaled),
    scale=1.0,
    bias=0.0,
    bias_after_scale=True,
)
def _scale(x: Tensor, scale: float, bias: float, bias_after_scale: bool) -> Tensor:
    if not x.is_floating_point():  # whole numbers stay whole
        scale, bias = int(scale), int(bias)
    if not bias:
        return x * scale
    return x * scale + bias if bias_after_scale else (x + bias) * scale


def _swapped(attrs: Mapping[str, Attribute]) -> dict[str, Attribute]:
    return {"in_dtype": attrs["out_dtype"], "out_dtype": attrs["in_dtype"]}


@kind(
    "cast",
    "X",
    "Out",
    dtypes={"Out": "attribute:out_dtype"},
    grad=_gradient_by("cast", _swapped),
    in_dtype="float32",
    out_dtype="float32",
)
def _cast(x: Tensor, out_dtype: str) -> Tensor:
    return x.to(getattr(torch, out_dtype))


def aligned(x: Tensor, y: Tensor, axis: int) -> Tensor:
    """Return `y` with size-1 dimensions appended, so that it broadcasts to `x` from dimension `axis` on."""
    behind = x.dim() - (x.dim() - y.dim() if axis == -1 else axis) - y.dim()
    while behind < 0 and y.shape[-1] == 1:
        y, behind = y.squeeze(-1), behind + 1
    return y.reshape(y.shape + (1,) * behind) if behind > 0 else y


def _broadcast(shapes: Mapping[str, Any], attrs: Mapping[str, Any]) -> Sequence[Shape]:
    x, y = shapes["X"], shapes["Y"]
    if x == y:
        return (x,)
    before = abs(len(x) - len(y)) if attrs["axis"] == -1 else attrs["axis"]
    shorter, longer = sorted((x, y), key=len)
    spread = ((1,) * before + shorter + (1,) * len(longer))[: len(longer)]
    pairs = zip(spread, longer, strict=True)
    return (tuple(-1 if max(pair) < 2 and pair != (1, 1) else max(pair) for pair in pairs),)


def _binary(type: str, reads: str, compute: Any) -> None:  # noqa: A002 - as in `Operator`
    """Register a function of two tensors, the second of which may have fewer dimensions."""
    gradient = Gradient(("X", "Y"), tuple(sorted((*reads.split(), "Out@GRAD")))) if reads else None

    @kind(type, "X Y", "Out", shapes=_broadcast, lod="X", grad=gradient, axis=-1)
    def _compute(x: Tensor, y: Tensor, axis: int) -> Tensor:
        if x.shape != y.shape:
            y = aligned(x, y, axis)
        result: Tensor = compute(x, y)
        return result


_binary("elementwise_add", "X Y", torch.add)
_binary("elementwise_sub", "X Y", torch.sub)
_binary("elementwise_mul", "X Y", torch.mul)
_binary(
    "elementwise_div",
    "X Y Out",
    lambda x, y: torch.div(x, y, rounding_mode=None if x.is_floating_point() else "trunc"),
)
_binary("elementwise_floordiv", "", lambda x, y: torch.div(x, y, rounding_mode="trunc"))
_binary("elementwise_mod", "", torch.remainder)
_binary("elementwise_pow", "X Y", torch.pow)
# If both elements are equal, only one of them gets the gradient; torch.maximum would split it.
_binary("elementwise_max", "X Y", lambda x, y: torch.where(x > y, x, y))
_binary("elementwise_min", "X Y", lambda x, y: torch.where(x < y, x, y))

for _type, _compare in (
    ("less_than", torch.lt),
    ("less_equal", torch.le),
    ("greater_than", torch.gt),
    ("greater_equal", torch.ge),
    ("equal", torch.eq),
    ("not_equal", torch.ne),
):
    kind(_type, "X Y", "Out", dtypes={"Out": "bool"}, axis=-1, force_cpu=False)(
        lambda x, y, axis, compare=_compare: compare(x, aligned(x, y, axis))
    )
kind("logical_and", "X Y", "Out", dtypes={"Out": "bool"})(lambda x, y: torch.logical_and(x, y))
kind("logical_or", "X Y", "Out", dtypes={"Out": "bool"})(lambda x, y: torch.logical_or(x, y))


@kind(
    "sum",
    "X*",
    "Out",
    shapes=lambda shapes, _: (shapes["X"][0],),
    grad=_gradient_by("scale", lambda _: {"scale": 1.0}),
)
def _sum(xs: list[Tensor]) -> Tensor:
    total = xs[0]
    for x in xs[1:]:
        total = total + x
    return total


@kind(
    "mean",
    "X",
    "Out",
    shapes=lambda _, __: ((1,),),
    grad=Gradient(("X",), ("Out@GRAD", "X"), attrs=lambda _: {}),
    lod="",
)
def _mean(x: Tensor) -> Tensor:
    return x.mean().reshape(1)


def _reduced(shapes: Mapping[str, Any], attrs: Mapping[str, Any]) -> Sequence[Shape]:
    shape: Shape = shapes["X"]
    dims = range(len(shape)) if attrs["reduce_all"] else [dim % len(shape) for dim in attrs["dim"]]
    if attrs["keep_dim"]:
        return (tuple(1 if dim in dims else size for dim, size in enumerate(shape)),)
    return (tuple(size for dim, size in enumerate(shape) if dim not in dims) or (1,),)


def _reduction(type: str, reads: str, compute: Any) -> None:  # noqa: A002 - as in `Operator`
    """Register a reduction over some or all dimensions; the gradient operator also reads `reads`."""

    @kind(
        type,
        "X",
        "Out",
        shapes=_reduced,
        grad=Gradient(("X",), (*reads.split(), "Out@GRAD", "X")),
        lod=lambda attrs: "" if attrs["reduce_all"] or 0 in attrs["dim"] else "X",
        dim=[0],
        keep_dim=False,
        reduce_all=False,
        in_dtype=-1,
        out_dtype=-1,
    )
    def _compute(x: Tensor, dim: list[int], keep_dim: bool, reduce_all: bool) -> Tensor:
        result: Tensor = compute(x, list(range(x.dim())) if reduce_all else dim, keep_dim)
        return result if result.dim() else result.reshape(1)


_reduction("reduce_sum", "", lambda x, dims, keep: x.sum(dims, keep))
_reduction("reduce_mean", "", lambda x, dims, keep: x.mean(dims, keep))
_reduction("reduce_max", "Out", lambda x, dims, keep: _extreme(x, torch.amax, dims, keep))
_reduction("reduce_min", "Out", lambda x, dims, keep: _extreme(x, torch.amin, dims, keep))


class _Extreme(torch.autograd.Function):
    """The maxima or minima of a tensor; each of several equal elements receives the whole gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Any, dims: list[int]) -> Tensor:
        found: Tensor = function(x, dims, True)
        ctx.save_for_backward(x == found)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (chosen,), (gradient,) = ctx.saved_tensors, gradients
        return torch.where(chosen, gradient, 0.0), None, None


def _extreme(x: Tensor, function: Any, dims: list[int], keep: bool) -> Tensor:
    whole: Tensor = _Extreme.apply(x, function, dims)
    return whole if keep else whole.squeeze(tuple(dims))


def _multiplied(shapes: Mapping[str, Any], attrs: Mapping[str, Any]) -> Sequence[Shape]:
    return (shapes["X"][: attrs["x_num_col_dims"]] + shapes["Y"][attrs["y_num_col_dims"] :],)


@kind(
    "mul",
    "X Y",
    "Out",
    shapes=_multiplied,
    grad=Gradient(("X", "Y"), ("Out@GRAD", "X", "Y"), lod_from=""),
    x_num_col_dims=1,
    y_num_col_dims=1,
)
def _mul(x: Tensor, y: Tensor, x_num_col_dims: int, y_num_col_dims: int) -> Tensor:
    if x.dim() == y.dim() == 2:
        return torch.mm(x, y)
    product = torch.mm(
        x.reshape(prod(x.shape[:x_num_col_dims]), -1), y.reshape(prod(y.shape[:y_num_col_dims]), -1)
    )
    return product.reshape(x.shape[:x_num_col_dims] + y.shape[y_num_col_dims:])


def _product(shapes: Mapping[str, Any], attrs: Mapping[str, Any]) -> Sequence[Shape]:
    x, y = shapes["X"], shapes["Y"]
    x = (1, *x) if len(x) == 1 else x
    y = (*y, 1) if len(y) == 1 else y
    rows = x[-1] if attrs["transpose_X"] else x[-2]
    columns = y[-2] if attrs["transpose_Y"] else y[-1]
    batch = x[:-2] if len(x) >= len(y) else y[:-2]
    return (_without_ones((*batch, rows, columns), len(shapes["X"]), len(shapes["Y"])),)


def _without_ones(shape: Shape, x_dims: int, y_dims: int) -> Shape:
    """Return a product's shape without the dimensions that were added to vectors."""
    if x_dims == 1 and shape[-2] == 1:
        shape = (*shape[:-2], shape[-1])
    if y_dims == 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape or (1,)


@kind(
    "matmul",
    "X Y",
    "Out",
    shapes=_product,
    grad=Gradient(("X", "Y"), ("Out@GRAD", "X", "Y"), lod_from=""),
    transpose_X=False,
    transpose_Y=False,
    alpha=1.0,
    head_number=1,
    fused_reshape_Out=[],
    fused_transpose_Out=[],
)
def _matmul(x: Tensor, y: Tensor, transpose_X: bool, transpose_Y: bool, alpha: float) -> Tensor:  # noqa: N803
    x_dims, y_dims = x.dim(), y.dim()
    x = x.unsqueeze(0) if x_dims == 1 else x
    y = y.unsqueeze(1) if y_dims == 1 else y
    product = torch.matmul(x.mT if transpose_X else x, y.mT if transpose_Y else y)
    if x_dims == 1 or y_dims == 1:
        product = product.reshape(_without_ones(tuple(product.shape), x_dims, y_dims))
    return product if alpha == 1.0 else product * alpha


@kind(
    "softmax",
    "X",
    "Out",
    grad=Gradient(("X",), ("Out", "Out@GRAD"), lod_from=""),
    axis=-1,
    is_test=False,
    data_format="AnyLayout",
)
def _softmax(x: Tensor, axis: int) -> Tensor:
    found = torch.softmax(x, axis)
    # Paddle's smallest probability is e**-64 times the largest. Autograd does not see the change, and
    # computes the gradient from these probabilities, as Paddle does.
    values = found.data
    if values.is_cuda or not bool(values.min() > _SMALLEST):
        values.clamp_(min=values.amax(axis, True) * _SMALLEST)
    return found


@kind(
    "norm",
    "X",
    "Out Norm",
    shapes=lambda shapes, attrs: (
        shapes["X"],
        tuple(1 if dim == attrs["axis"] % len(shapes["X"]) else size for dim, size in enumerate(shapes["X"])),
    ),
    grad=Gradient(("X",), ("Norm", "Out@GRAD", "X")),
    lod="",
    axis=1,
    epsilon=1e-10,
)
def _norm(x: Tensor, axis: int, epsilon: float) -> tuple[Tensor, Tensor]:
    norm = torch.sqrt((x * x).sum(axis, keepdim=True) + epsilon)
    return x / norm, norm


@kind(
    "cos_sim",
    "X Y",
    "Out XNorm YNorm",
    shapes=lambda shapes, _: ((shapes["X"][0], 1), (shapes["X"][0], 1), (shapes["Y"][0], 1)),
    grad=Gradient(("X", "Y"), ("Out", "Out@GRAD", "X", "XNorm", "Y", "YNorm")),
    **_COS_SIM,
)
def _cos_sim(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, y = x.flatten(1), y.flatten(1)
    x_norm, y_norm = (_norm_of_rows(each) for each in (x, y))
    return (x * y).sum(1, True) / (x_norm * y_norm), x_norm, y_norm


def _norm_of_rows(x: Tensor) -> Tensor:
    """Return the norm of each row, at least 1e-4 as in Paddle; gradients ignore this bound."""
    squares = (x * x).sum(1, True)
    squares.data.clamp_(min=1e-8)  # hidden from autograd
    return torch.sqrt(squares)


@kind("clip", "X", "Out", grad=Gradient(("X",), ("Out@GRAD", "X")), min=0.0, max=0.0)
def _clip(x: Tensor, min: float, max: float) -> Tensor:  # noqa: A002 - Paddle's names
    return torch.clamp(x, min, max)
