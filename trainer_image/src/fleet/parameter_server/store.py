"""The blocks of a server, with their values and optimizers. Only update records change them.

Only `DenseStore.apply` changes a value. Each record has a gradient or value, its origins (trainers and steps)
and a sequence number. Records for one block are applied one at a time in ascending order, so that they could
be logged and replayed. The training mode's rule determines the effect of an update; the effect depends only
on the value, its optimizer and the record. PyTorch itself computes the steps: each block has its own instance
of the user's optimizer, on a view of the server's values.
"""

import inspect
import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fleet.checkpoint import Piece, cut_state, join_pieces
from fleet.errors import ConfigurationError, FleetError
from fleet.parameter_server.pieces import by_block
from fleet.parameter_server.transport.arena import Arena, Extent, bytes_of, copy_bytes, dtype_of
from fleet.parameter_server.transport.shared_memory import SharedBlocks
from fleet.plan import PlannedBlock, ServerPlan
from fleet.plan.optimizers import build_optimizer
from fleet.wire import HyperParameters
from fleet.without_dynamo import direct_step

__all__ = [
    "DenseStore",
    "DenseUpdate",
    "FailedStep",
    "Origin",
    "Put",
    "Rule",
    "Target",
    "Update",
    "step_by_optimizer",
]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a gradient: a trainer, its attempt and its step."""

    trainer: int
    attempt: int
    """The attempt under which the trainer joined."""
    step: int


@dataclass(slots=True)
class Update:
    """A record that updates a block with the gradients of one or more trainers.

    Attributes
    ----------
    key : int
        The block.
    gradient : Tensor
        A gradient of the block's shape and dtype; in sync mode the mean over the trainers. The rule may
        overwrite it.
    hyper_parameters : tuple of mappings
        The hyper-parameters of the step, by param group.
    origins : tuple of Origin
        The origins of the summed gradients, in the order of the sum.
    seen : Tensor, optional
        The value for which the gradient was computed, if the mode keeps it.
    sequence : int
        The sequence number, which the store assigns; 0 until then.
    """

    key: int
    gradient: Tensor
    hyper_parameters: HyperParameters = ()
    origins: tuple[Origin, ...] = ()
    seen: Tensor | None = None
    sequence: int = 0


@dataclass(slots=True)
class Put:
    """A record that replaces a block's value with one from a checkpoint or a script.

    Attributes
    ----------
    key : int
    value : Tensor
        The new value, of the block's shape and dtype; copied.
    state : mapping of name to entry, optional
        The new state of the optimizer; None keeps the current state.
    sequence : int
        See `Update`.
    """

    key: int
    value: Tensor
    state: Mapping[str, Any] | None = None
    sequence: int = 0


class FailedStep:
    """The first error in a step of a block or table, which ends the server.

    A failed step may leave its block partly updated, so training cannot continue from the values. The failure
    therefore concerns every trainer, not only the trainer whose gradient arrived last: the next call of
    `ServerMode.missing` raises it, and the server reports it to all trainers.

    Parameters
    ----------
    endpoint : str
        The server's endpoint, for messages.
    """

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self.error: FleetError | None = None
        """The error to report to every trainer; None while no step has failed."""

    def note(self, raised: BaseException) -> FleetError:
        """Record a step's exception and log its traceback; return the error to send to all trainers."""
        if self.error is None:
            ours = isinstance(raised, FleetError)
            kind = ConfigurationError if isinstance(raised, ConfigurationError) else FleetError
            reason = (
                str(raised) if ours else f"{type(raised).__name__}: {raised}; the traceback is in its log"
            )
            what = f"a block or table of parameter server {self._endpoint}"
            self.error = kind(f"{what} could not be stepped: {reason}")
            _log.error("%s", self.error, exc_info=None if ours else raised)
        return self.error

    def check(self) -> None:
        """Raise the error of the failed step, if a step has failed."""
        if self.error is not None:
            raise self.error


class DenseUpdate:
    """The optimizer of one block; callers must serialize access.

    Parameters
    ----------
    optimizer_class : type
        The user's torch.optim class.
    value : Tensor
        The block's value, a view of the server's memory, which is updated in place.
    options : mapping
        The options of the block's param group at capture, including kernel flags.
    fused : bool
        Whether to use the fused kernel of the class instead of the kernel that the flags select.
    tensors : mapping of str to str
        The options that the class receives as tensors, with their dtypes.

    Raises
    ------
    ConfigurationError
        The class refuses the options, or has no fused kernel.
    """

    def __init__(
        self,
        optimizer_class: type[Optimizer],
        value: Tensor,
        options: Mapping[str, Any],
        *,
        fused: bool = False,
        tensors: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._value = value.detach()
        self._tensors = {name: getattr(torch, dtype) for name, dtype in tensors.items()}
        # CUDA graph capture is a property of the trainer's GPU; a server's values are in host memory.
        chosen = {name: option for name, option in options.items() if name != "capturable"}
        if self._tensors and chosen.get(
            "foreach"
        ):  # torch allows tensor options with foreach only for graph capture
            chosen["foreach"] = False
        if fused:
            _check_fused(optimizer_class)
            # torch accepts only one of the two kernels.
            chosen |= {"fused": True, "foreach": None}
        try:
            self._optimizer = build_optimizer(optimizer_class, [self._value], self._typed(chosen))
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigurationError(
                f"{optimizer_class.__name__} cannot be built on a parameter server with the options "
                f"{chosen}: {error}; expected a constructor that takes (params, **options) with the options "
                "of its param groups"
            ) from error
        # Without hooks: the trainers run them around the script's own step.
        self._step = direct_step(self._optimizer)

    def apply(self, gradient: Tensor, hyper_parameters: Mapping[str, Any]) -> None:
        """Run one optimizer step on the block.

        Parameters
        ----------
        gradient : Tensor
            The reduced gradient, of the block's shape.
        hyper_parameters : mapping
            The options of this step; they replace those of the previous step.
        """
        options = self._typed(hyper_parameters) if self._tensors else hyper_parameters
        self._optimizer.param_groups[0].update(options)
        self._value.grad = gradient
        try:
            self._step()
        finally:
            # The optimizer must not keep a gradient whose buffer is about to receive another one.
            self._value.grad = None

    def _typed(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the options, converting to tensors those that the optimizer expects as tensors."""
        tensors = {
            name: torch.tensor(options[name], dtype=dtype, device="cpu")
            for name, dtype in self._tensors.items()
            if name in options
        }
        return {**options, **tensors}

    def state(self) -> dict[str, Any]:
        """Return the optimizer's state by name, without copying tensors; empty before the first step."""
        return dict(self._optimizer.state.get(self._value, {}))

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Replace the optimizer's state with a copy of a state that `state` has returned."""
        self._optimizer.state[self._value] = {
            name: entry.detach().clone() if isinstance(entry, Tensor) else entry
            for name, entry in state.items()
        }


def _check_fused(optimizer_class: type[Optimizer]) -> None:
    if "fused" not in inspect.signature(optimizer_class).parameters:
        raise ConfigurationError(
            f"strategy.server_kernels is 'fused', and {optimizer_class.__name__} has no fused kernel; use "
            "'default', or a class that has one, such as SGD, Adam, AdamW or Adagrad"
        )


@dataclass(slots=True)
class _Entry:
    """A block with its value and its optimizer."""

    block: PlannedBlock
    value: Tensor
    optimizer: DenseUpdate | None
    """The optimizer; None in modes such as GEO, in which trainers have the optimizers."""
    limits: tuple[float, float] | None
    """The bounds for clipping gradients by value."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    """Guards the value and its optimizer's state."""


class Target:
    """The block that a mode's rule updates.

    Attributes
    ----------
    value : Tensor
        The value itself, not a copy.
    """

    __slots__ = ("_entry", "_hyper_parameters", "value")

    def __init__(self, entry: _Entry, hyper_parameters: HyperParameters) -> None:
        self.value = entry.value
        self._entry = entry
        self._hyper_parameters = hyper_parameters

    def step(self, gradient: Tensor) -> None:
        """Run the user's optimizer on the value, with a gradient of the same shape.

        Raises
        ------
        ConfigurationError
            The trainer's optimizer has fewer param groups than the optimizer of this process.
        """
        optimizer, block = self._entry.optimizer, self._entry.block
        if optimizer is None or block.group >= len(self._hyper_parameters):
            raise ConfigurationError(
                f"block {block.name} belongs to param group {block.group}, but the trainer's optimizer has "
                f"{len(self._hyper_parameters)} groups; build the optimizer in the same way in every role"
            )
        if self._entry.limits is not None:
            gradient.clamp_(*self._entry.limits)
        optimizer.apply(gradient, self._hyper_parameters[block.group])


Rule = Callable[[Target, Update], None]


def step_by_optimizer(target: Target, update: Update) -> None:
    """Update a block with the user's optimizer; the rule of most modes."""
    target.step(update.gradient)


class DenseStore:
    """All blocks of one server. Thread-safe; different blocks can be updated concurrently.

    Parameters
    ----------
    plan : ServerPlan
        The blocks of the server.
    parameters : mapping of name to Tensor
        The parameters of this process's module; the blocks' initial values are slices of them.
    state : mapping of name to state, optional
        The state of this process's own optimizer for these parameters; sliced like the values.
    rule : callable
        Applies an update to a value; called with the value's lock held.
    memory : SharedBlocks, optional
        Shared memory for the values; None keeps them in private memory.
    fused : bool
        Whether optimizers use the fused kernel of their class.
    """

    def __init__(
        self,
        plan: ServerPlan,
        parameters: Mapping[str, Tensor],
        state: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        rule: Rule = step_by_optimizer,
        memory: SharedBlocks | None = None,
        fused: bool = False,
    ) -> None:
        self.extents = {block.id: Extent(dtype_of(block.dtype), block.shape) for block in plan.blocks}
        """The dtype and shape of each block."""
        self.failed = FailedStep(plan.endpoint)
        """The first error in a step, if any. A value may then be partly changed, so updates are refused."""
        self._rule = rule
        self._sequence = itertools.count(1)
        values = memory.tensors(self.extents) if memory is not None else Arena(self.extents)
        self._entries: dict[int, _Entry] = {}
        for block in plan.blocks:
            value = values[block.id]
            value.copy_(
                parameters[block.param].detach().reshape(-1)[block.begin : block.end].view(block.shape)
            )
            group = plan.groups.get(block.group)
            optimizer = None
            if group is not None:
                optimizer = DenseUpdate(
                    group.optimizer_class, value, group.hyper_parameters, fused=fused, tensors=group.tensors
                )
                if state and state.get(block.param):
                    of_block = block.param_shape, block.begin, block.end, block.shape
                    optimizer.load_state(cut_state(state[block.param], *of_block))
            limits = plan.clipping.ranges.get(block.id)
            self._entries[block.id] = _Entry(block, value, optimizer, limits)
        self._bytes: Mapping[int, memoryview] | SharedBlocks = memory or {
            number: bytes_of(entry.value) for number, entry in self._entries.items()
        }

    def apply(self, update: Update | Put) -> None:
        """Apply an update to its block, and assign a sequence number to the update.

        Raises
        ------
        ConfigurationError
            The update has fewer param groups than this process's optimizer.
        FleetError
            The rule refused the update, which concerns only the trainer that sent it; or the rule raised
            another error, in this call or an earlier one. After another error the block may be partly
            changed, `failed` has the reason, and the server ends.
        """
        entry = self._entries[update.key]
        with entry.lock:
            # Checked under the lock, so that no update follows a failed one of the same block.
            if self.failed.error is not None:
                raise self.failed.error
            update.sequence = next(self._sequence)
            if isinstance(update, Put):
                entry.value.copy_(update.value)
                if update.state is not None and entry.optimizer is not None:
                    entry.optimizer.load_state(update.state)
                return
            try:
                self._rule(Target(entry, update.hyper_parameters), update)
            except FleetError:
                raise
            except BaseException as error:
                raise self.failed.note(error) from error

    def view(self, block: int) -> memoryview:
        """Return a view of the bytes of a block's value, which must not change while the view is used."""
        # No copy and no lock: sync mode, which sends this view, updates no block that a trainer may still be
        # reading.
        return self._bytes[block]

    def read(self, key: int, into: memoryview, begin: int = 0) -> None:
        """Copy the bytes of a block's value, from `begin` on, to a buffer. No update is applied meanwhile."""
        with self._entries[key].lock:
            copy_bytes(self._bytes[key][begin : begin + len(into)], into)

    def snapshot(self) -> list[Piece]:
        """Return copies of all blocks with their optimizer state; pieces are joined into blocks."""
        joined: list[Piece] = []
        for pieces in by_block(entry.block for entry in self._entries.values()):
            copies = []
            for piece in pieces:
                entry = self._entries[piece.id]
                with entry.lock:
                    state = _copy_state(entry.optimizer) if entry.optimizer is not None else {}
                    copies.append(Piece(piece.param, piece.begin, piece.end, entry.value.clone(), state))
            joined += join_pieces(copies)
        return joined

    def state(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield a copy of each block's optimizer state, by name."""
        for number, entry in sorted(self._entries.items()):
            if entry.optimizer is not None:
                with entry.lock:
                    state = _copy_state(entry.optimizer)
                yield number, state

    def values(self) -> list[tuple[int, Tensor]]:
        """Return a copy of each block's value."""
        copies = []
        for number, entry in sorted(self._entries.items()):
            with entry.lock:
                copies.append((number, entry.value.clone()))
        return copies


def _copy_state(optimizer: DenseUpdate) -> dict[str, Any]:
    return {
        name: entry.clone() if isinstance(entry, Tensor) else entry
        for name, entry in optimizer.state().items()
    }
