"""An embedding whose table lives on the parameter servers."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import Module

from fleet.errors import ConfigurationError
from fleet.nn.table import DistributedTable
from fleet.nn.taking import take
from fleet.tables.first_values import Constant, FirstValues, Normal
from fleet.tables.rules import RowRule

__all__ = ["DistributedEmbedding"]


class DistributedEmbedding(Module):
    """In place of ``torch.nn.Embedding``: the same call, and no row of the table on a trainer.

    Parameters
    ----------
    num_embeddings : int or None
        Ids are below it and not negative. None: any 64-bit id is one.
    embedding_dim : int
    padding_idx : int, optional
        As in torch: the id whose row is zero, and is not trained.
    max_norm : float, optional
        Refused: a look-up changes nothing here.
    name : str
        The table's, another one for each table of a model.
    first_values : FirstValues or float, optional
        What rows begin as: ``fleet.tables.Normal()``, as in torch, unless said otherwise; a number for all.
    seed : int
        Of the first values.
    rule : RowRule, optional
        What an update does to a row (`fleet.tables.rules`). Otherwise what the optimizer says that is built
        over ``model.parameters()``, with its options and schedules.
    options : mapping, optional
        Of `rule`.
    table : DistributedTable, optional
        Another module's, to be shared; then it says all of the above but `padding_idx`.

    Raises
    ------
    ConfigurationError
        An option cannot be honoured; the message names it.
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
                "they are looked up, which rows on parameter servers are not; expected max_norm=None, and "
                "weight decay or a clipped gradient to keep rows small"
            )
        self.table = table or DistributedTable(
            name, embedding_dim, num_embeddings, _first(first_values), seed, rule, options or {}
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
        """The tables of this module, which are on the servers."""
        return (self.table,)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the embeddings of ids.

        Parameters
        ----------
        ids : int64 or int32, of any shape

        Returns
        -------
        float32, of the ids' shape and one more dimension, of `embedding_dim`

        Raises
        ------
        ConfigurationError
            An id is out of range; the message names the table, the id and its place in the batch.
        """
        rows, positions = self.table.look_up(ids, padding=self.padding_idx)
        return take(rows, positions)

    def prefetch(self, ids: Tensor) -> None:
        """Ask for the rows with which this module is called for the next batch; see `fleet.prefetch`.

        Parameters
        ----------
        ids : integer tensor of any shape
            Of the next batch.

        Raises
        ------
        ConfigurationError
            An id is out of range, or nothing serves the table yet.
        """
        self.table.prefetch(ids, padding=self.padding_idx)

    def extra_repr(self) -> str:
        """Return what ``print(model)`` shows."""
        padding = f", padding_idx={self.padding_idx}" if self.padding_idx is not None else ""
        return f"{self.table.num_embeddings}, {self.table.dimension}{padding}, name={self.table.name!r}"


def _first(values: FirstValues | float | None) -> FirstValues:
    if values is None:
        return Normal()
    return Constant(values) if isinstance(values, int | float) else values


def _padding_of(padding_idx: int | None, num_embeddings: int | None, name: str) -> int | None:
    """Return the padding id; torch counts negative ones from the end."""
    if padding_idx is None or num_embeddings is None:
        return padding_idx
    if not -num_embeddings <= padding_idx < num_embeddings:
        raise ConfigurationError(
            f"table {name}: padding_idx is {padding_idx}, expected {-num_embeddings} to {num_embeddings - 1}"
        )
    return padding_idx % num_embeddings
