"""The layout: every block of a job, its name and its server, worked out once and shared by all programs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby

from fleet.errors import TranspileError
from fleet.fluid.agreement import agreement_of
from fleet.fluid.clip import CLIP_TYPES, NORM_TYPES
from fleet.fluid.ir import Block, Operator, OpRole, Variable
from fleet.fluid.program import Program
from fleet.fluid.tables import check_tables, tables_of
from fleet.plan.blocks import PlannedBlock, plan_block, slice_variable
from fleet.plan.config import DistributedMode, DistributeTranspilerConfig, TrainingMode
from fleet.plan.dispatch import PSDispatcher

__all__ = ["Layout", "lay_out", "optimize_operators"]


@dataclass(frozen=True)
class Layout:
    """Where everything goes.

    Attributes
    ----------
    mode : DistributedMode
    endpoints : tuple of str
    trainers : int
    blocks : tuple of PlannedBlock
        Sorted by parameter name, then by offset; ``blocks[i].id == i``.
    gradients : mapping of str to Variable
        The gradient of each parameter, by the parameter's name.
    merge_add : tuple of int
        The param groups whose gradients are summed, not averaged, when those of several steps are merged.
    cuttable : tuple of int
        The param groups whose blocks the runtime may step and send in pieces, to the same bits.
    agreement : mapping
        What all processes of the job must have in common.
    config : DistributeTranspilerConfig
        Not to be changed.
    custom : TrainingMode or None
        The user's own mode, if it is one.
    tables : tuple of str
        The names of the tables that live on the servers, in the order of their numbers.
    """

    mode: DistributedMode
    endpoints: tuple[str, ...]
    trainers: int
    blocks: tuple[PlannedBlock, ...]
    gradients: Mapping[str, Variable]
    merge_add: tuple[int, ...]
    cuttable: tuple[int, ...]
    agreement: Mapping[str, str]
    config: DistributeTranspilerConfig = field(default_factory=DistributeTranspilerConfig)
    custom: TrainingMode | None = None
    tables: tuple[str, ...] = ()

    @property
    def sender_cuts(self) -> bool:
        """Whether gradients are handed over whole, and cut by the one who sends them."""
        return self.config.runtime_split_send_recv and self.mode in (
            DistributedMode.ASYNC,
            DistributedMode.HALF_ASYNC,
        )

    @cached_property
    def by_param(self) -> dict[str, tuple[PlannedBlock, ...]]:
        """The blocks of each parameter, in order."""
        grouped = groupby(self.blocks, key=lambda block: block.param)
        return {name: tuple(blocks) for name, blocks in grouped}

    def on(self, endpoint: str) -> tuple[PlannedBlock, ...]:
        """Return the blocks that one server holds."""
        return tuple(block for block in self.blocks if block.endpoint == endpoint)

    def sent_name(self, block: PlannedBlock, trainer_id: int) -> str:
        """Return the name under which a trainer sends its gradient for a block."""
        suffixed = self.mode is DistributedMode.SYNC and self.trainers > 1
        return f"{block.grad}.trainer_{trainer_id}" if suffixed else block.grad

    def sent_names(self, block: PlannedBlock) -> list[str]:
        """Return the names under which the trainers send their gradients for a block, each once."""
        return list(dict.fromkeys(self.sent_name(block, trainer) for trainer in range(self.trainers)))


def optimize_operators(program: Program) -> dict[str, list[Operator]]:
    """Return the operators that step each parameter, by its name: clipping first, the optimizer last.

    Raises
    ------
    TranspileError
        There is no optimizer, or an operator beside it that parameter servers cannot carry out.
    """
    found: dict[str, list[Operator]] = {}
    for op in program.global_block().ops:
        if op.has_attr("is_distributed") and op.attr("is_distributed") and not op.has_attr("table"):
            raise TranspileError(
                f"operator {op.type} has is_distributed = True, and names no table; tables on the parameter "
                "servers are captured from a model with fleet.nn.DistributedEmbedding"
            )
        if not op.has_attr("op_role") or op.attr("op_role") != OpRole.OPTIMIZE:
            continue
        known = op.has_attr("optimizer") or op.type in CLIP_TYPES or op.type in ("scale", "sum")
        if not op.has_attr("op_role_var") or not known:
            raise TranspileError(
                f"operator {op.type} (reading {', '.join(op.input_arg_names) or 'nothing'}) is neither an "
                "optimizer nor weight decay nor clipping, and parameter servers cannot carry it out"
            )
        found.setdefault(op.attr("op_role_var")[0], []).append(op)
    if not found and not tables_of(program):
        raise TranspileError(
            "no optimizer: the program has no optimize operators; "
            "make it with Program.capture(model, loss_fn, optimizer) before it is transpiled"
        )
    for name, ops in found.items():
        places = [0 if op.type in CLIP_TYPES else 2 if op.has_attr("optimizer") else 1 for op in ops]
        if places != sorted(places) or places.count(0) > 1 or places.count(2) != 1:
            raise TranspileError(
                f"{name} is stepped by {', '.join(op.type for op in ops)}, which parameter servers cannot "
                "carry out; expected one way of clipping at most, then weight decay, then the optimizer"
            )
    return found


def lay_out(
    program: Program,
    config: DistributeTranspilerConfig,
    mode: DistributedMode,
    endpoints: Sequence[str],
    trainers: int,
    custom: TrainingMode | None = None,
) -> Layout:
    """Cut the parameters into blocks and give each block a server.

    Parameters
    ----------
    program : Program
        As captured.
    config : DistributeTranspilerConfig
        Checked.
    mode : DistributedMode
    endpoints : sequence of str
        Checked.
    trainers : int
    custom : TrainingMode, optional
        The user's own mode; `mode` is then the one whose programs it runs on.

    Returns
    -------
    Layout

    Raises
    ------
    TranspileError
        No optimizer, an optimizer that cannot be cut as the config says, or a dispatcher that answers
        with something other than one known endpoint for each block.
    """
    operators = optimize_operators(program)
    check_tables(program, config, mode, custom)
    root = program.global_block()
    if mode is not DistributedMode.GEO:  # where trainers step
        _check_servers_step(operators)
    gradients = {name: root.var(ops[-1].input("Grad")[0]) for name, ops in sorted(operators.items())}
    cut = _cut(root, operators, gradients, config, endpoints, geo=mode is DistributedMode.GEO)
    merge_add = {ops[-1].attr("param_group") for ops in operators.values() if ops[-1].type == "sgd"}
    cuttable = () if custom is not None else _cuttable(operators, mode)
    agreement = agreement_of(program) | {
        **_mode_agreement(config, mode, custom),
        "trainers": str(trainers),
        "endpoints": ",".join(endpoints),
    }
    return Layout(
        mode=mode,
        endpoints=tuple(endpoints),
        trainers=trainers,
        blocks=_dispatch(config.split_method(endpoints), cut, endpoints),
        gradients=gradients,
        merge_add=tuple(sorted(merge_add)),
        cuttable=cuttable,
        agreement=agreement,
        config=config,
        custom=custom,
        tables=tables_of(program),
    )


def _mode_agreement(
    config: DistributeTranspilerConfig, mode: DistributedMode, custom: TrainingMode | None
) -> dict[str, str]:
    if custom is not None:
        options = {f"{custom.name}: {fact}": value for fact, value in custom.agreement().items()}
        return {"mode": custom.name, "programs of the mode": mode.name.lower(), **options}
    agreement = {"mode": mode.name.lower()}
    if mode is DistributedMode.ASYNC:
        agreement["enable_dc_asgd"] = str(config.enable_dc_asgd)
    if mode is DistributedMode.GEO:
        agreement["geo_sgd_need_push_nums"] = str(config.geo_sgd_need_push_nums)
    return agreement


def _check_servers_step(operators: Mapping[str, Sequence[Operator]]) -> None:
    """Check that what each server does by itself is what the optimizer does."""
    for ops in operators.values():
        if ops[-1].has_attr("not_on_servers"):
            raise TranspileError(ops[-1].attr("not_on_servers"))


def _cuttable(operators: Mapping[str, Sequence[Operator]], mode: DistributedMode) -> tuple[int, ...]:
    """Return the param groups whose blocks may be stepped in pieces, in ascending order.

    A mode that keeps something of a block beside the gradient, as GEO, takes whole ones.
    """
    if mode not in (DistributedMode.SYNC, DistributedMode.ASYNC):
        return ()
    groups = {ops[-1].attr("param_group") for ops in operators.values()}
    whole = {
        ops[-1].attr("param_group")
        for ops in operators.values()
        if not ops[-1].attr("elementwise") or any(op.type in NORM_TYPES for op in ops)
    }
    return tuple(sorted(groups - whole))


def _cut(
    root: Block,
    operators: Mapping[str, Sequence[Operator]],
    gradients: Mapping[str, Variable],
    config: DistributeTranspilerConfig,
    endpoints: Sequence[str],
    *,
    geo: bool,
) -> tuple[PlannedBlock, ...]:
    """Cut the parameters into blocks, which are the first server's until they are dispatched."""
    blocks: list[PlannedBlock] = []
    for name, grad in gradients.items():
        param, optimizer = root.var(name), operators[name][-1]
        slices = slice_variable(
            param.shape, len(endpoints) if config.slice_var_up else 1, config.min_block_size
        )
        sliced = len(slices) > 1
        if sliced and not geo and not optimizer.attr("elementwise"):
            raise TranspileError(
                f"{optimizer.attr('optimizer')} computes over whole parameters, and {name} would be cut into "
                f"{len(slices)} blocks. Keep parameters whole: strategy.transpiler.slice_var_up = False, or "
                "DistributeTranspilerConfig(slice_var_up=False) for a transpiler of your own"
            )
        blocks.extend(
            plan_block(
                param.name,
                param.shape,
                param.dtype,
                grad.name,
                piece,
                sliced=sliced,
                geo=geo,
                number=number,
                group=optimizer.attr("param_group"),
                server=0,
                endpoint=endpoints[0],
            )
            for number, piece in enumerate(slices, len(blocks))
        )
    for block in blocks:
        if block.sliced and root.has_var(block.name):
            raise TranspileError(
                f"parameter {block.param} would be cut into blocks, and the name {block.name} is taken; "
                "rename the parameter that has it"
            )
    return tuple(blocks)


def _dispatch(
    dispatcher: PSDispatcher, blocks: Sequence[PlannedBlock], endpoints: Sequence[str]
) -> tuple[PlannedBlock, ...]:
    """Return the blocks with the servers that the dispatcher gives them."""
    servers = tuple(dispatcher.dispatch(blocks))
    unknown = [server for server in servers if server not in endpoints]
    if unknown or len(servers) != len(blocks):
        raise TranspileError(
            f"{type(dispatcher).__name__}.dispatch gave {len(servers)} endpoints"
            f"{f', {unknown[0]!r} among them' if unknown else ''}; "
            f"expected one of {', '.join(endpoints)} for each of {len(blocks)} blocks"
        )
    return tuple(
        replace(block, server=endpoints.index(endpoint), endpoint=endpoint)
        for block, endpoint in zip(blocks, servers, strict=True)
    )
