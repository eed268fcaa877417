"""Programs as text that reads like code: declarations first, then one line per operator."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fleet.program.ir import Block, Operator, Program, Variable

__all__ = ["format_program"]

_INDENT = "    "
# Attributes that repeat what the reader sees anyway.
_DETAILS = frozenset({"op_role", "op_role_var", "hyper_parameters", "block_ids"})


def format_program(program: "Program", *, with_details: bool = False) -> str:
    """Return the whole program as text, block by block.

    Parameters
    ----------
    program : Program
    with_details : bool
        Also print the output slots and the book-keeping attributes.
    """
    header = [f"// {name} = {_value(value)}" for name, value in program.attrs.items()]
    return "\n".join((*header, *(_format_block(block, with_details) for block in program.blocks)))


def _format_block(block: "Block", with_details: bool) -> str:
    parent = f", inside block {block.parent_idx}" if block.parent_idx >= 0 else ""
    declarations = [_INDENT + _format_variable(variable) for variable in block.vars.values()]
    operators = [_INDENT + _format_operator(op, with_details) for op in block.ops]
    gap = [""] if declarations and operators else []
    return "\n".join((f"{{ // block {block.idx}{parent}", *declarations, *gap, *operators, "}"))


def _format_variable(variable: "Variable") -> str:
    if variable.is_data:
        return f"data {variable.name}"
    kind = "param" if variable.is_parameter else "persist" if variable.persistable else "var"
    return f"{kind} {variable.name} : {variable.dtype}[{', '.join(map(str, variable.shape))}]"


def _format_operator(op: "Operator", with_details: bool) -> str:
    outputs = ", ".join(_slots(op.outputs) if with_details else op.output_arg_names)
    attrs = (
        f"{name}={_value(value)}" for name, value in op.attrs.items() if with_details or name not in _DETAILS
    )
    call = f"{op.type}({', '.join((*_slots(op.inputs), *attrs))})"
    return f"{outputs} = {call}" if outputs else call


def _slots(slots: Mapping[str, Iterable[str]]) -> list[str]:
    return [f"{slot}=[{', '.join(names)}]" for slot, names in slots.items()]


def _value(value: object) -> str:
    """Return an attribute as Python would write it, strings in double quotes."""
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_value(item)}' for key, item in value.items())}}}"
    return repr(value)
