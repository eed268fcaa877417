"""A table of embeddings as a model has it: what it is, and the one way to read rows and to give gradients.

The rows are the parameter servers'. A forward pass looks up the distinct ones of its batch, once; they become
a leaf of autograd, from which modules take what they need by position. So autograd itself sums the gradient
of each row, and what has come together until ``step()`` is sent.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Parameter

from fleet.errors import ConfigurationError
from fleet.tables.admission import Admission
from fleet.tables.devices import to_device, to_host
from fleet.tables.eviction import Eviction
from fleet.tables.first_values import FirstValues, Normal
from fleet.tables.kernels import distinct_ids
from fleet.tables.row_types import Float32, RowType
from fleet.tables.rules import RowRule, rule_of
from fleet.tables.storage import IN_MEMORY, Storage
from fleet.tables.table import TableConfig

__all__ = ["DistributedTable", "LookedUp", "RowSource", "Touched"]


_order = itertools.count()
"""Counts look-ups."""


class LookedUp(NamedTuple):
    """The rows of a batch.

    Attributes
    ----------
    rows : float32[n, dimension]
        The distinct rows, on the device of the ids; a leaf that takes a gradient where gradients are on.
    positions : int64, of the shape of the ids
        Which of the rows each id has.
    """

    rows: Tensor
    positions: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Touched:
    """Rows that were looked up, whose gradient has come.

    Attributes
    ----------
    order : int
        Counts the look-ups: gradients come in the reverse order, and are summed in this one.
    ids : int64[n]
        Ascending, none of them twice.
    rows : float32[n or more, dimension]
        The leaf; only those `at` these places have ids.
    at : int64[n], optional
        None for all.
    """

    order: int
    ids: NDArray[np.int64]
    rows: Tensor
    at: NDArray[np.int64] | None = None

    def gradient(self) -> Tensor | None:
        """Return the gradient of the ids, in memory of the host; None where it was dropped."""
        if self.rows.grad is None:
            return None
        return self._at(self.rows.grad.detach())

    def values(self) -> Tensor:
        """Return the ids' rows as they were looked up, in memory of the host."""
        return self._at(self.rows.detach())

    def _at(self, whole: Tensor) -> Tensor:
        return to_host(whole if self.at is None else whole[torch.from_numpy(self.at).to(whole.device)])


class RowSource(Protocol):
    """Where the rows of tables come from, and where their gradients go: a trainer's session."""

    def look_up(self, name: str, ids: NDArray[np.int64]) -> Tensor:
        """Return the rows of ids.

        Parameters
        ----------
        name : str
            The table's.
        ids : int64[n]
            None of them twice.

        Returns
        -------
        float32[n, dimension]
            On the host.
        """

    def prefetch(self, name: str, ids: NDArray[np.int64]) -> None:
        """Ask for rows that the next batch needs, without waiting for them.

        Parameters
        ----------
        name : str
            The table's.
        ids : int64[n]
            None of them twice.
        """

    def touched(self, name: str, touched: Touched) -> None:
        """Take note that rows have a gradient; called once a look-up, in the backward pass.

        Parameters
        ----------
        name : str
            The table's.
        touched : Touched
            The ids, and the rows that have the gradient.
        """


@dataclass(eq=False)
class DistributedTable:
    """A table that lives on the parameter servers; several modules may read one.

    Attributes
    ----------
    name : str
        Another one for each table of a model: it is part of what rows begin with.
    dimension : int
    num_embeddings : int, optional
        Ids are below it and not negative; without it any 64-bit id is one.
    first_values : FirstValues
        What rows are before their first update.
    seed : int
    rule : RowRule, optional
        What an update does to a row. Without it that is what the optimizer says whose param group holds the
        table's `placeholder`, with its options and their schedules.
    options : mapping
        Of `rule`, whose defaults they replace; a function of the number of the table's updates is a schedule.
    row_type : RowType
        As what numbers rows are stored: ``fleet.tables.Float32()`` or ``fleet.tables.BFloat16()``.
    admission : Admission, optional
        Which ids get a row; without it each does with its first update.
    eviction : tuple of Eviction
        Which rows go.
    storage : Storage
        Where the servers keep rows: ``fleet.tables.Memory()``, or ``fleet.tables.LocalDisk(memory=…)``.
    warm_start : callable, optional
        Returns ids and vectors, with which the table begins; other ids begin with `first_values`. Called on
        the servers alone, each of which keeps what belongs to it: it must return the same on all of them.
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
            raise ConfigurationError("a table has no name; expected name='…', another one for each table")
        if self.rule is None and self.options:
            raise ConfigurationError(
                f"table {self.name} has options ({', '.join(self.options)}) and no rule; expected rule=… "
                "with them, or the options in the param group of the optimizer that holds the table"
            )
        self.placeholder = Parameter(torch.empty(0, self.dimension, dtype=torch.float32))
        """What an optimizer's param group holds of the table; it has no elements."""
        setattr(self.placeholder, "fleet_table", self.name)  # noqa: B010 - by which it is told from others
        self._source: RowSource | None = None

    def config(
        self, optimizer_class: type | None = None, group: Mapping[str, Any] | None = None
    ) -> TableConfig:
        """Return what servers make the table from.

        Parameters
        ----------
        optimizer_class : type, optional
        group : mapping, optional
            The options of the param group that holds the placeholder, if one does.

        Raises
        ------
        ConfigurationError
            Neither the table nor a param group says how it is stepped, or no rule does what the class does.
        """
        rule, options = self.rule, dict(self.options)
        if rule is None:
            if optimizer_class is None or group is None:
                raise ConfigurationError(
                    f"table {self.name} is in no param group of the optimizer, and has no rule of its own; "
                    "expected an optimizer over model.parameters(), or rule=…"
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
        """Read rows from a trainer's session from now on.

        Parameters
        ----------
        source : RowSource
            The session.
        """
        self._source = source

    def look_up(self, ids: Tensor, *, padding: int | None = None, what: str = "") -> LookedUp:
        """Look up the distinct rows of a batch.

        Parameters
        ----------
        ids : int64 or int32, of any shape
        padding : int, optional
            An id whose row is zero, and takes no gradient.
        what : str
            For messages: the feature whose ids they are.

        Raises
        ------
        ConfigurationError
            An id is out of range, or is no whole number; or there is no session.
        FleetError
            The servers do not answer.
        """
        flat, source = self._checked(ids, what), self._bound()
        distinct, positions = distinct_ids(flat)
        at = np.flatnonzero(distinct != padding) if padding is not None else None
        if at is not None and at.size == distinct.size:
            at = None
        wanted = distinct if at is None else distinct[at]
        rows = source.look_up(self.name, wanted)
        if at is not None:
            found, rows = rows, rows.new_zeros(distinct.size, self.dimension)
            rows[torch.from_numpy(at)] = found
        rows = to_device(rows, ids.device)
        if torch.is_grad_enabled():
            self._watch(rows.requires_grad_(), wanted, at)
        return LookedUp(rows, to_device(torch.from_numpy(positions.reshape(ids.shape)), ids.device))

    def prefetch(self, ids: Tensor, *, padding: int | None = None) -> None:
        """Ask for the distinct rows of the next batch, without waiting for them.

        Parameters
        ----------
        ids : integer tensor of any shape
            Of the next batch.
        padding : int, optional
            An id whose row is not needed.

        Raises
        ------
        ConfigurationError
            As of `look_up`.
        """
        distinct, _ = distinct_ids(self._checked(ids, ""))
        self._bound().prefetch(self.name, distinct if padding is None else distinct[distinct != padding])

    def check(self, ids: Tensor, what: str) -> None:
        """Refuse ids that cannot be looked up, as `look_up` does.

        Parameters
        ----------
        ids : integer tensor of any shape
            What is to be looked up.
        what : str
            What the error says the ids are.

        Raises
        ------
        ConfigurationError
            They are no integers, or one is out of range.
        """
        self._checked(ids, what)

    def _bound(self) -> RowSource:
        if self._source is None:
            raise ConfigurationError(
                f"table {self.name} is on the parameter servers, and was read without a session; expected "
                "fleet.init_worker() before, and fleet.stop_worker() after the last look-up"
            )
        return self._source

    def _watch(self, rows: Tensor, ids: NDArray[np.int64], at: NDArray[np.int64] | None) -> None:
        """Tell the session of rows once they have a gradient; until then only the graph has them."""
        source, order = self._source, next(_order)

        def ready(leaf: Tensor) -> None:
            if source is not None:
                source.touched(self.name, Touched(order, ids, leaf, at))

        rows.register_post_accumulate_grad_hook(ready)  # type: ignore[no-untyped-call]

    def _checked(self, ids: Tensor, what: str) -> NDArray[np.int64]:
        """Return ids as they travel, all of them in range."""
        of = f"table {self.name}{f', feature {what}' if what else ''}"
        if ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool:
            raise ConfigurationError(f"{of}: ids of dtype {ids.dtype}, expected whole numbers (torch.int64)")
        flat = ids.detach().reshape(-1).to("cpu", torch.int64).numpy()
        limit = self.num_embeddings
        if limit is None or flat.size == 0 or int(flat.view(np.uint64).max()) < limit:
            return flat
        at = int(np.flatnonzero(flat.view(np.uint64) >= np.uint64(limit))[0])
        place: Sequence[int] = [int(each) for each in np.unravel_index(at, tuple(ids.shape))]
        raise ConfigurationError(
            f"{of}: id {flat[at]} at position {list(place)} of the batch, expected 0 to {limit - 1}"
        )
