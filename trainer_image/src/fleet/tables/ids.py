"""The distinct ids of a batch, their virtual shards, and the server of each shard.

The number of a table's virtual shards never changes. The shard of an id depends on the id alone; only the
map from shards to servers changes with the number of servers. All work per shard (admission, eviction, files
of a checkpoint) therefore gives the same result on any number of servers.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fleet.errors import ConfigurationError
from fleet.tables.kernels import FEW, library

__all__ = ["SHARDS", "Placement", "distinct_by_numpy", "distinct_ids", "shard_of"]

SHARDS: Final = 256
"""The number of virtual shards of a table."""
_MAX_IDS: Final = 2**31 - 1
"""The maximum number of ids that are passed to the C code, which stores their positions as uint32."""

_FIRST: Final = np.uint64(0xFF51AFD7ED558CCD)
_SECOND: Final = np.uint64(0xC4CEB9FE1A85EC53)
_33: Final = np.uint64(33)
_56: Final = np.uint64(56)
_few, _many = library(keeps_lock=True), library()

Ids = NDArray[np.int64]


def distinct_ids(ids: Ids) -> tuple[Ids, NDArray[np.int64]]:
    """Return the sorted distinct ids, and the index of each given id among them.

    Parameters
    ----------
    ids : int64[n]

    Returns
    -------
    int64[m], int64[n]
    """
    ids = np.ascontiguousarray(ids, dtype=np.int64).reshape(-1)
    size, compiled = ids.size, _few if ids.size <= FEW else _many
    if compiled is None or size > _MAX_IDS:
        return distinct_by_numpy(ids)
    found = np.empty((2, size), dtype=np.int64)
    room = np.empty(3 * size, dtype=np.uint64)  # for the C code: keys twice, and places of 32 bits twice
    to, keys = found.ctypes.data, room.ctypes.data
    count = compiled.fleet_distinct_ids(ids.ctypes.data, size, keys, keys + 16 * size, to, to + 8 * size)
    return found[0, :count].copy(), found[1]


def distinct_by_numpy(ids: Ids) -> tuple[Ids, NDArray[np.int64]]:
    """Compute the result of `distinct_ids` without compiled code."""
    distinct, positions = np.unique(ids, return_inverse=True)
    return distinct, positions.astype(np.int64, copy=False)


def shard_of(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the virtual shard of each id, 0 to 255; int64[n].

    Notes
    -----
    The 64-bit finalizer of MurmurHash3. `RowIndex` uses another hash, because with the same one the ids of a
    shard would cluster in one part of the index.
    """
    mixed = ids.view(np.uint64)
    mixed = (mixed ^ (mixed >> _33)) * _FIRST
    mixed = (mixed ^ (mixed >> _33)) * _SECOND
    return (mixed >> _56).view(np.int64)


@dataclass(frozen=True)
class Placement:
    """The assignment of virtual shards to servers.

    Attributes
    ----------
    servers : tuple of int
        The index of the server of each shard.
    version : int
        Increases with each change.
    """

    servers: tuple[int, ...]
    version: int = 0

    def __post_init__(self) -> None:
        if len(self.servers) != SHARDS:
            raise ConfigurationError(f"a placement of {len(self.servers)} virtual shards, expected {SHARDS}")

    @cached_property
    def _is_single(self) -> bool:
        return len(set(self.servers)) == 1

    @cached_property
    def _server_of(self) -> NDArray[np.uint16]:
        """The server of each shard, as uint16, because NumPy sorts 16-bit integers faster than wider ones."""
        return np.array(self.servers, dtype=np.uint16)

    @classmethod
    def over(cls, num_servers: int) -> "Placement":
        """Return the initial placement of a job: contiguous ranges of shards, as equal as possible.

        Parameters
        ----------
        num_servers : int
            1 to 256, the number of shards.

        Returns
        -------
        Placement
            Its version is 0.

        Raises
        ------
        ConfigurationError
            There are no servers, or more servers than shards.
        """
        if not 1 <= num_servers <= SHARDS:
            raise ConfigurationError(
                f"a table on {num_servers} parameter servers, expected 1 to {SHARDS}: it has as many shards"
            )
        return cls(tuple(shard * num_servers // SHARDS for shard in range(SHARDS)))

    def shards_of(self, server: int) -> tuple[int, ...]:
        """Return the virtual shards of a server.

        Parameters
        ----------
        server : int
            Index of the server.

        Returns
        -------
        tuple of int
            Ascending.
        """
        return tuple(shard for shard, of in enumerate(self.servers) if of == server)

    def positions(self, ids: NDArray[np.int64]) -> dict[int, NDArray[np.int64]]:
        """Return, for each server that holds any of the ids, the positions of these ids.

        Parameters
        ----------
        ids : int64[n]
            Of one table.

        Returns
        -------
        dict of int to int64[m]
            Positions in `ids`, ascending, by index of the server.
        """
        if not ids.size:
            return {}
        if self._is_single:
            return {self.servers[0]: np.arange(ids.size)}
        of = self._server_of[shard_of(ids)]
        order = np.argsort(of, kind="stable")
        counts = np.bincount(of)
        servers = np.flatnonzero(counts)
        ends = counts[servers].cumsum().tolist()
        return {
            server: order[begin:end]
            for server, begin, end in zip(servers.tolist(), (0, *ends[:-1]), ends, strict=True)
        }
