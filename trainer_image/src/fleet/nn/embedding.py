"""Embedding modules, and handles of tables, which look up rows and accumulate gradients.

The rows are on the parameter servers. A forward pass looks up the distinct rows of its batch, once; they
become a leaf of autograd, from which modules select by position. Autograd therefore sums the gradient of each
row, and ``step()`` sends the accumulated gradients.

On a CPU, torch's own backward pass adds one row at a time with its general addition, which takes several
times as long as all other work on the rows of a batch. Here one C loop sums the gradient of each row.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.functional import embedding

from fleet.errors import ConfigurationError
from fleet.tables.admission import Admission
from fleet.tables.config import Float32, RowType, TableConfig
from fleet.tables.eviction import Eviction
from fleet.tables.first_values import Constant, FirstValues, Normal
from fleet.tables.gradients import add_rows
from fleet.tables.ids import distinct_ids
from fleet.tables.rules import RowRule, rule_of
from fleet.tables.storage import IN_MEMORY, Storage

__all__ = [
    "DistributedEmbedding",
    "DistributedTable",
    "LookedUp",
    "RowSource",
    "Touched",
    "sum_at",
    "sums_here",
    "take",
    "to_device",
    "to_host",
]

# Must stay referenced, because torch removes an operator together with its library object.
_operators = torch.library.Library("fleet", "FRAGMENT")  # type: ignore[no-untyped-call]
_operators.define("sum_rows(Tensor positions, Tensor rows, SymInt num_rows) -> Tensor")  # type: ignore[no-untyped-call]
_order = itertools.count()
"""A counter that numbers the look-ups."""


class LookedUp(NamedTuple):
    """The result of looking up a batch of ids in a table.

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
    """The rows of a look-up that received a gradient.

    Attributes
    ----------
    order : int
        The number of the look-up. Gradients arrive in reverse order, but are summed in the order of look-ups.
    ids : int64[n]
        Distinct, ascending.
    rows : float32[n or more, dimension]
        The leaf that the look-up returned.
    at : int64[n], optional
        The position of each id in `rows`; None if row i belongs to id i.
    """

    order: int
    ids: NDArray[np.int64]
    rows: Tensor
    at: NDArray[np.int64] | None = None

    def gradient(self) -> Tensor | None:
        """Return the gradient of the rows with these ids, in host memory, or None if it was dropped."""
        if self.rows.grad is None:
            return None
        return self._at(self.rows.grad.detach())

    def values(self) -> Tensor:
        """Return the values that the look-up returned for these ids, in host memory."""
        return self._at(self.rows.detach())

    def _at(self, whole: Tensor) -> Tensor:
        return to_host(whole if self.at is None else whole[torch.from_numpy(self.at).to(whole.device)])


class RowSource(Protocol):
    """A source of table rows that also accepts their gradients; part of a trainer's session."""

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
        """Request the rows of the next batch without waiting for them.

        Parameters
        ----------
        name : str
            Name of the table.
        ids : int64[n]
            Distinct.
        """

    def touched(self, name: str, touched: Touched) -> None:
        """Accept the gradient of a look-up in the backward pass; called once per look-up.

        Parameters
        ----------
        name : str
            Name of the table.
        touched : Touched
            The ids, and the rows with the gradient.
        """


@dataclass(eq=False)
class DistributedTable:
    """A table on the parameter servers, which several modules may share.

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
        The rule that updates rows. By default, rows are updated like parameters of the optimizer whose param
        group holds the table's `placeholder`, with its options and schedules.
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
            The table has neither a rule nor a param group, or no rule corresponds to the class.
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
        """Request the distinct rows of the next batch without waiting for them.

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
        """Validate ids and return them in host memory.

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
        # Read as unsigned, a negative id is larger than every limit.
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
    """Copy values from host memory to a device asynchronously; later work on the device waits for them."""
    if device.type != "cuda":
        return values.to(device)
    # A GPU copies pinned memory by itself; the driver must first copy any other memory to a pinned buffer.
    return values.pin_memory().to(device, non_blocking=True)


def to_host(values: Tensor) -> Tensor:
    """Copy values from any device to host memory, after waiting for their computation."""
    if not values.is_cuda:
        return values.cpu()
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values)


class DistributedEmbedding(Module):
    """A replacement for ``torch.nn.Embedding`` with a table on the parameter servers.

    Parameters
    ----------
    num_embeddings : int or None
        Ids are 0 to `num_embeddings`, exclusive. None: any 64-bit id is valid.
    embedding_dim : int
    padding_idx : int, optional
        As in torch: the id whose row is zero and is not trained.
    max_norm : float, optional
        Not supported, because a look-up on parameter servers changes nothing.
    name : str
        Name of the table, unique in a model.
    first_values : FirstValues or float, optional
        Values of rows before their first update. The default is ``fleet.tables.Normal()``, as in torch; a
        number is the value of all elements.
    seed : int
        Seed of the first values.
    rule : RowRule, optional
        The rule that updates rows (`fleet.tables.rules`). By default, rows are updated as by the optimizer
        over ``model.parameters()``, with its options and schedules.
    options : mapping, optional
        Options of `rule`.
    table : DistributedTable, optional
        The table of another module, to share it; it replaces all of the above except `padding_idx`.

    Raises
    ------
    ConfigurationError
        An option is not supported; the message names it.
    """

    is_distributed = True

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        *,
        name: str = "",
        first_values: FirstValues | float | None = None,
        seed: int = 0,
        rule: RowRule | None = None,
        options: Mapping[str, Any] | None = None,
        table: DistributedTable | None = None,
    ) -> None:
        super().__init__()
        if max_norm is not None:
            raise ConfigurationError(
                f"table {name or (table.name if table else '')}: max_norm={max_norm} would change rows when "
                "they are looked up, but a look-up on parameter servers changes nothing; expected "
                "max_norm=None, and weight decay or a clipped gradient to keep rows small"
            )
        self.table = table or DistributedTable(
            name, embedding_dim, num_embeddings, _distribution(first_values), seed, rule, options or {}
        )
        if (self.table.num_embeddings, self.table.dimension) != (num_embeddings, embedding_dim):
            raise ConfigurationError(
                f"table {self.table.name} has {self.table.num_embeddings} embeddings of dimension "
                f"{self.table.dimension}, but the module that shares it has {num_embeddings} of "
                f"{embedding_dim}"
            )
        self.padding_idx = _padding_of(padding_idx, num_embeddings, self.table.name)
        self.placeholder = self.table.placeholder

    @property
    def distributed_tables(self) -> tuple[DistributedTable, ...]:
        """The tables of this module."""
        return (self.table,)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the embeddings of ids.

        Parameters
        ----------
        ids : int64 or int32, any shape

        Returns
        -------
        float32[*ids.shape, embedding_dim]

        Raises
        ------
        ConfigurationError
            An id is out of range; the message names the table, the id and its position in the batch.
        """
        rows, positions = self.table.look_up(ids, padding=self.padding_idx)
        return take(rows, positions)

    def prefetch(self, ids: Tensor) -> None:
        """Request the rows of the next batch without waiting for them; see `fleet.prefetch`.

        Parameters
        ----------
        ids : integer tensor, any shape
            The ids with which the module will be called.

        Raises
        ------
        ConfigurationError
            An id is out of range, or there is no session yet.
        """
        self.table.prefetch(ids, padding=self.padding_idx)

    def extra_repr(self) -> str:
        """Return the arguments that ``print(model)`` shows."""
        padding = f", padding_idx={self.padding_idx}" if self.padding_idx is not None else ""
        return f"{self.table.num_embeddings}, {self.table.dimension}{padding}, name={self.table.name!r}"


def _distribution(values: FirstValues | float | None) -> FirstValues:
    if values is None:
        return Normal()
    return Constant(values) if isinstance(values, int | float) else values


def _padding_of(padding_idx: int | None, num_embeddings: int | None, name: str) -> int | None:
    """Return the padding id; as in torch, a negative index counts from the end."""
    if padding_idx is None or num_embeddings is None:
        return padding_idx
    if not -num_embeddings <= padding_idx < num_embeddings:
        raise ConfigurationError(
            f"table {name}: padding_idx is {padding_idx}, expected {-num_embeddings} to {num_embeddings - 1}"
        )
    return padding_idx % num_embeddings


def take(rows: Tensor, positions: Tensor) -> Tensor:
    """Return the row at each position; the gradient of `rows` is summed per row.

    Parameters
    ----------
    rows : float[n, dimension]
    positions : int64 or int32, any shape

    Returns
    -------
    float[*positions.shape, dimension]
    """
    if not sums_here(rows):
        return embedding(positions, rows)
    taken: Tensor = _Take.apply(rows, positions)
    return taken


def sums_here(rows: Tensor) -> bool:
    """Return whether the C extension, instead of torch, sums the gradients."""
    return rows.requires_grad and rows.is_cpu and not torch.compiler.is_compiling()


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(positions)
        ctx.num_rows = len(rows)
        return embedding(positions, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (positions,), (gradient,) = ctx.saved_tensors, gradients
        return sum_at(positions.reshape(-1), gradient.reshape(-1, gradient.shape[-1]), ctx.num_rows), None


def sum_at(positions: Tensor, gradient: Tensor, num_rows: int) -> Tensor:
    """Return the sum of each row's gradients as float[num_rows, dimension]."""
    if torch.is_grad_enabled() and gradient.requires_grad:
        # A second derivative is required, which only torch's own operation has.
        return gradient.new_zeros(num_rows, gradient.shape[1]).index_add(0, positions, gradient)
    sums: Tensor = torch.ops.fleet.sum_rows(positions, gradient, num_rows)
    return sums


# A torch operator, so that torch resolves lazily negated views, can trace it, and knows its shape.
@torch.library.impl(_operators, "sum_rows", "CPU")
def _sum_rows(positions: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    return add_rows(rows.new_zeros(num_rows, rows.shape[1]), positions.long(), rows.contiguous())


@torch.library.impl(_operators, "sum_rows", "Meta")
def _shape_of_sums(positions: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    del positions
    return rows.new_empty(num_rows, rows.shape[1])
