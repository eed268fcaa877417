"""Rows that were asked for before the batch that needs them is trained on."""

from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleet.parameter_server.trainer.look_ups import LookUp
from fleet.tables.index import find_among

__all__ = ["Ahead", "RowsAhead"]

_BATCHES: Final = 2
"""The one that is trained on, and the next."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """The rows of one table for one batch.

    Attributes
    ----------
    step : int
        How many steps the trainer had made when they were asked for.
    ids : int64[n]
        Ascending, each once.
    asked : LookUp
    """

    step: int
    ids: NDArray[np.int64]
    asked: LookUp


class RowsAhead:
    """What was asked for ahead, by table. Used by the training thread."""

    def __init__(self) -> None:
        self._kept: dict[str, deque[Ahead]] = {}

    def keep(self, ahead: Ahead) -> None:
        """Keep the rows of a table for a batch, in the place of those of the batch before the last."""
        self._kept.setdefault(ahead.asked.table.name, deque(maxlen=_BATCHES)).append(ahead)

    def of(self, table: str, step: int) -> list[Ahead]:
        """Return what was asked for in the last step of a trainer that has made so many.

        Not what was asked for in this one: a trainer that came back may have been given rows of the next.
        """
        return [each for each in self._kept.get(table, ()) if each.step + 1 == step]

    def refresh(self, table: str, ids: NDArray[np.int64], rows: Tensor) -> None:
        """Put rows that have changed in the place of those that came before."""
        for each in self._kept.get(table, ()):
            found, at = find_among(ids, each.ids)
            each.asked.rows[torch.from_numpy(at)] = rows[torch.from_numpy(found)]

    def forget(self) -> None:
        """Drop everything: the servers have other rows."""
        self._kept.clear()
