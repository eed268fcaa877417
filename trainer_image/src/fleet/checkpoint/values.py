"""Plain values as JSON and back, exactly: what JSON cannot say is tagged, and tensors go beside it."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fleet.errors import ConfigurationError

__all__ = ["decode", "encode"]


def encode(value: object, tensors: dict[str, Tensor], path: str) -> Any:
    """Return a value as JSON.

    Parameters
    ----------
    value
        A number, a string, None, a tensor, an array, or a list, tuple or dict of these.
    tensors : dict
        Takes the tensors within, under names that begin with `path`.
    path : str
        Where the value stands, for names and messages.

    Raises
    ------
    ConfigurationError
        There is something else in it; the message says where.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, Tensor):
        return {"tensor": _put(tensors, path, value.detach())}
    if isinstance(value, np.ndarray):
        return {"array": _put(tensors, path, _tensor_of(value, path))}
    if isinstance(value, np.generic):
        return encode(value.item(), tensors, path)
    if isinstance(value, list | tuple):
        items = [encode(item, tensors, f"{path}.{index}") for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, Mapping):
        pairs = [[_key(key, path), encode(item, tensors, f"{path}.{key}")] for key, item in value.items()]
        return {"counter" if isinstance(value, Counter) else "dict": pairs}
    raise ConfigurationError(
        f"{path} is a {type(value).__name__}, which no checkpoint can hold; expected numbers, strings, None, "
        "tensors, arrays, and lists, tuples and dicts of these: leave it out, and build it anew after loading"
    )


def _tensor_of(array: npt.NDArray[Any], path: str) -> Tensor:
    try:
        return torch.from_numpy(np.ascontiguousarray(array)).reshape(array.shape)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{path} is an array of {array.dtype}, which no checkpoint can hold: {error}; expected numbers: "
            "convert it, to a list of strings for instance"
        ) from error


def _put(tensors: dict[str, Tensor], path: str, tensor: Tensor) -> str:
    """Put a tensor beside the value; return its name, which tells places apart that read alike."""
    name, count = path, 1
    while name in tensors:
        count += 1
        name = f"{path} ({count})"
    tensors[name] = tensor
    return name


def _key(key: object, path: str) -> object:
    if isinstance(key, bool) or not isinstance(key, int | str):
        raise ConfigurationError(
            f"{path} has the key {key!r}; expected strings or whole numbers as keys of what is saved"
        )
    return key


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return what `encode` was given.

    Raises
    ------
    ValueError, KeyError, TypeError
        It is not what `encode` returns.
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
