"""A parameter server's programs: one operator that listens, and one block of operators per slice it holds."""

from dataclasses import replace

from fleet.program.ir import Attribute, Block, Operator, OpRole, Program, Variable
from fleet.transpiler.config import DistributedMode
from fleet.transpiler.layout import Layout, ParamBlock, optimize_operators

__all__ = ["build_pserver_program", "build_pserver_startup"]

_OPTIMIZE = int(OpRole.OPTIMIZE)


def build_pserver_program(main: Program, layout: Layout, endpoint: str) -> Program:
    """Build the program that the server at `endpoint` runs.

    Block 0 holds only `listen_and_serv`. Each further block steps one slice: in synchronous mode the sum
    of the trainers' gradients, times one over their number, then the captured optimize operators.

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
        root.create_var(
            Variable(piece.name, piece.shape, piece.param.dtype, persistable=True, is_parameter=True)
        )
        received += _declare_gradients(root, piece, layout)
        block = program.create_block()
        if layout.mode is DistributedMode.SYNC:
            _append_mean(block, piece, layout)
        for op in operators[piece.param.name]:
            _append_on_slice(block, main.global_block(), op, piece)
        grad_to_block_id.append(f"{piece.grad_name}:{block.idx}")
    root.append_op(
        "listen_and_serv",
        {"X": received},
        attrs={
            "endpoint": endpoint,
            "pserver_id": layout.endpoints.index(endpoint),
            "Fanin": layout.trainers,
            "distributed_mode": int(layout.mode),
            "optimize_blocks": list(range(1, program.num_blocks)),
            "grad_to_block_id": grad_to_block_id,
            "sparse_grad_to_param": [],
            "lr_decay_block_id": -1,
            "checkpint_block_id": -1,
            "op_role": int(OpRole.RPC),
        },
    )
    program.attrs = _server_attributes(layout, endpoint)
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
        optimizer = operators[piece.param.name][-1]
        for slot in optimizer.input_names:
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
    program.attrs = _server_attributes(layout, endpoint)
    return program


def _server_attributes(layout: Layout, endpoint: str) -> dict[str, Attribute]:
    return {
        "role": "pserver",
        "endpoint": endpoint,
        "trainers": layout.trainers,
        "endpoints": list(layout.endpoints),
        "distributed_mode": int(layout.mode),
        "agreement": dict(layout.agreement),
    }


def _origin(piece: ParamBlock) -> dict[str, Attribute]:
    """Say where a slice lies in its parameter."""
    return {
        "origin": piece.param.name,
        "origin_shape": list(piece.param.shape),
        "begin": piece.begin,
        "block_index": piece.index,
        "block_ids": [piece.id],
    }


def _declare_gradients(root: Block, piece: ParamBlock, layout: Layout) -> list[str]:
    """Declare a slice's gradient, and each trainer's where they have names of their own."""
    sent = list(dict.fromkeys(layout.sent_name(piece, trainer) for trainer in range(layout.trainers)))
    for name in dict.fromkeys((piece.grad_name, *sent)):
        root.create_var(Variable(name, piece.shape, piece.grad.dtype))
    return sent


def _append_mean(block: Block, piece: ParamBlock, layout: Layout) -> None:
    grads = list(dict.fromkeys(layout.sent_name(piece, trainer) for trainer in range(layout.trainers)))
    role: dict[str, Attribute] = {"op_role": _OPTIMIZE, "op_role_var": [piece.name, piece.grad_name]}
    block.append_op("sum", {"X": grads}, {"Out": [piece.grad_name]}, role)
    block.append_op(
        "scale",
        {"X": [piece.grad_name]},
        {"Out": [piece.grad_name]},
        {"scale": 1.0 / layout.trainers, **role},
    )


def _append_on_slice(block: Block, captured: Block, op: Operator, piece: ParamBlock) -> None:
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
    attrs = dict(op.attrs) | {"op_role_var": [piece.name, piece.grad_name]}
    if op.has_attr("optimizer"):
        attrs |= _origin(piece)
    block.append_op(op.type, sliced.inputs, sliced.outputs, attrs)


def _on_slice(variable: Variable, piece: ParamBlock) -> Variable:
    """Return one of a parameter's variables as the slice has it: cut where it has the parameter's shape."""
    shape = piece.shape if variable.shape == piece.param.shape else variable.shape
    return replace(variable, name=variable.name + piece.suffix, shape=shape)
