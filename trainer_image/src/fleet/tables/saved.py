"""Rows of a table with all that belongs to them, as they are saved, moved to other servers and loaded."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleet.tables.shards import SHARDS, shard_of

__all__ = ["TableRows", "join", "part", "rows_at"]


@dataclass(frozen=True, slots=True)
class TableRows:
    """Rows with their state.

    Attributes
    ----------
    ids : int64[n]
    values : float32[n, dimension]
    state : mapping of name to float32[n, dimension] or float32[n, 1]
        By slot of the rule.
    marks : mapping of name to int32[n] or float32[n]
        ``last``, the step of each row's last update, and what rules of eviction keep of a row.
    policies : mapping of name to array
        What the rules of a table remember beside its rows: names are ``admission.…`` and ``eviction.…``.
        Arrays of one rule are of equal length, and its ``….ids`` or ``….shards`` say whose the entries are.
    """

    ids: NDArray[np.int64]
    values: Tensor
    state: Mapping[str, Tensor]
    marks: Mapping[str, Tensor] = field(default_factory=dict)
    policies: Mapping[str, NDArray[Any]] = field(default_factory=dict)


def part(rows: TableRows, shards: Collection[int]) -> TableRows:
    """Return what belongs to some virtual shards."""
    wanted = np.zeros(SHARDS, dtype=np.bool_)
    wanted[list(shards)] = True
    policies = {}
    for name, array in rows.policies.items():
        policies[name] = array[wanted[_shards_of_entries(rows.policies, name)]]
    return replace(rows_at(rows, np.flatnonzero(wanted[shard_of(rows.ids)])), policies=policies)


def rows_at(rows: TableRows, at: NDArray[np.int64]) -> TableRows:
    """Return the rows at these places, without policies."""
    places = torch.from_numpy(at)
    return TableRows(
        rows.ids[at],
        rows.values[places],
        {name: entry[places] for name, entry in rows.state.items()},
        {name: entry[places] for name, entry in rows.marks.items()},
    )


def join(parts: Sequence[TableRows]) -> TableRows:
    """Return all rows of parts that have none in common, by ascending id.

    Parameters
    ----------
    parts : sequence of TableRows
        At least one, all of one table.
    """
    ids = np.concatenate([each.ids for each in parts])
    order = np.argsort(ids)
    places = torch.from_numpy(order)
    names = sorted({name for each in parts for name in each.policies})
    return TableRows(
        ids[order],
        torch.cat([each.values for each in parts])[places],
        {name: torch.cat([each.state[name] for each in parts])[places] for name in parts[0].state},
        {name: torch.cat([each.marks[name] for each in parts])[places] for name in parts[0].marks},
        {
            name: np.concatenate([each.policies[name] for each in parts if name in each.policies])
            for name in names
        },
    )


def _shards_of_entries(policies: Mapping[str, NDArray[Any]], name: str) -> NDArray[np.int64]:
    """Return to which shards the entries of a rule's array belong."""
    rule = name.partition(".")[0]
    if (shards := policies.get(f"{rule}.shards")) is not None:
        return shards
    return shard_of(policies[f"{rule}.ids"])
