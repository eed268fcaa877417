"""Rows of tables in checkpoints: a file for each table and server, read by whoever holds shards of it."""

from collections.abc import Collection
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fleet.checkpoint.fields import PARSE_ERRORS
from fleet.checkpoint.files import naming, write_tensors
from fleet.checkpoint.manifest import FileRecord, RowsRecord
from fleet.checkpoint.reader import Checkpoint
from fleet.checkpoint.writer import announce
from fleet.errors import CheckpointError
from fleet.tables import TableRows
from fleet.tables.saved import join, part

__all__ = ["check_rows", "read_rows", "write_rows"]

_GROUPS = ("state", "marks", "policies")


def write_rows(
    directory: Path, save_name: str, shard: str, record: RowsRecord, rows: TableRows
) -> FileRecord:
    """Write rows to a file of their own.

    Parameters
    ----------
    directory : Path
        Made where it is missing.
    save_name : str
        The random name of the save.
    shard : str
        Which part this is, of which table: ``0-of-2-table-1``.
    record : RowsRecord
        What the manifest says of them.
    rows : TableRows

    Returns
    -------
    FileRecord
        For the manifest.

    Raises
    ------
    FleetError
        The disk refuses; the message names the file.
    """
    tensors: dict[str, Tensor] = {"ids": torch.from_numpy(rows.ids), "values": rows.values}
    tensors |= {f"state.{name}": entry for name, entry in rows.state.items()}
    tensors |= {f"marks.{name}": entry for name, entry in rows.marks.items()}
    tensors |= {
        f"policies.{name}": torch.from_numpy(np.ascontiguousarray(a)) for name, a in rows.policies.items()
    }
    path = directory / f"shard-{shard}-{save_name}.safetensors"
    with naming(path):
        announce(path, save_name)
        size, digest = write_tensors(path, tensors, {"format": "pt", "save": save_name})
    return FileRecord(path.name, size, digest, rows=record)


def check_rows(checkpoint: Checkpoint, table: str, shards: Collection[int]) -> None:
    """Check that the files with some shards of a table are there, and of the right size; CheckpointError."""
    for file, _ in _files_of(checkpoint, table, shards):
        checkpoint.check_size(file)


def read_rows(checkpoint: Checkpoint, table: str, shards: Collection[int]) -> tuple[TableRows, int]:
    """Return the rows of some shards of a table, and how many updates it has had.

    Raises
    ------
    CheckpointError
        A file is missing, truncated, changed or another checkpoint's; or no file has one of the shards.
    """
    files = _files_of(checkpoint, table, shards)
    parts = [part(_read(checkpoint, file, table), shards) for file, _ in files]
    return join(parts), max(record.updates for _, record in files)


def _files_of(
    checkpoint: Checkpoint, table: str, shards: Collection[int]
) -> list[tuple[FileRecord, RowsRecord]]:
    wanted = set(shards)
    found = [
        (file, file.rows)
        for file in checkpoint.manifest.files
        if file.rows is not None and file.rows.table == table and not wanted.isdisjoint(file.rows.shards)
    ]
    if missing := wanted.difference(*(record.shards for _, record in found)):
        raise CheckpointError(
            f"{checkpoint.directory} has no rows of table {table} of {len(missing)} of {len(wanted)} shards, "
            f"such as {min(missing)}; its manifest names no file with the rest: load another checkpoint"
        )
    return found


def _read(checkpoint: Checkpoint, file: FileRecord, table: str) -> TableRows:
    path = checkpoint.checked(file)
    try:
        with safe_open(path, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
        groups: dict[str, dict[str, Tensor]] = {group: {} for group in _GROUPS}
        for name, tensor in tensors.items():
            group, _, entry = name.partition(".")
            if entry:
                groups[group][entry] = tensor
        policies = {name: tensor.numpy() for name, tensor in groups["policies"].items()}
        ids = tensors["ids"].numpy()
        if len(ids) != len(tensors["values"]):
            raise ValueError(f"{len(ids)} ids and {len(tensors['values'])} rows")
        return TableRows(ids, tensors["values"], groups["state"], groups["marks"], policies)
    except (SafetensorError, OSError, *PARSE_ERRORS) as error:
        raise CheckpointError(
            f"{path} does not hold what its manifest says of table {table}: {error}; load another checkpoint"
        ) from error
