"""Embeddings and embedding bags whose tables are on the parameter servers.

A module looks up the distinct rows of its batch, and selects from them by position. On a CPU, torch's own
backward pass adds one row at a time with its general addition, which takes several times as long as all other
work on the rows of a batch. Here one C loop sums the gradient of each row.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import embedding, embedding_bag

from fleet.errors import ConfigurationError
from fleet.nn.table import DistributedTable
from fleet.tables.first_values import Constant, FirstValues, Normal
from fleet.tables.gradients import add_rows
from fleet.tables.rules import RowRule

__all__ = ["DistributedEmbedding", "DistributedEmbeddingBag", "offsets_of", "pool", "take"]

_MODES = ("sum", "mean", "max")

_operators = torch.library.Library("fleet", "FRAGMENT")  # type: ignore[no-untyped-call]
_operators.define("sum_rows(Tensor positions, Tensor rows, SymInt num_rows) -> Tensor")  # type: ignore[no-untyped-call]


class DistributedEmbedding(Module):
    """A replacement for ``torch.nn.Embedding`` whose table is not on the trainer.

    Parameters
    ----------
    num_embeddings : int or None
        Ids are 0 to `num_embeddings`, exclusive. None: any 64-bit id is valid.
    embedding_dim : int
    padding_idx : int, optional
        As in torch: the id whose row is zero and is not trained.
    max_norm : float, optional
        Not supported, because a look-up on parameter servers changes nothing.
    name : str
        Name of the table, unique in a model.
    first_values : FirstValues or float, optional
        Values of rows before their first update. The default is ``fleet.tables.Normal()``, as in torch; a
        number is the value of all elements.
    seed : int
        Seed of the first values.
    rule : RowRule, optional
        How an update steps a row (`fleet.tables.rules`). By default as the optimizer over
        ``model.parameters()`` does, with its options and schedules.
    options : mapping, optional
        Options of `rule`.
    table : DistributedTable, optional
        The table of another module, to share it; it replaces all of the above except `padding_idx`.

    Raises
    ------
    ConfigurationError
        An option is not supported; the message names it.
    """

    is_distributed = True

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        *,
        name: str = "",
        first_values: FirstValues | float | None = None,
        seed: int = 0,
        rule: RowRule | None = None,
        options: Mapping[str, Any] | None = None,
        table: DistributedTable | None = None,
    ) -> None:
        super().__init__()
        if max_norm is not None:
            raise ConfigurationError(
                f"table {name or (table.name if table else '')}: max_norm={max_norm} would change rows when "
                "they are looked up, but a look-up on parameter servers changes nothing; expected "
                "max_norm=None, and weight decay or a clipped gradient to keep rows small"
            )
        self.table = table or DistributedTable(
            name, embedding_dim, num_embeddings, _distribution(first_values), seed, rule, options or {}
        )
        if (self.table.num_embeddings, self.table.dimension) != (num_embeddings, embedding_dim):
            raise ConfigurationError(
                f"table {self.table.name} has {self.table.num_embeddings} embeddings of dimension "
                f"{self.table.dimension}, but the module that shares it has {num_embeddings} of "
                f"{embedding_dim}"
            )
        self.padding_idx = _padding_of(padding_idx, num_embeddings, self.table.name)
        self.placeholder = self.table.placeholder

    @property
    def distributed_tables(self) -> tuple[DistributedTable, ...]:
        """The tables of this module."""
        return (self.table,)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the embeddings of ids.

        Parameters
        ----------
        ids : int64 or int32, any shape

        Returns
        -------
        float32[*ids.shape, embedding_dim]

        Raises
        ------
        ConfigurationError
            An id is out of range; the message names the table, the id and its position in the batch.
        """
        rows, positions = self.table.look_up(ids, padding=self.padding_idx)
        return take(rows, positions)

    def prefetch(self, ids: Tensor) -> None:
        """Request the rows of the next batch, without waiting for them; see `fleet.prefetch`.

        Parameters
        ----------
        ids : integer tensor, any shape
            The ids with which the module will be called.

        Raises
        ------
        ConfigurationError
            An id is out of range, or there is no session yet.
        """
        self.table.prefetch(ids, padding=self.padding_idx)

    def extra_repr(self) -> str:
        """Return the arguments that ``print(model)`` shows."""
        padding = f", padding_idx={self.padding_idx}" if self.padding_idx is not None else ""
        return f"{self.table.num_embeddings}, {self.table.dimension}{padding}, name={self.table.name!r}"


class DistributedEmbeddingBag(DistributedEmbedding):
    """A replacement for ``torch.nn.EmbeddingBag`` whose table is not on the trainer.

    Parameters
    ----------
    num_embeddings, embedding_dim, max_norm
        As for `DistributedEmbedding`.
    scale_grad_by_freq : bool
        Not supported, because the frequencies in other trainers' batches are not known.
    mode : str
        ``mean``, ``sum`` or ``max``.
    include_last_offset : bool
        Whether offsets include the end of the last bag.
    padding_idx : int, optional
        As for `DistributedEmbedding`; padding is left out of bags.
    name, first_values, seed, rule, options, table
        As for `DistributedEmbedding`.

    Raises
    ------
    ConfigurationError
        An option is not supported; the message names it.
    """

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        max_norm: float | None = None,
        *,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        name: str = "",
        first_values: FirstValues | None = None,
        seed: int = 0,
        rule: RowRule | None = None,
        options: Mapping[str, Any] | None = None,
        table: DistributedTable | None = None,
    ) -> None:
        super().__init__(
            num_embeddings,
            embedding_dim,
            padding_idx,
            max_norm,
            name=name,
            first_values=first_values,
            seed=seed,
            rule=rule,
            options=options,
            table=table,
        )
        if mode not in _MODES:
            raise ConfigurationError(
                f"table {self.table.name}: mode is {mode!r}, expected one of {', '.join(_MODES)}"
            )
        if scale_grad_by_freq:
            raise ConfigurationError(
                f"table {self.table.name}: scale_grad_by_freq=True would need the frequency of each id in "
                "the batches of all trainers; expected False"
            )
        self.mode = mode
        self.include_last_offset = include_last_offset

    def forward(
        self, ids: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Return a vector for each bag of ids.

        Parameters
        ----------
        ids : int64 or int32, [num_ids] or [bags, ids_per_bag]
        offsets : int64[bags], optional
            The start of each bag in one-dimensional ids.
        per_sample_weights : float32, same shape as `ids`, optional
            With ``sum`` only.

        Returns
        -------
        float32[bags, embedding_dim]

        Raises
        ------
        ConfigurationError
            An id is out of range; the message names the table, the id and its position in the batch.
        ValueError
            Ids, offsets and weights do not match; the message is torch's.
        """
        rows, positions = self.table.look_up(ids, padding=self.padding_idx)
        return pool(
            rows,
            positions,
            offsets.long() if offsets is not None else None,
            self.mode,
            weights=per_sample_weights,
            padding=_row_of(ids, positions, self.padding_idx),
            include_last_offset=self.include_last_offset,
        )

    def extra_repr(self) -> str:
        """Return the arguments that ``print(model)`` shows."""
        return f"{super().extra_repr()}, mode={self.mode!r}"


def _distribution(values: FirstValues | float | None) -> FirstValues:
    if values is None:
        return Normal()
    return Constant(values) if isinstance(values, int | float) else values


def _padding_of(padding_idx: int | None, num_embeddings: int | None, name: str) -> int | None:
    """Return the padding id; as in torch, negative ones count from the end."""
    if padding_idx is None or num_embeddings is None:
        return padding_idx
    if not -num_embeddings <= padding_idx < num_embeddings:
        raise ConfigurationError(
            f"table {name}: padding_idx is {padding_idx}, expected {-num_embeddings} to {num_embeddings - 1}"
        )
    return padding_idx % num_embeddings


def _row_of(ids: Tensor, positions: Tensor, padding_idx: int | None) -> int | None:
    """Return the position of the padding id's row in a batch; None if it has no row."""
    if padding_idx is None or not (padded := ids == padding_idx).any():
        return None
    return int(positions[padded][0])


def take(rows: Tensor, positions: Tensor) -> Tensor:
    """Return the row at each position; the gradient of `rows` is one sum per row.

    Parameters
    ----------
    rows : float[n, dimension]
    positions : int64 or int32, any shape

    Returns
    -------
    float[*positions.shape, dimension]
    """
    if not _sums_here(rows):
        return embedding(positions, rows)
    taken: Tensor = _Take.apply(rows, positions)
    return taken


def pool(
    rows: Tensor,
    positions: Tensor,
    offsets: Tensor | None,
    mode: str,
    *,
    weights: Tensor | None = None,
    padding: int | None = None,
    include_last_offset: bool = False,
) -> Tensor:
    """Return one vector for each bag; the gradient of `rows` is one sum per row.

    Parameters
    ----------
    rows : float[n, dimension]
    positions : int64[num_ids] or int64[bags, ids_per_bag]
        The row of each id.
    offsets : int64[bags], optional
        The start of each bag in one-dimensional `positions`; with `include_last_offset` also the end of the
        last.
    mode : str
        ``sum``, ``mean`` or ``max``.
    weights : float, same shape as `positions`, optional
        Factors of the rows; with ``sum`` only.
    padding : int, optional
        A row that is left out of bags and means.
    include_last_offset : bool

    Returns
    -------
    float[bags, dimension]
        0 for an empty bag.
    """
    if not rows.shape[0]:
        # All bags of the batch are empty, and torch refuses a table without rows.
        rows = rows.new_zeros(1, rows.shape[1])
    if mode == "sum" and weights is None and _sums_here(rows):
        pooled: Tensor = _Sum.apply(rows, positions, offsets, include_last_offset, padding)
        return pooled
    return embedding_bag(
        positions,
        rows,
        offsets,
        mode=mode,
        per_sample_weights=weights,
        include_last_offset=include_last_offset,
        padding_idx=padding,
    )


def offsets_of(lengths: Tensor) -> Tensor:
    """Return the start of each bag, and the end of the last one; int64[bags + 1].

    Raises
    ------
    ConfigurationError
        A length is negative.
    """
    if lengths.numel() and int(lengths.min()) < 0:
        raise ConfigurationError(f"a bag has the length {int(lengths.min())}, expected 0 or more")
    offsets = lengths.new_zeros(lengths.numel() + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def _sums_here(rows: Tensor) -> bool:
    """Return whether to sum gradients with the C loop instead of torch."""
    return rows.requires_grad and rows.is_cpu and not torch.compiler.is_compiling()


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(positions)
        ctx.num_rows = len(rows)
        return embedding(positions, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (positions,), (gradient,) = ctx.saved_tensors, gradients
        return _sum_at(positions.reshape(-1), gradient.reshape(-1, gradient.shape[-1]), ctx.num_rows), None


class _Sum(torch.autograd.Function):
    """Sums of bags, with a backward pass that does not sort the ids again, as torch's would."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        positions: Tensor,
        offsets: Tensor | None,
        include_last_offset: bool,
        padding: int | None,
    ) -> Tensor:
        pooled = embedding_bag(
            positions,
            rows,
            offsets,
            mode="sum",
            include_last_offset=include_last_offset,
            padding_idx=padding,
        )
        ctx.save_for_backward(positions.reshape(-1), _bags_of(positions, offsets, len(pooled)))
        ctx.padding, ctx.num_rows = padding, len(rows)
        return pooled

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (positions, bags), (gradient,) = ctx.saved_tensors, gradients
        # With include_last_offset, positions after the last offset are in no bag.
        positions = positions[: len(bags)]
        if ctx.padding is not None:
            kept = positions != ctx.padding
            positions, bags = positions[kept], bags[kept]
        by_position = gradient.contiguous().index_select(0, bags)
        return _sum_at(positions, by_position, ctx.num_rows), *[None] * 4


def _bags_of(positions: Tensor, offsets: Tensor | None, num_bags: int) -> Tensor:
    """Return the bag of each id; int64[num_ids]."""
    bags = torch.arange(num_bags, device=positions.device)
    if offsets is None:
        return bags.repeat_interleave(positions.shape[1])
    ends = positions.new_full((num_bags + 1,), positions.numel(), dtype=torch.int64)
    ends[: len(offsets)] = offsets
    return bags.repeat_interleave(ends.diff())


def _sum_at(positions: Tensor, gradient: Tensor, num_rows: int) -> Tensor:
    """Return the sum of the gradients of each row; float[num_rows, dimension]."""
    if torch.is_grad_enabled() and gradient.requires_grad:
        # A second derivative is required, which only torch's own operation has.
        return gradient.new_zeros(num_rows, gradient.shape[1]).index_add(0, positions, gradient)
    sums: Tensor = torch.ops.fleet.sum_rows(positions, gradient, num_rows)
    return sums


# A torch operator, so that torch resolves lazily negated views, can trace it, and knows its shape.
@torch.library.impl(_operators, "sum_rows", "CPU")
def _sum_rows(positions: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    return add_rows(rows.new_zeros(num_rows, rows.shape[1]), positions.long(), rows.contiguous())


@torch.library.impl(_operators, "sum_rows", "Meta")
def _shape_of_sums(positions: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    del positions
    return rows.new_empty(num_rows, rows.shape[1])
