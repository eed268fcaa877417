"""Fields of what was read: each has the type and the range that it is used with, or a sentence says not."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

__all__ = ["LARGEST", "PARSE_ERRORS", "items", "mapping", "text", "whole_number"]

LARGEST: Final = 2**63 - 1
"""The largest number that counts steps, bytes, elements or checkpoints: what the control protocol carries."""
PARSE_ERRORS: Final = (
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
    RuntimeError,  # what torch raises
)
"""What parsing raises where the bytes are not what a save writes."""


def whole_number(name: str, value: object, least: int = 0) -> int:
    """Return a whole number from `least` to `LARGEST`; ValueError for anything else, true among it."""
    if type(value) is not int or not least <= value <= LARGEST:
        raise ValueError(f"{name} is {_told(value)}; expected a whole number from {least} to {LARGEST}")
    return value


def text(name: str, value: object) -> str:
    """Return a string; TypeError for anything else."""
    if not isinstance(value, str):
        raise TypeError(f"{name} is {_told(value)}; expected a string")
    return value


def items(name: str, value: object) -> Sequence[Any]:
    """Return a list; TypeError for anything else."""
    if not isinstance(value, list | tuple):
        raise TypeError(f"{name} is {_told(value)}; expected a list")
    return value


def mapping(name: str, value: object) -> Mapping[str, Any]:
    """Return an object of JSON; TypeError for anything else."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} is {_told(value)}; expected an object")
    return value


def _told(value: object) -> str:
    try:
        return repr(value)[:100]
    except (ValueError, RecursionError):  # too many digits, or too deep
        return f"a {type(value).__name__} that cannot be shown"
