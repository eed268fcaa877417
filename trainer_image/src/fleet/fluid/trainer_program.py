"""The program of a trainer: its computation, with the sends, barriers and receives around it."""

from collections.abc import Sequence

from fleet.fluid.ir import Attribute, Block, OpRole, Variable
from fleet.fluid.program import Program, startup_program, step_program
from fleet.fluid.step_operators import LOOK_UP_TYPE
from fleet.plan.blocks import PlannedBlock
from fleet.plan.config import DistributedMode
from fleet.plan.job import JobPlan

__all__ = ["append_exchange", "sent_name", "trainer_attributes", "trainer_program", "trainer_startup"]

_RPC = int(OpRole.RPC)
_DIST = int(OpRole.DIST)


def trainer_program(plan: JobPlan, trainer_id: int, *, wait_port: bool = True) -> Program:
    """Return the program that the trainer with index `trainer_id` runs in each step.

    Each gradient is sent right after the operator that produces it, so that communication overlaps with the
    rest of the backward pass. The optimize operators and their state are removed, because servers run them.
    In GEO the optimize operators stay, and the changes are sent after them.

    Parameters
    ----------
    plan : JobPlan
    trainer_id : int
    wait_port : bool
        False: do not wait for the servers' ports, even if the plan requests it.

    Returns
    -------
    Program
        Its attributes give the role, the job's endpoints and size, the mode and the agreement.
    """
    program = step_program(plan.spec)
    block = program.global_block()
    if plan.geo:
        append_exchange(block, plan, trainer_id)
    else:
        block.ops[:] = [op for op in block.ops if op.attrs.get("op_role") != OpRole.OPTIMIZE]
        _drop_unused_variables(block)
        _insert_sends(block, plan, trainer_id)
        _show_tables(block, plan, trainer_id)
    if plan.mode is DistributedMode.SYNC:
        _append_barrier(block, "send_barrier", plan, trainer_id, ())
    if not plan.geo:
        _append_receives(block, plan, trainer_id)
    program.plan = plan
    program.attrs = trainer_attributes(plan, trainer_id, wait_port=wait_port)
    return program


def append_exchange(block: Block, plan: JobPlan, trainer_id: int) -> None:
    """Append the operators that send GEO's changes after the updates, and then receive the values."""
    for blocks in plan.by_param.values():
        _append_push(block, blocks, plan, trainer_id)
    _append_receives(block, plan, trainer_id)


def trainer_startup(plan: JobPlan, trainer_id: int, *, wait_port: bool = True) -> Program:
    """Return a trainer's startup program, which initializes variables and receives the servers' values.

    Parameters
    ----------
    plan : JobPlan
    trainer_id : int
    wait_port : bool
        As for `trainer_program`.
    """
    program = startup_program(plan.spec)
    block = program.global_block()
    if not plan.geo:
        block.ops[:] = [op for op in block.ops if op.type != "init_state"]
    _drop_unused_variables(block)
    _append_receives(block, plan, trainer_id, barrier=True)
    program.plan, program.part = plan, "startup"
    program.attrs = trainer_attributes(plan, trainer_id, wait_port=wait_port)
    return program


def trainer_attributes(plan: JobPlan, trainer_id: int, *, wait_port: bool) -> dict[str, Attribute]:
    """Return the job settings that a trainer's program records as attributes."""
    return {
        "role": "trainer",
        "trainer_id": trainer_id,
        "trainers": plan.trainers,
        "endpoints": list(plan.endpoints),
        "distributed_mode": int(plan.mode),
        "wait_port": wait_port and plan.wait_port,
        "merge_add": list(plan.merge_add),
        "push_nums": plan.push_nums,
        "agreement": dict(plan.agreement),
        **({"tables": list(plan.tables)} if plan.tables else {}),
    }


def _drop_unused_variables(block: Block) -> None:
    used = {name for op in block.ops for name in (*op.input_arg_names, *op.output_arg_names)}
    block.vars = {name: variable for name, variable in block.vars.items() if name in used}


def sent_name(plan: JobPlan, block: PlannedBlock, trainer_id: int) -> str:
    """Return the name under which a trainer sends the gradient of a block."""
    suffixed = plan.mode is DistributedMode.SYNC and plan.trainers > 1
    return f"{block.grad}.trainer_{trainer_id}" if suffixed else block.grad


def _insert_sends(block: Block, plan: JobPlan, trainer_id: int) -> None:
    """Insert operators that split and send each gradient, after the operator that computes it."""
    block.rename_vars(
        {
            f"{name}@GRAD": sent_name(plan, blocks[0], trainer_id)
            for name, blocks in plan.by_param.items()
            if not blocks[0].sliced
        }
    )
    computation, block.ops[:] = list(block.ops), []
    for op in computation:
        block.ops.append(op)
        if op.type == "accumulate_grad":
            _append_send(block, plan.by_param[op.input("Param")[0]], plan, trainer_id)


def _append_send(block: Block, blocks: tuple[PlannedBlock, ...], plan: JobPlan, trainer_id: int) -> None:
    names = [sent_name(plan, piece, trainer_id) for piece in blocks]
    grad, sections = f"{blocks[0].param}@GRAD", _sections(blocks)
    attrs = _carried(blocks, trainer_id)
    if len(blocks) > 1 and plan.sender_cuts:
        # The sender cuts the gradient after it has merged several.
        attrs |= {"sections": sections, "send_varnames": list(names)}
        names = [grad]
    elif len(blocks) > 1:
        for name, piece in zip(names, blocks, strict=True):
            block.create_var(Variable(name, piece.shape, piece.dtype))
        block.append_op(
            "split_byref", {"X": [grad]}, {"Out": names}, {"sections": sections, "op_role": _DIST}
        )
    block.append_op("send", {"X": names}, attrs=attrs)


def _append_push(block: Block, blocks: tuple[PlannedBlock, ...], plan: JobPlan, trainer_id: int) -> None:
    """Append the operator that sends a parameter's change in GEO mode; it also slices the change."""
    attrs = _carried(blocks, trainer_id) | {
        "sections": _sections(blocks),
        "send_varnames": [piece.grad for piece in blocks],
        "push_nums": plan.push_nums,
    }
    block.append_op("send", {"X": [blocks[0].param]}, attrs=attrs)


def _sections(blocks: tuple[PlannedBlock, ...]) -> list[Attribute]:
    return [piece.shape[0] if piece.shape else 1 for piece in blocks]


def _carried(blocks: tuple[PlannedBlock, ...], trainer_id: int) -> dict[str, Attribute]:
    """Return the attributes of an operator that sends or receives blocks of a parameter."""
    return {
        "epmap": [piece.endpoint for piece in blocks],
        "trainer_id": trainer_id,
        "block_ids": [piece.id for piece in blocks],
        "param_group": blocks[0].group,
        "op_role": _RPC,
        "op_role_var": [blocks[0].param, f"{blocks[0].param}@GRAD"],
    }


def _append_barrier(
    block: Block, kind: str, plan: JobPlan, trainer_id: int, outputs: tuple[str, ...]
) -> None:
    attrs: dict[str, Attribute] = {
        "endpoints": list(plan.endpoints),
        "trainer_id": trainer_id,
        "op_role": _RPC,
    }
    block.append_op(kind, outputs={"Out": outputs} if outputs else {}, attrs=attrs)


def _append_receives(block: Block, plan: JobPlan, trainer_id: int, *, barrier: bool = False) -> None:
    """Append the operators that fetch values from servers: receives, a barrier and concatenations."""
    by_param = plan.by_param
    for blocks in by_param.values():
        for piece in blocks if blocks[0].sliced else ():
            block.create_var(Variable(piece.name, piece.shape, piece.dtype))
        received = [piece.name for piece in blocks]
        block.append_op("recv", outputs={"Out": received}, attrs=_carried(blocks, trainer_id))
    if barrier or plan.mode is DistributedMode.SYNC:
        everything = tuple(piece.name for piece in plan.blocks)
        _append_barrier(block, "fetch_barrier", plan, trainer_id, everything)
    for name, blocks in by_param.items():
        if blocks[0].sliced:
            block.append_op(
                "concat",
                {"X": [piece.name for piece in blocks]},
                {"Out": [name]},
                {"axis": 0, "op_role": _DIST},
            )


def _show_tables(block: Block, plan: JobPlan, trainer_id: int) -> None:
    """Replace look-ups with fetches from servers, and append sends of row gradients."""
    own = {table.name for table in plan.spec.tables if table.own}
    captured, block.ops[:] = list(block.ops), []
    for op in captured:
        if op.type == LOOK_UP_TYPE and op.attr("is_distributed"):
            _append_look_up(block, op.input("W")[0], op.output("Out")[0], plan.endpoints, trainer_id)
        else:
            block.ops.append(op)
        if op.outputs.get("W@GRAD"):
            table = op.attr("table")
            _append_row_send(block, table, plan.endpoints, trainer_id, own=table in own)


def _append_look_up(block: Block, table: str, rows: str, endpoints: Sequence[str], trainer_id: int) -> None:
    ids = [f"{table}.ids.{server}" for server in range(len(endpoints))]
    parts = [f"{table}.rows.{server}" for server in range(len(endpoints))]
    for name in (*ids, *parts):
        block.create_var(Variable(name, (-1,), "any"))
    common: dict[str, Attribute] = {"table": table, "trainer_id": trainer_id, "op_role": int(OpRole.DIST)}
    rpc = common | {"epmap": list(endpoints), "op_role": int(OpRole.RPC)}
    block.append_op("split_ids", {"W": [table]}, {"Out": ids}, common)
    block.append_op("prefetch", {"X": ids}, {"Out": parts}, rpc)
    attrs = common | {"is_distributed": True, "op_role": int(OpRole.FORWARD)}
    block.append_op("distributed_lookup_table", {"W": [table], "Rows": parts}, {"Out": [rows]}, attrs)


def _append_row_send(
    block: Block, table: str, endpoints: Sequence[str], trainer_id: int, *, own: bool
) -> None:
    """Append operators that send a table's gradient and, if trainers also hold the rows, receive the rows."""
    parts = [f"{table}@GRAD.{server}" for server in range(len(endpoints))]
    for name in parts:
        block.create_var(Variable(name, (-1,), "any"))
    common: dict[str, Attribute] = {"table": table, "trainer_id": trainer_id, "op_role": int(OpRole.DIST)}
    block.append_op("split_selected_rows", {"X": [f"{table}@GRAD"]}, {"Out": parts}, common)
    attrs = common | {"epmap": list(endpoints), "op_role": int(OpRole.RPC)}
    block.append_op("send", {"X": parts}, attrs=attrs)
    if own:
        block.append_op("recv", outputs={"Out": [table]}, attrs=attrs)
