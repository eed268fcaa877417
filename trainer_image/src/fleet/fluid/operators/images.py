"""Operators for convolution, pooling and normalization."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fleet.fluid.operators.kinds import Gradient, Shape, kind


def _around(sizes: Sequence[int], reach: Sequence[int], attrs: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return the padding before and after each spatial dimension."""
    paddings, strides = attrs["paddings"], attrs["strides"]
    if attrs["padding_algorithm"] == "SAME":
        around = []
        for size, window, stride in zip(sizes, reach, strides, strict=True):
            both = max((-(-size // stride) - 1) * stride + window - size, 0)
            around.append((both // 2, both - both // 2))
        return around
    if attrs["padding_algorithm"] == "VALID":
        return [(0, 0)] * len(sizes)
    if len(paddings) == len(sizes):
        return [(each, each) for each in paddings]
    return list(zip(paddings[::2], paddings[1::2], strict=True))


def _extents(
    sizes: Sequence[int], reach: Sequence[int], attrs: Mapping[str, Any], *, ceil: bool = False
) -> list[int]:
    found = []
    around = _around(sizes, reach, attrs)
    for size, window, stride, padding in zip(sizes, reach, attrs["strides"], around, strict=True):
        room = size + sum(padding) - window
        found.append(-1 if size < 0 else (-(-room // stride) if ceil else room // stride) + 1)
    return found


def _reach(windows: Sequence[int], attrs: Mapping[str, Any]) -> list[int]:
    same = attrs["padding_algorithm"] == "SAME"  # which Paddle computes without dilation
    dilations = [1] * len(windows) if same else attrs["dilations"]
    return [dilation * (window - 1) + 1 for window, dilation in zip(windows, dilations, strict=True)]


def _padded(x: Tensor, around: Sequence[tuple[int, int]], value: float = 0.0) -> tuple[Tensor, list[int]]:
    """Apply padding if it is asymmetric; return the images, and the padding still to be applied."""
    if all(before == behind for before, behind in around):
        return x, [before for before, _ in around]
    flat = [each for pair in reversed(around) for each in pair]
    return functional.pad(x, flat, value=value), [0] * len(around)


def _convolved(shapes: Mapping[str, Any], attrs: Mapping[str, Any]) -> Sequence[Shape]:
    batch, _, *sizes = shapes["Input"]
    filters, _, *windows = shapes["Filter"]
    return ((batch, filters, *_extents(sizes, _reach(windows, attrs), attrs)),)


def _conv2d(x: Tensor, weight: Tensor, attributes: dict[str, Any]) -> Tensor:
    reach = _reach(weight.shape[2:], attributes)
    x, padding = _padded(x, _around(x.shape[2:], reach, attributes))
    same = attributes["padding_algorithm"] == "SAME"
    dilations = [1, 1] if same else attributes["dilations"]
    return functional.conv2d(x, weight, None, attributes["strides"], padding, dilations, attributes["groups"])


for _type in ("conv2d", "depthwise_conv2d"):
    kind(
        _type,
        "Input Filter",
        "Output",
        shapes=_convolved,
        grad=Gradient(("Input", "Filter"), ("Filter", "Input", "Output@GRAD")),
        strides=[1, 1],
        paddings=[0, 0],
        dilations=[1, 1],
        groups=1,
        padding_algorithm="EXPLICIT",
        data_format="NCHW",
        is_test=False,
    )(_conv2d)


def _pooled(shapes: Mapping[str, Any], attrs: Mapping[str, Any]) -> Sequence[Shape]:
    *lead, height, width = shapes["X"]
    if attrs["global_pooling"]:
        return ((*lead, 1, 1),)
    return ((*lead, *_extents((height, width), attrs["ksize"], attrs, ceil=attrs["ceil_mode"])),)


@kind(
    "pool2d",
    "X",
    "Out",
    shapes=_pooled,
    grad=Gradient(("X",), ("Out", "Out@GRAD", "X")),
    pooling_type="max",
    ksize=[],
    global_pooling=False,
    strides=[1, 1],
    paddings=[0, 0],
    ceil_mode=False,
    exclusive=True,
    adaptive=False,
    padding_algorithm="EXPLICIT",
    data_format="NCHW",
    is_test=False,
)
def _pool2d(x: Tensor, attributes: dict[str, Any]) -> Tensor:
    largest, window, stride = (attributes[name] for name in ("pooling_type", "ksize", "strides"))
    largest, ceil = largest == "max", attributes["ceil_mode"]
    if attributes["global_pooling"]:
        return x.amax((2, 3), keepdim=True) if largest else x.mean((2, 3), keepdim=True)
    around = _around(x.shape[2:], window, attributes)
    padded, padding = _padded(x, around, -torch.inf if largest else 0.0)
    if largest:
        return functional.max_pool2d(padded, window, stride, padding, ceil_mode=ceil)
    divisor: Any = prod(window)  # PyTorch would divide by less for windows that reach past the padding
    if attributes["exclusive"]:
        ones, _ = _padded(torch.ones_like(x[:1, :1]), around)
        divisor = functional.avg_pool2d(ones, window, stride, padding, ceil, divisor_override=1)
    found: Tensor = functional.avg_pool2d(padded, window, stride, padding, ceil, divisor_override=1)
    return found.div(divisor)


@kind(
    "batch_norm",
    "X Scale Bias Mean Variance",
    "Y MeanOut VarianceOut SavedMean SavedVariance",
    shapes=lambda shapes, _: (shapes["X"], *(shapes["Mean"],) * 4),
    grad=Gradient(
        ("X", "Scale", "Bias"),
        lambda attrs: (
            *("Bias", "SavedMean", "SavedVariance", "Scale", "X", "Y@GRAD"),
            *(("Mean", "Variance") if attrs["use_global_stats"] else ()),
        ),
    ),
    momentum=0.9,
    epsilon=1e-5,
    is_test=False,
    data_layout="NCHW",
    fuse_with_relu=False,
    use_global_stats=False,
    trainable_statistics=False,
)
def _batch_norm(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    variance: Tensor,
    momentum: float,
    epsilon: float,
    is_test: bool,
    use_global_stats: bool,
) -> tuple[Tensor | None, ...]:
    if is_test or use_global_stats:
        # Copies, because the variables are written, though with the same values, before the backward pass.
        known = mean.clone(), variance.clone()
        normalized = functional.batch_norm(x, *known, scale, bias, training=False, eps=epsilon)
        return normalized, mean, variance, None, None
    normalized = functional.batch_norm(x, None, None, scale, bias, training=True, eps=epsilon)
    with torch.no_grad():
        dims = [dim for dim in range(x.dim()) if dim != 1]
        # Paddle's running variance is that of the batch, without the correction that PyTorch applies.
        here_variance, here_mean = torch.var_mean(x, dims, correction=0)
        kept = [
            old * momentum + new * (1 - momentum)
            for old, new in ((mean, here_mean), (variance, here_variance))
        ]
        return normalized, *kept, here_mean, torch.rsqrt(here_variance + epsilon)


def _layer(shapes: Mapping[str, Any], attrs: Mapping[str, Any]) -> Sequence[Shape]:
    rows = prod(shapes["X"][: attrs["begin_norm_axis"]])  # negative if the size of the batch is unknown
    return (rows,), (rows,), shapes["X"]


@kind(
    "layer_norm",
    "X Scale? Bias?",
    "Mean Variance Y",
    shapes=_layer,
    grad=Gradient(("X", "Scale", "Bias"), ("Bias", "Mean", "Scale", "Variance", "X", "Y@GRAD")),
    shares=("Y",),
    epsilon=1e-5,
    begin_norm_axis=1,
)
def _layer_norm(
    x: Tensor, scale: Tensor | None, bias: Tensor | None, epsilon: float, begin_norm_axis: int
) -> tuple[Tensor, Tensor, Tensor]:
    shape = x.shape[begin_norm_axis:]
    weight, shift = (None if each is None else each.reshape(shape) for each in (scale, bias))
    normalized, mean, deviation = torch.native_layer_norm(x, shape, weight, shift, epsilon)
    with torch.no_grad():
        variance = deviation.reshape(-1).pow(-2) - epsilon
    return mean.reshape(-1), variance, normalized
