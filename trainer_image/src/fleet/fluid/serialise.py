"""Converts programs to JSON and back: operators and plans, but not PyTorch objects.

The text is an object with the format's name, its version, the program and its startup program, if there is
one. Each program includes the plan that it shows. Numbers are preserved exactly. Text that is not exactly a
program of this version is refused, with the place of the error.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any, Final, TypeVar

from fleet.errors import TranspileError
from fleet.fluid.ir import Block, Operator, ProgramData, Variable
from fleet.plan.document import describe, read_plan, refuse, write_plan

__all__ = ["FORMAT", "VERSION", "read_program", "write_program"]

Built = TypeVar("Built", bound=ProgramData)

FORMAT: Final = "fleet-program"
VERSION: Final = 2
"""The version of the format; since version 2, the text contains plans."""

_PROGRAM: Final = {"part": str, "plan": object, "attrs": dict, "blocks": list}
_PARTS: Final = ("main", "startup")
_BLOCK: Final = {"parent": int, "vars": list, "ops": list}
_FLAGS: Final = ("persistable", "is_parameter", "is_data")
_VARIABLE: Final = {"name": str, "shape": list, "dtype": str, **dict.fromkeys(_FLAGS, bool)}
_BUILT: Final = {
    "lod_level": (int, 0),
    "stop_gradient": (bool, False),
    "type": (str, "LOD_TENSOR"),
    "trainable": (bool, True),
    "learning_rate": (float, 1.0),
}
"""Variable fields that only built programs use, with type and default; default values are not written."""
_OPERATOR: Final = {"type": str, "inputs": dict, "outputs": dict, "attrs": dict}
_KINDS: Final = {
    list: "a list",
    dict: "an object",
    str: "a text",
    int: "a whole number",
    bool: "true or false",
    float: "a number",
}


def write_program(program: ProgramData) -> str:
    """Convert a program and its startup program to JSON.

    Raises
    ------
    TranspileError
        An attribute is neither a number, a string, a boolean, None nor a list or mapping of these.
    """
    document: dict[str, Any] = {"format": FORMAT, "version": VERSION, **_program(program)}
    if program.startup_program is not None:
        document["startup_program"] = _program(program.startup_program)
    try:
        return json.dumps(document, indent=1, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise TranspileError(
            f"the program cannot be written as JSON: {error}; its attributes must be plain values"
        ) from error


def read_program(text: str, make: Callable[[], Built]) -> Built:
    """Build a program from the output of `write_program`.

    Parameters
    ----------
    text : str
        The result of `write_program`.
    make : callable
        Returns an empty program.

    Raises
    ------
    TranspileError
        The text is truncated, damaged, or of another format or version; the message gives the place.
    """
    document = _parse(text)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise TranspileError(
            f"the text is JSON, but not a program: expected an object whose format is {FORMAT!r}, found "
            f"{describe(document)}; pass the result of Program.to_json()"
        )
    if document.get("version") != VERSION:
        raise TranspileError(
            f"the program was written in version {document.get('version')!r} of its format, and this release "
            f"reads version {VERSION}; write it again with this release's Program.to_json()"
        )
    own = {name: value for name, value in document.items() if name not in ("format", "version")}
    startup = own.pop("startup_program", None)
    program = _read_program("the program", own, make)
    if startup is not None:
        program.startup_program = _read_program("startup_program", startup, make)
    return program


def _program(program: ProgramData) -> dict[str, Any]:
    return {
        "part": program.part,
        "plan": write_plan(program.plan) if program.plan is not None else None,
        "attrs": program.attrs,
        "blocks": [_block(block) for block in program.blocks],
    }


def _block(block: Block) -> dict[str, Any]:
    return {
        "parent": block.parent_idx,
        "vars": [_variable(variable) for variable in block.vars.values()],
        "ops": [_operator(op) for op in block.ops],
    }


def _variable(variable: Variable) -> dict[str, Any]:
    known = {field.name: getattr(variable, field.name) for field in fields(Variable)}
    return {name: value for name, value in known.items() if name not in _BUILT or value != _BUILT[name][1]}


def _operator(op: Operator) -> dict[str, Any]:
    return {"type": op.type, "inputs": op.inputs, "outputs": op.outputs, "attrs": op.attrs}


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError, TypeError) as error:
        raise TranspileError(
            f"the text is not JSON: {error}; it is {_summary(text)}: pass the complete result of "
            "Program.to_json()"
        ) from error


def _summary(text: object) -> str:
    if not isinstance(text, str):
        return f"a {type(text).__name__}"
    return f"{len(text)} characters long and ends with {text[-20:]!r}" if text else "empty"


def _read_program(where: str, found: object, make: Callable[[], Built]) -> Built:
    described = _fields(where, found, _PROGRAM)
    program = make()
    program.attrs, program.part = described["attrs"], described["part"]
    if program.part not in _PARTS:
        refuse(f"{where}, part", program.part, f"one of {', '.join(_PARTS)}")
    if described["plan"] is not None:
        program.plan = read_plan(f"{where}, plan", described["plan"])
    if not described["blocks"]:
        refuse(f"{where}, blocks", [], "at least the global block")
    for index, block in enumerate(described["blocks"]):
        place = f"{where}, block {index}"
        read = _fields(place, block, _BLOCK)
        parent = read["parent"]
        if (parent != -1) if index == 0 else not 0 <= parent < index:
            refuse(f"{place}, parent", parent, "-1 for the first block, an earlier block for the others")
        target = program.create_block(parent) if index else program.global_block()
        _read_block(place, read, target)
    return program


def _read_block(place: str, described: Mapping[str, Any], target: Block) -> None:
    for position, variable in enumerate(described["vars"]):
        where = f"{place}, variable {position}"
        _within(where, partial(target.create_var, _read_variable(where, variable)))
    for position, op in enumerate(described["ops"]):
        where = f"{place}, operator {position}"
        read = _fields(where, op, _OPERATOR)
        inputs, outputs = (
            {slot: _names(f"{where}, {side}, {slot}", names) for slot, names in read[side].items()}
            for side in ("inputs", "outputs")
        )
        _within(where, partial(target.append_op, read["type"], inputs, outputs, read["attrs"]))


def _read_variable(where: str, described: object) -> Variable:
    given = described.keys() if isinstance(described, dict) else ()
    built = {name: kind for name, (kind, _) in _BUILT.items() if name in given}
    found = _fields(where, described, _VARIABLE | built)
    shape = found.pop("shape")
    if not all(isinstance(size, int) and not isinstance(size, bool) for size in shape):
        refuse(f"{where}, shape", shape, "a list of whole numbers")
    return Variable(shape=tuple(shape), **found)


def _within(where: str, build: Callable[[], object]) -> None:
    try:
        build()
    except ValueError as error:
        raise TranspileError(f"the program is damaged: {where}: {error}") from error


def _names(where: str, found: object) -> tuple[str, ...]:
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        refuse(where, found, "a list of variables' names")
    return tuple(found)


def _fields(where: str, found: object, expected: Mapping[str, type]) -> dict[str, Any]:
    """Return the fields of a JSON object; raise an error for missing or unexpected fields."""
    if not isinstance(found, dict):
        refuse(where, found, f"an object with {_listed(expected)}")
    if missing := expected.keys() - found.keys():
        refuse(where, found, f"{_listed(sorted(missing))} too")
    if foreign := found.keys() - expected.keys():
        refuse(f"{where}, {min(foreign)}", found[min(foreign)], f"nothing beside {_listed(expected)}")
    for name, kind in expected.items():
        value = found[name]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            refuse(f"{where}, {name}", value, _KINDS[kind])
    return dict(found)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
