"""Embeddings and bags of embeddings whose table is on the parameter servers."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import Module

from fleet.errors import ConfigurationError
from fleet.nn.pooling import MODES, pool, take
from fleet.nn.table import DistributedTable
from fleet.tables.first_values import Constant, FirstValues, Normal
from fleet.tables.rules import RowRule

__all__ = ["DistributedEmbedding", "DistributedEmbeddingBag"]


class DistributedEmbedding(Module):
    """Replaces ``torch.nn.Embedding``: the same call, without the table on the trainer.

    Parameters
    ----------
    num_embeddings : int or None
        Ids are 0 to `num_embeddings`, exclusive. None: any 64-bit id is valid.
    embedding_dim : int
    padding_idx : int, optional
        As in torch: the id whose row is zero and is not trained.
    max_norm : float, optional
        Not supported, because a look-up changes nothing here.
    name : str
        Name of the table, unique in a model.
    first_values : FirstValues or float, optional
        Values of rows before their first update: by default ``fleet.tables.Normal()``, as in torch; a number
        is the value of all elements.
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
                f"{self.table.dimension}, and the module that shares it {num_embeddings} of {embedding_dim}"
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
    """Replaces ``torch.nn.EmbeddingBag``: the same call, without the table on the trainer.

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
        if mode not in MODES:
            raise ConfigurationError(
                f"table {self.table.name}: mode is {mode!r}, expected one of {', '.join(MODES)}"
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
    """Return the position of the padding's row in a batch, if it has one."""
    if padding_idx is None or not (padded := ids == padding_idx).any():
        return None
    return int(positions[padded][0])
