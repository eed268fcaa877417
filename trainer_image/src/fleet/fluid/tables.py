"""The operators about tables in a job's programs, as the original's programs have them.

A trainer splits a batch's distinct ids by server, fetches their rows, and looks up in these; the gradients of
the rows are split and sent. A server has a block that answers, for each table.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from fleet.errors import TranspileError
from fleet.fluid.clip import CLIP_TYPES
from fleet.fluid.ir import Attribute, Block, OpRole, ProgramData, Variable
from fleet.plan.config import DistributedMode, DistributeTranspilerConfig, TrainingMode
from fleet.plan.source import CapturedTable, OwnTable

__all__ = [
    "LOOK_UP_TYPE",
    "append_look_ups",
    "append_prefetch_blocks",
    "append_row_gradients",
    "check_tables",
    "show_tables",
    "tables_of",
]


LOOK_UP_TYPE: Final = "lookup_table"
_GRADIENT_TYPE: Final = "lookup_table_grad"


def tables_of(program: ProgramData) -> tuple[str, ...]:
    """Return the names of a captured program's tables."""
    ops = program.global_block().ops
    return tuple(op.input("W")[0] for op in ops if op.type == LOOK_UP_TYPE and op.has_attr("table"))


def check_tables(
    program: ProgramData,
    config: DistributeTranspilerConfig,
    mode: DistributedMode,
    custom: TrainingMode | None,
) -> None:
    """Refuse what tables are not trained with, by name.

    Raises
    ------
    TranspileError
        A mode of the user's own, delay compensation, or clipping on the servers.
    """
    tables = tables_of(program)
    clipped = any(op.type in CLIP_TYPES for op in program.global_block().ops)
    refused = {
        f"the mode {custom.name if custom is not None else mode.name.lower()!r}": custom is not None,
        "enable_dc_asgd": mode is DistributedMode.ASYNC and config.enable_dc_asgd,
        "strategy.grad_clip": clipped,
    }
    for what, found in refused.items():
        if tables and found:
            raise TranspileError(
                f"{what} knows no tables, and the model has {', '.join(tables)} on the parameter servers; "
                "expected one of the modes sync, async, half_async and geo of the strategy, without delay "
                "compensation and clipping there, or torch.nn.Embedding in place of the table, with "
                "sparse=False"
            )


def show_tables(block: Block, tables: Sequence[str], endpoints: Sequence[str], trainer_id: int) -> None:
    """Show in a trainer's program how rows come and gradients go; in place."""
    captured, block.ops[:] = list(block.ops), []
    for op in captured:
        if op.type == LOOK_UP_TYPE and op.attr("is_distributed"):
            _append_look_up(block, op.input("W")[0], op.output("Out")[0], endpoints, trainer_id)
        else:
            block.ops.append(op)
        if op.outputs.get("W@GRAD") and op.attr("table") in tables:
            _append_send(block, op.attr("table"), endpoints, trainer_id, told=not op.attr("is_distributed"))


def append_look_ups(block: Block, tables: Iterable[CapturedTable]) -> None:
    """Append the operators that read rows, before the model's own."""
    for table in tables:
        if block.has_var(table.name):
            raise TranspileError(f"a table and a parameter or an input are named {table.name!r}; rename one")
        rows, grad, config = f"{table.name}@ROWS", f"{table.name}@GRAD", table.config
        shape = (config.num_embeddings or -1, config.dimension)
        for name in (table.name, rows, grad):
            block.create_var(Variable(name, shape))
        attrs: Mapping[str, Attribute] = {
            "is_sparse": True,
            "is_distributed": not isinstance(config, OwnTable),
            "table": _describe(table),
            "op_role": int(OpRole.FORWARD),
        }
        block.append_op(LOOK_UP_TYPE, {"W": [table.name]}, {"Out": [rows]}, attrs)


def append_row_gradients(block: Block, tables: Iterable[CapturedTable], loss_grad: str) -> None:
    """Append the operators that give the rows that were read their gradients."""
    for table in tables:
        grad = f"{table.name}@GRAD"
        attrs: Mapping[str, Attribute] = {
            "is_distributed": not isinstance(table.config, OwnTable),
            "table": table.name,
            "op_role": int(OpRole.BACKWARD),
            "op_role_var": [table.name, grad],
        }
        block.append_op(_GRADIENT_TYPE, {"X": [loss_grad]}, {"W@GRAD": [grad]}, attrs)


def _named(option: object) -> object:
    """Return an option, of a schedule what it is called: where it lies in memory is each process's own."""
    if not callable(option):
        return option
    return f"{option.__module__}.{getattr(option, '__qualname__', type(option).__qualname__)}"


def _describe(table: CapturedTable) -> str:
    """Say what a table is: what must be equal in every process, and in a checkpoint."""
    config = table.config
    if isinstance(config, OwnTable):
        return (
            f"dimension {config.dimension}, {config.num_embeddings} ids, rows of the module's own, stepped "
            f"as {config.optimizer_class.__qualname__} of param group {table.group}"
        )
    rule = type(config.rule).__qualname__
    if table.group is not None:
        stepped = f"{rule} of param group {table.group}"
    else:
        options = ", ".join(f"{name}={_named(value)}" for name, value in sorted(config.options.items()))
        stepped = f"{rule}({options}) of its own"
    rules = "".join(f", {each!r}" for each in (config.admission, *config.eviction) if each is not None)
    ids = "any id" if config.num_embeddings is None else f"{config.num_embeddings} ids"
    return (
        f"dimension {config.dimension} of {config.row_type!r}, {ids}, {stepped}, first values "
        f"{config.first_values!r} with seed {config.seed}{rules}"
    )


def append_prefetch_blocks(root: Block, tables: Sequence[str]) -> list[Attribute]:
    """Append to a server's program a block for each table, which answers look-ups; return which is whose."""
    whose: list[Attribute] = []
    for name in tables:
        block = root.program.create_block()
        for variable in (f"{name}.ids", f"{name}.rows"):
            root.create_var(Variable(variable, (-1,), "any"))
        attrs: dict[str, Attribute] = {"table": name, "is_distributed": True, "op_role": int(OpRole.RPC)}
        block.append_op("lookup_sparse_table", {"Ids": [f"{name}.ids"]}, {"Out": [f"{name}.rows"]}, attrs)
        whose.append(f"{name}.ids:{block.idx}")
    return whose


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


def _append_send(block: Block, table: str, endpoints: Sequence[str], trainer_id: int, *, told: bool) -> None:
    """Append the split and the send of a table's gradient, and the way back of rows that a trainer holds."""
    parts = [f"{table}@GRAD.{server}" for server in range(len(endpoints))]
    for name in parts:
        block.create_var(Variable(name, (-1,), "any"))
    common: dict[str, Attribute] = {"table": table, "trainer_id": trainer_id, "op_role": int(OpRole.DIST)}
    block.append_op("split_selected_rows", {"X": [f"{table}@GRAD"]}, {"Out": parts}, common)
    attrs = common | {"epmap": list(endpoints), "op_role": int(OpRole.RPC)}
    block.append_op("send", {"X": parts}, attrs=attrs)
    if told:
        block.append_op("recv", outputs={"Out": [table]}, attrs=attrs)
