"""Files of table rows in checkpoints: one for each table and server.

Files are written and read in parts, so neither needs as much memory as the table. An incremental file has
only the rows that have changed since another checkpoint, its base, and the ids of the rows that were removed.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fleet.checkpoint.files import disk_errors, sha256_of, write_parts
from fleet.checkpoint.manifest import BaseRecord, FileRecord, RowsRecord
from fleet.checkpoint.reader import Checkpoint
from fleet.checkpoint.values import PARSE_ERRORS
from fleet.checkpoint.writer import announce
from fleet.errors import CheckpointError
from fleet.tables import Table, TableConfig, TableRows
from fleet.tables.rows import part
from fleet.tables.snapshot import PART_BYTES, Snapshot

__all__ = ["open_base", "parts_of", "read_rows", "row_files", "rows_have_state", "write_rows"]


def write_rows(
    directory: Path,
    save_name: str,
    shard: str,
    record: RowsRecord,
    snapshot: Snapshot,
    parts: Iterable[TableRows],
) -> FileRecord:
    """Write rows of a table to a file.

    Parameters
    ----------
    directory : Path
        Created if it is missing.
    save_name : str
        The random name of the save.
    shard : str
        The server's part of the checkpoint, and the table: ``0-of-2-table-1``.
    record : RowsRecord
        The description for the manifest.
    snapshot : Snapshot
    parts : iterable of TableRows
        The rows of the snapshot, in parts.

    Returns
    -------
    FileRecord
        The file's entry in the manifest.

    Raises
    ------
    FleetError
        A disk operation fails; the message names the file.
    """
    whole = {"removed": torch.from_numpy(snapshot.removed)}
    whole |= {
        f"policies.{name}": torch.from_numpy(np.ascontiguousarray(a)) for name, a in snapshot.policies.items()
    }
    path = directory / f"shard-{shard}-{save_name}.safetensors"
    with disk_errors(path):
        announce(path, save_name)
        size = write_parts(
            path,
            whole,
            _columns_of(snapshot.none),
            snapshot.num_rows,
            map(_columns_of, parts),
            {"format": "pt", "save": save_name},
        )
        # Read back, because the parts of the columns were not written in the order of the file.
        return FileRecord(path.name, size, sha256_of(path), rows=record)


def read_rows(checkpoint: Checkpoint, config: TableConfig, shards: Collection[int]) -> tuple[Table, int]:
    """Read the rows of some virtual shards of a table.

    Returns
    -------
    table : Table
    updates : int
        The number of updates that the table has received.

    Raises
    ------
    CheckpointError
        A file is missing, damaged or from another checkpoint; or no file has one of the shards.
    """
    files = row_files(checkpoint, config.name, shards)
    updates = max(record.updates for _, _, record in files)
    table = Table(config, updates)
    for found, file, _ in files:
        # The policies of a base are older than this checkpoint.
        for removed, rows in parts_of(found, file, config.name, with_policies=found is checkpoint):
            table.remove(removed)
            table.load(part(rows, shards))
    return table, updates


def rows_have_state(checkpoint: Checkpoint, table: str, shards: Collection[int]) -> bool:
    """Return whether rows of some shards have optimizer state; raise the same errors as `read_rows`."""
    for found, file, _ in row_files(checkpoint, table, shards):
        found.check_size(file)
        try:
            with safe_open(found.directory / file.name, framework="pt") as opened:
                if any(name.startswith("state.") for name in opened.keys()):  # noqa: SIM118 - not a mapping
                    return True
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{found.directory / file.name} cannot be read: {error}; load another checkpoint"
            ) from error
    return False


def row_files(
    checkpoint: Checkpoint, table: str, shards: Collection[int]
) -> list[tuple[Checkpoint, FileRecord, RowsRecord]]:
    """Return the files that contain the given shards, in reading order: files of the base come first.

    Raises
    ------
    CheckpointError
        No file has one of the shards, or a base is missing.
    """
    wanted = set(shards)
    found = [
        (checkpoint, file, file.rows)
        for file in checkpoint.manifest.files
        if file.rows is not None and file.rows.table == table and not wanted.isdisjoint(file.rows.shards)
    ]
    if missing := wanted.difference(*(record.shards for _, _, record in found)):
        raise CheckpointError(
            f"{checkpoint.directory} has no rows of table {table} for {len(missing)} of {len(wanted)} "
            f"shards, such as {min(missing)}; its manifest names no file with the rest: load another "
            "checkpoint"
        )
    bases: dict[BaseRecord, set[int]] = {}
    for _, _, record in found:
        if record.base is not None:
            bases.setdefault(record.base, set()).update(wanted.intersection(record.shards))
    of_bases = []
    for base, of in bases.items():
        of_base = row_files(open_base(checkpoint, base), table, of)
        if any(record.base is not None for _, _, record in of_base):
            raise CheckpointError(
                f"{checkpoint.directory} needs the rows of {base.directory}, which is itself incremental; "
                "expected a checkpoint with all rows: load another checkpoint"
            )
        of_bases += of_base
    return of_bases + found


def open_base(checkpoint: Checkpoint, base: BaseRecord) -> Checkpoint:
    """Open the base of an incremental checkpoint.

    Raises
    ------
    CheckpointError
        The base is missing or was replaced.
    """
    directory = checkpoint.directory.parent / base.directory
    try:
        found = Checkpoint(directory)
    except CheckpointError as error:
        reason = str(error)
    else:
        if found.manifest.save == base.save:
            return found
        reason = f"it has the save {found.manifest.save!r}"
    raise CheckpointError(
        f"{checkpoint.directory} has only the rows that have changed since the save {base.save!r} in "
        f"{directory}, which cannot be used: {reason}; copy it there again, or load another checkpoint"
    )


def parts_of(
    checkpoint: Checkpoint,
    file: FileRecord,
    table: str,
    columns: Collection[str] = (),
    *,
    with_policies: bool = False,
) -> Iterator[tuple[NDArray[np.int64], TableRows]]:
    """Yield the rows in a file, in chunks.

    Parameters
    ----------
    checkpoint : Checkpoint
    file : FileRecord
        One of its files.
    table : str
        Names the table in error messages.
    columns : collection of str
        The columns to read, ``ids`` among them; all if empty. Without ``values`` the values have no elements.
    with_policies : bool
        Whether the first part has the state of the table's admission and eviction rules.

    Yields
    ------
    removed : int64[n]
        Ids whose rows were removed. The first part has all of them.
    rows : TableRows

    Raises
    ------
    CheckpointError
        The file is missing, is damaged, or does not match the manifest.
    """
    path = checkpoint.verify_file(file)
    try:
        with safe_open(path, framework="pt") as opened:
            names = set(opened.keys())
            policies = {name for name in names if name.startswith("policies.")}
            slices = {name: opened.get_slice(name) for name in names - policies - {"removed"}}
            sizes = {name: found.get_shape()[0] for name, found in slices.items()}
            if len(set(sizes.values())) != 1 or not {"ids", "values"}.issubset(sizes):
                raise ValueError(f"its columns have {sizes} rows")
            at_once = max(1, PART_BYTES * sizes["ids"] // file.bytes)
            removed = opened.get_tensor("removed").numpy()
            # A file without rows has one part too, because it may have removed ids and policies.
            for begin in range(0, max(1, sizes["ids"]), at_once):
                wanted = slices.keys() & (columns or slices.keys())
                rows = {name: slices[name][begin : begin + at_once] for name in wanted}
                if with_policies and not begin:
                    rows |= {name: opened.get_tensor(name) for name in policies}
                yield removed, _rows_of(rows)
                removed = removed[:0]
    except (SafetensorError, OSError, *PARSE_ERRORS) as error:
        raise CheckpointError(
            f"{path} does not match its manifest in table {table}: {error}; load another checkpoint"
        ) from error


def _columns_of(rows: TableRows) -> dict[str, Tensor]:
    """Convert rows to columns of a file."""
    return {
        "ids": torch.from_numpy(rows.ids),
        "values": rows.values,
        **{f"state.{name}": entry for name, entry in rows.state.items()},
        **{f"marks.{name}": entry for name, entry in rows.marks.items()},
    }


def _rows_of(columns: Mapping[str, Tensor]) -> TableRows:
    """Convert columns of a file to rows; the inverse of `_columns_of`."""
    groups: dict[str, dict[str, Tensor]] = {"state": {}, "marks": {}, "policies": {}}
    for name, tensor in columns.items():
        group, _, entry = name.partition(".")
        if entry:
            groups[group][entry] = tensor
    policies = {name: tensor.numpy() for name, tensor in groups["policies"].items()}
    ids = columns["ids"].numpy()
    values = columns.get("values", torch.empty(ids.size, 0, dtype=torch.float32))
    return TableRows(ids, values, groups["state"], groups["marks"], policies)
