"""What a server keeps of the model, and the one way in which it changes.

A store holds values by key: a dense one a block of a parameter by its number; one of tables would hold rows
by theirs. Nothing changes a value but `apply`: whatever comes is an update record that says what has come,
from whom, and at which step. Updates of one key are applied one after the other, each with a higher number
than the one before; so they could be written to a log, and applied again from it.

What an update does to a value is the training mode's rule: a function of the value, its optimizer and the
record alone.
"""

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from torch import Tensor

from fleet.checkpoint import Piece, cut_state, join_pieces
from fleet.errors import ConfigurationError, FleetError
from fleet.parameter_server.failed_step import FailedStep
from fleet.parameter_server.pieces import by_block
from fleet.parameter_server.transport.arena import Arena, Extent, bytes_of, copy_bytes, dtype_of
from fleet.parameter_server.transport.shared_memory import SharedBlocks
from fleet.plan import PlannedBlock, ServerPlan
from fleet.update import DenseUpdate
from fleet.wire import HyperParameters

__all__ = ["DenseStore", "Origin", "Put", "Rule", "Store", "Target", "Update", "step_by_optimizer"]

Key = TypeVar("Key", contravariant=True)


@dataclass(frozen=True, slots=True)
class Origin:
    """Which step of which life of a trainer something comes from."""

    trainer: int
    incarnation: int
    """The attempt under which the trainer has joined."""
    step: int


@dataclass(slots=True)
class Update:
    """What trainers have sent for a value.

    Attributes
    ----------
    key : int
        The value's.
    gradient : Tensor
        Of the value's shape and dtype; in sync mode the mean over the trainers. The rule may overwrite it.
    hyper_parameters : tuple of mappings
        Those of the step, by param group.
    origins : tuple of Origin
        Whose gradients it is made of, in the order of their sum.
    seen : Tensor, optional
        The value that the gradient was computed on, where the mode keeps it.
    sequence : int
        The number that the store gives it; 0 before.
    """

    key: int
    gradient: Tensor
    hyper_parameters: HyperParameters = ()
    origins: tuple[Origin, ...] = ()
    seen: Tensor | None = None
    sequence: int = 0


@dataclass(slots=True)
class Put:
    """A value that takes the place of another: a checkpoint's, or what a script has written.

    Attributes
    ----------
    key : int
    value : Tensor
        Of the shape and dtype of the value that it replaces; copied.
    state : mapping of name to entry, optional
        The optimizer's from now on; without any it keeps its own.
    sequence : int
        As of `Update`.
    """

    key: int
    value: Tensor
    state: Mapping[str, Any] | None = None
    sequence: int = 0


class Store(Protocol[Key]):
    """Values by key. Any thread may call; what is about different keys may happen at the same time."""

    def apply(self, update: Update | Put) -> None:
        """Change a value, and give the update its number."""

    def read(self, key: Key, into: memoryview, begin: int = 0) -> None:
        """Fill a buffer with what is asked for, from this byte on, as it is between two updates."""

    def snapshot(self) -> list[Piece]:
        """Return a copy of everything with its optimizers' state, each value as it is between two updates."""


@dataclass(frozen=True, slots=True)
class Target:
    """A value that an update is about to change.

    Attributes
    ----------
    value : Tensor
        The value itself, not a copy.
    step : callable
        Lets the user's optimizer step the value by a gradient of its shape.
    """

    value: Tensor
    step: Callable[[Tensor], None]


Rule = Callable[[Target, Update], None]


def step_by_optimizer(target: Target, update: Update) -> None:
    """Step a value by its gradient: the rule of most modes."""
    target.step(update.gradient)


@dataclass(slots=True)
class _Entry:
    """One block: its value and what steps it."""

    block: PlannedBlock
    value: Tensor
    optimizer: DenseUpdate | None
    """None where trainers have the optimizers, as in GEO."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    """Held by whoever changes or copies the value or its optimizer's state."""


class DenseStore:
    """The blocks of one server; see `Store`.

    Parameters
    ----------
    plan : ServerPlan
        What the server owns.
    parameters : mapping of name to Tensor
        The module that this process built; the blocks' initial values are cut from it.
    state : mapping of name to state, optional
        What this process's own optimizer has for these parameters already; it is cut like the values.
    rule : callable
        What an update does to a value; called with the value's lock held.
    memory : SharedBlocks, optional
        Where the values lie, if not in memory of this process alone.
    fused : bool
        Whether optimizers step with their class's fused kernel.
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
        """Dtype and shape of each block."""
        self.failed = FailedStep(plan.endpoint)
        """Why a value may be half changed, after which nothing is applied any more."""
        self._plan = plan
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
            self._entries[block.id] = _Entry(block, value, optimizer)
        self._bytes: Mapping[int, memoryview] | SharedBlocks = memory or {
            number: bytes_of(entry.value) for number, entry in self._entries.items()
        }

    def apply(self, update: Update | Put) -> None:
        """Change a block.

        Raises
        ------
        ConfigurationError
            The update is of fewer param groups than this process's optimizer has.
        FleetError
            The rule refuses the update by such an error; or it has failed at this one or one before, by any
            other: then the block may be half changed, `failed` says so, and the server ends.
        """
        entry = self._entries[update.key]
        with entry.lock:
            self.failed.check()
            update.sequence = next(self._sequence)
            if isinstance(update, Put):
                entry.value.copy_(update.value)
                if update.state is not None and entry.optimizer is not None:
                    entry.optimizer.load_state(update.state)
                return
            try:
                self._rule(Target(entry.value, self._stepper(entry, update)), update)
            except FleetError:
                raise
            except BaseException as error:
                raise self.failed.note(error) from error

    def view(self, block: int) -> memoryview:
        """Return the bytes of a block's value, not a copy: for whoever knows that nobody applies now."""
        return self._bytes[block]

    def read(self, key: int, into: memoryview, begin: int = 0) -> None:
        """Fill a buffer with the bytes of a block's value, from this one on."""
        with self._entries[key].lock:
            copy_bytes(self._bytes[key][begin : begin + len(into)], into)

    def snapshot(self) -> list[Piece]:
        """Return a copy of every block with its state, pieces of one joined."""
        copies: list[Piece] = []
        for pieces in by_block(entry.block for entry in self._entries.values()):
            copies += join_pieces([self._copy(self._entries[piece.id]) for piece in pieces])
        return copies

    def state(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Iterate over copies of the optimizers' state by block: its entries by name."""
        for number, entry in sorted(self._entries.items()):
            if entry.optimizer is not None:
                with entry.lock:
                    state = _copy_state(entry.optimizer)
                yield number, state

    def values(self) -> list[tuple[int, Tensor]]:
        """Return copies of the values, by block."""
        copies = []
        for number, entry in sorted(self._entries.items()):
            with entry.lock:
                copies.append((number, entry.value.clone()))
        return copies

    def _stepper(self, entry: _Entry, update: Update) -> Callable[[Tensor], None]:
        def step(gradient: Tensor) -> None:
            group, block = entry.block.group, entry.block
            if entry.optimizer is None or group >= len(update.hyper_parameters):
                raise ConfigurationError(
                    f"block {block.name} belongs to param group {group}, but the trainer's "
                    f"optimizer has {len(update.hyper_parameters)} groups; build the optimizer alike in "
                    "every role"
                )
            if (bounds := self._plan.clipping.ranges.get(block.id)) is not None:
                gradient.clamp_(*bounds)
            entry.optimizer.apply(gradient, update.hyper_parameters[group])

        return step

    def _copy(self, entry: _Entry) -> Piece:
        block = entry.block
        with entry.lock:
            state = _copy_state(entry.optimizer) if entry.optimizer is not None else {}
            return Piece(block.param, block.begin, block.end, entry.value.clone(), state)


def _copy_state(optimizer: DenseUpdate) -> dict[str, Any]:
    return {
        name: entry.clone() if isinstance(entry, Tensor) else entry
        for name, entry in optimizer.state().items()
    }
