"""Rows that a table begins with: vectors that are given for some ids."""

from typing import Any

import numpy as np
import torch

from fleet.errors import ConfigurationError
from fleet.tables.config import TableConfig
from fleet.tables.saved import TableRows

__all__ = ["warm_start"]


def warm_start(config: TableConfig, ids: Any, vectors: Any) -> TableRows:
    """Return rows for `Table.load`; `fleet.tables.saved.part` takes a server's own of them.

    Parameters
    ----------
    config : TableConfig
    ids : int[n]
        A tensor, an array or a list; none of them twice.
    vectors : float[n, dimension]

    Raises
    ------
    ConfigurationError
        An id comes twice, or the vectors are of another shape or not finite.
    """
    given, values = np.asarray(ids), torch.as_tensor(vectors)
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise ConfigurationError(
            f"table {config.name}: ids of type {given.dtype} and shape {list(given.shape)}, expected whole "
            "numbers in one dimension"
        )
    if values.shape != (expected := (given.size, config.dimension)):
        raise ConfigurationError(
            f"table {config.name}: vectors of shape {list(values.shape)}, expected {list(expected)}: a row "
            "for each id"
        )
    distinct, times = np.unique(given, return_counts=True)
    if distinct.size != given.size:
        raise ConfigurationError(
            f"table {config.name}: id {distinct[times > 1][0]} is given twice, expected each id once"
        )
    if not (finite := values.isfinite().all(dim=1)).all():
        at = int((~finite).nonzero()[0])
        raise ConfigurationError(
            f"table {config.name}: the vector of id {given[at]} at position {at} is not finite; expected "
            "numbers to begin with"
        )
    return TableRows(given.astype(np.int64), values.detach().to(torch.float32), {})
