"""Bags of embeddings as one vector each, from the distinct rows of a batch. Pure functions."""

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from fleet.errors import ConfigurationError

__all__ = ["MODES", "offsets_of", "pool"]

MODES = ("sum", "mean", "max")


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
    """Return one vector for each bag; what comes back to `rows` is one gradient a row.

    Parameters
    ----------
    rows : float[n, dimension]
    positions : int64[num_ids] or int64[bags, ids_per_bag]
        Which of the rows each id has.
    offsets : int64[bags], optional
        Where each bag begins in `positions`, where these have one dimension; one more with
        `include_last_offset`, their end.
    mode : str
        ``sum``, ``mean`` or ``max``.
    weights : float, of the shape of `positions`, optional
        By which rows are multiplied before they are summed; with ``sum`` only.
    padding : int, optional
        The row that is no part of any bag, and is not counted by a mean.
    include_last_offset : bool

    Returns
    -------
    float[bags, dimension]
        0 for a bag without any.
    """
    if not rows.shape[0]:
        # A batch of empty bags: torch refuses a table without a row.
        rows = rows.new_zeros(1, rows.shape[1])
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
    """Return where each bag begins, and the end of the last one; int64[bags + 1].

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
