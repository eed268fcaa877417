"""Embedding tables as safetensors files of ids and rows, for what serves or trains elsewhere."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from fleet.checkpoint.files import TEMPORARY, naming, publish
from fleet.tables.saved import TableRows
from fleet.tables.snapshot import Snapshot

__all__ = ["read_rows", "write_rows"]

_TYPES: Final = {torch.float32: "F32", torch.bfloat16: "BF16"}


def write_rows(path: Path, snapshot: Snapshot, dtype: torch.dtype = torch.float32) -> None:
    """Write what a snapshot gives out, one virtual shard at a time.

    The file has ``ids``, int64[n], and ``rows``, of `dtype` and shape [n, dimension], by shard and then by
    id. ``removed``, int64[m], are the ids whose rows have gone since the step of ``since`` in its metadata.
    Each server writes a file of its own.

    Parameters
    ----------
    path : Path
        In a folder that exists.
    snapshot : Snapshot
        Is read to the end.
    dtype : torch.dtype
        float32 or bfloat16.

    Raises
    ------
    FleetError
        The disk refuses; the message names the file.
    """
    num_rows, dimension = snapshot.num_rows, snapshot.dimension
    shapes = {"removed": (snapshot.removed.size,), "ids": (num_rows,), "rows": (num_rows, dimension)}
    header, begins = _header(shapes, dtype, snapshot)
    temporary = path.with_name(path.name + TEMPORARY)
    with naming(path):
        with temporary.open("wb") as file:
            file.write(header)
            file.write(snapshot.removed.astype("<i8").tobytes())
            done = 0
            for part in snapshot.parts():
                file.seek(begins["ids"] + 8 * done)
                file.write(part.ids.astype("<i8").tobytes())
                file.seek(begins["rows"] + dtype.itemsize * dimension * done)
                file.write(part.values.to(dtype).view(torch.uint8).numpy().tobytes())
                done += part.ids.size
        publish(temporary, path)


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


def _header(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, snapshot: Snapshot
) -> tuple[bytes, dict[str, int]]:
    """Return the beginning of a file, and at which byte of the file each tensor begins."""
    since = "" if snapshot.since is None else str(snapshot.since)
    described: dict[str, Any] = {"__metadata__": {"format": "pt", "step": str(snapshot.step), "since": since}}
    begins, end = {}, 0
    for name, shape in shapes.items():
        size = int(np.prod(shape)) * (dtype.itemsize if name == "rows" else 8)
        begins[name] = end
        described[name] = {
            "dtype": _TYPES[dtype] if name == "rows" else "I64",
            "shape": list(shape),
            "data_offsets": [end, end + size],
        }
        end += size
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + begin for name, begin in begins.items()}
