"""Clipping by operators: what a slice's operator says beside its bound, and how it is lowered.

A norm is taken over slices that several servers hold. The operator names them all in `epmap`: each server
tells the others its part of the sum before it steps what the norm is about.
"""

from collections.abc import Mapping

from fleet.errors import TranspileError
from fleet.fluid.clip import CLIP_TYPES, NORM_TYPES
from fleet.fluid.ir import Attribute, Operator
from fleet.fluid.layout import Layout
from fleet.fluid.program import Program
from fleet.plan.blocks import PlannedBlock
from fleet.plan.clipping import ClippingPlan, NormPlan
from fleet.plan.config import DistributedMode, TrainingMode

__all__ = ["check_clipping", "clipping_attributes", "lower_clipping"]

_GLOBAL = "clip_by_global_norm"


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
