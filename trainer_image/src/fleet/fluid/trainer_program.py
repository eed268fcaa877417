"""A trainer's programs: its own computation, with sends, barriers and receives around it."""

from fleet.errors import TranspileError
from fleet.fluid.ir import Attribute, Block, OpRole, Variable
from fleet.fluid.layout import Layout
from fleet.fluid.program import Program
from fleet.fluid.tables import show_tables
from fleet.plan.blocks import PlannedBlock
from fleet.plan.config import DistributedMode

__all__ = ["build_trainer_program", "rewrite_startup"]

_RPC = int(OpRole.RPC)
_DIST = int(OpRole.DIST)


def build_trainer_program(main: Program, layout: Layout, trainer_id: int) -> Program:
    """Build the program that trainer `trainer_id` runs at each step.

    Each gradient leaves right after the operator that produces it, so that the network works while the
    rest of the backward pass computes. What the servers do is gone: optimize operators and their state.
    In GEO the optimize operators stay, and what has changed leaves behind them.

    Parameters
    ----------
    main : Program
        As captured. It is not changed.
    layout : Layout
    trainer_id : int

    Returns
    -------
    Program
        Named in its attributes: the role, the job's endpoints and size, the mode and the agreement.

    Raises
    ------
    TranspileError
        A gradient has no operator that produces it.
    """
    program = main.clone()
    block = program.global_block()
    if layout.mode is DistributedMode.GEO:
        for blocks in layout.by_param.values():
            _append_push(block, blocks, layout, trainer_id)
    else:
        block.ops[:] = [op for op in block.ops if op.attrs.get("op_role") != OpRole.OPTIMIZE]
        _drop_unused_variables(block)
        _insert_sends(block, layout, trainer_id)
        show_tables(block, layout.tables, layout.endpoints, trainer_id)
    if layout.mode is DistributedMode.SYNC:
        _append_barrier(block, "send_barrier", layout, trainer_id, ())
    _append_receives(block, layout, trainer_id)
    program.attrs = trainer_attributes(layout, trainer_id)
    program.mode = layout.custom
    return program


def trainer_attributes(layout: Layout, trainer_id: int) -> dict[str, Attribute]:
    """Return the facts about the whole job that a trainer's program carries."""
    return {
        "role": "trainer",
        "trainer_id": trainer_id,
        "trainers": layout.trainers,
        "endpoints": list(layout.endpoints),
        "distributed_mode": int(layout.mode),
        "wait_port": True,
        "merge_add": list(layout.merge_add),
        "push_nums": layout.config.geo_sgd_need_push_nums,
        "agreement": dict(layout.agreement),
        **({"tables": list(layout.tables)} if layout.tables else {}),
    }


def rewrite_startup(startup: Program, layout: Layout, trainer_id: int) -> None:
    """Turn a startup program, in place, into a trainer's: its own initial values, then the servers'.

    Parameters
    ----------
    startup : Program
        As captured.
    layout : Layout
    trainer_id : int
    """
    block = startup.global_block()
    if layout.mode is not DistributedMode.GEO:
        block.ops[:] = [op for op in block.ops if op.type != "init_state"]
    _drop_unused_variables(block)
    _append_receives(block, layout, trainer_id, barrier=True)
    startup.attrs = trainer_attributes(layout, trainer_id)
    startup.mode = layout.custom


def _drop_unused_variables(block: Block) -> None:
    used = {name for op in block.ops for name in (*op.input_arg_names, *op.output_arg_names)}
    block.vars = {name: variable for name, variable in block.vars.items() if name in used}


def _insert_sends(block: Block, layout: Layout, trainer_id: int) -> None:
    """Put each gradient's split and send right behind the last operator that writes the gradient."""
    by_param = layout.by_param
    whole = {
        layout.gradients[name].name: layout.sent_name(blocks[0], trainer_id)
        for name, blocks in by_param.items()
        if not blocks[0].sliced
    }
    block.rename_vars(whole)
    producers = {name: position for position, op in enumerate(block.ops) for name in op.output_arg_names}
    blocks_at: dict[int, list[tuple[PlannedBlock, ...]]] = {}
    for name, blocks in by_param.items():
        grad = layout.gradients[name].name
        produced = whole.get(grad, grad)
        if produced not in producers:
            raise TranspileError(f"no operator produces the gradient {grad}; it cannot be sent")
        blocks_at.setdefault(producers[produced], []).append(blocks)

    computation, block.ops[:] = list(block.ops), []
    for position, op in enumerate(computation):
        block.ops.append(op)
        for blocks in blocks_at.get(position, ()):
            _append_send(block, blocks, layout, trainer_id)


def _append_send(block: Block, blocks: tuple[PlannedBlock, ...], layout: Layout, trainer_id: int) -> None:
    names = [layout.sent_name(piece, trainer_id) for piece in blocks]
    grad = layout.gradients[blocks[0].param]
    sections = _sections(blocks)
    attrs = _carried(blocks, layout, trainer_id)
    if len(blocks) > 1 and layout.sender_cuts:
        # The sender cuts the gradient when it has merged enough of them.
        attrs |= {"sections": sections, "send_varnames": list(names)}
        names = [grad.name]
    elif len(blocks) > 1:
        for name, piece in zip(names, blocks, strict=True):
            block.create_var(Variable(name, piece.shape, grad.dtype))
        block.append_op(
            "split_byref",
            {"X": [grad.name]},
            {"Out": names},
            {"sections": sections, "op_role": _DIST},
        )
    block.append_op("send", {"X": names}, attrs=attrs)


def _append_push(block: Block, blocks: tuple[PlannedBlock, ...], layout: Layout, trainer_id: int) -> None:
    """Append the send of what GEO exchanges: a parameter's change, cut by the sender."""
    attrs = _carried(blocks, layout, trainer_id) | {
        "sections": _sections(blocks),
        "send_varnames": [piece.grad for piece in blocks],
        "push_nums": layout.config.geo_sgd_need_push_nums,
    }
    block.append_op("send", {"X": [blocks[0].param]}, attrs=attrs)


def _sections(blocks: tuple[PlannedBlock, ...]) -> list[Attribute]:
    return [piece.shape[0] if piece.shape else 1 for piece in blocks]


def _carried(blocks: tuple[PlannedBlock, ...], layout: Layout, trainer_id: int) -> dict[str, Attribute]:
    """Return the attributes of an operator that carries a parameter's blocks."""
    return {
        "epmap": [piece.endpoint for piece in blocks],
        "trainer_id": trainer_id,
        "block_ids": [piece.id for piece in blocks],
        "param_group": blocks[0].group,
        "op_role": _RPC,
        "op_role_var": [blocks[0].param, layout.gradients[blocks[0].param].name],
    }


def _append_barrier(
    block: Block, kind: str, layout: Layout, trainer_id: int, outputs: tuple[str, ...]
) -> None:
    attrs: dict[str, Attribute] = {
        "endpoints": list(layout.endpoints),
        "trainer_id": trainer_id,
        "op_role": _RPC,
    }
    block.append_op(kind, outputs={"Out": outputs} if outputs else {}, attrs=attrs)


def _append_receives(block: Block, layout: Layout, trainer_id: int, *, barrier: bool = False) -> None:
    """Append what brings the servers' values in: receives, a barrier, and the joining of cut parameters."""
    by_param = layout.by_param
    for blocks in by_param.values():
        for piece in blocks if blocks[0].sliced else ():
            block.create_var(Variable(piece.name, piece.shape, piece.dtype))
        received = [piece.name for piece in blocks]
        block.append_op("recv", outputs={"Out": received}, attrs=_carried(blocks, layout, trainer_id))
    if barrier or layout.mode is DistributedMode.SYNC:
        everything = tuple(piece.name for piece in layout.blocks)
        _append_barrier(block, "fetch_barrier", layout, trainer_id, everything)
    for name, blocks in by_param.items():
        if blocks[0].sliced:
            block.append_op(
                "concat",
                {"X": [piece.name for piece in blocks]},
                {"Out": [name]},
                {"axis": 0, "op_role": _DIST},
            )
