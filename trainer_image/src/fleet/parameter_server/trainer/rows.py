"""A trainer's access to tables on the servers: look-ups of rows, and gradients of rows.

A look-up requests rows from every server that holds some of the ids, in parts of bounded size. Gradients are
collected from backward passes and sent in ``step()``, one for each table and server. In modes with a common
step, a step ends once every server has updated every table, so that no table is ever more than one step
ahead of another.
"""

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Parameter

from fleet.errors import ConfigurationError
from fleet.nn.embedding import Touched, to_device, to_host
from fleet.parameter_server.trainer.replies import LookUp, Replies
from fleet.plan import Source
from fleet.process import progress
from fleet.process.finite import OfRows
from fleet.tables import Placement, RowGradients, merge
from fleet.tables.index import find_among
from fleet.wire import Kind
from fleet.wire.rows import PART_BYTES, most_rows, pack_ids, pack_row_gradient

if TYPE_CHECKING:
    from fleet.parameter_server.transport.stream import ResumableStream

__all__ = ["TrainerRows", "rows_of_tables", "write_rows"]

_BATCHES: Final = 2
"""The number of batches whose prefetched rows are kept: the current batch and the next."""


@dataclass(frozen=True, slots=True)
class _Prefetched:
    """Prefetched rows of one table for one batch.

    Attributes
    ----------
    step : int
        The step in which the rows were requested.
    ids : int64[n]
        Ascending and distinct ids.
    look_up : LookUp
    """

    step: int
    ids: NDArray[np.int64]
    look_up: LookUp


class TrainerRows:
    """The tables on the servers, as a `fleet.nn.RowSource` for a trainer.

    Parameters
    ----------
    streams : sequence of ResumableStream
        The stream to each server.
    replies : Replies
        The replies expected from the servers.
    """

    def __init__(self, streams: "Sequence[ResumableStream]", replies: Replies) -> None:
        self._streams = streams
        self.replies = replies
        self._tables = {table.name: table for table in replies.plan.tables}
        self._most_at_once = {
            name: max(1, PART_BYTES // table.row_bytes) for name, table in self._tables.items()
        }
        """The largest number of rows of each table in one request."""
        self._own = {name: table.own for name, table in self._tables.items() if table.own is not None}
        """The weights of tables that this trainer also stores; their gradients are sparse."""
        self._waits_each_step = replies.plan.has_common_step or bool(self._own)
        self._placement = Placement.over(len(streams))
        self._placed: dict[str, tuple[NDArray[np.int64], dict[int, NDArray[np.int64]]]] = {}
        """For each table, the latest ids and their positions by server; a gradient often has the same ids."""
        self._order = threading.Lock()
        """Held while requests are sent, because each server answers requests in the order of sending."""
        self._prefetched: dict[str, deque[_Prefetched]] = {}
        self._touched: dict[tuple[str, int], Touched] = {}
        """The rows with gradients, by table and look-up."""

    def __bool__(self) -> bool:
        """Return whether the model has any tables."""
        return bool(self._tables)

    def fetch(self, name: str, ids: NDArray[np.int64]) -> Tensor:
        """Return the rows of the given ids, as of this trainer's current step.

        Parameters
        ----------
        name : str
            The table's name.
        ids : int64[n]
            Ascending and distinct.

        Returns
        -------
        float32[n, dimension]

        Raises
        ------
        FleetError
            A server refuses the request, or does not answer in time.
        """
        step, rows, missing = self.replies.step, None, np.arange(ids.size)
        for batch in self._prefetched.get(name, ()):
            # Only batches prefetched in the previous step: those of this step are for the next step.
            if batch.step + 1 != step:
                continue
            found, at = find_among(ids[missing], batch.ids)
            if found.any():
                known = self.replies.wait_for_rows(batch.look_up)
                rows = known.new_empty(ids.size, known.shape[1]) if rows is None else rows
                rows[torch.from_numpy(missing[found])] = known[torch.from_numpy(at)]
                missing = missing[~found]
        if rows is None:
            return self.replies.wait_for_rows(self._request(name, ids, step))
        if missing.size:
            others = self.replies.wait_for_rows(self._request(name, ids[missing], step))
            rows[torch.from_numpy(missing)] = others
        return rows

    def prefetch(self, name: str, ids: NDArray[np.int64]) -> None:
        """Request the rows of the next batch without waiting for them.

        The rows are requested as rows of the next step. In modes with a common step, the confirmations of the
        current step include those requested rows that the step has changed.
        """
        step = self.replies.step
        batch = _Prefetched(step, ids, self._request(name, ids, step + 1))
        self._prefetched.setdefault(name, deque(maxlen=_BATCHES)).append(batch)

    def _request(self, name: str, ids: NDArray[np.int64], step: int) -> LookUp:
        """Request rows for a step. If a server has too many open requests, wait first."""
        self.replies.check()
        table, most = self._tables[name], self._most_at_once[name]
        parts = [
            (server, at[begin : begin + most])
            for server, at in self._positions(name, ids).items()
            for begin in range(0, at.size, most)
        ]
        rows = torch.empty(ids.size, table.config.dimension, dtype=torch.float32)  # whatever torch's default
        look_up = LookUp(table, rows, len(parts))
        with self._order:
            for server, at in parts:
                self.replies.expect_rows(server, look_up, at)
                self._streams[server].send(Kind.LOOK_UP, pack_ids(ids[at]), step=step, block=table.number)
        progress.count("rows_looked_up", ids.size)
        return look_up

    def _positions(self, name: str, ids: NDArray[np.int64]) -> dict[int, NDArray[np.int64]]:
        """Return the positions of each server's ids. The ids must not change afterwards."""
        placed = self._placed.get(name)
        if placed is None or placed[0] is not ids:
            placed = self._placed[name] = ids, self._placement.positions(ids)
        return placed[1]

    def touched(self, name: str, touched: Touched) -> None:
        """Record the rows of a look-up that received a gradient, to which later backward passes add."""
        self._touched[name, touched.order] = touched

    def gradients(self) -> OfRows:
        """Return, for each table, the sorted ids with gradients, and each id's summed gradient.

        The gradients are added in the order of the look-ups, regardless of the order of the backward pass.

        Raises
        ------
        ConfigurationError
            The gradient of a table that this trainer also stores is not sparse.
        """
        parts = {
            name: [_rows_of(name, weight)] for name, weight in self._own.items() if weight.grad is not None
        }
        for (name, _), touched in sorted(self._touched.items()):
            if (gradient := touched.gradient()) is not None:
                parts.setdefault(name, []).append(RowGradients(touched.ids, gradient))
        return {
            name: (total.ids, total.values)
            for name, of_table in parts.items()
            for total in ([of_table[0]] if len(of_table) == 1 else [merge(of_table)])
        }

    def gradient_tensors(self) -> list[Tensor]:
        """Return the row gradients from the backward passes, which the caller may change in place."""
        leaves = (*(touched.rows for touched in self._touched.values()), *self._own.values())
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    def forget_gradients(self) -> None:
        """Drop all row gradients since the last step."""
        touched, self._touched = self._touched, {}
        for each in touched.values():
            each.rows.grad = None

    def values_seen(self, name: str, ids: NDArray[np.int64]) -> Tensor:
        """Return the values that the first look-up of the step returned for rows with gradients.

        Parameters
        ----------
        name : str
            The table's name.
        ids : int64[n]

        Returns
        -------
        float32[n, dimension]
        """
        touched = [each for (of, _), each in sorted(self._touched.items()) if of == name]
        known, places = np.unique(np.concatenate([each.ids for each in touched]), return_index=True)
        values = torch.cat([each.values() for each in touched])
        return values[torch.from_numpy(places[np.searchsorted(known, ids)])]

    def send(self, gradients: OfRows, step: int | None = None) -> None:
        """Send each table's gradient, even an empty one, to every server.

        Parameters
        ----------
        gradients : mapping of name to (ids, Tensor)
        step : int, optional
            The step of the gradients; by default the trainer's current step.
        """
        # The confirmations of the previous step come first: `expect_table_steps` forgets what was expected.
        self.wait()
        step = self.replies.step if step is None else step
        self.replies.expect_table_steps(step)
        for table in self._tables.values():
            ids, values = gradients.get(table.name, (np.zeros(0, dtype=np.int64), None))
            progress.count("row_gradients_sent", ids.size)
            servers = self._positions(table.name, ids)
            for server, stream in enumerate(self._streams):
                payload = memoryview(b"")
                if server in servers and values is not None:
                    at = servers[server]
                    if at.size > (most := most_rows(table.row_bytes)):
                        raise ConfigurationError(
                            f"one step has gradients of {at.size} rows of table {table.name} for one server, "
                            f"expected at most {most}; use smaller batches, more parameter servers, or merge "
                            "fewer steps (max_merge_var_num)"
                        )
                    of_ids, of_values = ids, values.numpy()
                    if at.size < ids.size:
                        of_ids, of_values = of_ids[at], of_values.take(at, axis=0)
                    payload = pack_row_gradient(of_ids, of_values)
                # The end of the step follows.
                stream.send(Kind.ROW_GRADIENT, payload, step=step, block=table.number, more=True)

    def end_step(self) -> None:
        """End a step. If the mode requires it, wait until servers have updated the tables; copy changed rows.

        Without a common step, waiting is necessary only for tables that this trainer also stores. For any
        other table, a server applies a trainer's gradient before it answers the trainer's next look-up, which
        follows on the same stream, and the next step waits for this step.
        """
        if self._waits_each_step:
            self.wait()
            self.adopt()

    @property
    def settled(self) -> bool:
        """True if every server has applied the row gradients that were sent last."""
        return self.replies.tables_stepped

    def wait(self, *, background: bool = False) -> None:
        """Wait until `settled` is True; see `Replies.wait_until`."""
        self.replies.wait_for_tables(background=background)

    def adopt(self) -> None:
        """Copy changed rows to this trainer's weights and prefetched rows. For the training thread only."""
        for table, ids, rows in self.replies.take_changed_rows():
            if table.own is not None:
                write_rows(table.own, ids, rows)
                continue
            for batch in self._prefetched.get(table.name, ()):
                found, at = find_among(ids, batch.ids)
                batch.look_up.rows[torch.from_numpy(at)] = rows[torch.from_numpy(found)]

    def take_all(self) -> None:
        """Fetch all rows of the tables that this trainer also stores; drop prefetched rows."""
        self._prefetched.clear()
        for name, weight in self._own.items():
            num_rows, most = len(weight), self._most_at_once[name]
            for begin in range(0, num_rows, most):
                ids = np.arange(begin, min(begin + most, num_rows), dtype=np.int64)
                write_rows(weight, ids, self.fetch(name, ids))


@torch.no_grad()
def write_rows(weight: Parameter, ids: NDArray[np.int64], rows: Tensor) -> None:
    """Overwrite the given rows of a weight."""
    weight[torch.from_numpy(ids).to(weight.device)] = to_device(rows, weight.device)


def _rows_of(name: str, weight: Parameter) -> RowGradients:
    """Return a weight's sparse gradient, merged by row; the weight's own gradient does not change."""
    if weight.grad is None or not weight.grad.is_sparse:
        raise ConfigurationError(
            f"the gradient of {name} is not sparse, but its module has sparse=True, so that parameter "
            "servers step it row by row; is the weight also used elsewhere? If so, use sparse=False"
        )
    gradient = weight.grad.coalesce().detach()
    return RowGradients(gradient.indices()[0].cpu().numpy(), to_host(gradient.values()))


@torch.no_grad()
def rows_of_tables(source: Source, table_ids: Mapping[str, Any]) -> dict[str, Tensor]:
    """Look up the rows of the given ids, to export them with a model.

    Parameters
    ----------
    source : Source
    table_ids : mapping of str to int[n]
        The ids for each table, as tensors, arrays or lists, in any order; ids may repeat.

    Returns
    -------
    dict of str to Tensor
        For each table, ``{table}.ids``, int64[m], ascending and distinct, and ``{table}.rows``,
        float32[m, dim].

    Raises
    ------
    ConfigurationError
        No ids are given for a table of the model, there is no table with a given name, or the session has
        ended.
    """
    tables = {each.name: each.declared for each in source.tables if each.name not in source.own_tables}
    if missing := [name for name in tables if name not in table_ids]:
        raise ConfigurationError(
            f"the rows of table {', '.join(missing)} are on the parameter servers, not in the state dict of "
            "one process; expected the ids to export, as in fleet.save_inference_model(directory, "
            "table_ids={name: ids}). To export all rows, save a checkpoint and run python -m fleet.checkpoint"
        )
    if unknown := [name for name in table_ids if name not in tables]:
        raise ConfigurationError(
            f"table_ids names {unknown[0]!r}, which is not a table on the servers; expected "
            f"{', '.join(tables) or 'no ids, as there are no tables'}"
        )
    found: dict[str, Tensor] = {}
    for name, given in table_ids.items():
        ids = torch.from_numpy(np.unique(torch.as_tensor(given).cpu().numpy()))
        found |= {f"{name}.ids": ids.long(), f"{name}.rows": tables[name].look_up(ids).rows}
    return found
