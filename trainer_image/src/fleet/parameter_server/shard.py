"""One server's part of the model: the store that keeps it, and the memory in which trainers' bytes land."""

import logging
import zlib
from collections.abc import Mapping
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
    for parameter in (*source.parameters.values(), *source.own_tables.values()):
        parameter.data = parameter.data.new_full((), nan).expand(parameter.shape)


class Shard:
    """The blocks of one server.

    Parameters
    ----------
    plan : ServerPlan
        What the server owns.
    parameters, state, rule, fused
        As of `DenseStore`.
    share : bool
        Whether the values lie in memory that trainers of this host may map, where the system has such.
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
    ) -> None:
        self.plan = plan
        self.blocks: Mapping[int, PlannedBlock] = {block.id: block for block in plan.blocks}
        self.block_bytes: Mapping[int, int] = {
            number: prod(block.shape) * dtype_of(block.dtype).itemsize
            for number, block in self.blocks.items()
        }
        """Bytes of each block's tensor."""
        self.shared_values = _share(self.block_bytes) if share else None
        """The memory of the values, where trainers of this host may map it."""
        self.store = DenseStore(plan, parameters, state, rule=rule, memory=self.shared_values, fused=fused)
        """The values."""
        self.tables = TableStore(plan.tables, self.store.failed, plan.table_shards)
        """The rows of tables."""
        self.buffers = ReceiveBuffers(self.store.extents)
        """Where gradients land."""
        self.initial_checksums = {number: zlib.crc32(self.store.view(number)) for number in self.blocks}

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
        extent = self.store.extents[block]
        if expected:
            written = torch.frombuffer(bytearray(value), dtype=extent.dtype).view(extent.shape)
            self.store.apply(Put(block, written))


def _share(block_bytes: Mapping[int, int]) -> SharedBlocks | None:
    """Return memory for the values that others may map; None where the system has no such."""
    try:
        return SharedBlocks.create(block_bytes)
    except OSError as error:
        _log.debug("the values lie in memory of this process alone: %s", error)
        return None
