"""The program of a parameter server: an operator that serves trainers, and an update block per slice."""

from collections.abc import Sequence
from dataclasses import replace

from fleet.fluid.ir import Attribute, Block, Operator, OpRole, Variable
from fleet.fluid.program import Program, startup_program, step_program
from fleet.fluid.trainer_program import sent_name
from fleet.plan.blocks import PlannedBlock
from fleet.plan.config import DistributedMode
from fleet.plan.job import JobPlan

__all__ = ["pserver_attributes", "pserver_program", "pserver_startup"]

_OPTIMIZE = int(OpRole.OPTIMIZE)


def pserver_program(plan: JobPlan, endpoint: str) -> Program:
    """Return the main program of the server at `endpoint`.

    Block 0 holds only `listen_and_serv`. Each further block updates one slice. In synchronous mode, it sums
    the trainers' gradients, divides the sum by the number of trainers, and runs the optimize operators. In
    asynchronous modes, it runs these operators for each gradient, with delay compensation if the plan
    requests it. In GEO, it adds a trainer's change.

    Parameters
    ----------
    plan : JobPlan
    endpoint : str
        One of the plan's endpoints.

    Returns
    -------
    Program
        Without optimize blocks if the server holds nothing.
    """
    program = Program()
    root, step = program.global_block(), step_program(plan.spec).global_block()
    operators = _optimize_operators(step)
    received: list[str] = []
    grad_to_block_id: list[Attribute] = []
    for piece in plan.on(endpoint):
        root.create_var(Variable(piece.name, piece.shape, piece.dtype, persistable=True, is_parameter=True))
        received += _declare_gradients(root, piece, plan)
        block = program.create_block()
        _append_step(block, step, operators[piece.param], piece, plan)
        grad_to_block_id.append(f"{piece.grad}:{block.idx}")
    optimize_blocks: list[Attribute] = list(range(1, program.num_blocks))
    prefetches = _append_prefetch_blocks(root, plan.tables)
    root.append_op(
        "listen_and_serv",
        {"X": received},
        attrs={
            "endpoint": endpoint,
            "pserver_id": plan.endpoints.index(endpoint),
            "Fanin": plan.trainers,
            "distributed_mode": int(plan.mode),
            "optimize_blocks": optimize_blocks,
            "grad_to_block_id": grad_to_block_id,
            "sparse_grad_to_param": [f"{name}@GRAD:{name}" for name in plan.tables],
            **({"prefetch_var_name_to_block_id": prefetches} if prefetches else {}),
            "lr_decay_block_id": -1,
            # Paddle's spelling.
            "checkpint_block_id": -1,
            "op_role": int(OpRole.RPC),
        },
    )
    program.plan = plan
    program.attrs = pserver_attributes(plan, endpoint)
    return program


def pserver_startup(plan: JobPlan, endpoint: str) -> Program:
    """Return the startup program of the server at `endpoint`, which creates its variables.

    Parameters
    ----------
    plan : JobPlan
    endpoint : str
        One of the plan's endpoints.

    Returns
    -------
    Program
        Each slice is cut from a parameter of this process's own module.
    """
    program, startup = Program(), startup_program(plan.spec).global_block()
    block = program.global_block()
    operators = _optimize_operators(step_program(plan.spec).global_block())
    created_by = {op.output("Out")[0]: op for op in startup.ops}
    for piece in plan.on(endpoint):
        optimizer = operators[piece.param][-1]
        # In GEO only the trainers have optimizers.
        for slot in ("Param",) if plan.geo else optimizer.input_names:
            if slot == "Grad":
                continue
            (name,) = optimizer.input(slot)
            variable = startup.var(name)
            if slot != "LearningRate":
                variable = _on_slice(variable, piece)
            elif block.has_var(name):
                continue  # the parameters of a group share the learning rate
            block.create_var(variable)
            op = created_by[name]
            attrs = dict(op.attrs) | (_origin(piece) if slot == "Param" else {})
            block.append_op(op.type, outputs={"Out": [variable.name]}, attrs=attrs)
        for backup in _backups(piece, plan):
            block.create_var(backup)
            role: dict[str, Attribute] = {"op_role": int(OpRole.FORWARD)}
            block.append_op("assign", {"X": [piece.name]}, {"Out": [backup.name]}, role)
    program.plan, program.part = plan, "startup"
    program.attrs = pserver_attributes(plan, endpoint)
    return program


def _optimize_operators(step: Block) -> dict[str, list[Operator]]:
    """Return the operators that update each parameter, from clipping to the optimizer."""
    found: dict[str, list[Operator]] = {}
    for op in step.ops:
        if op.attr("op_role") == OpRole.OPTIMIZE:
            found.setdefault(op.attr("op_role_var")[0], []).append(op)
    return found


def _append_prefetch_blocks(root: Block, tables: Sequence[str]) -> list[Attribute]:
    """Append a look-up block for each table; return each block's ids variable and index, as text."""
    whose: list[Attribute] = []
    for name in tables:
        block = root.program.create_block()
        for variable in (f"{name}.ids", f"{name}.rows"):
            root.create_var(Variable(variable, (-1,), "any"))
        attrs: dict[str, Attribute] = {"table": name, "is_distributed": True, "op_role": int(OpRole.RPC)}
        block.append_op("lookup_sparse_table", {"Ids": [f"{name}.ids"]}, {"Out": [f"{name}.rows"]}, attrs)
        whose.append(f"{name}.ids:{block.idx}")
    return whose


def pserver_attributes(plan: JobPlan, endpoint: str) -> dict[str, Attribute]:
    """Return the job settings that a server's program records as attributes."""
    return {
        "role": "pserver",
        "endpoint": endpoint,
        "trainers": plan.trainers,
        "endpoints": list(plan.endpoints),
        "distributed_mode": int(plan.mode),
        "num_blocks": len(plan.blocks),
        "cuttable": list(plan.cuttable),
        "agreement": dict(plan.agreement),
        **({"tables": list(plan.tables)} if plan.tables else {}),
    }


def _origin(piece: PlannedBlock) -> dict[str, Attribute]:
    """Return the attributes that locate a slice within its parameter."""
    return {
        "origin": piece.param,
        "origin_shape": list(piece.param_shape),
        "begin": piece.begin,
        "block_index": piece.index,
        "block_ids": [piece.id],
    }


def _append_step(
    block: Block, step: Block, operators: Sequence[Operator], piece: PlannedBlock, plan: JobPlan
) -> None:
    """Append the operators with which a server updates a slice."""
    if plan.geo:
        _append_addition(block, piece)
        return
    if plan.mode is DistributedMode.SYNC:
        _append_mean(block, piece, plan)
    elif plan.dc_asgd:
        _append_compensation(block, piece, plan)
    for op in operators:
        _append_on_slice(block, step, op, piece, plan)


def _declare_gradients(root: Block, piece: PlannedBlock, plan: JobPlan) -> list[str]:
    """Declare a slice's gradient under each name that trainers use to send it; return these names."""
    sent = _sent_names(piece, plan)
    for name in dict.fromkeys((piece.grad, *sent)):
        root.create_var(Variable(name, piece.shape, piece.dtype))
    return sent


def _sent_names(piece: PlannedBlock, plan: JobPlan) -> list[str]:
    """Return the distinct names under which trainers send a slice's gradient."""
    return list(dict.fromkeys(sent_name(plan, piece, trainer) for trainer in range(plan.trainers)))


def _append_mean(block: Block, piece: PlannedBlock, plan: JobPlan) -> None:
    role: dict[str, Attribute] = {"op_role": _OPTIMIZE, "op_role_var": [piece.name, piece.grad]}
    block.append_op("sum", {"X": _sent_names(piece, plan)}, {"Out": [piece.grad]}, role)
    block.append_op(
        "scale",
        {"X": [piece.grad]},
        {"Out": [piece.grad]},
        {"scale": 1.0 / plan.trainers, **role},
    )


def _backups(piece: PlannedBlock, plan: JobPlan) -> list[Variable]:
    """Return DC-ASGD's backup variables, which hold the values last sent to each trainer."""
    if not plan.dc_asgd:
        return []
    names = [f"{piece.name}.trainer_{trainer}_bak" for trainer in range(plan.trainers)]
    return [Variable(name, piece.shape, piece.dtype, persistable=True) for name in names]


def _append_compensation(block: Block, piece: PlannedBlock, plan: JobPlan) -> None:
    """Append DC-ASGD's compensation: the squared gradient times the change since the trainer's last pull."""
    root = block.program.global_block()
    backups = _backups(piece, plan)
    role: dict[str, Attribute] = {"op_role": _OPTIMIZE, "op_role_var": [piece.name, piece.grad]}
    trainer, backup = "@TRAINER_ID@", f"{piece.name}.local_bak"
    drift, half, whole = (f"{piece.name}.dc_asgd_{number}" for number in range(3))
    for variable in backups:
        root.create_var(variable)
    block.create_var(Variable(trainer, (1,), "int64"))
    for name in (backup, drift, half, whole):
        block.create_var(Variable(name, piece.shape, piece.dtype))
    grad = piece.grad
    inputs = {"X": [variable.name for variable in backups], "TrainerId": [trainer]}
    block.append_op("ref_by_trainer_id", inputs, {"Out": [backup]}, role)
    block.append_op("elementwise_sub", {"X": [piece.name], "Y": [backup]}, {"Out": [drift]}, role)
    block.append_op("elementwise_mul", {"X": [drift], "Y": [grad]}, {"Out": [half]}, role)
    block.append_op("elementwise_mul", {"X": [half], "Y": [grad]}, {"Out": [whole]}, role)
    block.append_op("elementwise_add", {"X": [grad], "Y": [whole]}, {"Out": [grad]}, role)


def _append_addition(block: Block, piece: PlannedBlock) -> None:
    """Append the operator that adds a trainer's change to a slice's values in GEO mode."""
    attrs: dict[str, Attribute] = {
        "param_group": piece.group,
        "op_role": _OPTIMIZE,
        "op_role_var": [piece.name, piece.grad],
        **_origin(piece),
    }
    block.append_op("sum", {"X": [piece.name, piece.grad]}, {"Out": [piece.name]}, attrs)


def _append_on_slice(block: Block, step: Block, op: Operator, piece: PlannedBlock, plan: JobPlan) -> None:
    """Append an update operator that reads and writes a slice's variables instead of the parameter's."""
    root = block.program.global_block()
    names: dict[str, str] = {}
    for name in (*op.input_arg_names, *op.output_arg_names):
        variable = step.var(name)
        if name not in op.inputs.get("LearningRate", ()):
            variable = _on_slice(variable, piece)
        names[name] = variable.name
        if not root.has_var(variable.name):
            root.create_var(variable)
    sliced = op.renamed(names)
    attrs = dict(op.attrs) | {"op_role_var": [piece.name, piece.grad]}
    if op.has_attr("max_norm"):
        # The servers that hold a part of the norm exchange their parts before they step.
        key = "" if op.type == "clip_by_global_norm" else piece.param
        attrs |= {"epmap": [plan.endpoints[server] for server in plan.holders(key)], "key": key}
    if op.has_attr("optimizer"):
        attrs |= _origin(piece)
    block.append_op(op.type, sliced.inputs, sliced.outputs, attrs)


def _on_slice(variable: Variable, piece: PlannedBlock) -> Variable:
    """Return a slice's counterpart of a variable; a variable of the parameter's shape is sliced as well."""
    shape = piece.shape if variable.shape == piece.param_shape else variable.shape
    return replace(variable, name=variable.name + piece.suffix, shape=shape)
