"""Rows of tables on the servers, for what serves a model: those of given ids."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fleet.errors import ConfigurationError
from fleet.plan import Source

__all__ = ["rows_of_tables"]


@torch.no_grad()
def rows_of_tables(source: Source, table_ids: Mapping[str, Any]) -> dict[str, Tensor]:
    """Look up the rows of given ids.

    Parameters
    ----------
    source : Source
    table_ids : mapping of str to int[n]
        By table, tensors, arrays or lists, in any order and each any number of times.

    Returns
    -------
    dict of str to Tensor
        By table ``{table}.ids``, int64[m], ascending and each once, and ``{table}.rows``, float32[m, dim].

    Raises
    ------
    ConfigurationError
        A table of the model has no ids, or there is none of that name; or there is no session any more.
    """
    tables = {each.name: each.declared for each in source.tables if each.name not in source.own_tables}
    if missing := [name for name in tables if name not in table_ids]:
        raise ConfigurationError(
            f"the rows of table {', '.join(missing)} are on the parameter servers, and no state dict of one "
            "process has them; expected the ids that are served: fleet.save_inference_model(directory, "
            "table_ids={name: ids}), or a checkpoint, of which python -m fleet.checkpoint exports all rows"
        )
    if unknown := [name for name in table_ids if name not in tables]:
        raise ConfigurationError(
            f"table_ids has {unknown[0]!r}, and the tables on the servers are {', '.join(tables) or 'none'}; "
            "expected ids of these"
        )
    found: dict[str, Tensor] = {}
    for name, given in table_ids.items():
        ids = torch.from_numpy(np.unique(torch.as_tensor(given).cpu().numpy()))
        found |= {f"{name}.ids": ids.long(), f"{name}.rows": tables[name].look_up(ids).rows}
    return found
