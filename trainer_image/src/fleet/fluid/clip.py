"""The operators that stand for gradient clipping in a captured program."""

from typing import Final

from fleet.fluid.ir import Attribute, Operator, ProgramData
from fleet.plan.clipping import ClipGradByGlobalNorm, ClipGradByNorm, ClipGradByValue, GradClip

__all__ = ["CLIP_TYPES", "NORM_TYPES", "clip_attributes", "clip_of", "clip_type", "describe_clip"]

_TYPES: Final[dict[type, str]] = {
    ClipGradByValue: "clip",
    ClipGradByNorm: "clip_by_norm",
    ClipGradByGlobalNorm: "clip_by_global_norm",
}
CLIP_TYPES: Final = frozenset(_TYPES.values())
NORM_TYPES: Final = frozenset({_TYPES[ClipGradByNorm], _TYPES[ClipGradByGlobalNorm]})
"""The types of the operators that clip."""


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
