"""Formats programs as text that reads like code: declarations, then one line per operator."""

import json
from collections.abc import Iterable, Mapping
from difflib import unified_diff

from fleet.fluid.ir import Block, Operator, ProgramData, Variable

__all__ = ["format_difference", "format_program"]

_INDENT = "    "
# Attributes that repeat what the text already shows.
_DETAILS = frozenset({"op_role", "op_role_var", "hyper_parameters", "block_ids", "agreement"})


def format_program(program: ProgramData, *, with_details: bool = False) -> str:
    """Format a whole program, block by block.

    Parameters
    ----------
    program : ProgramData
    with_details : bool
        Also show output slots and bookkeeping attributes.
    """
    header = [
        f"// {name} = {_value(value)}"
        for name, value in program.attrs.items()
        if with_details or name not in _DETAILS
    ]
    return "\n".join((*header, *(_format_block(block, with_details) for block in program.blocks)))


def format_difference(ours: ProgramData, theirs: ProgramData) -> str:
    """Return a diff of two programs, with two lines of context."""
    here, there = (format_program(program, with_details=True).splitlines() for program in (ours, theirs))
    return "\n".join(unified_diff(here, there, "this program", "the other", n=2, lineterm=""))


def _format_block(block: Block, with_details: bool) -> str:
    parent = f", inside block {block.parent_idx}" if block.parent_idx >= 0 else ""
    declarations = [_INDENT + _format_variable(variable, with_details) for variable in block.vars.values()]
    operators = [_INDENT + _format_operator(op, with_details) for op in block.ops]
    gap = [""] if declarations and operators else []
    return "\n".join((f"{{ // block {block.idx}{parent}", *declarations, *gap, *operators, "}"))


def _format_variable(variable: Variable, with_details: bool) -> str:
    if variable.is_data and not with_details:
        return f"data {variable.name}"  # the shape is unknown until the variable is fed
    kinds = {
        "data": variable.is_data,
        "param": variable.is_parameter,
        "persist": variable.persistable and (with_details or not variable.is_parameter),
    }
    kind = " ".join(name for name, applies in kinds.items() if applies) or "var"
    return f"{kind} {variable.name} : {variable.dtype}[{', '.join(map(str, variable.shape))}]"


def _format_operator(op: Operator, with_details: bool) -> str:
    outputs = ", ".join(_slots(op.outputs) if with_details else op.output_arg_names)
    attrs = (
        f"{name}={_value(value)}" for name, value in op.attrs.items() if with_details or name not in _DETAILS
    )
    call = f"{op.type}({', '.join((*_slots(op.inputs), *attrs))})"
    return f"{outputs} = {call}" if outputs else call


def _slots(slots: Mapping[str, Iterable[str]]) -> list[str]:
    return [f"{slot}=[{', '.join(names)}]" for slot, names in slots.items()]


def _value(value: object) -> str:
    """Format an attribute as a Python literal, with strings in double quotes."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_value(item)}' for key, item in value.items())}}}"
    return repr(value)
