"""Conversion of tables to plain tensors, for serving or for training in other programs."""

from dataclasses import replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from fleet.errors import ConfigurationError
from fleet.tables.config import TableConfig
from fleet.tables.index import find_among
from fleet.tables.rows import TableRows
from fleet.tables.storage import IN_MEMORY
from fleet.tables.table import Table

__all__ = ["apply_delta", "dense", "pruned"]

_ROWS_AT_ONCE: Final = 1 << 16


def dense(config: TableConfig, rows: TableRows) -> Tensor:
    """Return a table with bounded ids as one tensor; ids without a row have their initial values.

    Parameters
    ----------
    config : TableConfig
    rows : TableRows
        Of all servers.

    Returns
    -------
    float32[num_embeddings, dimension]
        For ``torch.nn.Embedding.from_pretrained``.

    Raises
    ------
    ConfigurationError
        The table has no `num_embeddings`, or the id of a row is out of range.
    """
    if config.num_embeddings is None:
        raise ConfigurationError(
            f"table {config.name} takes any 64-bit id, so it has no dense tensor; expected a table with "
            "num_embeddings, or an export as ids and rows"
        )
    config.check_ids(rows.ids)
    values = torch.empty(config.num_embeddings, config.dimension, dtype=torch.float32)
    empty = Table(replace(config, storage=IN_MEMORY))
    for begin in range(0, config.num_embeddings, _ROWS_AT_ONCE):
        end = min(begin + _ROWS_AT_ONCE, config.num_embeddings)
        values[begin:end] = empty.look_up(np.arange(begin, end))
    values[torch.from_numpy(rows.ids)] = rows.values
    return values


def pruned(config: TableConfig, rows: TableRows, ids: Tensor) -> TableRows:
    """Return rows for the given ids, with values but no state; ids without a row have their initial values.

    Parameters
    ----------
    config : TableConfig
    rows : TableRows
        Of all servers.
    ids : int64[n]
        In any order; ids may repeat.
    """
    wanted = np.unique(ids.numpy())
    values = Table(replace(config, storage=IN_MEMORY)).look_up(wanted)
    found, positions = find_among(wanted, rows.ids)
    values[torch.from_numpy(found)] = rows.values[torch.from_numpy(positions)]
    return TableRows(wanted, values, {})


def apply_delta(rows: TableRows, changed: TableRows, removed: Tensor) -> TableRows:
    """Apply a delta to rows as a serving process would; return the resulting rows, sorted by id.

    Parameters
    ----------
    rows : TableRows
    changed : TableRows
        New rows, and rows with a changed value.
    removed : int64[n]
        Ids whose rows were removed.
    """
    stays = ~np.isin(rows.ids, np.concatenate([changed.ids, removed.numpy()]))
    ids = np.concatenate([rows.ids[stays], changed.ids])
    order = np.argsort(ids)
    values = torch.cat([rows.values[torch.from_numpy(stays)], changed.values])
    return TableRows(ids[order], values[torch.from_numpy(order)], {})
