"""What a checkpoint is made of: runs of a parameter's elements, each with its optimizer's state."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

__all__ = ["Piece", "cut_state"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Some elements of one parameter, which lie one after the other in row-major order."""

    param: str
    begin: int
    """First element in the flattened parameter."""
    end: int
    """One past the last element."""
    value: Tensor
    """Of the piece's shape: the parameter's, with the first dimension cut."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """The optimizer's entries for these elements: tensors, or plain values such as a count of steps."""


def cut_state(
    state: Mapping[str, Any], whole: tuple[int, ...], begin: int, end: int, shape: tuple[int, ...]
) -> dict[str, Any]:
    """Return an optimizer's state of some elements of what it steps.

    Parameters
    ----------
    state : mapping
        The entries for a tensor of the shape `whole`. An entry of that shape has an element for each of
        the tensor's; any other, as a count of steps, belongs to the tensor as such.
    whole, shape : tuple of int
        The shape of the tensor, and that of the elements wanted.
    begin, end : int
        Which elements, in row-major order.
    """
    cut = {}
    for name, entry in state.items():
        one_each = isinstance(entry, Tensor) and tuple(entry.shape) == whole
        cut[name] = entry.detach().reshape(-1)[begin:end].view(shape) if one_each else entry
    return cut
