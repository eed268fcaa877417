"""Bags of embeddings whose table lives on the parameter servers."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fleet.errors import ConfigurationError
from fleet.nn.embedding import DistributedEmbedding
from fleet.nn.pooling import MODES, pool
from fleet.nn.table import DistributedTable
from fleet.tables.first_values import FirstValues
from fleet.tables.rules import RowRule

__all__ = ["DistributedEmbeddingBag"]


class DistributedEmbeddingBag(DistributedEmbedding):
    """In place of ``torch.nn.EmbeddingBag``: the same call, and no row of the table on a trainer.

    Parameters
    ----------
    num_embeddings, embedding_dim, max_norm
        As of `DistributedEmbedding`.
    scale_grad_by_freq : bool
        Refused: how often an id comes is not known of the other trainers.
    mode : str
        ``mean``, ``sum`` or ``max``.
    include_last_offset : bool
        Whether offsets end with that of the end of the last bag.
    padding_idx : int, optional
        As of `DistributedEmbedding`; an id that is padding is in no bag.
    name, first_values, seed, rule, options, table
        As of `DistributedEmbedding`.

    Raises
    ------
    ConfigurationError
        An option cannot be honoured; the message names it.
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
                f"table {self.table.name}: scale_grad_by_freq=True would need to know how often an id comes "
                "in the batches of all trainers; expected False"
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
            Where each bag begins, where ids have one dimension.
        per_sample_weights : float32, of the shape of `ids`, optional
            With ``sum`` only.

        Returns
        -------
        float32[bags, embedding_dim]

        Raises
        ------
        ConfigurationError
            An id is out of range; the message names the table, the id and its place in the batch.
        ValueError
            Ids, offsets and weights do not go together; as torch says it.
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
        """Return what ``print(model)`` shows."""
        return f"{super().extra_repr()}, mode={self.mode!r}"


def _row_of(ids: Tensor, positions: Tensor, padding_idx: int | None) -> int | None:
    """Return which row of a batch is that of the padding, if one is."""
    if padding_idx is None or not (padded := ids == padding_idx).any():
        return None
    return int(positions[padded][0])
