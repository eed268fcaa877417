"""A server's shard: its blocks and tables, with the buffers and norm parts that modes use."""

import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import nan, prod
from typing import Any

import torch
from torch import Tensor

from fleet.errors import RemoteProtocolError
from fleet.parameter_server.receive_buffers import ReceiveBuffers
from fleet.parameter_server.store import DenseStore, Put, Rule, step_by_optimizer
from fleet.parameter_server.table_store import TableStore
from fleet.parameter_server.transport.arena import dtype_of
from fleet.parameter_server.transport.shared_memory import SharedBlocks
from fleet.plan import PlannedBlock, ServerPlan, Source

__all__ = ["NormPart", "SendNormPart", "Shard", "release"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NormPart:
    """One server's part of a gradient norm: the sums of squares of its blocks."""

    step: int
    key: str
    """The key of the norm; empty for the norm of all gradients."""
    server: int
    sums: Mapping[int, float]


SendNormPart = Callable[[NormPart, Sequence[int]], None]
"""Sends this server's part of a norm to the servers with these indexes, without waiting for them."""


def release(source: Source) -> None:
    """Free the memory of a module and an optimizer after a shard has copied their values.

    Parameters
    ----------
    source : Source
        The module and the optimizer of a server's process. The parameters keep their shapes and become NaN,
        so that a script cannot mistake initial values for trained values.
    """
    source.optimizer.state.clear()
    for parameter in (*source.parameters.values(), *source.own_tables.values()):
        parameter.data = parameter.data.new_full((), nan).expand(parameter.shape)


def _send_to_none(part: NormPart, servers: Sequence[int]) -> None:
    """Discard a part of a norm that covers only this server's blocks."""


class Shard:
    """The blocks and tables of one server, and the receive buffers for their gradients.

    Parameters
    ----------
    plan : ServerPlan
        The blocks and tables of the server.
    parameters, state, rule, fused
        See `DenseStore`.
    share : bool
        Whether to keep the values in memory that trainers on this host may map, if the system supports it.
    send_norm_part : callable, optional
        Sends parts of norms to the other servers; required if a norm covers blocks of several servers.
    """

    def __init__(
        self,
        plan: ServerPlan,
        parameters: Mapping[str, Tensor],
        state: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        rule: Rule = step_by_optimizer,
        share: bool = False,
        fused: bool = False,
        send_norm_part: SendNormPart = _send_to_none,
    ) -> None:
        self.plan = plan
        self.send_norm_part = send_norm_part
        self.blocks: Mapping[int, PlannedBlock] = {block.id: block for block in plan.blocks}
        self.block_bytes: Mapping[int, int] = {
            number: prod(block.shape) * dtype_of(block.dtype).itemsize
            for number, block in self.blocks.items()
        }
        """The size of each block's tensor in bytes."""
        self.shared_values = _share(self.block_bytes) if share else None
        """The shared memory that contains the values; None if the values are in private memory."""
        self.store = DenseStore(plan, parameters, state, rule=rule, memory=self.shared_values, fused=fused)
        self.tables = TableStore(plan.tables, self.store.failed, plan.table_shards)
        self.buffers = ReceiveBuffers(self.store.extents)
        # Of the values before a checkpoint is loaded: a trainer compares them with its own initial values.
        self.initial_checksums = {number: zlib.crc32(self.store.view(number)) for number in self.blocks}

    def write(self, block: int, value: bytes) -> None:
        """Replace a block's value without changing the optimizer state.

        Raises
        ------
        RemoteProtocolError
            This server has no such block, or the block has a different size.
        """
        expected = self.block_bytes.get(block)
        if expected != len(value):
            raise RemoteProtocolError(
                f"a trainer wrote {len(value)} bytes to block {block}, expected "
                + ("a block of this server" if expected is None else f"{expected} bytes")
            )
        extent = self.store.extents[block]
        if expected:
            written = torch.frombuffer(bytearray(value), dtype=extent.dtype).view(extent.shape)
            self.store.apply(Put(block, written))


def _share(block_bytes: Mapping[int, int]) -> SharedBlocks | None:
    """Allocate shared memory for the values; return None if the system does not support it."""
    try:
        return SharedBlocks.create(block_bytes)
    except OSError as error:
        _log.debug("the values are in private memory, because shared memory failed: %s", error)
        return None
