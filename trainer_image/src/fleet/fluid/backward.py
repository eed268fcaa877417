"""The backward pass of a built program: gradient operators that are appended to it, as in Paddle.

These operators describe what autograd computes; see `fleet.fluid.module`.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from fleet.errors import TranspileError
from fleet.fluid.building import ProgramVariable, create_variable
from fleet.fluid.ir import Block, Operator, OpRole, Variable
from fleet.fluid.operators import GRAD, Gradient, kind_of
from fleet.fluid.operators.kinds import kinds

__all__ = ["append_backward", "loss_of"]

_EMPTY: Final = "@EMPTY@"
_RENAMED: Final = "@RENAME@block0@"
_BACKWARD = int(OpRole.BACKWARD)
_ROLE: Final = {"op_role": _BACKWARD}


def append_backward(
    loss: ProgramVariable,
    parameter_list: Iterable[str | Variable] | None = None,
    no_grad_set: Iterable[str | Variable] | None = None,
    callbacks: Any = None,
    checkpoints: Any = None,
) -> list[tuple[ProgramVariable, ProgramVariable]]:
    """Append the operators that compute the gradients of a loss; return the parameters with their gradients.

    Parameters
    ----------
    loss : ProgramVariable
        A variable of one element.
    parameter_list : iterable of Variable or str, optional
        The parameters whose gradients are needed; by default all trained parameters.
    no_grad_set : iterable of Variable or str, optional
        Variables at which gradients end, in addition to those with ``stop_gradient``.
    callbacks, checkpoints : object, optional
        Not supported.

    Returns
    -------
    list of (ProgramVariable, ProgramVariable)
        The parameters and their gradients, in the order of `parameter_list` or else of creation.

    Raises
    ------
    TranspileError
        The loss has several elements, or an argument is not supported.

    Notes
    -----
    Paddle's ``fluid.backward.append_backward``.
    """
    if callbacks is not None or checkpoints is not None:
        raise TranspileError(
            "append_backward: callbacks and checkpoints are not in fleet.fluid; leave them out"
        )
    if tuple(loss.shape) != (1,):
        raise TranspileError(
            f"the loss {loss.name} has the shape {list(loss.shape)}; expected one element, as of layers.mean"
        )
    block = loss.block.program.global_block()
    ended = {name for name, each in block.vars.items() if each.stop_gradient}
    ended.update(_named(no_grad_set))
    path = _path(block, loss.name, ended)
    ended |= _unused(block, path, loss.name)
    _mark_loss(block, loss.name)
    seed = Operator(
        "fill_constant",
        {},
        {"Out": (loss.name + GRAD,)},
        {
            "dtype": loss.dtype,
            "force_cpu": False,
            "op_role": _BACKWARD | int(OpRole.LOSS),
            "shape": [1],
            "value": 1.0,
        },
    )
    gradients = [op for forward in reversed(path) for op in _gradients_of(forward, ended)]
    gradients = _without_ended(_summed(gradients), {name + GRAD for name in ended})
    for op in (seed, *gradients):
        _declare(block, op)
        block.ops.append(op)
    wanted = _named(parameter_list) or [each.name for each in block.all_parameters() if each.trainable]
    found = [(block.var(name), block.vars[name + GRAD]) for name in wanted if name + GRAD in block.vars]
    for parameter, gradient in found:
        at = _last_writer(block, gradient.name)
        op = block.ops[at]
        before: Any = op.attrs.get("op_role_var") or []
        about = [parameter.name, gradient.name, *before]
        block.ops[at] = replace(op, attrs={**op.attrs, "op_role_var": about})
    return found  # type: ignore[return-value]  # the variables of a built program


def loss_of(block: Block) -> str | None:
    """Return the loss whose gradients a block computes, or None if the block has no backward pass."""
    for op in block.ops:
        if op.attrs.get("op_role") == _BACKWARD | int(OpRole.LOSS):
            return op.output_arg_names[0].removesuffix(GRAD)
    return None


def _named(given: Iterable[str | Variable] | None) -> list[str]:
    return [each if isinstance(each, str) else each.name for each in given or ()]


def _path(block: Block, loss: str, ended: set[str]) -> list[Operator]:
    """Return the operators through which gradients of the loss flow, in order."""
    needed, path = {loss}, []
    for op in reversed(block.ops):
        known = kinds().get(op.type)
        if known is None or known.gradient is None or not needed.intersection(op.output_arg_names):
            continue
        path.append(op)
        needed.update(name for name in op.input_arg_names if name not in ended)
    return path[::-1]


def _unused(block: Block, path: Sequence[Operator], loss: str) -> set[str]:
    """Return the variables, except the loss, that operators on the path compute but none of them reads."""
    read, unused = {loss}, set()
    for op in reversed(path):
        for name in op.output_arg_names:
            if name not in read and name not in op.input_arg_names and not block.vars[name].stop_gradient:
                unused.add(name)
        read.update(op.input_arg_names)
    return unused


def _mark_loss(block: Block, loss: str) -> None:
    if (at := _last_writer(block, loss)) >= 0:
        op = block.ops[at]
        role = int(op.attrs.get("op_role", 0)) | int(OpRole.LOSS)  # type: ignore[arg-type]
        block.ops[at] = replace(op, attrs={**op.attrs, "op_role": role})


def _last_writer(block: Block, name: str) -> int:
    """Return the index of the last operator that computes a variable, or -1 if none does."""
    at = len(block.ops) - 1
    while at >= 0 and name not in block.ops[at].output_arg_names:
        at -= 1
    return at


def _gradients_of(op: Operator, ended: set[str]) -> list[Operator]:
    """Return the operators that compute the gradients of an operator's inputs; empty if none is needed."""
    kind = kind_of(op.type)
    gradient = kind.gradient
    assert gradient is not None  # noqa: S101 - it is on the path
    outputs = {
        slot + GRAD: tuple(_EMPTY if name in ended else name + GRAD for name in op.inputs.get(slot, ()))
        for slot in gradient.of
    }
    outputs = {
        slot: names if slot.removesuffix(GRAD) in kind.several else tuple(n for n in names if n != _EMPTY)
        for slot, names in outputs.items()
    }
    outputs = {slot: names for slot, names in outputs.items() if set(names) - {_EMPTY}}
    if not outputs:
        return []
    reads = gradient.reads(op.attrs) if callable(gradient.reads) else gradient.reads
    inputs = {slot: _read(op, slot) for slot in reads}
    inputs = {slot: names for slot, names in inputs.items() if names}
    kept = {name: value for name, value in op.attrs.items() if name != "op_role"}
    attrs = gradient.attrs(op.attrs) if gradient.attrs is not None else kept
    made = Operator(gradient.type or f"{op.type}_grad", inputs, outputs, {**attrs, "op_role": _BACKWARD})
    return [_reslotted(each, gradient) for each in (_one_each(made) if op.type == "sum" else [made])]


def _read(op: Operator, slot: str) -> tuple[str, ...]:
    if slot.endswith(GRAD):
        return tuple(name + GRAD for name in op.outputs[slot.removesuffix(GRAD)])
    return tuple(op.inputs.get(slot, op.outputs.get(slot, ())))


def _one_each(op: Operator) -> list[Operator]:
    """Split an operator that passes one gradient on to several inputs into one operator per input."""
    ((slot, names),) = op.outputs.items()
    return [replace(op, outputs={slot: (name,)}) for name in names if name != _EMPTY]


def _reslotted(op: Operator, gradient: Gradient) -> Operator:
    def named(slots: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        return {gradient.slots.get(slot, slot): names for slot, names in slots.items()}

    return replace(op, inputs=named(op.inputs), outputs=named(op.outputs))


def _summed(ops: Sequence[Operator]) -> list[Operator]:
    """If several operators contribute to one gradient, rename the contributions and insert their sum.

    A sum precedes the first operator that reads it, or is at the end if no operator reads it.
    """
    total = Counter(
        name
        for op in ops
        for name in op.output_arg_names
        if name != _EMPTY and name not in op.input_arg_names
    )
    parts: dict[str, list[str]] = {}
    result: list[Operator] = []
    for op in ops:
        result += [_sum(name, parts.pop(name)) for name in op.input_arg_names if name in parts]
        outputs = {}
        for slot, names in op.outputs.items():
            renamed = []
            for name in names:
                if total[name] > 1 and name not in op.input_arg_names:
                    known = parts.setdefault(name, [])
                    known.append(f"{name}{_RENAMED}{len(known)}")
                    renamed.append(known[-1])
                else:
                    renamed.append(name)
            outputs[slot] = tuple(renamed)
        result.append(replace(op, outputs=outputs))
    return result + [_sum(name, of) for name, of in parts.items()]


def _sum(name: str, parts: Sequence[str]) -> Operator:
    return Operator("sum", {"X": tuple(parts)}, {"Out": (name,)}, {"op_role": _BACKWARD})


def _without_ended(ops: Sequence[Operator], ended: set[str]) -> list[Operator]:
    """Remove operators that read or compute only stopped gradients; record their outputs as stopped too.

    If an operator reads other gradients as well, additional operators set the stopped ones to zeros.
    """
    kept = []
    for op in ops:
        read = [name for name in op.input_arg_names if GRAD in name]
        if all(name in ended for name in op.output_arg_names) or all(name in ended for name in read):
            ended.update(op.output_arg_names)
        else:
            kept += [
                Operator("fill_zeros_like", {"X": (name.removesuffix(GRAD),)}, {"Out": (name,)}, dict(_ROLE))
                for name in read
                if name in ended
            ]
            kept.append(op)
    return kept


def _declare(block: Block, op: Operator) -> None:
    """Declare the gradient variables that an operator computes, with the shapes of the forward variables."""
    forward = kinds().get(op.type.removesuffix("_grad")) if op.type.endswith("_grad") else None
    rule = forward.gradient.lod_from if forward is not None and forward.gradient is not None else "X"
    rows = op.type == "lookup_table_grad" and bool(op.attrs["is_sparse"])
    if op.type == "sum":
        rows = all(block.vars[name].type == "SELECTED_ROWS" for name in op.input_arg_names)
    for name in op.output_arg_names:
        before = op.inputs.get("XShape") if op.type.endswith("2_grad") else None
        if name == _EMPTY or (name in block.vars and before is None):
            continue
        of = block.var(name.partition(GRAD)[0])
        shape = block.vars[before[0]].shape[1:] if before else of.shape  # that of a value reshaped in place
        level = of.lod_level if rule == "X" else 0
        if rule == "Out":
            level = block.vars[next(each for each in op.input_arg_names if GRAD in each)].lod_level
        kind = "SELECTED_ROWS" if rows else "LOD_TENSOR"
        create_variable(block, name, shape, of.dtype, lod_level=level, type=kind)
