"""The layout: every block of a job, its name and its server, worked out once and shared by all programs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby

from fleet.errors import TranspileError
from fleet.program.agreement import agreement_of
from fleet.program.clip import CLIP_TYPES, NORM_TYPES
from fleet.program.ir import Operator, OpRole, Program, Variable
from fleet.transpiler.config import DistributedMode, DistributeTranspilerConfig, TrainingMode
from fleet.transpiler.dispatch import PSDispatcher
from fleet.transpiler.slicing import slice_variable

__all__ = ["Layout", "ParamBlock", "lay_out", "optimize_operators"]


@dataclass(frozen=True)
class ParamBlock:
    """A block of a parameter and of its gradient."""

    id: int
    param: Variable
    grad: Variable
    index: int
    begin: int
    end: int
    shape: tuple[int, ...]
    sliced: bool
    group: int
    merge_add: bool = False
    """Whether gradients of several steps are summed rather than averaged when they travel together."""
    cuttable: bool = False
    """Whether stepping it piece by piece gives the bits that stepping it whole gives."""

    @property
    def suffix(self) -> str:
        """What the block's name adds to the variable's."""
        return f".block{self.index}" if self.sliced else ""

    @property
    def name(self) -> str:
        """The parameter block's name."""
        return self.param.name + self.suffix

    @property
    def grad_name(self) -> str:
        """The gradient block's name, the same for all trainers."""
        return self.grad.name + self.suffix

    @property
    def delta_name(self) -> str:
        """The name of what GEO sends instead of a gradient."""
        return f"{self.name}.delta"


@dataclass(frozen=True)
class Layout:
    """Where everything goes.

    Attributes
    ----------
    mode : DistributedMode
    endpoints : tuple of str
    trainers : int
    blocks : tuple of ParamBlock
        Sorted by parameter name, then by offset; ``blocks[i].id == i``.
    servers : tuple of str
        The endpoint of each block.
    agreement : mapping
        What all processes of the job must have in common.
    config : DistributeTranspilerConfig
        Not to be changed.
    custom : TrainingMode or None
        The user's own mode, if it is one.
    """

    mode: DistributedMode
    endpoints: tuple[str, ...]
    trainers: int
    blocks: tuple[ParamBlock, ...]
    servers: tuple[str, ...]
    agreement: Mapping[str, str]
    config: DistributeTranspilerConfig = field(default_factory=DistributeTranspilerConfig)
    custom: TrainingMode | None = None

    @property
    def sender_cuts(self) -> bool:
        """Whether gradients are handed over whole, and cut by the one who sends them."""
        return self.config.runtime_split_send_recv and self.mode in (
            DistributedMode.ASYNC,
            DistributedMode.HALF_ASYNC,
        )

    @cached_property
    def by_param(self) -> dict[str, tuple[ParamBlock, ...]]:
        """The blocks of each parameter, in order."""
        grouped = groupby(self.blocks, key=lambda block: block.param.name)
        return {name: tuple(blocks) for name, blocks in grouped}

    @cached_property
    def cuttable_groups(self) -> tuple[int, ...]:
        """The param groups whose blocks the runtime may step and send in pieces, in ascending order.

        A mode that keeps something of a block beside the gradient, as GEO or a user's own, takes whole ones.
        """
        if self.custom is not None or self.mode not in (DistributedMode.SYNC, DistributedMode.ASYNC):
            return ()
        whole = {block.group for block in self.blocks if not block.cuttable}
        return tuple(sorted({block.group for block in self.blocks} - whole))

    def on(self, endpoint: str) -> tuple[ParamBlock, ...]:
        """Return the blocks that one server holds."""
        return tuple(
            block for block, server in zip(self.blocks, self.servers, strict=True) if server == endpoint
        )

    def sent_name(self, block: ParamBlock, trainer_id: int) -> str:
        """Return the name under which a trainer sends its gradient for a block."""
        if self.mode is DistributedMode.GEO:
            return block.delta_name
        suffixed = self.mode is DistributedMode.SYNC and self.trainers > 1
        return f"{block.grad_name}.trainer_{trainer_id}" if suffixed else block.grad_name

    def sent_names(self, block: ParamBlock) -> list[str]:
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
        if op.has_attr("is_distributed") and op.attr("is_distributed"):
            raise TranspileError(
                f"operator {op.type} has is_distributed = True; tables kept on the parameter servers are not "
                "supported yet, use is_distributed=False"
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
    if not found:
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
    blocks = _cut(program, config, len(endpoints))
    servers = _dispatch(config.split_method(endpoints), blocks, endpoints)
    agreement = agreement_of(program) | {
        **_mode_agreement(config, mode, custom),
        "trainers": str(trainers),
        "endpoints": ",".join(endpoints),
        "slice_var_up": str(config.slice_var_up),
        "min_block_size": str(config.min_block_size),
        "split_method": config.split_method.__qualname__,
    }
    return Layout(mode, tuple(endpoints), trainers, blocks, servers, agreement, config, custom)


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


def _cut(program: Program, config: DistributeTranspilerConfig, num_servers: int) -> tuple[ParamBlock, ...]:
    block = program.global_block()
    blocks: list[ParamBlock] = []
    for name, ops in sorted(optimize_operators(program).items()):
        optimizer = ops[-1]
        param, grad = block.var(name), block.var(optimizer.input("Grad")[0])
        slices = slice_variable(param.shape, num_servers if config.slice_var_up else 1, config.min_block_size)
        if len(slices) > 1 and not optimizer.attr("elementwise"):
            raise TranspileError(
                f"{optimizer.attr('optimizer')} computes over whole parameters, and {name} would be cut into "
                f"{len(slices)} blocks. Keep parameters whole: strategy.transpiler.slice_var_up = False, or "
                "DistributeTranspilerConfig(slice_var_up=False) for a transpiler of your own"
            )
        first = len(blocks)
        blocks.extend(
            ParamBlock(
                id=first + piece.index,
                param=param,
                grad=grad,
                index=piece.index,
                begin=piece.begin,
                end=piece.end,
                shape=piece.shape,
                sliced=len(slices) > 1,
                group=optimizer.attr("param_group"),
                merge_add=optimizer.type == "sgd",
                cuttable=optimizer.attr("elementwise") and not any(op.type in NORM_TYPES for op in ops),
            )
            for piece in slices
        )
    for piece in blocks:
        if piece.sliced and block.has_var(piece.name):
            raise TranspileError(
                f"parameter {piece.param.name} would be cut into blocks, and the name {piece.name} is taken; "
                "rename the parameter that has it"
            )
    return tuple(blocks)


def _dispatch(
    dispatcher: PSDispatcher, blocks: Sequence[ParamBlock], endpoints: Sequence[str]
) -> tuple[str, ...]:
    servers = tuple(dispatcher.dispatch(blocks))
    unknown = [server for server in servers if server not in endpoints]
    if unknown or len(servers) != len(blocks):
        raise TranspileError(
            f"{type(dispatcher).__name__}.dispatch gave {len(servers)} endpoints"
            f"{f', {unknown[0]!r} among them' if unknown else ''}; "
            f"expected one of {', '.join(endpoints)} for each of {len(blocks)} blocks"
        )
    return servers
