"""A parameter server's programs: one operator that listens, and one block of operators per slice it holds."""

from collections.abc import Sequence
from dataclasses import replace

from fleet.fluid.clipping import clipping_attributes
from fleet.fluid.ir import Attribute, Block, Operator, OpRole, Variable
from fleet.fluid.layout import Layout, optimize_operators
from fleet.fluid.program import Program
from fleet.fluid.tables import append_prefetch_blocks
from fleet.plan.blocks import PlannedBlock
from fleet.plan.config import DistributedMode

__all__ = ["build_pserver_program", "build_pserver_startup"]

_OPTIMIZE = int(OpRole.OPTIMIZE)


def build_pserver_program(main: Program, layout: Layout, endpoint: str) -> Program:
    """Build the program that the server at `endpoint` runs.

    Block 0 holds only `listen_and_serv`. Each further block steps one slice: in synchronous mode the sum
    of the trainers' gradients, times one over their number, then the captured optimize operators. In
    asynchronous modes the operators step each gradient, compensated for its delay where the config says so;
    in GEO what a trainer has changed is added.

    Parameters
    ----------
    main : Program
        As captured. It is not changed.
    layout : Layout
    endpoint : str
        One of the layout's.

    Returns
    -------
    Program
        Without optimize blocks when the server holds nothing.
    """
    program = Program()
    program.source = main.source
    root = program.global_block()
    operators = optimize_operators(main)
    received: list[str] = []
    grad_to_block_id: list[Attribute] = []
    for piece in layout.on(endpoint):
        root.create_var(Variable(piece.name, piece.shape, piece.dtype, persistable=True, is_parameter=True))
        received += _declare_gradients(root, piece, layout)
        block = program.create_block()
        arrives = _append_step(block, main.global_block(), operators[piece.param], piece, layout)
        grad_to_block_id.append(f"{arrives}:{block.idx}")
    optimize_blocks: list[Attribute] = list(range(1, program.num_blocks))
    prefetches = append_prefetch_blocks(root, layout.tables)
    root.append_op(
        "listen_and_serv",
        {"X": received},
        attrs={
            "endpoint": endpoint,
            "pserver_id": layout.endpoints.index(endpoint),
            "Fanin": layout.trainers,
            "distributed_mode": int(layout.mode),
            "optimize_blocks": optimize_blocks,
            "grad_to_block_id": grad_to_block_id,
            "sparse_grad_to_param": [f"{name}@GRAD:{name}" for name in layout.tables],
            **({"prefetch_var_name_to_block_id": prefetches} if prefetches else {}),
            "lr_decay_block_id": -1,
            "checkpint_block_id": -1,
            "op_role": int(OpRole.RPC),
        },
    )
    program.attrs = _server_attributes(layout, endpoint)
    program.mode = layout.custom
    return program


def build_pserver_startup(startup: Program, main: Program, layout: Layout, endpoint: str) -> Program:
    """Build the program that creates what the server at `endpoint` holds.

    Parameters
    ----------
    startup, main : Program
        As captured. They are not changed.
    layout : Layout
    endpoint : str
        One of the layout's.

    Returns
    -------
    Program
        Each slice is cut from the parameter that this process's own module has.
    """
    program = Program()
    program.source = startup.source
    block = program.global_block()
    operators = optimize_operators(main)
    created_by = {op.output("Out")[0]: op for op in startup.global_block().ops}
    for piece in layout.on(endpoint):
        optimizer = operators[piece.param][-1]
        # In GEO the trainers have optimizers, and the servers none.
        slots = ("Param",) if layout.mode is DistributedMode.GEO else optimizer.input_names
        for slot in slots:
            if slot == "Grad":
                continue
            (name,) = optimizer.input(slot)
            variable = startup.global_block().var(name)
            if slot != "LearningRate":
                variable = _on_slice(variable, piece)
            elif block.has_var(name):
                continue  # the parameters of a group share it
            block.create_var(variable)
            op = created_by[name]
            attrs = dict(op.attrs) | (_origin(piece) if slot == "Param" else {})
            block.append_op(op.type, outputs={"Out": [variable.name]}, attrs=attrs)
        for backup in _backups(piece, layout):
            block.create_var(backup)
            role: dict[str, Attribute] = {"op_role": int(OpRole.FORWARD)}
            block.append_op("assign", {"X": [piece.name]}, {"Out": [backup.name]}, role)
    program.attrs = _server_attributes(layout, endpoint)
    program.mode = layout.custom
    return program


def _server_attributes(layout: Layout, endpoint: str) -> dict[str, Attribute]:
    return {
        "role": "pserver",
        "endpoint": endpoint,
        "trainers": layout.trainers,
        "endpoints": list(layout.endpoints),
        "distributed_mode": int(layout.mode),
        "num_blocks": len(layout.blocks),
        "cuttable": list(layout.cuttable),
        "agreement": dict(layout.agreement),
        **({"tables": list(layout.tables)} if layout.tables else {}),
    }


def _origin(piece: PlannedBlock) -> dict[str, Attribute]:
    """Say where a slice lies in its parameter."""
    return {
        "origin": piece.param,
        "origin_shape": list(piece.param_shape),
        "begin": piece.begin,
        "block_index": piece.index,
        "block_ids": [piece.id],
    }


def _append_step(
    block: Block, captured: Block, operators: Sequence[Operator], piece: PlannedBlock, layout: Layout
) -> str:
    """Append what a server does with what arrives for a slice; return the name under which it arrives."""
    if layout.mode is DistributedMode.GEO:
        _append_addition(block, piece)
        return piece.grad
    if layout.mode is DistributedMode.SYNC:
        _append_mean(block, piece, layout)
    elif layout.config.enable_dc_asgd:
        _append_compensation(block, piece, layout)
    for op in operators:
        _append_on_slice(block, captured, op, piece, layout)
    return piece.grad


def _declare_gradients(root: Block, piece: PlannedBlock, layout: Layout) -> list[str]:
    """Declare a slice's gradient, and each trainer's where they have names of their own."""
    sent = layout.sent_names(piece)
    for name in dict.fromkeys((piece.grad, *sent)):
        root.create_var(Variable(name, piece.shape, layout.gradients[piece.param].dtype))
    return sent


def _append_mean(block: Block, piece: PlannedBlock, layout: Layout) -> None:
    role: dict[str, Attribute] = {"op_role": _OPTIMIZE, "op_role_var": [piece.name, piece.grad]}
    block.append_op("sum", {"X": layout.sent_names(piece)}, {"Out": [piece.grad]}, role)
    block.append_op(
        "scale",
        {"X": [piece.grad]},
        {"Out": [piece.grad]},
        {"scale": 1.0 / layout.trainers, **role},
    )


def _backups(piece: PlannedBlock, layout: Layout) -> list[Variable]:
    """Return the value that each trainer was sent last, which DC-ASGD compares with the present one."""
    if not layout.config.enable_dc_asgd:
        return []
    names = [f"{piece.name}.trainer_{trainer}_bak" for trainer in range(layout.trainers)]
    return [Variable(name, piece.shape, piece.dtype, persistable=True) for name in names]


def _append_compensation(block: Block, piece: PlannedBlock, layout: Layout) -> None:
    """Append DC-ASGD: the gradient, plus its square times what changed since its trainer got the value."""
    root = block.program.global_block()
    backups = _backups(piece, layout)
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
    """Append what a server of GEO does: it adds what a trainer has changed."""
    attrs: dict[str, Attribute] = {
        "param_group": piece.group,
        "op_role": _OPTIMIZE,
        "op_role_var": [piece.name, piece.grad],
        **_origin(piece),
    }
    block.append_op("sum", {"X": [piece.name, piece.grad]}, {"Out": [piece.name]}, attrs)


def _append_on_slice(
    block: Block, captured: Block, op: Operator, piece: PlannedBlock, layout: Layout
) -> None:
    """Append a captured operator with the parameter's variables replaced by those of the slice."""
    root = block.program.global_block()
    names: dict[str, str] = {}
    for name in (*op.input_arg_names, *op.output_arg_names):
        variable = captured.var(name)
        if name not in op.inputs.get("LearningRate", ()):
            variable = _on_slice(variable, piece)
        names[name] = variable.name
        if not root.has_var(variable.name):
            root.create_var(variable)
    sliced = op.renamed(names)
    attrs = dict(op.attrs) | {"op_role_var": [piece.name, piece.grad]}
    attrs |= clipping_attributes(op, piece, layout)
    if op.has_attr("optimizer"):
        attrs |= _origin(piece)
    block.append_op(op.type, sliced.inputs, sliced.outputs, attrs)


def _on_slice(variable: Variable, piece: PlannedBlock) -> Variable:
    """Return one of a parameter's variables as the slice has it: cut where it has the parameter's shape."""
    shape = piece.shape if variable.shape == piece.param_shape else variable.shape
    return replace(variable, name=variable.name + piece.suffix, shape=shape)
