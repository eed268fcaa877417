"""Gradient clipping: the options that users set, and the plans that servers follow.

The mathematics is that of ``torch.nn.utils``: `clip_grad_value_` and `clip_grad_norm_` on the gradient that
is averaged over the trainers. Clipping comes before weight decay, as in PyTorch and in Paddle.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fleet.errors import ConfigurationError

if TYPE_CHECKING:
    from torch.nn import Parameter

__all__ = [
    "ClipGradByGlobalNorm",
    "ClipGradByNorm",
    "ClipGradByValue",
    "ClippingPlan",
    "GradClip",
    "NormPlan",
    "check_grad_clip",
    "clip_gradients",
    "in_floats",
]


@dataclass(frozen=True)
class ClipGradByValue:
    """Clip each element of a gradient to the range from ``min`` to ``max``.

    Attributes
    ----------
    max : float
    min : float, optional
        By default ``-max``.

    Notes
    -----
    Paddle's ``fluid.clip.GradientClipByValue``.
    """

    max: float
    min: float | None = None

    def __post_init__(self) -> None:
        _check(self, "max", self.max)
        if self.min is None:
            object.__setattr__(self, "min", -self.max)
        _check(self, "min", self.min)
        if self.low > self.max:
            raise ConfigurationError(
                f"ClipGradByValue: min {self.min} is larger than max {self.max}; the order of the arguments "
                "is (max, min), and max alone must not be negative"
            )

    @property
    def low(self) -> float:
        """`min` as a float, never None: construction sets a missing `min` to ``-max``."""
        return -self.max if self.min is None else self.min


@dataclass(frozen=True)
class ClipGradByNorm:
    """Scale each parameter's gradient down so that its 2-norm is at most `clip_norm`.

    Attributes
    ----------
    clip_norm : float

    Notes
    -----
    Paddle's ``fluid.clip.GradientClipByNorm``.
    """

    clip_norm: float

    def __post_init__(self) -> None:
        _check(self, "clip_norm", self.clip_norm, positive=True)


@dataclass(frozen=True)
class ClipGradByGlobalNorm:
    """Scale all gradients down by one factor so that their joint 2-norm is at most `clip_norm`.

    Attributes
    ----------
    clip_norm : float

    Notes
    -----
    Paddle's ``fluid.clip.GradientClipByGlobalNorm``.
    """

    clip_norm: float

    def __post_init__(self) -> None:
        _check(self, "clip_norm", self.clip_norm, positive=True)


GradClip = ClipGradByValue | ClipGradByNorm | ClipGradByGlobalNorm


@dataclass(frozen=True, slots=True)
class NormPlan:
    """A gradient norm over several blocks, used to clip the gradients of these blocks."""

    key: str
    """The parameter's name; empty for the norm over all parameters."""
    max_norm: float
    blocks: tuple[int, ...]
    """The blocks of this server that contribute to the norm, in order of id."""
    servers: tuple[int, ...]
    """All servers that contribute to the norm, this one included, in ascending order."""

    @property
    def name(self) -> str:
        """The name of the norm in messages."""
        return f"the gradient of {self.key}" if self.key else "all gradients"


@dataclass(frozen=True, slots=True)
class ClippingPlan:
    """A server's plan for clipping the gradients of its blocks."""

    ranges: Mapping[int, tuple[float, float]]
    """The bounds of gradient elements, by block; empty unless gradients are clipped by value."""
    norms: tuple[NormPlan, ...]
    """The norms by which gradients are clipped; empty unless gradients are clipped by norm."""


def in_floats(clip: GradClip) -> GradClip:
    """Return a copy with float bounds, so that its text representation is the same in all processes."""
    if isinstance(clip, ClipGradByValue):
        return ClipGradByValue(float(clip.max), float(clip.low))
    return type(clip)(float(clip.clip_norm))


def check_grad_clip(name: str, value: object) -> None:
    """Raise an error unless a value is an instance of one of the three clipping classes.

    Raises
    ------
    ConfigurationError
        `value` is not an instance of one of the three classes; the message begins with `name`.
    """
    if not isinstance(value, GradClip):
        raise ConfigurationError(
            f"{name} is {value!r}; expected None, fleet.ClipGradByValue(max), "
            "fleet.ClipGradByNorm(clip_norm) or fleet.ClipGradByGlobalNorm(clip_norm)"
        )


def clip_gradients(clip: GradClip, parameters: "Collection[Parameter]") -> None:
    """Clip the gradients of parameters in this process, in the same way as servers do."""
    from torch.nn.utils import clip_grad_norm_  # imported here, so that plans can be read without torch

    match clip:
        case ClipGradByValue():
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.clamp_(clip.low, clip.max)
        case ClipGradByNorm():
            for parameter in parameters:
                clip_grad_norm_(parameter, clip.clip_norm)
        case ClipGradByGlobalNorm():
            clip_grad_norm_(parameters, clip.clip_norm)


def _check(clip: object, name: str, value: object, *, positive: bool = False) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or (positive and isinstance(value, int | float) and value <= 0):
        raise ConfigurationError(
            f"{type(clip).__name__}: {name} is {value!r}; expected a {'positive' if positive else 'finite'} "
            "number"
        )
