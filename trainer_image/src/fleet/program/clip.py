"""Gradient clipping: how a user asks for it, and the operators that stand for it in a program.

The mathematics is that of ``torch.nn.utils``: `clip_grad_value_` and `clip_grad_norm_` on the gradient that
is averaged over the trainers. Clipping comes before weight decay, as in PyTorch and in the original.
"""

import math
from dataclasses import dataclass
from typing import Final

from fleet.errors import ConfigurationError
from fleet.program.ir import Attribute, Operator, ProgramData

__all__ = [
    "CLIP_TYPES",
    "NORM_TYPES",
    "ClipGradByGlobalNorm",
    "ClipGradByNorm",
    "ClipGradByValue",
    "GradClip",
    "check_grad_clip",
    "clip_attributes",
    "clip_of",
    "clip_type",
    "describe_clip",
]


@dataclass(frozen=True)
class ClipGradByValue:
    """Clip each element of a gradient to ``min`` … ``max``.

    Attributes
    ----------
    max : float
    min : float, optional
        ``-max`` otherwise.

    Notes
    -----
    The original's ``fluid.clip.GradientClipByValue``.
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
        """The least value: `min`, which is never None once this is made."""
        return -self.max if self.min is None else self.min


@dataclass(frozen=True)
class ClipGradByNorm:
    """Scale each parameter's gradient down so that its 2-norm is at most `clip_norm`.

    Attributes
    ----------
    clip_norm : float

    Notes
    -----
    The original's ``fluid.clip.GradientClipByNorm``.
    """

    clip_norm: float

    def __post_init__(self) -> None:
        _check(self, "clip_norm", self.clip_norm, positive=True)


@dataclass(frozen=True)
class ClipGradByGlobalNorm:
    """Scale all gradients down by one factor so that their 2-norm, taken together, is at most `clip_norm`.

    Attributes
    ----------
    clip_norm : float

    Notes
    -----
    The original's ``fluid.clip.GradientClipByGlobalNorm``.
    """

    clip_norm: float

    def __post_init__(self) -> None:
        _check(self, "clip_norm", self.clip_norm, positive=True)


GradClip = ClipGradByValue | ClipGradByNorm | ClipGradByGlobalNorm

_TYPES: Final[dict[type, str]] = {
    ClipGradByValue: "clip",
    ClipGradByNorm: "clip_by_norm",
    ClipGradByGlobalNorm: "clip_by_global_norm",
}
CLIP_TYPES: Final = frozenset(_TYPES.values())
NORM_TYPES: Final = frozenset({_TYPES[ClipGradByNorm], _TYPES[ClipGradByGlobalNorm]})
"""The types of the operators that clip."""


def check_grad_clip(name: str, value: object) -> None:
    """Refuse what is no way to clip.

    Raises
    ------
    ConfigurationError
        `value` is no instance of one of the three classes; the message begins with `name`.
    """
    if not isinstance(value, GradClip):
        raise ConfigurationError(
            f"{name} is {value!r}; expected None, fleet.ClipGradByValue(max), "
            "fleet.ClipGradByNorm(clip_norm) or fleet.ClipGradByGlobalNorm(clip_norm)"
        )


def clip_type(clip: GradClip) -> str:
    """Return the type of the operator that clips so."""
    return _TYPES[type(clip)]


def clip_attributes(clip: GradClip) -> dict[str, Attribute]:
    """Return the attributes of the operator that clips so, under the original's names."""
    if isinstance(clip, ClipGradByValue):
        return {"min": float(clip.low), "max": float(clip.max)}
    return {"max_norm": float(clip.clip_norm)}


def clip_of(program: ProgramData) -> GradClip | None:
    """Return how a captured program clips its gradients; None when it does not."""
    for op in program.global_block().ops:
        if op.type in CLIP_TYPES:
            return _clip(op)
    return None


def describe_clip(op: Operator) -> str:
    """Return how an operator clips, as a user would write it."""
    return repr(_clip(op))


def _clip(op: Operator) -> GradClip:
    if op.type == "clip":
        return ClipGradByValue(max=op.attr("max"), min=op.attr("min"))
    kind = ClipGradByNorm if op.type == "clip_by_norm" else ClipGradByGlobalNorm
    return kind(op.attr("max_norm"))


def _check(clip: object, name: str, value: object, *, positive: bool = False) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or (positive and isinstance(value, int | float) and value <= 0):
        raise ConfigurationError(
            f"{type(clip).__name__}: {name} is {value!r}; expected a {'positive' if positive else 'finite'} "
            "number"
        )
