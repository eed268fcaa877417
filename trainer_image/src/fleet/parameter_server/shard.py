"""One server's part of the model: values, gradients and optimizers of the blocks it owns."""

import logging
import threading
import zlib
from collections.abc import Iterator, Mapping
from math import nan, prod
from typing import Any

from torch import Tensor

from fleet.checkpoint import Piece, cut_state, join_pieces
from fleet.errors import ConfigurationError, RemoteProtocolError
from fleet.parameter_server.pieces import by_block
from fleet.parameter_server.receive_buffers import ReceiveBuffers
from fleet.parameter_server.transport.arena import Arena, Extent, bytes_of, dtype_of
from fleet.parameter_server.transport.shared_memory import SharedBlocks
from fleet.program import Source
from fleet.transpiler.lowering import PlannedBlock, ServerPlan
from fleet.update import DenseUpdate
from fleet.wire import HyperParameters

__all__ = ["Shard", "release"]

_log = logging.getLogger(__name__)


def release(source: Source) -> None:
    """Give back the memory of a module and an optimizer whose values a shard has taken; the shapes stay.

    Parameters
    ----------
    source : Source
        What a server's process built. Its parameters consist of one NaN each from now on, so that nobody
        takes the initial values for the trained ones.
    """
    source.optimizer.state.clear()
    for parameter in source.parameters.values():
        parameter.data = parameter.data.new_full((), nan).expand(parameter.shape)


class Shard:
    """The blocks of one server in flat arenas.

    Values lie in one arena; gradients land in `buffers`. Calls about different blocks may come at the same
    time.

    Parameters
    ----------
    plan : ServerPlan
        What the server owns.
    parameters : mapping of name to Tensor
        The module that this process built; the blocks' initial values are cut from it.
    state : mapping of name to state, optional
        What this process's own optimizer has for these parameters already; it is cut like the values.
    share : bool
        Whether the values lie in memory that trainers of this host may map, where the system has such.
    """

    def __init__(
        self,
        plan: ServerPlan,
        parameters: Mapping[str, Tensor],
        state: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        share: bool = False,
        fused: bool = False,
    ) -> None:
        self.plan = plan
        self.blocks: Mapping[int, PlannedBlock] = {block.id: block for block in plan.blocks}
        extents = {block.id: Extent(dtype_of(block.dtype), block.shape) for block in plan.blocks}
        self._extents = extents
        self.buffers = ReceiveBuffers(extents)
        """Where gradients land."""
        self.block_bytes: Mapping[int, int] = {
            block: prod(extent.shape) * extent.dtype.itemsize for block, extent in extents.items()
        }
        """Bytes of each block's tensor."""
        self.shared_values = _share(self.block_bytes) if share else None
        """The memory of the values, where trainers of this host may map it."""
        self._values = self.shared_values.tensors(extents) if self.shared_values else Arena(extents)
        self._ranges = plan.ranges
        self._updates: dict[int, DenseUpdate] = {}
        self.locks: Mapping[int, threading.RLock] = {block.id: threading.RLock() for block in plan.blocks}
        """Whoever changes or copies a block holds its lock; `apply` takes it by itself."""
        self.touched = False
        """Whether a gradient has come, or is about to."""
        for block in plan.blocks:
            value = self._values[block.id]
            value.copy_(
                parameters[block.param].detach().reshape(-1)[block.begin : block.end].view(block.shape)
            )
            group = plan.groups.get(block.group)
            if group is None:  # in GEO the trainers have optimizers, and the servers none
                continue
            update = DenseUpdate(group.optimizer_class, value, group.hyper_parameters, fused=fused)
            if state and state.get(block.param):
                whole = block.param_shape
                update.load_state(cut_state(state[block.param], whole, block.begin, block.end, block.shape))
            self._updates[block.id] = update
        self._value_bytes: Mapping[int, memoryview] | SharedBlocks = self.shared_values or {
            number: bytes_of(self._values[number]) for number in self.blocks
        }
        self.initial_checksums = {number: zlib.crc32(self._value_bytes[number]) for number in self.blocks}

    def value(self, block: int) -> Tensor:
        """Return a block's value, not a copy."""
        return self._values[block]

    def copy_values(self) -> Arena[int]:
        """Return a copy of all values, by block."""
        copies = Arena(self._extents)
        for block in self.blocks:
            copies[block].copy_(self._values[block])
        return copies

    def value_bytes(self, block: int) -> memoryview:
        """Return the bytes of a block's value."""
        return self._value_bytes[block]

    def apply(self, block: int, gradient: Tensor, hyper_parameters: HyperParameters) -> None:
        """Step a block.

        Parameters
        ----------
        block : int
        gradient : Tensor
            Of the block's shape; a block with a range for its gradients has it clamped in place.
        hyper_parameters : tuple of mappings
            Those of the step, by param group.
        """
        options = self._options(block, hyper_parameters)
        if block in self._ranges:
            gradient.clamp_(*self._ranges[block])
        with self.locks[block]:
            self._updates[block].apply(gradient, options)

    def _options(self, block: int, hyper_parameters: HyperParameters) -> Mapping[str, Any]:
        group = self.blocks[block].group
        if group >= len(hyper_parameters):
            raise ConfigurationError(
                f"block {self.blocks[block].name} belongs to param group {group}, but the trainer's "
                f"optimizer has {len(hyper_parameters)} groups; build the optimizer alike in every role"
            )
        return hyper_parameters[group]

    def state(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Iterate over copies of the optimizers' state by block: its entries by name."""
        for number in sorted(self._updates):
            with self.locks[number]:
                state = self._copy_state(number)
            yield number, state

    def touch(self) -> None:
        """Take note that a gradient is about to come."""
        self.touched = True

    def copies(self) -> list[Piece]:
        """Return a copy of every block with its state, each piece as it is between two updates."""
        return [
            copy
            for block in by_block(self.blocks.values())
            for copy in join_pieces([self._copy(piece) for piece in block])
        ]

    def restore(self, pieces: Mapping[int, Piece]) -> None:
        """Take values and state of every block from a checkpoint, by block."""
        for number, piece in pieces.items():
            with self.locks[number]:
                self._values[number].copy_(piece.value)
                if number in self._updates:
                    self._updates[number].load_state(piece.state)

    def write(self, block: int, value: bytes) -> None:
        """Put a value in the place of a block's; its optimizer's state stays.

        Raises
        ------
        RemoteProtocolError
            This server has no such block, or the block is of another size.
        """
        expected = self.block_bytes.get(block)
        if expected != len(value):
            raise RemoteProtocolError(
                f"a trainer has written {len(value)} bytes to block {block}, expected "
                + ("a block of this server" if expected is None else f"{expected} bytes")
            )
        with self.locks[block]:
            self.value_bytes(block)[:] = value

    def _copy(self, block: PlannedBlock) -> Piece:
        with self.locks[block.id]:
            value = self._values[block.id].clone()
            state = self._copy_state(block.id)
        return Piece(block.param, block.begin, block.end, value, state)

    def _copy_state(self, block: int) -> dict[str, Any]:
        """Return a copy of the state of a block's optimizer, if it has one; with the block's lock held."""
        update = self._updates.get(block)
        return {
            name: entry.clone() if isinstance(entry, Tensor) else entry
            for name, entry in (update.state() if update is not None else {}).items()
        }


def _share(block_bytes: Mapping[int, int]) -> SharedBlocks | None:
    """Return memory for the values that others may map; None where the system has no such."""
    try:
        return SharedBlocks.create(block_bytes)
    except OSError as error:
        _log.debug("the values lie in memory of this process alone: %s", error)
        return None
