"""Exporting for other programs: a model's state dict, or a checkpoint's tables as files of ids and rows.

Only a table's ids are read all at once, because its rows may be larger than memory.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from safetensors.torch import save as serialize
from torch import Tensor

from fleet.checkpoint.files import disk_errors, write_bytes, write_parts
from fleet.checkpoint.manifest import MOST_BEFORE
from fleet.checkpoint.reader import TRAINERS_STATE, Checkpoint
from fleet.checkpoint.rows import parts_of, row_files
from fleet.errors import CheckpointError, ConfigurationError
from fleet.plan import Source, describe_difference
from fleet.tables.ids import SHARDS
from fleet.tables.index import find_among
from fleet.tables.rows import TableRows, rows_at

if TYPE_CHECKING:
    from fleet.tables.snapshot import Snapshot

__all__ = ["export_tables", "named_state", "read_table_file", "write_model", "write_table_file"]

_log = logging.getLogger(__name__)
_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def named_state(source: Source, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict with the parameter names of the user's module.

    Parameters
    ----------
    source : Source
    values : mapping of name to Tensor
        The trained parameters. Buffers and frozen parameters are taken from the module; entries that are not
        tensors are left out.

    Raises
    ------
    ConfigurationError
        The parameters have no names.
    """
    if not source.named:
        raise ConfigurationError(
            "the parameters have no names to export, only positions (param_0_0, …); name them: "
            "fleet.distributed_optimizer(optimizer, model=model), or build the optimizer from "
            "model.named_parameters()"
        )
    if source.module is None:
        return dict(values)
    trained: dict[Tensor, Tensor] = {parameter: values[name] for name, parameter in source.parameters.items()}
    kept = source.module.state_dict(keep_vars=True)
    tensors = {name: value for name, value in kept.items() if isinstance(value, Tensor)}
    if others := kept.keys() - tensors.keys():
        _warn_of_extra_state(", ".join(sorted(others)))
    return {
        name: trained[tensor] if tensor in trained else tensor.detach().cpu().clone()
        for name, tensor in tensors.items()
        if not hasattr(tensor, "fleet_table")  # a placeholder without elements for a table on the servers
    }


def write_model(directory: Path, state: Mapping[str, Tensor], facts: Mapping[str, object]) -> Path:
    """Write a state dict that `safetensors.torch.load_file` reads.

    Parameters
    ----------
    directory : Path
        Receives the file ``model.safetensors``.
    state : mapping of name to Tensor
    facts : mapping of str
        Further facts, stored as JSON in the file's metadata.

    Returns
    -------
    Path
        The file.
    """
    metadata = {"format": "pt", **{name: json.dumps(fact) for name, fact in facts.items()}}
    path = directory / "model.safetensors"
    with disk_errors(path):
        # Tied weights share memory, which safetensors refuses.
        copies = {name: tensor.clone().contiguous() for name, tensor in state.items()}
        write_bytes(path, serialize(copies, metadata))
    return path


def export_tables(
    checkpoint: str | PathLike[str],
    directory: str | PathLike[str],
    *,
    since: str | PathLike[str] | None = None,
    tables: Sequence[str] = (),
    dtype: str = "float32",
) -> dict[str, Path]:
    """Write a checkpoint's tables as safetensors files with ``ids``, ``rows`` and ``removed``.

    Parameters
    ----------
    checkpoint : path
        A directory that `save_check_point` or `save_persistables` wrote, incremental or not.
    directory : path
        Receives ``{table}.safetensors`` for each table; created if it is missing.
    since : path, optional
        An earlier checkpoint of the same training. The files then have only the rows that have changed since
        that checkpoint, and ``removed`` has the ids whose rows were removed.
    tables : sequence of str
        The tables to write; all if empty.
    dtype : str
        The dtype of the rows: ``float32`` or ``bfloat16``.

    Returns
    -------
    dict of str to Path
        The files, by table.

    Raises
    ------
    CheckpointError
        A checkpoint is not complete; or `since` is later, or from another model, optimizer or training run.
    ConfigurationError
        There is no such table or dtype.
    FleetError
        A disk operation fails; the message names the file.
    """
    if dtype not in _DTYPES:
        raise ConfigurationError(f"rows as {dtype!r}, expected {' or '.join(_DTYPES)}")
    found = Checkpoint(Path(checkpoint))
    earlier = None if since is None else Checkpoint(Path(since))
    if earlier is not None:
        _check_earlier(earlier, found)
    known = sorted({file.rows.table for file in found.manifest.files if file.rows is not None})
    if unknown := sorted(set(tables).difference(known)):
        raise ConfigurationError(
            f"{found.directory} has no table {unknown[0]!r}; expected some of {', '.join(known) or 'none'}"
        )
    written = {}
    for table in tables or known:
        path = Path(directory) / f"{quote(table, safe='')}.safetensors"
        write_table_file(path, _SavedTable(found, table, earlier), _DTYPES[dtype])
        written[table] = path
    return written


def write_table_file(path: Path, rows: "Snapshot | _SavedTable", dtype: torch.dtype = torch.float32) -> None:
    """Write rows to a safetensors file, keeping only one part in memory at a time.

    The file has ``ids``, int64[n], and ``rows``, of `dtype` and shape [n, dimension], in no particular order.
    ``removed``, int64[m], are the ids whose rows were removed since the step ``since`` in its metadata.

    Parameters
    ----------
    path : Path
    rows : Snapshot
        The result of `Table.snapshot`, which is read to the end.
    dtype : torch.dtype
        float32 or bfloat16.

    Raises
    ------
    FleetError
        A disk operation fails; the message names the file.
    """

    def columns(part: TableRows) -> dict[str, Tensor]:
        return {"ids": torch.from_numpy(part.ids), "rows": part.values.to(dtype)}

    since = "" if rows.since is None else str(rows.since)
    with disk_errors(path):
        write_parts(
            path,
            {"removed": torch.from_numpy(rows.removed)},
            columns(rows.none),
            rows.num_rows,
            map(columns, rows.parts()),
            {"format": "pt", "step": str(rows.step), "since": since},
        )


def read_table_file(path: Path) -> tuple[TableRows, Tensor]:
    """Read a file that `write_table_file` or `export_tables` wrote.

    Returns
    -------
    rows : TableRows
        By ascending id, without optimizer state.
    removed : int64[m]
        The ids whose rows were removed.

    Raises
    ------
    SafetensorError
        The file is not a safetensors file.
    """
    tensors = load_file(path)
    ids = tensors["ids"].numpy()
    order = np.argsort(ids)
    rows = tensors["rows"].float()[torch.from_numpy(order)]
    return TableRows(ids[order], rows, {}), tensors["removed"]


class _SavedTable:
    """A table in a checkpoint, with the same interface as `Snapshot`."""

    def __init__(self, checkpoint: Checkpoint, table: str, earlier: Checkpoint | None = None) -> None:
        self._checkpoint = checkpoint
        self._table = table
        self._files = row_files(checkpoint, table, range(SHARDS))
        self.step = checkpoint.manifest.step
        self.since: int | None = None
        self.removed = np.zeros(0, dtype=np.int64)
        self._after = -1
        """The update count after which a row must have changed to be written; -1 for every row."""
        if earlier is not None:
            before = _SavedTable(earlier, table)
            # The smallest of the servers' counts: without barriers, some servers have received more updates.
            own = [record.updates for found, _, record in before._files if found is earlier]
            self.since, self._after = before.step, min(own)
            # Computed from all ids: the files record only what was removed since their own base.
            self.removed = np.setdiff1d(before._ids(), self._ids())

    @cached_property
    def none(self) -> TableRows:
        """An empty set of rows with the dtypes and row shapes of those that `parts` yields."""
        return rows_at(next(self._all_rows("ids", "values")), np.zeros(0, dtype=np.int64))

    @cached_property
    def num_rows(self) -> int:
        """The number of rows to write."""
        return sum(part.ids.size for part in self._changed_rows("ids", "marks.last"))

    def parts(self) -> Iterator[TableRows]:
        """Yield the rows to write, in parts."""
        return self._changed_rows("ids", "values", "marks.last")

    def _ids(self) -> NDArray[np.int64]:
        return np.concatenate([part.ids for part in self._all_rows("ids")])

    def _changed_rows(self, *columns: str) -> Iterator[TableRows]:
        for part in self._all_rows(*columns):
            yield rows_at(part, np.flatnonzero(part.marks["last"].numpy() > self._after))

    def _all_rows(self, *columns: str) -> Iterator[TableRows]:
        """Yield every row once, with the selected columns."""
        for found, file, _ in self._files:
            for _, part in parts_of(found, file, self._table, columns):
                if found is not self._checkpoint:
                    part = rows_at(part, np.flatnonzero(~find_among(part.ids, self._superseded)[0]))
                yield part

    @cached_property
    def _superseded(self) -> NDArray[np.int64]:
        """The sorted ids of rows that have changed or been removed since the base was saved."""
        changed = [np.zeros(0, dtype=np.int64)]
        for found, file, record in self._files:
            if found is self._checkpoint and record.base is not None:
                for removed, rows in parts_of(found, file, self._table, ["ids"]):
                    changed += [removed, rows.ids]
        return np.unique(np.concatenate(changed))


def _check_earlier(earlier: Checkpoint, found: Checkpoint) -> None:
    """Raise an error unless `earlier` is an earlier checkpoint of the same training run."""
    if earlier.manifest.step > found.manifest.step:
        raise CheckpointError(
            f"{earlier.directory} is of step {earlier.manifest.step}, and {found.directory} of step "
            f"{found.manifest.step}; expected `since` to be an earlier checkpoint of the same training run"
        )
    after = found.manifest.after
    # A full list has dropped the oldest saves, and `earlier` may be one of them.
    before = None if after is None or len(after) >= MOST_BEFORE else (*after, found.manifest.save)
    if before is not None and earlier.manifest.save not in before:
        raise CheckpointError(
            f"{earlier.directory} is the save {earlier.manifest.save}, which is not one of the "
            f"{len(before) - 1} saves before {found.directory}: another training run wrote it, or this run "
            "has since resumed from an older checkpoint; expected `since` to be an earlier checkpoint of "
            "the same training run"
        )
    here, there = dict(earlier.manifest.facts), dict(found.manifest.facts)
    for facts in (here, there):
        facts.pop(TRAINERS_STATE, None)  # a trainer has no state before its first step
    if difference := describe_difference(here, there):
        raise CheckpointError(
            f"{earlier.directory} (here) and {found.directory} (there) are from different training runs: "
            f"{difference}; expected `since` to be an earlier checkpoint of the same training run"
        )


@cache
def _warn_of_extra_state(names: str) -> None:
    """Warn once that a safetensors file cannot store some entries of the state dict."""
    _log.warning(
        "the exported state dict leaves out %s, which get_extra_state() returns and which is not a tensor; "
        "load it with load_state_dict(..., strict=False)",
        names,
    )
