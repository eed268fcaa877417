"""The handle of an embedding table that a model holds: its configuration, its look-ups and its gradients.

The rows are on the parameter servers. A forward pass looks up the distinct rows of its batch, once; they
become a leaf of autograd, from which modules select by position. Autograd therefore sums the gradient of each
row, and ``step()`` sends the accumulated gradients.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Parameter

from fleet.errors import ConfigurationError
from fleet.tables.admission import Admission
from fleet.tables.config import Float32, RowType, TableConfig
from fleet.tables.eviction import Eviction
from fleet.tables.first_values import FirstValues, Normal
from fleet.tables.ids import distinct_ids
from fleet.tables.rules import RowRule, rule_of
from fleet.tables.storage import IN_MEMORY, Storage

__all__ = ["DistributedTable", "LookedUp", "RowSource", "Touched", "to_device", "to_host"]

_order = itertools.count()
"""Numbers look-ups."""


class LookedUp(NamedTuple):
    """The rows of a batch.

    Attributes
    ----------
    rows : float32[n, dimension]
        The distinct rows, on the device of the ids; a leaf that requires a gradient if gradients are enabled.
    positions : int64, same shape as the ids
        The row of each id.
    """

    rows: Tensor
    positions: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Touched:
    """Rows of one look-up that have a gradient.

    Attributes
    ----------
    order : int
        The number of the look-up. Gradients arrive in reverse order, but are summed in the order of look-ups.
    ids : int64[n]
        Distinct, ascending.
    rows : float32[n or more, dimension]
        The leaf.
    at : int64[n], optional
        The position of each id in `rows`; None if row i is that of id i.
    """

    order: int
    ids: NDArray[np.int64]
    rows: Tensor
    at: NDArray[np.int64] | None = None

    def gradient(self) -> Tensor | None:
        """Return the gradient of the rows with these ids, in host memory; None if it was dropped."""
        if self.rows.grad is None:
            return None
        return self._at(self.rows.grad.detach())

    def values(self) -> Tensor:
        """Return the rows of the ids as they were looked up, in host memory."""
        return self._at(self.rows.detach())

    def _at(self, whole: Tensor) -> Tensor:
        return to_host(whole if self.at is None else whole[torch.from_numpy(self.at).to(whole.device)])


class RowSource(Protocol):
    """The interface of a trainer's session, which serves rows of tables and receives their gradients."""

    def fetch(self, name: str, ids: NDArray[np.int64]) -> Tensor:
        """Return the rows of ids.

        Parameters
        ----------
        name : str
            Name of the table.
        ids : int64[n]
            Distinct.

        Returns
        -------
        float32[n, dimension]
            In host memory.
        """

    def prefetch(self, name: str, ids: NDArray[np.int64]) -> None:
        """Request the rows of the next batch, without waiting for them.

        Parameters
        ----------
        name : str
            Name of the table.
        ids : int64[n]
            Distinct.
        """

    def touched(self, name: str, touched: Touched) -> None:
        """Accept the gradient of a look-up; called once for each look-up, in the backward pass.

        Parameters
        ----------
        name : str
            Name of the table.
        touched : Touched
            The ids, and the rows with the gradient.
        """


@dataclass(eq=False)
class DistributedTable:
    """A table on the parameter servers; several modules may share one.

    Attributes
    ----------
    name : str
        Must be unique in a model; first values depend on it.
    dimension : int
    num_embeddings : int, optional
        Ids are 0 to `num_embeddings`, exclusive; without it any 64-bit id is valid.
    first_values : FirstValues
        Values of rows before their first update.
    seed : int
    rule : RowRule, optional
        How an update steps a row. Without it, rows are stepped as the optimizer whose param group holds the
        table's `placeholder` would, with its options and schedules.
    options : mapping
        Options of `rule` that differ from its defaults; a function of the number of updates is a schedule.
    row_type : RowType
        How values are stored: ``fleet.tables.Float32()`` or ``fleet.tables.BFloat16()``.
    admission : Admission, optional
        Which ids get a row; without it, each id gets one at its first update.
    eviction : tuple of Eviction
        Which rows are evicted.
    storage : Storage
        Where the servers keep rows: ``fleet.tables.Memory()`` or ``fleet.tables.LocalDisk(memory=…)``.
    warm_start : callable, optional
        Returns the table's initial ids and vectors; other ids start with `first_values`. It runs only on the
        servers, each of which keeps its own part, so it must return the same on every server.
    """

    name: str
    dimension: int
    num_embeddings: int | None = None
    first_values: FirstValues = field(default_factory=Normal)
    seed: int = 0
    rule: RowRule | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    row_type: RowType = field(default_factory=Float32)
    admission: Admission | None = None
    eviction: tuple[Eviction, ...] = ()
    storage: Storage = IN_MEMORY
    warm_start: Callable[[], tuple[Any, Any]] | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigurationError("a table has no name; expected name='…', unique for each table")
        if self.rule is None and self.options:
            raise ConfigurationError(
                f"table {self.name} has options ({', '.join(self.options)}) but no rule; expected rule=… as "
                "well, or the options in the param group of the optimizer that holds the table"
            )
        self.placeholder = Parameter(torch.empty(0, self.dimension, dtype=torch.float32))
        """The placeholder of the table in an optimizer's param group; it has no elements."""
        setattr(self.placeholder, "fleet_table", self.name)  # noqa: B010 - how the capture recognises it
        self._source: RowSource = _NoSession()

    def config(
        self, optimizer_class: type | None = None, group: Mapping[str, Any] | None = None
    ) -> TableConfig:
        """Return the configuration from which servers create the table.

        Parameters
        ----------
        optimizer_class : type, optional
        group : mapping, optional
            Options of the param group with the placeholder, if there is one.

        Raises
        ------
        ConfigurationError
            The table has neither a rule nor a param group, or no rule does what the class does.
        """
        rule, options = self.rule, dict(self.options)
        if rule is None:
            if optimizer_class is None or group is None:
                raise ConfigurationError(
                    f"table {self.name} is in no param group of the optimizer, and has no rule; expected an "
                    "optimizer over model.parameters(), or rule=…"
                )
            rule, options = rule_of(self.name, optimizer_class, group)
        return TableConfig(
            self.name,
            self.dimension,
            rule,
            self.num_embeddings,
            self.first_values,
            self.seed,
            options,
            self.row_type,
            self.admission,
            self.eviction,
            self.storage,
        )

    def bind(self, source: RowSource) -> None:
        """Use a trainer's session as the source of rows.

        Parameters
        ----------
        source : RowSource
            The trainer's session.
        """
        self._source = source

    def look_up(self, ids: Tensor, *, padding: int | None = None) -> LookedUp:
        """Look up the distinct rows of a batch.

        Parameters
        ----------
        ids : int64 or int32, any shape
        padding : int, optional
            An id whose row is zero and gets no gradient.

        Raises
        ------
        ConfigurationError
            An id is out of range or not an integer, or there is no session.
        FleetError
            The servers do not respond.
        """
        source = self._source
        distinct, positions = distinct_ids(self.check(ids))
        at = np.flatnonzero(distinct != padding) if padding is not None else None
        if at is not None and at.size == distinct.size:
            at = None
        wanted = distinct if at is None else distinct[at]
        rows = source.fetch(self.name, wanted)
        if at is not None:
            found, rows = rows, rows.new_zeros(distinct.size, self.dimension)
            rows[torch.from_numpy(at)] = found
        of_ids = torch.from_numpy(positions.reshape(ids.shape))
        if not ids.is_cpu:
            rows, of_ids = to_device(rows, ids.device), to_device(of_ids, ids.device)
        if torch.is_grad_enabled():
            order = next(_order)
            # The session gets the rows once they have a gradient. Until then, only the graph references them.
            rows.requires_grad_().register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda leaf: source.touched(self.name, Touched(order, wanted, leaf, at))
            )
        return LookedUp(rows, of_ids)

    def prefetch(self, ids: Tensor, *, padding: int | None = None) -> None:
        """Request the distinct rows of the next batch, without waiting for them.

        Parameters
        ----------
        ids : integer tensor, any shape
            Ids of the next batch.
        padding : int, optional
            An id whose row is not needed.

        Raises
        ------
        ConfigurationError
            As for `look_up`.
        """
        distinct, _ = distinct_ids(self.check(ids))
        self._source.prefetch(self.name, distinct if padding is None else distinct[distinct != padding])

    def check(self, ids: Tensor, feature: str = "") -> NDArray[np.int64]:
        """Check ids, and return them in host memory.

        Parameters
        ----------
        ids : integer tensor, any shape
            Ids to look up.
        feature : str
            The feature of the ids, for messages.

        Returns
        -------
        int64[n]
            The ids, flattened.

        Raises
        ------
        ConfigurationError
            An id is out of range or not an integer.
        """
        of = f"table {self.name}{f', feature {feature}' if feature else ''}"
        if ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool:
            raise ConfigurationError(f"{of}: ids of dtype {ids.dtype}, expected whole numbers (torch.int64)")
        flat = ids.detach().reshape(-1).to("cpu", torch.int64).numpy()
        limit = self.num_embeddings
        if limit is None or flat.size == 0 or int(flat.view(np.uint64).max()) < limit:
            return flat
        at = int(np.flatnonzero(flat.view(np.uint64) >= np.uint64(limit))[0])
        position = [int(each) for each in np.unravel_index(at, tuple(ids.shape))]
        raise ConfigurationError(
            f"{of}: id {flat[at]} at position {position} of the batch, expected 0 to {limit - 1}"
        )


class _NoSession:
    """The `RowSource` of a table before it has a session; every method raises ConfigurationError."""

    def fetch(self, name: str, ids: NDArray[np.int64]) -> Tensor:
        del ids
        raise ConfigurationError(
            f"table {name} is on the parameter servers, and was read without a session; call "
            "fleet.init_worker() before the first look-up, and fleet.stop_worker() after the last one"
        )

    def prefetch(self, name: str, ids: NDArray[np.int64]) -> None:
        self.fetch(name, ids)

    def touched(self, name: str, touched: Touched) -> None:
        self.fetch(name, touched.ids)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy values from host memory to a device, asynchronously; later work on the device waits for them."""
    if device.type != "cuda":
        return values.to(device)
    # A GPU copies pinned memory by itself; the driver must first copy any other memory to a pinned buffer.
    return values.pin_memory().to(device, non_blocking=True)


def to_host(values: Tensor) -> Tensor:
    """Copy values from any device to host memory, after waiting until they are computed."""
    if not values.is_cuda:
        return values.cpu()
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values)
