"""Lossless JSON encoding of saved values, and validation of parsed fields.

JSON has no tensors, tuples, infinities or integer keys. `encode` tags them, and collects the tensors for the
safetensors file that carries the JSON in its metadata.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fleet.errors import ConfigurationError

__all__ = ["LARGEST", "PARSE_ERRORS", "as_count", "as_list", "as_mapping", "as_text", "decode", "encode"]

LARGEST: Final = 2**63 - 1
"""The largest step, size or checkpoint number: the control protocol carries them as int64."""
PARSE_ERRORS: Final = (
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
    RuntimeError,  # raised by torch
)
"""The errors that parsing raises for malformed input."""


def encode(value: object, tensors: dict[str, Tensor], path: str) -> Any:
    """Encode a value for JSON.

    Parameters
    ----------
    value
        A number, string, None, tensor or array, or a list, tuple or dict of these.
    tensors : dict
        Receives the tensors in `value`, under names that begin with `path`.
    path : str
        Names the value in tensor names and error messages, such as ``state``.

    Returns
    -------
    JSON value

    Raises
    ------
    ConfigurationError
        The value holds an unsupported type; the message gives its path.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, Tensor):
        return {"tensor": _add(tensors, path, value.detach())}
    if isinstance(value, np.ndarray):
        return {"array": _add(tensors, path, _tensor_of(value, path))}
    # A number that Python has no type for, such as numpy.longdouble, is its own item.
    if isinstance(value, np.generic) and not isinstance(plain := value.item(), np.generic):
        return encode(plain, tensors, path)
    if isinstance(value, list | tuple):
        items = [encode(item, tensors, f"{path}.{index}") for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, Mapping):
        pairs = []  # a list of pairs: keys of a JSON object are always strings
        for key, item in value.items():
            if isinstance(key, bool) or not isinstance(key, int | str):
                raise ConfigurationError(
                    f"{path} has the key {key!r}; expected strings or integers as keys of saved mappings"
                )
            pairs.append([key, encode(item, tensors, f"{path}.{key}")])
        # MultiStepLR keeps its milestones in a Counter, and fails with a dict in its place.
        return {"counter" if isinstance(value, Counter) else "dict": pairs}
    raise ConfigurationError(
        f"{path} is a {type(value).__name__}, which a checkpoint cannot hold; expected numbers, strings, "
        "None, tensors, arrays, and lists, tuples and dicts of these: leave it out, and rebuild it after "
        "loading"
    )


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that `encode` encoded.

    Raises
    ------
    ValueError, KeyError, TypeError
        `encode` did not write this.
    """
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    match tag:
        case "float":
            return float(content)
        case "tensor":
            return tensors[content]
        case "array":
            return tensors[content].numpy()
        case "tuple":
            return tuple(decode(item, tensors) for item in content)
        case "dict" | "counter":
            pairs = {key: decode(item, tensors) for key, item in content}
            return Counter(pairs) if tag == "counter" else pairs
    raise ValueError(f"the tag {tag!r} is unknown")


def as_count(name: str, value: object, least: int = 0) -> int:
    """Return `value`; raise ValueError unless it is an integer from `least` to `LARGEST` and not a bool."""
    if type(value) is not int or not least <= value <= LARGEST:
        raise ValueError(f"{name} is {_shown(value)}; expected a whole number from {least} to {LARGEST}")
    return value


def as_text(name: str, value: object) -> str:
    """Return `value`; raise TypeError if it is not a string."""
    if not isinstance(value, str):
        raise TypeError(f"{name} is {_shown(value)}; expected a string")
    return value


def as_list(name: str, value: object) -> Sequence[Any]:
    """Return `value`; raise TypeError if it is neither a list nor a tuple."""
    if not isinstance(value, list | tuple):
        raise TypeError(f"{name} is {_shown(value)}; expected a list")
    return value


def as_mapping(name: str, value: object) -> Mapping[str, Any]:
    """Return `value`; raise TypeError if it is not a mapping."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} is {_shown(value)}; expected an object")
    return value


def _tensor_of(array: npt.NDArray[Any], path: str) -> Tensor:
    try:
        # ascontiguousarray makes a 0-d array 1-d, hence the reshape.
        return torch.from_numpy(np.ascontiguousarray(array)).reshape(array.shape)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{path} is an array of {array.dtype}, which a checkpoint cannot hold: {error}; expected "
            "numbers: convert it, for example to a list of strings"
        ) from error


def _add(tensors: dict[str, Tensor], path: str, tensor: Tensor) -> str:
    """Add a tensor under a unique name, and return that name."""
    # Paths may coincide: {"a": {"b": …}, "a.b": …}.
    name, count = path, 1
    while name in tensors:
        count += 1
        name = f"{path} ({count})"
    tensors[name] = tensor
    return name


def _shown(value: object) -> str:
    try:
        return repr(value)[:100]
    except (ValueError, RecursionError):  # an integer with too many digits, or too deep nesting
        return f"a {type(value).__name__} that cannot be shown"
