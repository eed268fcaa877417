"""Operators that compute losses."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fleet.fluid.operators.kinds import Gradient, Shape, kind

_LARGE = 1e20
"""The finite value that replaces infinity in losses; their gradients stay infinite."""


def _log(x: Tensor) -> Tensor:
    logarithm = torch.log(x)
    logarithm.detach().clamp_(min=-_LARGE)  # hidden from autograd, so that the gradient stays infinite
    return logarithm


def _per_label(shapes: Mapping[str, Any]) -> Shape:
    """Return the shape of a loss, which has a last dimension of size 1 only if the labels have one."""
    x: Shape = shapes["X"]
    return x[:-1] if len(shapes["Label"]) < len(x) else (*x[:-1], 1)


@kind(
    "cross_entropy2",
    "X Label",
    "Y XShape MatchX",
    shapes=lambda shapes, _: (_per_label(shapes), (*shapes["X"], 0), (*shapes["X"][:-1], 1)),
    grad=Gradient(("X",), ("Label", "MatchX", "XShape", "Y@GRAD"), "cross_entropy_grad2"),
    ignore_index=-100,
)
def _cross_entropy2(x: Tensor, label: Tensor, ignore_index: int) -> tuple[Tensor, None, Tensor]:
    if label.dim() < x.dim():
        loss, _, matched = _cross_entropy2(x, label.unsqueeze(-1), ignore_index)
        return loss.squeeze(-1), None, matched.squeeze(-1)
    ignored = label == ignore_index
    if label.is_cuda or bool(ignored.any()):
        matched = x.gather(-1, label.masked_fill(ignored, 0)).masked_fill(ignored, 1.0)
    else:
        matched = x.gather(-1, label)
    return -_log(matched), None, matched


@kind(
    "cross_entropy",
    "X Label",
    "Y",
    shapes=lambda shapes, _: ((*shapes["X"][:-1], 1),),
    grad=Gradient(("X",), ("Label", "X", "Y@GRAD")),
    soft_label=False,
    ignore_index=-100,
)
def _cross_entropy(x: Tensor, label: Tensor, soft_label: bool, ignore_index: int) -> Tensor:
    if soft_label:
        return -(label * _log(x)).sum(-1, keepdim=True)
    return _cross_entropy2(x, label, ignore_index)[0]  # type: ignore[no-any-return]


@kind(
    "softmax_with_cross_entropy",
    "Logits Label",
    "Softmax Loss",
    shapes=lambda shapes, attrs: (
        shapes["Logits"],
        tuple(
            1 if at == attrs["axis"] % len(shapes["Logits"]) else size
            for at, size in enumerate(shapes["Logits"])
        ),
    ),
    shares=("Softmax", "Loss"),
    grad=Gradient(("Logits",), ("Label", "Loss@GRAD", "Softmax")),
    soft_label=False,
    ignore_index=-100,
    numeric_stable_mode=True,
    axis=-1,
)
def _softmax_with_cross_entropy(
    logits: Tensor, label: Tensor, soft_label: bool, ignore_index: int, axis: int
) -> tuple[Tensor, Tensor]:
    logarithm = torch.log_softmax(logits, axis)
    values = logarithm.data  # hidden from autograd: see the operator softmax
    values.clamp_(min=values.amax(axis, True) - 64.0)
    if soft_label:
        loss = -(label * logarithm).sum(axis, keepdim=True)
        # Paddle's gradient is softmax - label even if the labels do not add up to 1.
        like = torch.logsumexp(logits, axis, keepdim=True) - (label * logits).sum(axis, keepdim=True)
        loss = like + (loss - like).detach()
    else:
        ignored = label == ignore_index
        loss = -logarithm.gather(axis, label.masked_fill(ignored, 0)).masked_fill(ignored, 0.0)
    return logarithm.exp(), loss


@kind(
    "log_loss",
    "Predicted Labels",
    "Loss",
    grad=Gradient(("Predicted",), ("Labels", "Loss@GRAD", "Predicted")),
    epsilon=1e-4,
)
def _log_loss(predicted: Tensor, labels: Tensor, epsilon: float) -> Tensor:
    return -labels * torch.log(predicted + epsilon) - (1 - labels) * torch.log(1 - predicted + epsilon)


@kind(
    "sigmoid_cross_entropy_with_logits",
    "X Label",
    "Out",
    grad=Gradient(("X",), ("Label", "Out@GRAD", "X"), lod_from=""),
    normalize=False,
    ignore_index=-100,
)
def _sigmoid_cross_entropy(x: Tensor, label: Tensor, normalize: bool, ignore_index: int) -> Tensor:
    ignored = label == ignore_index
    loss = functional.binary_cross_entropy_with_logits(x, label, reduction="none").masked_fill(ignored, 0.0)
    return loss / (~ignored).sum().clamp(min=1e-5) if normalize else loss


@kind("label_smooth", "X PriorDist?", "Out", grad=Gradient(("X",), ("Out@GRAD",)), epsilon=0.0)
def _label_smooth(label: Tensor, prior: Tensor | None, epsilon: float) -> Tensor:
    other = 1.0 / label.shape[-1] if prior is None else prior
    return (1 - epsilon) * label + epsilon * other


@kind(
    "dropout",
    "X",
    "Out Mask",
    grad=Gradient(("X",), ("Mask", "Out@GRAD")),
    shapes=lambda shapes, _: (shapes["X"], shapes["X"]),
    dtypes={"Mask": "uint8"},
    dropout_prob=0.5,
    is_test=False,
    fix_seed=False,
    seed=0,
    dropout_implementation="downgrade_in_infer",
)
def _dropout(
    x: Tensor,
    dropout_prob: float,
    is_test: bool,
    fix_seed: bool,
    seed: int,
    dropout_implementation: str,
) -> tuple[Tensor, Tensor | None]:
    upscales = dropout_implementation == "upscale_in_train"
    if is_test:
        return (x if upscales else x * (1.0 - dropout_prob)), None
    # With a seed, every run of the program draws the same mask, as in Paddle.
    generator = torch.Generator(x.device).manual_seed(seed) if fix_seed else None
    mask = torch.rand(x.shape, generator=generator, device=x.device) >= dropout_prob
    if upscales:
        scale = 0.0 if dropout_prob == 1.0 else 1.0 / (1.0 - dropout_prob)
        return x * mask * scale, mask.to(torch.uint8)
    return x * mask, mask.to(torch.uint8)
