"""Conversion of plans to plain JSON values and back.

The types of the fields determine how a plan is read. A value of another type raises an error that gives the
value's location in the text. Reading a plan imports nothing that the text names; an optimizer's class is
looked up when the plan runs.
"""

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import IntEnum
from math import prod
from types import NoneType, UnionType
from typing import Any, Final, NoReturn, get_args, get_origin, get_type_hints

from fleet.errors import ConfigurationError, TranspileError
from fleet.plan.clipping import ClipGradByGlobalNorm, ClipGradByNorm, ClipGradByValue
from fleet.plan.job import CollectivePlan, JobPlan
from fleet.plan.optimizers import HyperParameter
from fleet.plan.spec import TrainingSpec

__all__ = ["describe", "read_plan", "refuse", "write_plan"]

Plan = TrainingSpec | JobPlan | CollectivePlan

_NAMED: Final = {
    kind.__name__: kind
    for kind in (
        TrainingSpec,
        JobPlan,
        CollectivePlan,
        ClipGradByValue,
        ClipGradByNorm,
        ClipGradByGlobalNorm,
    )
}
"""Classes whose JSON form includes the class name, because one field may hold any of several classes."""
_NAMES: Final = {
    dict: "an object",
    list: "a list",
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}


def write_plan(plan: Plan) -> dict[str, Any]:
    """Convert a plan to plain values."""
    written: dict[str, Any] = _write(plan)
    return written


def read_plan(where: str, value: object) -> Plan:
    """Build a plan from plain values.

    Parameters
    ----------
    where : str
        The location in the text, for messages.
    value
        The result of `write_plan`.

    Raises
    ------
    TranspileError
        The values are not a plan, or contradict each other; the message gives the location.
    """
    plan: Plan = _read(where, value, Plan)
    if isinstance(plan, JobPlan):
        _check_job(where, plan)
    if isinstance(plan, CollectivePlan) and not 0 <= plan.trainer_id < len(plan.endpoints):
        refuse(f"{where}, trainer_id", plan.trainer_id, f"a number from 0 to {len(plan.endpoints) - 1}")
    return plan


def refuse(where: str, found: object, expected: str) -> NoReturn:
    """Raise a TranspileError that names a location, the value found there and the expected value."""
    raise TranspileError(f"the program is damaged: {where} is {describe(found)}; expected {expected}")


def describe(value: object) -> str:
    """Format a value for a message."""
    if isinstance(value, dict):
        return f"an object with {', '.join(value) or 'nothing'}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _write(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        written = {field.name: _write(getattr(value, field.name)) for field in fields(value)}
        kind = type(value).__name__
        return {"kind": kind, **written} if kind in _NAMED else written
    if isinstance(value, Mapping):
        return {name: _write(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return [_write(item) for item in value]
    return int(value) if isinstance(value, IntEnum) else value


def _read(where: str, value: Any, kind: Any) -> Any:
    """Convert a JSON value to the type of a field; raise an error if this is impossible."""
    if kind == HyperParameter:
        return _hyper_parameter(where, value)
    if isinstance(kind, UnionType):
        return _read_one_of(where, value, get_args(kind))
    if isinstance(kind, type) and is_dataclass(kind):
        return _read_fields(where, value, kind)
    origin, arguments = get_origin(kind) or kind, get_args(kind)
    if origin is tuple:
        _expect(where, value, list)
        return tuple(_read(f"{where}, {at}", item, arguments[0]) for at, item in enumerate(value))
    if origin is Mapping:
        _expect(where, value, dict)
        return {name: _read(f"{where}, {name}", item, arguments[1]) for name, item in value.items()}
    if issubclass(kind, IntEnum):
        if isinstance(value, bool) or value not in list(kind):
            refuse(where, value, f"one of {', '.join(str(int(each)) for each in kind)}")
        return kind(value)
    _expect(where, value, kind)
    return value


def _read_one_of(where: str, value: Any, kinds: tuple[Any, ...]) -> Any:
    if value is None and NoneType in kinds:
        return None
    named = {kind.__name__: kind for kind in kinds if kind in _NAMED.values()}
    if not named:
        return _read(where, value, next(kind for kind in kinds if kind is not NoneType))
    _expect(where, value, dict)
    name = value.get("kind")
    if name not in named:
        refuse(f"{where}, kind", name, f"one of {', '.join(named)}")
    return _read_fields(where, value, named[name])


def _read_fields(where: str, value: Any, kind: Any) -> Any:
    """Build a dataclass instance from a mapping that has exactly its fields."""
    _expect(where, value, dict)
    hints = get_type_hints(kind)
    names = {field.name for field in fields(kind)} | ({"kind"} if kind.__name__ in _NAMED else set())
    for name in names ^ value.keys():
        refuse(f"{where}, {name}", value.get(name), "nothing" if name in value else "a value")
    if "kind" in names and value["kind"] != kind.__name__:
        refuse(f"{where}, kind", value["kind"], kind.__name__)
    given = {name: _read(f"{where}, {name}", value[name], hints[name]) for name in names - {"kind"}}
    try:
        return kind(**given)
    except ConfigurationError as error:  # such as an invalid clipping bound
        raise TranspileError(f"the program is damaged: {where}: {error}") from error


def _hyper_parameter(where: str, value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_hyper_parameter(where, item) for item in value)
    if value is not None and not isinstance(value, bool | int | float | str):
        refuse(where, value, "a plain value")
    return value


def _expect(where: str, value: object, kind: type) -> None:
    wanted = (int, float) if kind is float else (kind,)
    if not isinstance(value, wanted) or (isinstance(value, bool) and kind is not bool):
        refuse(where, value, _NAMES[kind])


def _check_job(where: str, plan: JobPlan) -> None:
    """Check that a plan's blocks cover each element of its parameters exactly once."""
    if plan.trainers < 1:
        refuse(f"{where}, trainers", plan.trainers, "at least 1")
    ids = [block.id for block in plan.blocks]
    if ids != list(range(len(ids))):
        refuse(f"{where}, blocks, id", ids, f"0 to {len(ids) - 1}, in order")
    if list(plan.by_param) != [parameter.name for parameter in plan.spec.by_name]:
        refuse(f"{where}, blocks", list(plan.by_param), "the blocks of each parameter, by name")
    groups = {group.index for group in plan.spec.groups}
    for parameter in plan.spec.by_name:
        blocks = plan.by_param[parameter.name]
        place = f"{where}, blocks of {parameter.name}"
        if parameter.group not in groups:
            refuse(f"{where}, parameter {parameter.name}, group", parameter.group, "one of the groups")
        if _ends(blocks) != prod(parameter.shape):
            refuse(place, [(block.begin, block.end) for block in blocks], "each element once, in order")
        for block in blocks:
            facts = (block.param_shape, block.dtype, block.group)
            if facts != (parameter.shape, parameter.dtype, parameter.group):
                refuse(place, facts, f"{(parameter.shape, parameter.dtype, parameter.group)}")
            if not 0 <= block.server < len(plan.endpoints) or plan.endpoints[block.server] != block.endpoint:
                refuse(f"{place}, endpoint", block.endpoint, "that of its server")


def _ends(blocks: Iterable[Any]) -> int:
    """Return the end of the last block if the blocks are contiguous from 0, otherwise -1."""
    end = 0
    for block in blocks:
        if block.begin != end:
            return -1
        end = block.end
    return end
