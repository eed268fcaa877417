"""Tables as plain tensors, for what serves or trains elsewhere."""

from dataclasses import replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from fleet.errors import ConfigurationError
from fleet.tables.ascending import find_among
from fleet.tables.config import TableConfig
from fleet.tables.saved import TableRows
from fleet.tables.storage import IN_MEMORY
from fleet.tables.table import Table

__all__ = ["apply_delta", "dense", "pruned"]

_AT_ONCE: Final = 1 << 16


def dense(config: TableConfig, rows: TableRows) -> Tensor:
    """Return a bounded table as one tensor: rows that there are, and the first values of all others.

    Parameters
    ----------
    config : TableConfig
    rows : TableRows
        Of all servers.

    Returns
    -------
    float32[num_embeddings, dimension]
        What ``torch.nn.Embedding.from_pretrained`` takes.

    Raises
    ------
    ConfigurationError
        The table has no number of embeddings, or a row lies outside it.
    """
    if config.num_embeddings is None:
        raise ConfigurationError(
            f"table {config.name}: any 64-bit id is one of it, so it is no dense tensor; expected a table "
            "with num_embeddings, or an export as ids and rows"
        )
    values = torch.empty(config.num_embeddings, config.dimension, dtype=torch.float32)
    empty = Table(replace(config, storage=IN_MEMORY))
    for begin in range(0, config.num_embeddings, _AT_ONCE):
        end = min(begin + _AT_ONCE, config.num_embeddings)
        values[begin:end] = empty.look_up(np.arange(begin, end))
    empty.look_up(rows.ids)  # refuses ids that are out of range
    values[torch.from_numpy(rows.ids)] = rows.values
    return values


def pruned(config: TableConfig, rows: TableRows, ids: Tensor) -> TableRows:
    """Return the values of given ids alone, without state, those that have no row with their first values.

    Parameters
    ----------
    config : TableConfig
    rows : TableRows
        Of all servers.
    ids : int64[n]
        In any order, each of them any number of times.
    """
    wanted = np.unique(ids.numpy())
    table = Table(replace(config, storage=IN_MEMORY))
    values = table.look_up(wanted)
    there, places = find_among(wanted, rows.ids)
    values[torch.from_numpy(there)] = rows.values[torch.from_numpy(places)]
    return TableRows(wanted, values, {})


def apply_delta(rows: TableRows, changed: TableRows, removed: Tensor) -> TableRows:
    """Return the values of rows with a delta carried out, as who serves a table does; by ascending id.

    Parameters
    ----------
    rows : TableRows
    changed : TableRows
        Rows that are new or have another value.
    removed : int64[n]
        Ids that have no row any more.
    """
    stays = ~np.isin(rows.ids, np.concatenate([changed.ids, removed.numpy()]))
    ids = np.concatenate([rows.ids[stays], changed.ids])
    order = np.argsort(ids)
    values = torch.cat([rows.values[torch.from_numpy(stays)], changed.values])
    return TableRows(ids[order], values[torch.from_numpy(order)], {})
