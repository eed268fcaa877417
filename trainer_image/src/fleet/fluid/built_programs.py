"""The trainer and server programs that Paddle's transpiler creates from a program built with layers.

They show the plan in Paddle's operators, slots and names; the runtime follows the plan. Tables are shown in
slices of consecutive rows, although the runtime distributes rows by their ids.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import Any, Final

from fleet.fluid.ir import Attribute, Block, Operator, OpRole, Variable
from fleet.fluid.program import Program
from fleet.fluid.pserver_program import pserver_attributes
from fleet.fluid.trainer_program import append_exchange, trainer_attributes
from fleet.plan.blocks import PlannedBlock
from fleet.plan.config import DistributedMode
from fleet.plan.dispatch import shuffled
from fleet.plan.job import JobPlan

__all__ = ["pserver_program", "pserver_startup", "trainer_program", "trainer_startup"]

_OPTIMIZE: Final = int(OpRole.OPTIMIZE)
_RATES: Final = (int(OpRole.SCHEDULE), int(OpRole.SCHEDULE) | _OPTIMIZE)
_RPC: Final = int(OpRole.RPC)
_DIST: Final = int(OpRole.DIST)
# The defaults of Paddle's flags, such as FLAGS_rpc_send_thread_num.
_THREADS: Final = 12
_SERVED_STARTS: Final = frozenset(
    {"fill_constant", "gaussian_random", "truncated_gaussian_random", "uniform_random"}
)


@dataclass(frozen=True)
class _Job:
    """The built program and the plan of a job, from which trainer and server programs are created."""

    origin: Program
    plan: JobPlan

    @property
    def block(self) -> Block:
        return self.origin.global_block()

    @property
    def sync(self) -> bool:
        return self.plan.mode is DistributedMode.SYNC

    @cached_property
    def sliced(self) -> dict[str, tuple[PlannedBlock, ...]]:
        """The blocks of each parameter and table, by name."""
        found: dict[str, list[PlannedBlock]] = {}
        for each in sorted((*self.plan.blocks, *self.plan.table_blocks), key=lambda each: each.param):
            found.setdefault(each.param, []).append(each)
        return {name: tuple(blocks) for name, blocks in found.items()}

    @cached_property
    def dispatched(self) -> list[str]:
        """The parameters in the order of their dispatch to servers."""
        seed = self.plan.shuffle_seed
        return list(self.sliced) if seed is None else shuffled(list(self.sliced), seed)

    @cached_property
    def gradients(self) -> dict[str, str]:
        """The gradient's name for each parameter and table."""
        training = self.origin.training
        return {each.name: each.gradient for each in training.parameters} if training is not None else {}

    @cached_property
    def rates(self) -> list[Operator]:
        """The operators that compute learning rates."""
        return [op for op in self.block.ops if op.attrs.get("op_role") in _RATES]

    @cached_property
    def updates(self) -> list[Operator]:
        """The operators that update parameters: clipping, regularization and the optimizer."""
        return [op for op in self.block.ops if op.attrs.get("op_role") == _OPTIMIZE]

    @property
    def counter(self) -> str | None:
        """The variable that counts steps for the learning-rate schedule."""
        return next((op.outputs["Out"][0] for op in self.rates if op.type == "increment"), None)

    def served(self) -> set[str]:
        """Return the variables that only updates use, such as optimizer state and learning rates."""
        named = {name for op in self.updates for name in op.attrs["op_role_var"]}  # type: ignore[union-attr]
        return {name for op in self.updates for name in op.input_arg_names} - named

    def on(self, endpoint: str) -> list[PlannedBlock]:
        """Return the blocks of parameters and tables that one server holds."""
        return [each for blocks in self.sliced.values() for each in blocks if each.endpoint == endpoint]

    def is_table(self, name: str) -> bool:
        """Return whether a parameter is a table, of which trainers fetch rows instead of keeping a copy."""
        return any(each.name == name and not each.own for each in self.plan.spec.tables)

    def sent(self, gradient: str, block: PlannedBlock, trainer: int) -> str:
        """Return the name under which a trainer sends the gradient of a block."""
        suffix = f".trainer_{trainer}" if self.sync and self.plan.trainers > 1 else ""
        return gradient + block.suffix + suffix

    def whole(self, name: str, trainer: int) -> str:
        """Return the name of a whole gradient on a trainer; the same as `sent` for an unsliced gradient."""
        first = self.sliced[name][0]
        return self.gradients[name] if first.sliced else self.sent(self.gradients[name], first, trainer)


def trainer_program(origin: Program, plan: JobPlan, trainer_id: int, *, wait_port: bool = True) -> Program:
    """Return the program that the trainer with index `trainer_id` runs in each step.

    Parameters
    ----------
    origin : Program
        The built program.
    plan : JobPlan
    trainer_id : int
    wait_port : bool
        False: do not wait for the servers' ports, even if the plan requests it.
    """
    job, program = _Job(origin, plan), origin.shallow_copy()
    block = program.global_block()
    if plan.geo:
        append_exchange(block, plan, trainer_id)
        return _of_job(program, job, trainer_attributes(plan, trainer_id, wait_port=wait_port))
    renamed = {
        job.gradients[name]: job.whole(name, trainer_id)
        for name, blocks in job.sliced.items()
        if not blocks[0].sliced
    }
    _rename(block, renamed)
    controls = count()
    done = {name: _append_send(job, block, name, trainer_id, controls) for name in job.dispatched}
    control = _control(block, controls)  # declared even if there are no barriers
    barrier = control if job.sync else None
    if barrier is not None:
        endpoints: dict[str, Attribute] = {"endpoints": list(plan.endpoints), "trainer_id": trainer_id}
        rpc: dict[str, Attribute] = {**endpoints, "op_role": _RPC, "op_role_var": []}
        block.append_op(
            "send_barrier", {"X": [*done.values()]}, {"Out": [barrier]}, {**rpc, "half_async": False}
        )
    elif job.counter is not None:
        _append_count(job, block, job.counter, trainer_id, controls)
    received: list[str] = []
    for name, blocks in job.sliced.items():
        received += _append_receive(job, block, name, blocks, trainer_id, barrier or done[name])
    for name in (name for name in job.sliced if job.is_table(name)):
        _merge_look_ups(block, name, job.sliced[name], trainer_id)
    if barrier is not None:
        outputs = {"Out": received} if received else {}
        block.append_op("fetch_barrier", {"X": [barrier]}, outputs, rpc)
    if not plan.sender_cuts:
        _append_concats(job, block, _DIST)
    # Not earlier: Paddle sends a gradient that regularization has changed only after all updates.
    away = (_OPTIMIZE, *_RATES)
    block.ops[:] = [op for op in block.ops if op.attrs.get("op_role") not in away]
    _drop(block, job.served())
    return _of_job(program, job, trainer_attributes(plan, trainer_id, wait_port=wait_port))


def trainer_startup(origin: Program, plan: JobPlan, trainer_id: int, *, wait_port: bool = True) -> Program:
    """Return a trainer's startup program, which initializes variables and receives the servers' values.

    Parameters
    ----------
    origin, plan, trainer_id, wait_port
        As for `trainer_program`.
    """
    job, program = _Job(origin, plan), (origin.startup_program or Program()).shallow_copy()
    block = program.global_block()
    away = job.served() if not plan.geo else set()
    block.ops[:] = [op for op in block.ops if not set(op.output_arg_names) & away]
    _drop(block, away)
    _count_trainers(job, block)
    for name, blocks in job.sliced.items():
        if not job.is_table(name):
            _append_receive(job, block, name, blocks, trainer_id, None)
    control = _control(block, count())
    rpc: dict[str, Attribute] = {"endpoints": list(plan.endpoints), "trainer_id": trainer_id}
    block.append_op("fetch_barrier", {}, {"Out": [control]}, {**rpc, "op_role": _RPC, "op_role_var": []})
    _append_concats(job, block, int(OpRole.FORWARD))
    for op in [op for op in block.ops if any(map(job.is_table, op.output_arg_names))]:
        block.ops.remove(op)
        role: dict[str, Attribute] = {"op_role": int(OpRole.FORWARD), "op_role_var": []}
        # Trainers hold no rows of a table: Paddle's `fake_init` declares it without values.
        block.append_op("fake_init", {}, op.outputs, {"shape": op.attrs["shape"], **role})
    return _of_job(program, job, trainer_attributes(plan, trainer_id, wait_port=wait_port), "startup")


def pserver_program(origin: Program, plan: JobPlan, endpoint: str) -> Program:
    """Return the program of the server at `endpoint`: a block per slice, and one for learning rates.

    Parameters
    ----------
    origin, plan
        As for `trainer_program`.
    endpoint : str
        One of the plan's endpoints.
    """
    job, program = _Job(origin, plan), Program()
    root = program.global_block()
    held = job.on(endpoint)
    for each in held:
        root.create_var(_slice_of(job.block.var(each.param), each.name, each, persistable=True))
    received: list[str] = []
    for each in sorted(held, key=lambda each: job.dispatched.index(each.param)):
        gradient, variable = job.gradients[each.param], job.block.var(job.gradients[each.param])
        root.create_var(_slice_of(variable, gradient + each.suffix, each, persistable=True))
        sent = [job.sent(gradient, each, trainer) for trainer in range(plan.trainers)]
        for name in sent if job.sync and plan.trainers > 1 else ():
            root.create_var(_slice_of(variable, name, each, persistable=False))
        received += dict.fromkeys(sent)
    if job.rates:
        rates = program.create_block()
        for op in _served_rates(job):
            _append_as_on_server(job, rates, op, {})
            _append_inner_block(job, rates)
    served = [1] if job.rates else []
    # In Paddle's programs, the blocks of updates are children of the last block of the rates.
    parent = program.num_blocks - 1
    whose: list[Attribute] = []
    rows: list[Attribute] = []
    for each in held:
        block = program.create_block(parent)
        gradient = job.gradients[each.param] + each.suffix
        served.append(block.idx)
        _append_update(job, block, each)
        whose.append(f"{gradient}:{block.idx}")
        regularized = _with_decay(job.gradients[each.param]) in job.block.vars
        if root.var(gradient).type == "SELECTED_ROWS" and not regularized:
            rows.append(f"{gradient}:{each.name}")
    root.append_op(
        "listen_and_serv",
        {"X": received},
        attrs={
            "endpoint": endpoint,
            "pserver_id": plan.endpoints.index(endpoint),
            "Fanin": plan.trainers,
            "distributed_mode": int(plan.mode),
            "dc_asgd": plan.dc_asgd,
            "optimize_blocks": {"blocks": [*served]},
            "grad_to_block_id": whose,
            "sparse_grad_to_param": rows,
            "prefetch_var_name_to_block_id": [],
            "lr_decay_block_id": 1 if job.rates else -1,
            # Paddle's spelling.
            "checkpint_block_id": -1,
            "rpc_get_thread_num": _THREADS,
            "rpc_prefetch_thread_num": _THREADS,
            "rpc_send_thread_num": _THREADS,
            "op_role": int(OpRole.FORWARD),
            "op_role_var": [],
        },
    )
    return _of_job(program, job, pserver_attributes(plan, endpoint))


def pserver_startup(origin: Program, plan: JobPlan, endpoint: str) -> Program:
    """Return the startup program of the server at `endpoint`, which creates its variables.

    Parameters
    ----------
    origin, plan, endpoint
        As for `pserver_program`.
    """
    job, program = _Job(origin, plan), Program()
    served = pserver_program(origin, plan, endpoint).global_block()
    block = program.global_block()
    for variable in served.vars.values():
        block.create_var(replace(variable, persistable=True))
    started = (origin.startup_program or Program()).shallow_copy().global_block()
    _count_trainers(job, started)
    held = {each.param: each.name for each in job.on(endpoint)}
    for op in started.ops:
        (name,) = op.output_arg_names
        name = held.get(name, name)
        if not block.has_var(name):
            continue
        shape: dict[str, Attribute] = {"shape": list(block.var(name).shape)}
        block.append_op(
            op.type, op.inputs, {"Out": [name]}, {**op.attrs, **(shape if op.type in _SERVED_STARTS else {})}
        )
    return _of_job(program, job, pserver_attributes(plan, endpoint), "startup")


def _of_job(program: Program, job: _Job, attrs: dict[str, Attribute], part: str = "main") -> Program:
    program.attrs, program.part = attrs, part
    program.plan, program.origin = job.plan, job.origin
    return program


def _drop(block: Block, names: set[str]) -> None:
    block.vars = {name: variable for name, variable in block.vars.items() if name not in names}


def _rename(block: Block, names: Mapping[str, str]) -> None:
    """Rename gradients in a block, including in ``op_role_var`` attributes."""
    block.vars = {
        names.get(name, name): replace(variable, name=names[name]) if name in names else variable
        for name, variable in block.vars.items()
    }
    for at, op in enumerate(block.ops):
        about = op.attrs.get("op_role_var")
        if isinstance(about, list) and any(name in names for name in about):
            about = [names.get(str(name), name) for name in about]
            op = replace(op, attrs={**op.attrs, "op_role_var": about})
        if any(name in names for name in (*op.input_arg_names, *op.output_arg_names)):
            op = op.renamed(names)
        block.ops[at] = op


def _slice_of(variable: Variable, name: str, each: PlannedBlock, *, persistable: bool) -> Variable:
    return Variable(name, each.shape, variable.dtype, persistable=persistable, type=variable.type)


def _control(block: Block, numbers: "count[int]") -> str:
    """Declare a control variable, which only determines the order of operators, and return its name."""
    name = f"__control_var@{next(numbers)}"
    block.create_var(Variable(name, (), "bool"))
    return name


def _append_send(job: _Job, block: Block, name: str, trainer_id: int, controls: "count[int]") -> str:
    """Insert the operators that split and send a gradient; return the control variable of the send.

    They follow the operator that computes the gradient.
    """
    blocks, whole = job.sliced[name], job.whole(name, trainer_id)
    at = max(at for at, op in enumerate(block.ops) if whole in op.output_arg_names)
    parts = [job.sent(job.gradients[name], each, trainer_id) for each in blocks]
    sections: list[Attribute] = [each.shape[0] for each in blocks]
    gradient = block.var(whole)
    for each, part in zip(blocks, parts, strict=True) if blocks[0].sliced else ():
        block.create_var(_slice_of(gradient, part, each, persistable=False))
    attrs = _sending([each.endpoint for each in blocks], [name, whole], trainer_id)
    if job.plan.sender_cuts:  # after it has merged several gradients
        attrs |= {"sections": sections, "send_varnames": [*parts]}
        parts = [whole]
    elif blocks[0].sliced:
        split: dict[str, Attribute] = {"op_role": _DIST, "op_role_var": []}
        if gradient.type == "SELECTED_ROWS":
            kind, split = "split_selected_rows", {"height_sections": sections, **split}
        else:
            kind, split = "split_byref", {"sections": sections, "num": 0, **split}
        at += 1
        block.insert_op(at, kind, {"X": [whole]}, {"Out": parts}, split)
    control = _control(block, controls)
    block.insert_op(at + 1, "send", {"X": parts}, {"Out": [control]}, attrs)
    return control


def _sending(
    endpoints: Sequence[str], about: Sequence[str], trainer_id: int, *, merge_add: bool = False
) -> dict[str, Attribute]:
    return {
        "epmap": list(endpoints),
        "sections": [],
        "send_varnames": [],
        "trainer_id": trainer_id,
        "merge_add": merge_add,
        "use_send_handler": not merge_add,
        "num": 0,
        "op_role": _RPC,
        "op_role_var": list(about),
    }


def _append_receive(
    job: _Job, block: Block, name: str, blocks: Sequence[PlannedBlock], trainer_id: int, behind: str | None
) -> list[str]:
    """Append the operator that receives a parameter, and return its outputs."""
    names = [each.name for each in blocks]
    for each in blocks if blocks[0].sliced else ():
        block.create_var(_slice_of(job.block.var(name), each.name, each, persistable=False))
    if job.is_table(name):
        return []
    whole = job.plan.sender_cuts and behind is not None
    attrs: dict[str, Attribute] = {
        "epmap": [each.endpoint for each in blocks],
        "recv_varnames": [*names] if whole else [],
        "varnames": [],
        "trainer_id": trainer_id,
        "with_barrier": True,
        "do_not_run": 0,
        "op_role": _RPC,
        "op_role_var": [name, job.whole(name, trainer_id)] if behind is not None else [],
    }
    outputs = [name] if whole else names
    block.append_op("recv", {"X": [behind]} if behind is not None else {}, {"Out": outputs}, attrs)
    return outputs


def _append_concats(job: _Job, block: Block, role: int) -> None:
    for name, blocks in job.sliced.items():
        if blocks[0].sliced and not job.is_table(name):
            pieces = [each.name for each in blocks]
            block.append_op(
                "concat", {"X": pieces}, {"Out": [name]}, {"axis": 0, "op_role": role, "op_role_var": []}
            )


def _merge_look_ups(block: Block, table: str, blocks: Sequence[PlannedBlock], trainer_id: int) -> None:
    """Merge all look-ups of a table into one, placed after the last operator on which it depends."""
    found = [op for op in block.ops if op.type == "lookup_table" and op.inputs["W"] == (table,)]
    away = {id(op) for op in found}
    block.ops[:] = [op for op in block.ops if id(op) not in away]
    ids = [op.inputs["Ids"][0] for op in found]
    behind = [at for at, op in enumerate(block.ops) if set(ids) & set(op.output_arg_names)]
    block.insert_op(
        max(behind, default=-1) + 1,
        "distributed_lookup_table",
        {"Ids": ids, "W": [table]},
        {"Outputs": [op.outputs["Out"][0] for op in found]},
        {
            "table_names": [each.name for each in blocks],
            "height_sections": [each.shape[0] for each in blocks],
            "endpoints": [each.endpoint for each in blocks],
            "padding_idx": found[0].attrs["padding_idx"],
            "trainer_id": trainer_id,
            "lookup_table_version": "lookup_table",
            "dtype": block.var(table).dtype,
            "op_role": int(OpRole.FORWARD),
            "op_role_var": [],
        },
    )


def _append_count(job: _Job, block: Block, counter: str, trainer_id: int, controls: "count[int]") -> None:
    """Outside sync mode, append an operator that makes the servers count this trainer's steps."""
    for variable in _counts(job, counter):
        block.create_var(variable)
    own = f"{counter}.trainer_{trainer_id}"
    attrs = _sending(job.plan.endpoints, [own, own], trainer_id, merge_add=True)
    attrs["send_varnames"] = [counter] if job.plan.sender_cuts else []
    block.append_op("send", {"X": [own]}, {"Out": [_control(block, controls)]}, attrs)


def _counts(job: _Job, counter: str) -> list[Variable]:
    variable = job.block.var(counter)
    return [
        Variable(f"{counter}.trainer_{trainer}", variable.shape, variable.dtype, persistable=True)
        for trainer in range(job.plan.trainers)
    ]


def _count_trainers(job: _Job, block: Block) -> None:
    """Outside sync mode, initialize the servers' and the trainers' step counters, with Paddle's values."""
    counter = job.counter
    if job.sync or counter is None:
        return
    for at, op in enumerate(block.ops):
        if op.output_arg_names == [counter]:
            block.ops[at] = replace(op, attrs={**op.attrs, "value": -float(job.plan.trainers)})
    for variable in _counts(job, counter):
        block.create_var(variable)
        attrs: dict[str, Attribute] = {
            "shape": list(variable.shape),
            "value": 1.0,
            "str_value": "",
            "dtype": variable.dtype,
            "force_cpu": False,
            "op_role": int(OpRole.FORWARD),
            "op_role_var": [],
        }
        block.insert_op(0, "fill_constant", {}, {"Out": [variable.name]}, attrs)


def _served_rates(job: _Job) -> list[Operator]:
    """Return the operators that compute learning rates on servers."""
    if job.sync:
        return job.rates
    found = []
    for op in job.rates:
        if op.type == "increment":
            (counter,) = op.outputs["Out"]
            names = tuple(each.name for each in _counts(job, counter))
            role = {name: op.attrs[name] for name in ("op_role", "op_role_var")}
            op = Operator("sum", {"X": names}, {"Out": (counter,)}, role)
        found.append(op)
    return found


def _append_update(job: _Job, block: Block, each: PlannedBlock) -> None:
    """Append a server's update of a slice: average the gradients, then run the optimizer."""
    root = block.program.global_block()
    gradient = job.gradients[each.param]
    merged = gradient + each.suffix
    role: dict[str, Attribute] = {"op_role": int(OpRole.FORWARD), "op_role_var": []}
    if job.sync and job.plan.trainers > 1:
        sent = [job.sent(gradient, each, trainer) for trainer in range(job.plan.trainers)]
        block.append_op("sum", {"X": sent}, {"Out": [merged]}, role)
        scale: dict[str, Attribute] = {
            "scale": 1.0 / job.plan.trainers,
            "bias": 0.0,
            "bias_after_scale": True,
        }
        block.append_op("scale", {"X": [merged]}, {"Out": [merged]}, {**scale, **role})
    names = {each.param: each.name, gradient: merged}
    whole = job.block.var(each.param).shape
    for op in job.updates:
        about = op.attrs["op_role_var"]
        if not isinstance(about, list) or about[0] != each.param:
            continue
        for name in (*op.input_arg_names, *op.output_arg_names):
            if name not in names and not root.has_var(name):
                variable = job.block.var(name)
                shape = each.shape if variable.shape == whole else variable.shape
                root.create_var(_served(variable, shape))
        dense = about[1] == _with_decay(gradient)
        named: list[Attribute] = [each.param, about[1] if dense else job.whole(each.param, 0)]
        _append_as_on_server(job, block, replace(op, attrs={**op.attrs, "op_role_var": named}), names)


def _with_decay(gradient: str) -> str:
    """Return the name of the dense gradient that results from adding a regularizer's term to a sparse one."""
    return f"{gradient}@NEWGRAD@"


def _append_inner_block(job: _Job, outer: Block) -> None:
    """Copy the inner block that a block's last operator runs, if any, and the inner block's variables."""
    op = outer.ops[-1]
    number: Any = op.attrs.get("sub_block")
    if number is None:
        return
    inner = outer.program.create_block(outer.idx)
    for each in job.origin.blocks[number["block"]].ops:
        for name in (*each.input_arg_names, *each.output_arg_names):
            variable = job.block.var(name)
            inner.create_var(_served(variable, variable.shape))
        inner.append_op(each.type, each.inputs, each.outputs, each.attrs)
    outer.ops[-1] = replace(op, attrs={**op.attrs, "sub_block": {"block": inner.idx}})


def _append_as_on_server(job: _Job, block: Block, op: Operator, names: Mapping[str, str]) -> None:
    root = block.program.global_block()
    served = op.renamed(names)
    for name in (*served.input_arg_names, *served.output_arg_names):
        if not root.has_var(name):
            counts = {each.name: each for each in _counts(job, job.counter)} if job.counter else {}
            variable = counts.get(name) or job.block.var(name)
            root.create_var(_served(variable, variable.shape))
    block.append_op(served.type, served.inputs, served.outputs, served.attrs)


def _served(variable: Variable, shape: tuple[int, ...]) -> Variable:
    return Variable(variable.name, shape, variable.dtype, persistable=True, type=variable.type)
