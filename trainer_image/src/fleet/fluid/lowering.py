"""Lowering: from the operators of a transpiled program to the flat plan that the runtime follows.

Both sides number the blocks alike: a block's id is its position in the list of all blocks of the job, sorted
by parameter name (code points) and then by offset.
"""

from math import prod
from typing import TYPE_CHECKING, cast

from fleet.errors import TranspileError
from fleet.fluid.clipping import lower_clipping
from fleet.fluid.ir import Attribute, Block, Operator
from fleet.fluid.optimizers import hyper_parameters_of
from fleet.fluid.program import Program
from fleet.plan.blocks import PlannedBlock, Slice, plan_block
from fleet.plan.config import DistributedMode, TrainingMode
from fleet.plan.job import GroupPlan, ServerPlan, TrainerPlan
from fleet.plan.optimizers import class_path
from fleet.plan.tables import served, table_plans

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = [
    "server_plan",
    "startup_plan",
    "trainer_plan",
]


def trainer_plan(program: Program) -> TrainerPlan:
    """Lower a trainer's program.

    Parameters
    ----------
    program : Program
        What `DistributeTranspiler.get_trainer_program` returned.

    Returns
    -------
    TrainerPlan

    Raises
    ------
    TranspileError
        The program is not a trainer's, or its operators contradict each other.
    """
    mode = _mode_of(program, "trainer", "get_trainer_program()")
    block = program.global_block()
    endpoints = tuple(program.attr("endpoints"))
    sends = [op for op in block.ops if op.type == "send" and not op.has_attr("table")]
    if not sends and not program.attrs.get("tables"):
        raise TranspileError(
            "the program sends nothing; expected a trainer's main program, as get_trainer_program() "
            "returned it"
        )
    received = {
        name: server
        for op in block.ops
        if op.type == "recv" and not op.has_attr("table")
        for name, server in zip(op.output("Out"), op.attr("epmap"), strict=True)
    }
    lowered = [
        planned
        for op in sends
        for planned in _lower_blocks(block, op, _sent_names(op), endpoints, geo=mode is DistributedMode.GEO)
    ]
    for planned in lowered:
        if received.get(planned.name) != planned.endpoint:
            raise TranspileError(
                f"the program sends {planned.grad} to {planned.endpoint} and receives {planned.name} from "
                f"{received.get(planned.name)}; a parameter and its gradient must share a server"
            )
    return _trainer_plan(program, mode, lowered)


def startup_plan(program: Program) -> TrainerPlan:
    """Lower a trainer's startup program, which only receives.

    Parameters
    ----------
    program : Program
        The startup program that `transpile` rewrote.

    Returns
    -------
    TrainerPlan
        The plan of the main program it belongs to, but for the order of sending.

    Raises
    ------
    TranspileError
        The program is not a trainer's.
    """
    mode = _mode_of(program, "trainer", "transpile(), in its startup program,")
    block = program.global_block()
    endpoints = tuple(program.attr("endpoints"))
    # No sends say the order here; the last gradient comes into being first, so the reverse is nearest to it.
    lowered = [
        planned
        for op in reversed(block.ops)
        if op.type == "recv" and not op.has_attr("table")
        for planned in _lower_blocks(
            block, op, tuple(op.output("Out")), endpoints, geo=mode is DistributedMode.GEO
        )
    ]
    return _trainer_plan(program, mode, lowered)


def _trainer_plan(program: Program, mode: DistributedMode, lowered: list[PlannedBlock]) -> TrainerPlan:
    blocks = tuple(sorted(lowered, key=lambda planned: planned.id))
    _check_ids(blocks)
    return TrainerPlan(
        mode=mode,
        trainer_id=program.attr("trainer_id"),
        trainers=program.attr("trainers"),
        endpoints=tuple(program.attr("endpoints")),
        wait_port=program.attr("wait_port"),
        blocks=blocks,
        send_order=tuple(planned.id for planned in lowered),
        agreement=dict(program.attr("agreement")),
        merge_add=frozenset(program.attr("merge_add")),
        push_nums=program.attr("push_nums"),
        custom=_custom_mode(program, mode),
        tables=table_plans(cast("list[str]", program.attrs.get("tables", [])), program.source),
    )


def server_plan(program: Program) -> ServerPlan:
    """Lower a parameter server's program.

    Parameters
    ----------
    program : Program
        What `DistributeTranspiler.get_pserver_program` returned.

    Returns
    -------
    ServerPlan

    Raises
    ------
    TranspileError
        The program is not a server's, or its operators contradict each other.
    """
    mode = _mode_of(program, "pserver", "get_pserver_program(endpoint)")
    (listen,) = program.global_block().ops
    endpoint, server = listen.attr("endpoint"), listen.attr("pserver_id")
    blocks: list[PlannedBlock] = []
    groups: dict[int, GroupPlan] = {}
    operators: dict[int, list[Operator]] = {}
    for idx in listen.attr("optimize_blocks"):
        ops = program.block(idx).ops
        planned = _lower_optimize(program.global_block(), ops[-1], server, endpoint)
        if mode is DistributedMode.SYNC:
            _check_mean(ops, planned, listen.attr("Fanin"))
        blocks.append(planned)
        operators[planned.id] = ops
        if planned.group not in groups and mode is not DistributedMode.GEO:
            groups[planned.group] = _lower_group(program, ops, planned.name)
    return ServerPlan(
        mode=mode,
        server=server,
        endpoints=tuple(program.attr("endpoints")),
        trainers=listen.attr("Fanin"),
        blocks=tuple(blocks),
        num_blocks=program.attr("num_blocks"),
        groups=groups,
        clipping=lower_clipping(operators, tuple(program.attr("endpoints"))),
        agreement=dict(program.attr("agreement")),
        custom=_custom_mode(program, mode),
        tables=served(table_plans(cast("list[str]", program.attrs.get("tables", [])), program.source), mode),
    )


def _mode_of(program: Program, role: str, made_by: str) -> DistributedMode:
    found = program.attrs.get("role")
    if found != role:
        raise TranspileError(
            f"expected a {role}'s program, found {f'one of a {found}' if found else 'one not transpiled'}; "
            f"run what DistributeTranspiler.{made_by} returned"
        )
    return DistributedMode(program.attr("distributed_mode"))


def _custom_mode(program: Program, mode: DistributedMode) -> TrainingMode | None:
    """Return the user's own mode that the program was transpiled for, if it is one."""
    custom = cast("TrainingMode | None", program.mode)
    name = program.attr("agreement")["mode"]
    if name != (custom.name if custom is not None else mode.name.lower()):
        raise TranspileError(
            f"the program was transpiled for the mode {name!r}, and its `mode` is "
            f"{'none' if custom is None else repr(custom.name)}; set program.mode to the mode's object (a "
            "program that was read from JSON has none)"
        )
    return custom


def _sent_names(op: Operator) -> tuple[str, ...]:
    """Return the names of what a send operator sends, also where the sender cuts it."""
    return tuple(op.attr("send_varnames") if op.has_attr("send_varnames") else op.input("X"))


def _lower_blocks(
    block: Block, op: Operator, names: tuple[str, ...], endpoints: tuple[str, ...], *, geo: bool
) -> list[PlannedBlock]:
    """Return the blocks that a send or recv operator carries; their offsets follow from their sizes."""
    param_name, grad = op.attr("op_role_var")
    param = block.var(param_name)
    sliced = len(names) > 1
    planned: list[PlannedBlock] = []
    begin = 0
    for index, (name, endpoint, block_id) in enumerate(
        zip(names, op.attr("epmap"), op.attr("block_ids"), strict=True)
    ):
        if not sliced:
            shape = param.shape
        elif op.has_attr("sections"):  # the sender cuts: the slices are no variables
            shape = (op.attr("sections")[index], *param.shape[1:])
        else:
            shape = block.var(name).shape
        planned.append(
            plan_block(
                param.name,
                param.shape,
                param.dtype,
                grad,
                Slice(index, begin, begin + prod(shape), shape),
                sliced=sliced,
                geo=geo,
                number=block_id,
                group=op.attr("param_group"),
                server=endpoints.index(endpoint),
                endpoint=endpoint,
            )
        )
        begin += prod(shape)
    if begin != param.numel:
        raise TranspileError(
            f"the program carries {begin} of the {param.numel} elements of {param.name} in {op.type}"
        )
    return planned


def _check_ids(blocks: tuple[PlannedBlock, ...]) -> None:
    ids = [planned.id for planned in blocks]
    if ids != list(range(len(blocks))):
        raise TranspileError(f"the program's blocks are numbered {ids}; expected 0 to {len(blocks) - 1}")


def _lower_optimize(root: Block, op: Operator, server: int, endpoint: str) -> PlannedBlock:
    name, grad = op.attr("op_role_var")
    variable = root.var(name)
    begin = op.attr("begin")
    return PlannedBlock(
        id=op.attr("block_ids")[0],
        name=name,
        grad=grad,
        param=op.attr("origin"),
        param_shape=tuple(op.attr("origin_shape")),
        dtype=variable.dtype,
        index=op.attr("block_index"),
        begin=begin,
        shape=variable.shape,
        server=server,
        endpoint=endpoint,
        group=op.attr("param_group"),
    )


def _check_mean(ops: list[Operator], planned: PlannedBlock, trainers: int) -> None:
    """Check that a block's gradient is the mean over the trainers, which is what the servers compute."""
    total, mean = ops[:2]
    if len(total.input("X")) != trainers or mean.attr("scale") != 1.0 / trainers:
        raise TranspileError(
            f"the program sums {len(total.input('X'))} gradients for {planned.name} and scales them by "
            f"{mean.attr('scale')}; expected {trainers}, the number of trainers, and {1.0 / trainers}"
        )


def _lower_group(program: Program, ops: list[Operator], param: str) -> GroupPlan:
    """Fuse a slice's operators into one torch.optim call: weight decay goes back into its options."""
    optimizer = ops[-1]
    carried = hyper_parameters_of(optimizer)
    decays = [op.attr("scale") for op in ops if op.type == "scale" and op.input("X") == [param]]
    others = {"weight_decay": decays[0] if decays else 0.0}
    return GroupPlan(
        index=optimizer.attr("param_group"),
        optimizer_class=_optimizer_class(program, optimizer),
        hyper_parameters={
            name: carried[name] if name in carried else others[name]
            for name in optimizer.attr("hyper_parameters")
        },
        elementwise=optimizer.attr("elementwise"),
        cuttable=optimizer.attr("param_group") in program.attr("cuttable"),
        tensors=_pairs(optimizer.attrs.get("tensors")),
    )


def _pairs(texts: Attribute) -> dict[str, str]:
    """Return names and values of texts as ``lr:float32``."""
    found = [str(text).partition(":") for text in texts] if isinstance(texts, list) else []
    return {name: value for name, _, value in found}


def _optimizer_class(program: Program, op: Operator) -> "type[Optimizer]":
    """Return the class that an optimize operator stands for: the captured one, or PyTorch's own.

    A program that was read from a text has no captured class, and a text must not choose what is imported.
    """
    path: str = op.attr("optimizer")
    if program.source is not None and class_path(type(program.source.optimizer)) == path:
        return type(program.source.optimizer)
    module, _, name = path.rpartition(".")
    if module.startswith("torch.optim."):
        import torch

        found = getattr(torch.optim, name, None)
        if isinstance(found, type) and class_path(found) == path:
            return found
    raise TranspileError(
        f"operator {op.type} stands for {path}, which the program has no class for and PyTorch does not "
        "have; give the program the source of one that was captured with it: program.source = "
        "captured.source"
    )
