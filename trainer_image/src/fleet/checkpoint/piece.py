"""What a checkpoint is made of: runs of a parameter's elements, each with its optimizer's state."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["Piece", "cut_state", "emptied", "join_pieces"]


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


def emptied(pieces: list[Piece]) -> Iterator[Piece]:
    """Iterate over pieces that nobody else holds, letting each go."""
    pieces.reverse()
    while pieces:
        yield pieces.pop()


def join_pieces(pieces: Sequence[Piece]) -> Sequence[Piece]:
    """Put runs of elements that follow each other together; the inverse of `cut_state`.

    Parameters
    ----------
    pieces : sequence of Piece
        Of one parameter, in order, at least one.

    Returns
    -------
    sequence of Piece
        One; the pieces themselves where what belongs to each as such, a count of steps say, differs.
    """
    first = pieces[0]
    if len(pieces) == 1 or any(piece.state.keys() != first.state.keys() for piece in pieces):
        return pieces
    state: dict[str, Any] = {}
    for name, entry in first.state.items():
        entries = [piece.state[name] for piece in pieces]
        if all(_has_an_element_for_each(piece, name) for piece in pieces):
            state[name] = torch.cat(entries)
        elif all(_is_equal(each, entry) for each in entries):
            state[name] = entry
        else:
            return pieces
    value = torch.cat([piece.value for piece in pieces])
    return [Piece(first.param, first.begin, pieces[-1].end, value, state)]


def _has_an_element_for_each(piece: Piece, name: str) -> bool:
    entry = piece.state[name]
    return isinstance(entry, Tensor) and entry.shape == piece.value.shape


def _is_equal(one: object, other: object) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return bool(one == other)
