"""The plan of a job: its blocks, the server of each block, and the work of each replica.

`plan_job` computes it from the training specification and the configuration. The plan of each trainer and
server follows from it. All processes of a job number the blocks in the same way: a block's id is its position
in the list of all blocks, sorted by parameter name (code points) and then by offset.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, groupby
from typing import TYPE_CHECKING

from fleet.errors import TranspileError
from fleet.plan.agreement import fingerprint_of
from fleet.plan.blocks import PlannedBlock, plan_block, slice_variable
from fleet.plan.clipping import ClipGradByNorm, ClipGradByValue, ClippingPlan, NormPlan
from fleet.plan.config import DistributedMode, DistributeTranspilerConfig, TrainingMode
from fleet.plan.dispatch import PSDispatcher, shuffled
from fleet.plan.optimizers import HyperParameter, optimizer_class_at
from fleet.plan.placement import Placement, announced_blocks, part_of
from fleet.plan.source import Source, refuse_forward_writes
from fleet.plan.spec import ParameterSpec, TrainingSpec
from fleet.plan.tables import TablePlan, served, shards_on, table_plans

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["CollectivePlan", "GroupPlan", "JobPlan", "ServerPlan", "TrainerPlan", "plan_job"]


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """A param group: its optimizer, its options, and whether its blocks may be updated in pieces."""

    index: int
    optimizer_class: "type[Optimizer]"
    hyper_parameters: Mapping[str, HyperParameter]
    """Every option of the group at capture, ``lr``, ``weight_decay`` and kernel flags included."""
    elementwise: bool
    """Whether updating two slices is bitwise-identical to updating the whole parameter."""
    cuttable: bool
    """Whether blocks may be sent and updated in pieces, considering the mode and the clipping as well."""
    tensors: Mapping[str, str] = field(default_factory=dict)
    """The dtypes of the options that the user set to tensors; the exact result of a step depends on them."""


@dataclass(frozen=True, slots=True)
class TrainerPlan:
    """The plan of one trainer: the blocks, tables and mode with which it trains."""

    mode: DistributedMode
    trainer_id: int
    trainers: int
    endpoints: tuple[str, ...]
    wait_port: bool
    """Whether to wait until every server accepts connections before the first step."""
    blocks: tuple[PlannedBlock, ...]
    """The job's blocks, sorted by parameter name and offset; after joining, the blocks that servers hold."""
    send_order: tuple[int, ...]
    """Block ids, starting with the parameter that was created last. An eager loop may use another order."""
    agreement: Mapping[str, str]
    """The facts that must be equal in every process of the job, by the names that messages use."""
    merge_add: frozenset[int]
    """The param groups whose gradients are summed, not averaged, when several steps are merged."""
    push_nums: int
    """GEO: the number of steps between two exchanges."""
    custom: TrainingMode | None
    """The user-defined mode, which replaces `mode`."""
    tables: tuple[TablePlan, ...] = ()
    """The tables on the servers; every server holds a part of each table."""

    @property
    def has_common_step(self) -> bool:
        """True if all trainers share a step count: in sync mode, unless the mode is user-defined."""
        return self.mode is DistributedMode.SYNC and self.custom is None

    @property
    def fingerprint(self) -> str:
        """The hex digest of `agreement`; equal in all processes that may train together."""
        return fingerprint_of(self.agreement)

    def placed(self, announced: Sequence[Placement]) -> "TrainerPlan":
        """Return this plan with the blocks that the servers have announced; see `announced_blocks`."""
        runs = announced_blocks(self.blocks, self.endpoints, announced)
        param_of = {block.id: block.param for block in self.blocks}
        sent = (runs[param] for param in dict.fromkeys(param_of[number] for number in self.send_order))
        return replace(
            self,
            blocks=tuple(chain.from_iterable(runs.values())),
            send_order=tuple(block.id for block in chain.from_iterable(sent)),
        )

    def blocks_of(self, param: str) -> tuple[PlannedBlock, ...]:
        """Return the blocks of a parameter in order of offset."""
        return tuple(block for block in self.blocks if block.param == param)

    def blocks_on(self, server: int) -> tuple[PlannedBlock, ...]:
        """Return the blocks on one server, in order."""
        return tuple(block for block in self.blocks if block.server == server)


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """The plan of one server: the parts of the model that it stores and updates."""

    mode: DistributedMode
    server: int
    """This server's index in `endpoints`."""
    endpoints: tuple[str, ...]
    trainers: int
    """Fan-in: the number of trainers, by which the summed gradients are divided."""
    blocks: tuple[PlannedBlock, ...]
    """The blocks that this server owns, or their pieces, in order; empty if it owns none."""
    num_blocks: int
    """The number of blocks in the whole job; pieces of a block do not count separately."""
    groups: Mapping[int, GroupPlan]
    """The param groups that `blocks` refer to, by index."""
    clipping: ClippingPlan
    agreement: Mapping[str, str]
    """The facts that must be equal in every process of the job, by the names that messages use."""
    custom: TrainingMode | None
    """The user-defined mode, which replaces `mode`."""
    version: int = 0
    """The version of the placement; see `Placement`."""
    tables: tuple[TablePlan, ...] = ()
    """The tables on the servers; this server holds some shards of each table."""

    @property
    def has_common_step(self) -> bool:
        """True if all trainers share a step count: in sync mode, unless the mode is user-defined."""
        return self.mode is DistributedMode.SYNC and self.custom is None

    @property
    def dc_asgd(self) -> bool:
        """True if the server compensates gradients for their delay, as in DC-ASGD."""
        return self.agreement.get("enable_dc_asgd") == str(True)

    @property
    def endpoint(self) -> str:
        """The server's endpoint, at which other replicas reach it."""
        return self.endpoints[self.server]

    @property
    def table_shards(self) -> tuple[int, ...]:
        """The virtual shards of every table that are on this server."""
        return shards_on(self.server, len(self.endpoints))

    @property
    def fingerprint(self) -> str:
        """The hex digest of `agreement`; see `TrainerPlan.fingerprint`."""
        return fingerprint_of(self.agreement)

    @property
    def placement(self) -> Placement:
        """The placement that this server announces to each trainer."""
        return Placement(tuple(map(part_of, self.blocks)), self.version)


@dataclass(frozen=True)
class JobPlan:
    """The plan of a job with parameter servers.

    A plan is plain data: it can be written as text, and equal plans give equal programs.

    Attributes
    ----------
    spec : TrainingSpec
        What is trained.
    mode : DistributedMode
        The mode, or the mode whose programs a user-defined mode runs.
    own_mode : str
        The name of the user-defined mode; empty if there is none.
    endpoints : tuple of str
        The servers' endpoints.
    trainers : int
        The number of trainers.
    blocks : tuple of PlannedBlock
        Sorted by parameter name, then by offset; ``blocks[i].id == i``.
    agreement : mapping
        The facts that must be equal in all processes of the job.
    push_nums : int
        GEO: the number of steps between two exchanges.
    sender_cuts : bool
        Whether the thread that sends gradients also slices them, instead of the training thread.
    dc_asgd : bool
        Whether servers compensate gradients for their delay.
    wait_port : bool
        Whether trainers wait until every server accepts connections before the first step.
    table_blocks : tuple of PlannedBlock
        The blocks of tables as Paddle's programs show them. The rows themselves are spread by their ids.
    shuffle_seed : int or None
        The seed of the order in which whole parameters were assigned to servers; None: by name.
    """

    spec: TrainingSpec
    mode: DistributedMode
    own_mode: str
    endpoints: tuple[str, ...]
    trainers: int
    blocks: tuple[PlannedBlock, ...]
    agreement: Mapping[str, str]
    push_nums: int
    sender_cuts: bool
    dc_asgd: bool
    wait_port: bool
    table_blocks: tuple[PlannedBlock, ...] = ()
    shuffle_seed: int | None = None

    @property
    def geo(self) -> bool:
        """True in GEO mode, in which trainers update their own copies and exchange the changes."""
        return self.mode is DistributedMode.GEO

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of the tables on the servers, by table number."""
        return tuple(table.name for table in self.spec.tables)

    @property
    def merge_add(self) -> tuple[int, ...]:
        """The param groups whose gradients are summed, not averaged, when several steps are merged."""
        return tuple(group.index for group in self.spec.groups if group.kind == "sgd")

    @property
    def cuttable(self) -> tuple[int, ...]:
        """The param groups whose blocks can be sent and updated in pieces with bitwise-equal results.

        A norm needs a whole gradient. A mode that keeps data of a block besides the gradient, such as GEO,
        also needs whole blocks.
        """
        norms = self.spec.clip is not None and not isinstance(self.spec.clip, ClipGradByValue)
        in_pieces = not self.own_mode and self.mode in (DistributedMode.SYNC, DistributedMode.ASYNC)
        if norms or not in_pieces:
            return ()
        return tuple(group.index for group in self.spec.groups if group.elementwise)

    @cached_property
    def by_param(self) -> dict[str, tuple[PlannedBlock, ...]]:
        """The blocks of each parameter, in order."""
        grouped = groupby(self.blocks, key=lambda block: block.param)
        return {name: tuple(blocks) for name, blocks in grouped}

    def on(self, endpoint: str) -> tuple[PlannedBlock, ...]:
        """Return the blocks on one server."""
        return tuple(block for block in self.blocks if block.endpoint == endpoint)

    def trainer(
        self,
        trainer_id: int,
        source: Source | None,
        custom: TrainingMode | None = None,
        *,
        wait_port: bool = True,
    ) -> TrainerPlan:
        """Return the plan of one trainer.

        Parameters
        ----------
        trainer_id : int
        source : Source or None
            Holds the tables, if the job has any.
        custom : TrainingMode, optional
            The user-defined mode, if the job has one.
        wait_port : bool
            False: do not wait for the servers' ports, even if the configuration requests it.

        Raises
        ------
        TranspileError
            The job has another mode, or tables that the source does not have.
        """
        self._check_mode(custom)
        # Autograd computes the last parameter's gradient first, so that gradient can be sent first.
        latest_first = (self.by_param[each.name] for each in reversed(self.spec.parameters))
        return TrainerPlan(
            mode=self.mode,
            trainer_id=trainer_id,
            trainers=self.trainers,
            endpoints=self.endpoints,
            wait_port=wait_port and self.wait_port,
            blocks=self.blocks,
            send_order=tuple(block.id for block in chain.from_iterable(latest_first)),
            agreement=self.agreement,
            merge_add=frozenset(self.merge_add),
            push_nums=self.push_nums,
            custom=custom,
            tables=table_plans(self.tables, source),
        )

    def server(self, endpoint: str, source: Source | None, custom: TrainingMode | None = None) -> ServerPlan:
        """Return the plan of the server at an endpoint.

        Parameters
        ----------
        endpoint : str
            One of `endpoints`.
        source : Source or None
            Holds the tables, and the optimizer's class if it is not one of PyTorch's.
        custom : TrainingMode, optional
            As for `trainer`.

        Raises
        ------
        TranspileError
            The job has another mode, or a class or tables that the source does not have.
        """
        self._check_mode(custom)
        blocks = self.on(endpoint)
        held = dict.fromkeys(block.group for block in blocks)
        return ServerPlan(
            mode=self.mode,
            server=self.endpoints.index(endpoint),
            endpoints=self.endpoints,
            trainers=self.trainers,
            blocks=blocks,
            num_blocks=len(self.blocks),
            groups={} if self.geo else {index: self._group(index, source) for index in held},
            clipping=self._clipping(blocks),
            agreement=self.agreement,
            custom=custom,
            tables=served(table_plans(self.tables, source), self.mode),
        )

    def _check_mode(self, custom: TrainingMode | None) -> None:
        if (custom.name if custom is not None else "") != self.own_mode:
            raise TranspileError(
                f"the program was transpiled for the mode {self.own_mode or self.mode.name.lower()!r}, and "
                f"its `mode` is {'none' if custom is None else repr(custom.name)}; set program.mode to the "
                "mode's object (a program that was read from JSON has none)"
            )

    def _group(self, index: int, source: Source | None) -> GroupPlan:
        group = self.spec.group(index)
        options = dict(group.options)
        if group.coupled and "weight_decay" in options:
            options["weight_decay"] = float(options["weight_decay"] or 0.0)  # type: ignore[arg-type]
        return GroupPlan(
            index=index,
            optimizer_class=optimizer_class_at(group.optimizer, source.optimizer if source else None),
            hyper_parameters=options,
            elementwise=group.elementwise,
            cuttable=index in self.cuttable,
            tensors=group.tensors,
        )

    def _clipping(self, blocks: Sequence[PlannedBlock]) -> ClippingPlan:
        """Return how a server clips the gradients of its blocks."""
        clip = self.spec.clip
        if clip is None:
            return ClippingPlan({}, ())
        if isinstance(clip, ClipGradByValue):
            return ClippingPlan({block.id: (clip.low, clip.max) for block in blocks}, ())
        norms: dict[str, list[int]] = {}
        for block in blocks:
            norms.setdefault(block.param if isinstance(clip, ClipGradByNorm) else "", []).append(block.id)
        return ClippingPlan(
            {},
            tuple(
                NormPlan(key, clip.clip_norm, tuple(held), self.holders(key)) for key, held in norms.items()
            ),
        )

    def holders(self, param: str) -> tuple[int, ...]:
        """Return the sorted indexes of servers with blocks of `param`, or with any blocks if it is empty."""
        return tuple(sorted({block.server for block in (self.by_param[param] if param else self.blocks)}))


@dataclass(frozen=True)
class CollectivePlan:
    """The plan of a collective job that an executor trains.

    Attributes
    ----------
    spec : TrainingSpec
        What is trained.
    form : str
        The form of the programs, as in Paddle: ``nccl2`` or ``collective``.
    collective_mode : str
        ``grad_allreduce`` or ``local_sgd``.
    endpoints : tuple of str
        The trainers' endpoints, by trainer number.
    trainer_id : int
        This trainer's number.
    """

    spec: TrainingSpec
    form: str
    collective_mode: str
    endpoints: tuple[str, ...]
    trainer_id: int


def plan_job(
    spec: TrainingSpec,
    source: Source | None,
    config: DistributeTranspilerConfig,
    endpoints: Sequence[str],
    trainers: int,
    *,
    sync_mode: bool = True,
    custom: TrainingMode | None = None,
    seed: int | None = None,
) -> JobPlan:
    """Slice the parameters into blocks and assign each block to a server.

    Parameters
    ----------
    spec : TrainingSpec
    source : Source or None
        The PyTorch objects that are trained, if known.
    config : DistributeTranspilerConfig
    endpoints : sequence of str
        The servers' endpoints, ``host:port``, without duplicates.
    trainers : int
        At least 1.
    sync_mode : bool
        False for asynchronous training; the configuration can request it as well.
    custom : TrainingMode, optional
        A user-defined mode, which then takes precedence.
    seed : int, optional
        The seed of the order in which Paddle assigns unsliced parameters; by default, they are assigned by
        name.

    Returns
    -------
    JobPlan

    Raises
    ------
    TranspileError
        A field of the configuration is not supported, servers cannot train an optimizer or a module as
        requested, or a dispatcher does not return one known endpoint for each block.
    """
    config.check()
    if custom is None:
        mode = config.distributed_mode(sync_mode)
    else:
        mode = custom.programs
        config.check_options(mode, custom=True)
    _check(spec, source, config, mode, custom)
    # Paddle shuffles the parameters only if it does not slice them.
    if config.slice_var_up:
        seed = None
    geo = mode is DistributedMode.GEO
    blocks, table_blocks = _placed(
        _cut(spec, config, endpoints, geo=geo),
        _table_blocks(spec, config, endpoints, geo=geo),
        config.split_method(endpoints),
        endpoints,
        seed,
    )
    plan = JobPlan(
        spec=spec,
        mode=mode,
        own_mode=custom.name if custom is not None else "",
        endpoints=tuple(endpoints),
        trainers=trainers,
        blocks=blocks,
        agreement=spec.agreement()
        | _mode_agreement(config, mode, custom)
        | {"trainers": str(trainers), "endpoints": ",".join(endpoints)},
        push_nums=config.geo_sgd_need_push_nums,
        sender_cuts=config.runtime_split_send_recv
        and mode in (DistributedMode.ASYNC, DistributedMode.HALF_ASYNC),
        dc_asgd=config.enable_dc_asgd,
        wait_port=config.wait_port,
        table_blocks=table_blocks,
        shuffle_seed=seed,
    )
    if config.print_log:
        _print_blocks(plan)
    return plan


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


def _check(
    spec: TrainingSpec,
    source: Source | None,
    config: DistributeTranspilerConfig,
    mode: DistributedMode,
    custom: TrainingMode | None,
) -> None:
    """Raise an error if servers cannot train this model, with these options, in this mode."""
    if not spec.parameters and not spec.tables:
        raise TranspileError(
            "no optimizer: the program has no optimize operators; "
            "make it with Program.capture(model, loss_fn, optimizer) before it is transpiled"
        )
    name = mode.name.lower().replace("_", "-") if custom is None else repr(custom.name)
    if spec.clip is not None and (custom is not None or mode is not DistributedMode.SYNC):
        raise TranspileError(  # the servers of other modes do not average over the trainers
            f"clipping gradients on the servers needs synchronous training, and the mode is "
            f"{name}; set sync_mode=True, or clip in the loop before "
            "optimizer.step(), with DistributedStrategy(overlap=False)"
        )
    if custom is None:
        refuse_forward_writes(source, steps_alone=mode is DistributedMode.GEO)
    refused = {
        f"the mode {name}": custom is not None,
        "enable_dc_asgd": mode is DistributedMode.ASYNC and config.enable_dc_asgd,
        "strategy.grad_clip": spec.clip is not None,
    }
    for what, found in refused.items():
        if spec.tables and found:
            raise TranspileError(
                f"{what} does not support tables, but the model has "
                f"{', '.join(each.name for each in spec.tables)} on the parameter servers; expected one of "
                "the modes sync, async, half_async and geo of the strategy, without delay compensation and "
                "without clipping on the servers, or torch.nn.Embedding in place of the table, with "
                "sparse=False"
            )
    if mode is not DistributedMode.GEO:  # in GEO the trainers step
        for parameter in spec.by_name:
            if refusal := spec.group(parameter.group).refusal:
                raise TranspileError(refusal)


def _cut(
    spec: TrainingSpec, config: DistributeTranspilerConfig, endpoints: Sequence[str], *, geo: bool
) -> tuple[PlannedBlock, ...]:
    """Slice the parameters into blocks and assign all to the first server, until they are dispatched."""
    blocks: list[PlannedBlock] = []
    for parameter in spec.by_name:
        group = spec.group(parameter.group)
        slices = slice_variable(
            parameter.shape, len(endpoints) if config.slice_var_up else 1, config.min_block_size
        )
        sliced = len(slices) > 1
        if sliced and not geo and not group.elementwise:
            raise TranspileError(
                f"{group.optimizer} computes over whole parameters, and {parameter.name} would be sliced "
                f"into {len(slices)} blocks. Keep parameters whole: strategy.transpiler.slice_var_up = "
                "False, or DistributeTranspilerConfig(slice_var_up=False) for a transpiler that the script "
                "calls itself"
            )
        blocks.extend(
            plan_block(
                parameter,
                piece,
                sliced=sliced,
                geo=geo,
                number=number,
                server=0,
                endpoint=endpoints[0],
            )
            for number, piece in enumerate(slices, len(blocks))
        )
    taken = {*spec.feeds, *(each.name for each in spec.parameters), *(each.name for each in spec.tables)}
    for block in blocks:
        if block.sliced and block.name in taken:
            raise TranspileError(
                f"parameter {block.param} would be sliced into blocks, and the name {block.name} is taken; "
                "rename the parameter that has it"
            )
    return tuple(blocks)


def _table_blocks(
    spec: TrainingSpec, config: DistributeTranspilerConfig, endpoints: Sequence[str], *, geo: bool
) -> list[PlannedBlock]:
    """Return the blocks that represent tables when a dispatcher assigns blocks to servers."""
    found: list[PlannedBlock] = []
    for table in (each for each in spec.tables if each.placed):
        parameter = ParameterSpec(table.name, (table.num_embeddings, table.dimension), "float32", 0)
        slices = slice_variable(
            parameter.shape, len(endpoints) if config.slice_var_up else 1, config.min_block_size
        )
        # Without an id: programs show these blocks, but none is sent.
        found += [
            plan_block(
                parameter, piece, sliced=len(slices) > 1, geo=geo, number=-1, server=0, endpoint=endpoints[0]
            )
            for piece in slices
        ]
    return found


def _placed(
    blocks: Sequence[PlannedBlock],
    table_blocks: Sequence[PlannedBlock],
    dispatcher: PSDispatcher,
    endpoints: Sequence[str],
    seed: int | None,
) -> tuple[tuple[PlannedBlock, ...], tuple[PlannedBlock, ...]]:
    """Return the blocks on the servers that the dispatcher selects.

    The dispatcher sees the blocks by parameter name, or by names that are shuffled with the seed.
    """
    names = sorted({block.param for block in (*blocks, *table_blocks)})
    if seed is not None:
        names = shuffled(names, seed)
    place = {name: at for at, name in enumerate(names)}
    ordered = sorted((*blocks, *table_blocks), key=lambda block: (place[block.param], block.index))
    chosen = tuple(dispatcher.dispatch(ordered))
    unknown = [server for server in chosen if server not in endpoints]
    if unknown or len(chosen) != len(ordered):
        raise TranspileError(
            f"{type(dispatcher).__name__}.dispatch gave {len(chosen)} endpoints"
            f"{f', {unknown[0]!r} among them' if unknown else ''}; "
            f"expected one of {', '.join(endpoints)} for each of {len(ordered)} blocks"
        )
    servers = {block.name: server for block, server in zip(ordered, chosen, strict=True)}

    def placed(block: PlannedBlock) -> PlannedBlock:
        return replace(block, server=endpoints.index(servers[block.name]), endpoint=servers[block.name])

    return tuple(map(placed, blocks)), tuple(map(placed, table_blocks))


def _print_blocks(plan: JobPlan) -> None:
    """Print each block and the share of each server, as Paddle does."""
    for block in plan.blocks:
        shape = list(block.shape)
        print(f"{block.name} {shape} elements {block.begin} to {block.end} on {block.endpoint}")
    for endpoint in plan.endpoints:
        held = plan.on(endpoint)
        elements = sum(block.numel for block in held)
        print(f"{endpoint} holds {len(held)} blocks, {elements} elements", flush=True)
