"""Lowering: from the operators of a transpiled program to the flat plan that the runtime follows.

Both sides number the blocks alike: a block's id is its position in the list of all blocks of the job, sorted
by parameter name (code points) and then by offset.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, cast

from fleet.errors import TranspileError
from fleet.program.agreement import fingerprint_of
from fleet.program.ir import Attribute, Block, Operator
from fleet.program.optimizers import HyperParameter, class_path, hyper_parameters_of
from fleet.program.program import Program
from fleet.transpiler.block import PlannedBlock, plan_block
from fleet.transpiler.clipping import ClippingPlan, lower_clipping
from fleet.transpiler.config import DistributedMode, TrainingMode
from fleet.transpiler.placement import Placement, blocks_told, part_of
from fleet.transpiler.slicing import Slice
from fleet.transpiler.tables import TablePlan, lower_tables, served, shards_on

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = [
    "GroupPlan",
    "HyperParameter",
    "ServerPlan",
    "TrainerPlan",
    "server_plan",
    "startup_plan",
    "trainer_plan",
]


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """How the parameters of one param group are stepped."""

    index: int
    optimizer_class: "type[Optimizer]"
    hyper_parameters: Mapping[str, HyperParameter]
    """Every option of the group at capture, ``lr``, ``weight_decay`` and kernel flags included."""
    elementwise: bool
    """Whether stepping two slices gives the bits that stepping the whole parameter gives."""
    cuttable: bool
    """Whether the mode and the clipping too let blocks be sent and stepped in pieces."""
    tensors: Mapping[str, str] = field(default_factory=dict)
    """The options that are tensors where the user has them, and their dtypes, which decide bits of a step."""


@dataclass(frozen=True, slots=True)
class TrainerPlan:
    """What one trainer sends and receives at each step."""

    mode: DistributedMode
    trainer_id: int
    trainers: int
    endpoints: tuple[str, ...]
    wait_port: bool
    """Whether to wait until every server accepts connections before the first step."""
    blocks: tuple[PlannedBlock, ...]
    """All blocks of the job, by parameter name and then by offset; once joined, those that servers hold."""
    send_order: tuple[int, ...]
    """Block ids in the order of the program's send operators. An eager loop may send in another."""
    agreement: Mapping[str, str]
    """What every process of the job must have in common, by name, for messages."""
    merge_add: frozenset[int]
    """The param groups whose gradients are summed, not averaged, when those of several steps are merged."""
    push_nums: int
    """GEO: after how many steps a trainer sends what has changed."""
    custom: TrainingMode | None
    """The user's own mode, which takes the place of `mode`."""
    tables: tuple[TablePlan, ...] = ()
    """The tables that live on the servers, each on all of them."""

    @property
    def fingerprint(self) -> str:
        """Hex digest of `agreement`: equal on all processes that may work together."""
        return fingerprint_of(self.agreement)

    def placed(self, told: Sequence[Placement]) -> "TrainerPlan":
        """Return the plan for the blocks that servers hold, which they tell; see `blocks_told`."""
        runs = blocks_told(self.blocks, self.endpoints, told)
        param_of = {block.id: block.param for block in self.blocks}
        sent = (runs[param] for param in dict.fromkeys(param_of[number] for number in self.send_order))
        return replace(
            self,
            blocks=tuple(chain.from_iterable(runs.values())),
            send_order=tuple(block.id for block in chain.from_iterable(sent)),
        )

    def blocks_of(self, param: str) -> tuple[PlannedBlock, ...]:
        """Return the blocks of one parameter in order of offset."""
        return tuple(block for block in self.blocks if block.param == param)

    def blocks_on(self, server: int) -> tuple[PlannedBlock, ...]:
        """Return the blocks that one server owns, in order."""
        return tuple(block for block in self.blocks if block.server == server)


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """What one server holds and steps."""

    mode: DistributedMode
    server: int
    """This server's index in `endpoints`."""
    endpoints: tuple[str, ...]
    trainers: int
    """Fanin: the number of trainers, which is also the divisor of the summed gradients."""
    blocks: tuple[PlannedBlock, ...]
    """The blocks this server owns, or their pieces, in that order; empty when it owns none."""
    num_blocks: int
    """How many blocks the whole job has, however they are cut into pieces."""
    groups: Mapping[int, GroupPlan]
    """The param groups that `blocks` refer to, by index."""
    clipping: ClippingPlan
    agreement: Mapping[str, str]
    """As in `TrainerPlan`."""
    custom: TrainingMode | None
    """As in `TrainerPlan`."""
    version: int = 0
    """Of the placement; see `Placement`."""
    tables: tuple[TablePlan, ...] = ()
    """As in `TrainerPlan`; of each this server holds some shards."""

    @property
    def dc_asgd(self) -> bool:
        """Whether gradients are compensated for their delay."""
        return self.agreement.get("enable_dc_asgd") == str(True)

    @property
    def endpoint(self) -> str:
        """Where this server is reached."""
        return self.endpoints[self.server]

    @property
    def table_shards(self) -> tuple[int, ...]:
        """The virtual shards of every table that this server holds."""
        return shards_on(self.server, len(self.endpoints))

    @property
    def fingerprint(self) -> str:
        """As of `TrainerPlan`."""
        return fingerprint_of(self.agreement)

    @property
    def placement(self) -> Placement:
        """What this server tells each trainer of its blocks."""
        return Placement(tuple(map(part_of, self.blocks)), self.version)


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
        tables=lower_tables(program),
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
        tables=served(lower_tables(program), mode),
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
                param,
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
