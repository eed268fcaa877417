"""Rows of tables in checkpoints: a file for each table and server, read by whoever holds shards of it.

Files are written and read part by part, so that neither takes the memory of a table. A file may have only the
rows that have changed since another checkpoint, its base, and the ids of those that have gone.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fleet.checkpoint.fields import PARSE_ERRORS
from fleet.checkpoint.files import naming, sha256_of, write_parts
from fleet.checkpoint.manifest import BaseRecord, FileRecord, RowsRecord
from fleet.checkpoint.reader import Checkpoint
from fleet.checkpoint.writer import announce
from fleet.errors import CheckpointError
from fleet.tables import Table, TableConfig, TableRows
from fleet.tables.rows import part
from fleet.tables.snapshot import PART_BYTES, Snapshot

__all__ = ["base_of", "files_of", "have_state", "parts_of", "read_rows", "write_rows"]

_GROUPS = ("state", "marks", "policies")


def write_rows(
    directory: Path,
    save_name: str,
    shard: str,
    record: RowsRecord,
    snapshot: Snapshot,
    parts: Iterable[TableRows],
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
    snapshot : Snapshot
    parts : iterable of TableRows
        Those of the snapshot.

    Returns
    -------
    FileRecord
        For the manifest.

    Raises
    ------
    FleetError
        The disk refuses; the message names the file.
    """
    whole = {"removed": torch.from_numpy(snapshot.removed)}
    whole |= {
        f"policies.{name}": torch.from_numpy(np.ascontiguousarray(a)) for name, a in snapshot.policies.items()
    }
    path = directory / f"shard-{shard}-{save_name}.safetensors"
    with naming(path):
        announce(path, save_name)
        size = write_parts(
            path,
            whole,
            _columns(snapshot.none),
            snapshot.num_rows,
            map(_columns, parts),
            {"format": "pt", "save": save_name},
        )
        return FileRecord(path.name, size, sha256_of(path), rows=record)


def have_state(checkpoint: Checkpoint, table: str, shards: Collection[int]) -> bool:
    """Whether the rows of some shards of a table have state of optimizers; raises as `read_rows`."""
    for found, file, _ in files_of(checkpoint, table, shards):
        found.check_size(file)
        try:
            with safe_open(found.directory / file.name, framework="pt") as opened:
                if any(name.startswith("state.") for name in opened.keys()):  # noqa: SIM118 - no mapping
                    return True
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{found.directory / file.name} cannot be read: {error}; load another checkpoint"
            ) from error
    return False


def read_rows(checkpoint: Checkpoint, config: TableConfig, shards: Collection[int]) -> tuple[Table, int]:
    """Return a table with the rows of some shards, and how many updates it has had.

    Raises
    ------
    CheckpointError
        A file is missing, truncated, changed or another checkpoint's; or no file has one of the shards.
    """
    files = files_of(checkpoint, config.name, shards)
    updates = max(record.updates for _, _, record in files)
    table = Table(config, updates)
    for found, file, _ in files:
        for removed, rows in parts_of(found, file, config.name, with_policies=found is checkpoint):
            table.remove(removed)
            table.load(part(rows, shards))
    return table, updates


def base_of(checkpoint: Checkpoint, base: BaseRecord) -> Checkpoint:
    """Return the checkpoint that another one needs.

    Raises
    ------
    CheckpointError
        It is not there any more.
    """
    directory = checkpoint.directory.parent / base.directory
    reason = ""
    try:
        found = Checkpoint(directory)
    except CheckpointError as error:
        reason = str(error)
    else:
        if found.manifest.save == base.save:
            return found
        reason = f"that is the save {found.manifest.save!r}"
    raise CheckpointError(
        f"{checkpoint.directory} has the rows that have changed since the save {base.save!r} in {directory}, "
        f"and without it they are no table: {reason}; copy it there again, or load another checkpoint"
    )


def files_of(
    checkpoint: Checkpoint, table: str, shards: Collection[int]
) -> list[tuple[Checkpoint, FileRecord, RowsRecord]]:
    """Return the files with some shards of a table, in the order in which they are to be read.

    Raises
    ------
    CheckpointError
        There is none with one of the shards, or what they build on is not there.
    """
    wanted = set(shards)
    found = [
        (checkpoint, file, file.rows)
        for file in checkpoint.manifest.files
        if file.rows is not None and file.rows.table == table and not wanted.isdisjoint(file.rows.shards)
    ]
    if missing := wanted.difference(*(record.shards for _, _, record in found)):
        raise CheckpointError(
            f"{checkpoint.directory} has no rows of table {table} of {len(missing)} of {len(wanted)} shards, "
            f"such as {min(missing)}; its manifest names no file with the rest: load another checkpoint"
        )
    bases: dict[BaseRecord, set[int]] = {}
    for _, _, record in found:
        if record.base is not None:
            bases.setdefault(record.base, set()).update(wanted.intersection(record.shards))
    of_bases = []
    for base, of in bases.items():
        of_base = files_of(base_of(checkpoint, base), table, of)
        if any(record.base is not None for _, _, record in of_base):
            raise CheckpointError(
                f"{checkpoint.directory} needs the rows of {base.directory}, which has not all of them "
                "either; expected a checkpoint of all rows: load another checkpoint"
            )
        of_bases += of_base
    return of_bases + found


def _columns(rows: TableRows) -> dict[str, Tensor]:
    """Return rows as a file has them."""
    return {
        "ids": torch.from_numpy(rows.ids),
        "values": rows.values,
        **{f"state.{name}": entry for name, entry in rows.state.items()},
        **{f"marks.{name}": entry for name, entry in rows.marks.items()},
    }


def parts_of(
    checkpoint: Checkpoint,
    file: FileRecord,
    table: str,
    columns: Collection[str] = (),
    *,
    with_policies: bool = False,
) -> Iterator[tuple[NDArray[np.int64], TableRows]]:
    """Yield what a file has, some rows at a time.

    Parameters
    ----------
    checkpoint : Checkpoint
    file : FileRecord
        One of it.
    table : str
        For messages.
    columns : collection of str
        Which of a row's there are to be, ``ids`` among them; without any, all. Of values that are not, rows
        have no elements.
    with_policies : bool
        Whether the first rows come with what the table's rules remember.

    Yields
    ------
    removed : int64[n]
        Ids that have no row any more; all of them come first.
    rows : TableRows

    Raises
    ------
    CheckpointError
        The file is not what the manifest says.
    """
    path = checkpoint.checked(file)
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
            for begin in range(0, max(1, sizes["ids"]), at_once):
                wanted = slices.keys() & (columns or slices.keys())
                rows = {name: slices[name][begin : begin + at_once] for name in wanted}
                if with_policies and not begin:
                    rows |= {name: opened.get_tensor(name) for name in policies}
                yield removed, _rows_of(rows)
                removed = removed[:0]
    except (SafetensorError, OSError, *PARSE_ERRORS) as error:
        raise CheckpointError(
            f"{path} does not hold what its manifest says of table {table}: {error}; load another checkpoint"
        ) from error


def _rows_of(columns: Mapping[str, Tensor]) -> TableRows:
    groups: dict[str, dict[str, Tensor]] = {group: {} for group in _GROUPS}
    for name, tensor in columns.items():
        group, _, entry = name.partition(".")
        if entry:
            groups[group][entry] = tensor
    policies = {name: tensor.numpy() for name, tensor in groups["policies"].items()}
    ids = columns["ids"].numpy()
    values = columns.get("values", torch.empty(ids.size, 0, dtype=torch.float32))
    return TableRows(ids, values, groups["state"], groups["marks"], policies)
