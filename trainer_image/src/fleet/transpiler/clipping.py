"""Clipping by operators: what a slice's operator says beside its bound, and how it is lowered.

A norm is taken over slices that several servers hold. The operator names them all in `epmap`: each server
tells the others its part of the sum before it steps what the norm is about.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from fleet.errors import TranspileError
from fleet.program.clip import CLIP_TYPES, NORM_TYPES
from fleet.program.ir import Attribute, Operator
from fleet.program.program import Program
from fleet.transpiler.block import PlannedBlock
from fleet.transpiler.config import DistributedMode, TrainingMode
from fleet.transpiler.layout import Layout

__all__ = ["ClippingPlan", "NormPlan", "check_clipping", "clipping_attributes", "lower_clipping"]

_GLOBAL = "clip_by_global_norm"


@dataclass(frozen=True, slots=True)
class NormPlan:
    """A norm over gradients of several blocks, by which each of them is clipped before it is stepped."""

    key: str
    """The parameter's name; empty for the norm over all parameters."""
    max_norm: float
    blocks: tuple[int, ...]
    """The blocks of this server that have a part in it, in order of id."""
    servers: tuple[int, ...]
    """Every server that has a part in it, this one included, in ascending order."""

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"the gradient of {self.key}" if self.key else "all gradients"


@dataclass(frozen=True, slots=True)
class ClippingPlan:
    """How a server clips the gradients of its blocks."""

    ranges: Mapping[int, tuple[float, float]]
    """Least and largest value of a gradient's elements, by block, where they are clipped by value."""
    norms: tuple[NormPlan, ...]
    """The norms by which gradients are clipped, where they are."""


def check_clipping(program: Program, mode: DistributedMode, custom: TrainingMode | None) -> None:
    """Refuse clipping where there is no gradient that is averaged over the trainers.

    Raises
    ------
    TranspileError
        The program clips, and the mode is not the built-in sync mode.
    """
    built_in = custom is None and mode is DistributedMode.SYNC
    name = mode.name.lower().replace("_", "-") if custom is None else repr(custom.name)
    if not built_in and any(op.type in CLIP_TYPES for op in program.global_block().ops):
        raise TranspileError(
            f"clipping gradients on the servers needs synchronous training, and the mode is "
            f"{name}; set sync_mode=True, or clip in the loop before "
            "optimizer.step(), with DistributedStrategy(overlap=False)"
        )


def clipping_attributes(op: Operator, piece: PlannedBlock, layout: Layout) -> dict[str, Attribute]:
    """Return what an operator that clips a slice says beside its bound."""
    if op.type not in NORM_TYPES:
        return {}
    blocks = layout.blocks if op.type == _GLOBAL else layout.by_param[piece.param]
    holders = {block.endpoint for block in blocks}
    epmap: list[Attribute] = [endpoint for endpoint in layout.endpoints if endpoint in holders]
    return {"epmap": epmap, "key": "" if op.type == _GLOBAL else piece.param}


def lower_clipping(operators: Mapping[int, list[Operator]], endpoints: tuple[str, ...]) -> ClippingPlan:
    """Return how a server clips.

    Parameters
    ----------
    operators : mapping of block id to operators
        Those that step the block.
    endpoints : tuple of str
        All servers.

    Raises
    ------
    TranspileError
        Two blocks disagree about a norm that both have a part in.
    """
    ranges = {
        block: (op.attr("min"), op.attr("max"))
        for block, ops in operators.items()
        for op in ops
        if op.type == "clip"
    }
    norms: dict[str, NormPlan] = {}
    for block in sorted(operators):
        for op in operators[block]:
            if op.type not in NORM_TYPES:
                continue
            servers = tuple(sorted(endpoints.index(endpoint) for endpoint in op.attr("epmap")))
            found = NormPlan(op.attr("key"), op.attr("max_norm"), (block,), servers)
            known = norms.setdefault(found.key, NormPlan(found.key, found.max_norm, (), servers))
            if (found.max_norm, found.servers) != (known.max_norm, known.servers):
                raise TranspileError(
                    f"the program clips {found.name} by {found.max_norm} over servers {list(servers)} for "
                    f"one slice and by {known.max_norm} over servers {list(known.servers)} for another; "
                    "expected the same for all"
                )
            norms[found.key] = NormPlan(known.key, known.max_norm, (*known.blocks, block), servers)
    return ClippingPlan(ranges, tuple(norms.values()))
