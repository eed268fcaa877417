"""Embedding tables as safetensors files of ids and rows, for what serves or trains elsewhere."""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from fleet.checkpoint.files import naming, write_parts
from fleet.tables.rows import TableRows

__all__ = ["Source", "read_rows", "write_rows"]


class Source(Protocol):
    """Rows that are written part by part: a `Snapshot`, or what a checkpoint has.

    Attributes
    ----------
    step : int
        The newest update that is in it.
    since : int, optional
        Only rows that were updated after this step are in it.
    removed : int64[n]
        Ids whose rows have gone since.
    """

    step: int
    since: int | None
    removed: NDArray[np.int64]

    @property
    def num_rows(self) -> int:
        """How many rows there are."""

    @property
    def none(self) -> TableRows:
        """No rows, in the types and shapes of the parts."""

    def parts(self) -> Iterator[TableRows]:
        """Yield the rows; to be called once."""


def write_rows(path: Path, source: Source, dtype: torch.dtype = torch.float32) -> None:
    """Write rows, one part at a time.

    The file has ``ids``, int64[n], and ``rows``, of `dtype` and shape [n, dimension], in no order.
    ``removed``, int64[m], are the ids whose rows have gone since the step of ``since`` in its metadata.

    Parameters
    ----------
    path : Path
    source : Source
        Is read to the end.
    dtype : torch.dtype
        float32 or bfloat16.

    Raises
    ------
    FleetError
        The disk refuses; the message names the file.
    """

    def columns(part: TableRows) -> dict[str, Tensor]:
        return {"ids": torch.from_numpy(part.ids), "rows": part.values.to(dtype)}

    since = "" if source.since is None else str(source.since)
    with naming(path):
        write_parts(
            path,
            {"removed": torch.from_numpy(source.removed)},
            columns(source.none),
            source.num_rows,
            map(columns, source.parts()),
            {"format": "pt", "step": str(source.step), "since": since},
        )


def read_rows(path: Path) -> tuple[TableRows, Tensor]:
    """Return the rows of a file by ascending id, without state, and the ids that it says have none any more.

    Raises
    ------
    SafetensorError
        It is no such file.
    """
    tensors = load_file(path)
    ids = tensors["ids"].numpy()
    order = np.argsort(ids)
    rows = tensors["rows"].float()[torch.from_numpy(order)]
    return TableRows(ids[order], rows, {}), tensors["removed"]
