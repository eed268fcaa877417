"""Operators that look up rows, pool sequences of rows, and rearrange tensors."""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fleet.fluid.ir import Block
from fleet.fluid.operators.kinds import Gradient, Shape, kind


@kind(
    "lookup_table",
    "Ids W",
    "Out",
    shapes=lambda shapes, _: ((*shapes["Ids"][:-1], shapes["W"][-1]),),
    dtypes={"Out": "slot:W"},
    grad=Gradient(("W",), ("Ids", "Out@GRAD", "W")),
    is_sparse=False,
    is_distributed=False,
    padding_idx=-1,
    remote_prefetch=False,
    trainer_id=0,
    epmap=[],
    height_sections=[],
    table_names=[],
    grad_inplace=False,
)
def _lookup_table(ids: Tensor, table: Tensor, is_sparse: bool, padding_idx: int) -> Tensor:
    ids = ids.squeeze(-1)
    return padded(functional.embedding(ids, table, sparse=is_sparse), ids, padding_idx, keeps=is_sparse)


def is_distributed(block: Block, table: str) -> bool:
    """Return whether the look-ups of a table mark it as distributed over parameter servers."""
    return any(
        op.type == "lookup_table" and op.inputs["W"] == (table,) and bool(op.attrs["is_distributed"])
        for op in block.ops
    )


def padded(rows: Tensor, ids: Tensor, padding_idx: int, *, keeps: bool) -> Tensor:
    """Return looked-up rows with the rows of the padding id set to zero.

    Parameters
    ----------
    rows, ids : Tensor
    padding_idx : int
        -1 if there is no padding.
    keeps : bool
        Whether the padding row still gets a gradient, as with Paddle's sparse gradients.
    """
    if padding_idx == -1:
        return rows
    padding = (ids == padding_idx).unsqueeze(-1)
    if not keeps:
        return rows.masked_fill(padding, 0.0)
    rows.detach().masked_fill_(padding, 0.0)  # hidden from autograd, which does not need these values again
    return rows


@kind(
    "sequence_pool",
    "X",
    "Out MaxIndex",
    shapes=lambda shapes, attrs: (
        (-1, *shapes["X"][1:]),
        (-1, *shapes["X"][1:]) if attrs["pooltype"] == "MAX" else (),
    ),
    grad=Gradient(
        ("X",),
        lambda attrs: ("MaxIndex", "Out@GRAD", "X") if attrs["pooltype"] == "MAX" else ("Out@GRAD", "X"),
    ),
    drops_level=True,
    pooltype="AVERAGE",
    is_test=False,
    pad_value=0.0,
)
def _sequence_pool(x: Tensor, pooltype: str, pad_value: float, lengths: Tensor) -> tuple[Tensor, None]:
    lengths = lengths.to(x.device)
    empty = (lengths == 0).reshape((-1,) + (1,) * (x.dim() - 1))
    return torch.where(empty, pad_value, _POOLS[pooltype](x, lengths)), None


def _totals(x: Tensor, lengths: Tensor) -> Tensor:
    sequences = torch.repeat_interleave(lengths)
    return x.new_zeros((len(lengths), *x.shape[1:])).index_add(0, sequences, x)


def _per(lengths: Tensor, x: Tensor) -> Tensor:
    return lengths.clamp(min=1).to(x.dtype).reshape((-1,) + (1,) * (x.dim() - 1))


def _at(x: Tensor, positions: Tensor) -> Tensor:
    """Return the rows at the given positions; an empty sequence's position may lie beyond the last row."""
    return (
        x[positions.clamp(0, max(len(x) - 1, 0))] if len(x) else x.new_zeros((len(positions), *x.shape[1:]))
    )


def _largest(x: Tensor, lengths: Tensor) -> Tensor:
    """Return the maximum of each sequence; of several equal values, the first one receives the gradient."""
    longest = int(lengths.max()) if len(lengths) else 0
    sequences, begins = torch.repeat_interleave(lengths), lengths.cumsum(0) - lengths
    places = sequences * longest + torch.arange(len(x), device=x.device) - begins[sequences]
    spread = x.new_full((len(lengths) * longest, *x.shape[1:]), -torch.inf).index_copy(0, places, x)
    if not longest:
        return x.new_zeros((len(lengths), *x.shape[1:]))
    return spread.reshape(len(lengths), longest, *x.shape[1:]).max(1).values


_POOLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": _totals,
    "AVERAGE": lambda x, lengths: _totals(x, lengths) / _per(lengths, x),
    "SQRT": lambda x, lengths: _totals(x, lengths) / _per(lengths, x).sqrt(),
    "MAX": _largest,
    "FIRST": lambda x, lengths: _at(x, lengths.cumsum(0) - lengths),
    "LAST": lambda x, lengths: _at(x, lengths.cumsum(0) - 1),
}


def _joined(shapes: Mapping[str, Any], attrs: Mapping[str, Any]) -> Sequence[Shape]:
    first: Shape = shapes["X"][0]
    axis = attrs["axis"] % len(first)
    sizes = [shape[axis] for shape in shapes["X"]]
    size = -1 if -1 in sizes else sum(sizes)
    return ((*first[:axis], size, *first[axis + 1 :]),)


@kind("concat", "X*", "Out", shapes=_joined, grad=Gradient(("X",), ("Out@GRAD", "X")), axis=0)
def _concat(xs: list[Tensor], axis: int) -> Tensor:
    return torch.cat(xs, axis)


def _reshaped(shapes: Mapping[str, Any], attrs: Mapping[str, Any]) -> Sequence[Shape]:
    before: Shape = shapes["X"]
    shape = [before[at] if size == 0 else size for at, size in enumerate(attrs["shape"])]
    if -1 not in before and shape.count(-1) == 1:
        shape[shape.index(-1)] = prod(before) // -prod(shape)
    return tuple(shape), (0, *before)


@kind(
    "reshape2",
    "X",
    "Out XShape",
    shapes=_reshaped,
    grad=Gradient(("X",), ("Out@GRAD", "XShape")),
    forgets=True,
    shape=[],
)
def _reshape(x: Tensor, shape: list[int]) -> tuple[Tensor, None]:
    return x.reshape([x.shape[at] if size == 0 else size for at, size in enumerate(shape)]), None


@kind(
    "transpose2",
    "X",
    "Out XShape",
    shapes=lambda shapes, attrs: (tuple(shapes["X"][dim] for dim in attrs["axis"]), (0, *shapes["X"])),
    grad=Gradient(("X",), ("Out@GRAD", "XShape")),
    lod="",
    axis=[],
    data_format="AnyLayout",
)
def _transpose(x: Tensor, axis: list[int]) -> tuple[Tensor, None]:
    return x.permute(axis), None


def _without(shapes: Mapping[str, Any], attrs: Mapping[str, Any]) -> Sequence[Shape]:
    shape = shapes["X"]
    axes = [axis % len(shape) for axis in attrs["axes"]] or [at for at, size in enumerate(shape) if size == 1]
    return tuple(size for at, size in enumerate(shape) if at not in axes), (0, *shape)


@kind("squeeze2", "X", "Out XShape", shapes=_without, grad=Gradient(("X",), ("Out@GRAD", "XShape")), axes=[])
def _squeeze(x: Tensor, axes: list[int]) -> tuple[Tensor, None]:
    return (x.squeeze(tuple(axes)) if axes else x.squeeze()), None


def _with(shapes: Mapping[str, Any], attrs: Mapping[str, Any]) -> Sequence[Shape]:
    shape = list(shapes["X"])
    for axis in attrs["axes"]:
        shape.insert(axis if axis >= 0 else axis + len(shape) + 1, 1)
    return tuple(shape), (0, *shapes["X"])


@kind("unsqueeze2", "X", "Out XShape", shapes=_with, grad=Gradient(("X",), ("Out@GRAD", "XShape")), axes=[])
def _unsqueeze(x: Tensor, axes: list[int]) -> tuple[Tensor, None]:
    for axis in axes:
        x = x.unsqueeze(axis)
    return x, None


@kind(
    "gather",
    "X Index",
    "Out",
    shapes=lambda shapes, _: ((shapes["Index"][0], *shapes["X"][1:]),),
    grad=Gradient(("X",), ("Index", "Out@GRAD", "X")),
    lod="",
    overwrite=True,
)
def _gather(x: Tensor, index: Tensor, overwrite: bool) -> Tensor:
    index = index.reshape(-1)
    rows = x.index_select(0, index)
    if overwrite and rows.requires_grad:  # of equal positions, only the last one gives the row its gradient
        order = torch.arange(1, len(index) + 1, device=x.device)
        last = order.new_zeros(len(x)).scatter_reduce(0, index.long(), order, "amax")[index.long()] == order
        rows.register_hook(  # type: ignore[no-untyped-call]
            lambda gradient: gradient * last.reshape((-1,) + (1,) * (gradient.dim() - 1))
        )
    return rows


def _cut(size: int, start: int, end: int) -> int:
    if size < 0:
        return -1
    begin, stop = (min(max(at + size if at < 0 else at, 0), size) for at in (start, end))
    return max(stop - begin, 0)


def _sliced(shapes: Mapping[str, Any], attrs: Mapping[str, Any]) -> Sequence[Shape]:
    shape = list(shapes["Input"])
    for axis, start, end in zip(attrs["axes"], attrs["starts"], attrs["ends"], strict=True):
        shape[axis] = _cut(shape[axis], start, end)
    dropped = attrs["decrease_axis"]
    return (tuple(size for at, size in enumerate(shape) if at not in dropped) or (1,),)


@kind(
    "slice",
    "Input",
    "Out",
    shapes=_sliced,
    grad=Gradient(("Input",), ("Input", "Out@GRAD")),
    axes=[],
    starts=[],
    ends=[],
    infer_flags=[],
    decrease_axis=[],
)
def _slice(
    x: Tensor, axes: list[int], starts: list[int], ends: list[int], decrease_axis: list[int]
) -> Tensor:
    whole: list[Any] = [slice(None)] * x.dim()
    for axis, start, end in zip(axes, starts, ends, strict=True):
        whole[axis] = slice(start, end)
    cut = x[tuple(whole)]
    return cut.squeeze(tuple(decrease_axis)) if decrease_axis else cut


def _stacked(shapes: Mapping[str, Any], attrs: Mapping[str, Any]) -> Sequence[Shape]:
    shape = list(shapes["X"][0])
    axis = attrs["axis"]
    shape.insert(axis if axis >= 0 else axis + len(shape) + 1, len(shapes["X"]))
    return (tuple(shape),)


@kind("stack", "X*", "Y", shapes=_stacked, grad=Gradient(("X",), ("Y@GRAD",)), axis=0)
def _stack(xs: list[Tensor], axis: int) -> Tensor:
    return torch.stack(xs, axis)


def _unstacked(shapes: Mapping[str, Any], attrs: Mapping[str, Any]) -> Sequence[Shape]:
    shape = list(shapes["X"])
    return (tuple(size for at, size in enumerate(shape) if at != attrs["axis"] % len(shape)),)


@kind("unstack", "X", "Y*", shapes=_unstacked, grad=Gradient(("X",), ("Y@GRAD",)), lod="", axis=0, num=0)
def _unstack(x: Tensor, axis: int) -> list[Tensor]:
    return list(x.unbind(axis))


@kind(
    "expand",
    "X",
    "Out",
    shapes=lambda shapes, attrs: (
        tuple(
            size * times if size > 0 else -1
            for size, times in zip(shapes["X"], attrs["expand_times"], strict=True)
        ),
    ),
    grad=Gradient(("X",), ("Out@GRAD", "X")),
    expand_times=[],
)
def _expand(x: Tensor, expand_times: list[int]) -> Tensor:
    return x.repeat(expand_times)


@kind(
    "one_hot",
    "X",
    "Out",
    shapes=lambda shapes, attrs: ((*shapes["X"][:-1], attrs["depth"]),),
    dtypes={"Out": "attribute:dtype"},
    depth=1,
    dtype="float32",
    allow_out_of_range=False,
)
def _one_hot(x: Tensor, depth: int, dtype: str, allow_out_of_range: bool) -> Tensor:
    ids = x.squeeze(-1)
    if not allow_out_of_range:
        return functional.one_hot(ids, depth).to(getattr(torch, dtype))
    return (ids.unsqueeze(-1) == torch.arange(depth, device=x.device)).to(getattr(torch, dtype))
