"""The virtual shard of an id, and the server that holds each shard.

The number of a table's virtual shards never changes. The shard of an id depends on the id alone; only the
map from shards to servers changes with the number of servers. So all work per shard (admission,
eviction, files of a checkpoint) gives the same result on any number of servers.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fleet.errors import ConfigurationError

__all__ = ["SHARDS", "Placement", "shard_of"]

SHARDS: Final = 256
"""Virtual shards of a table."""

_FIRST: Final = np.uint64(0xFF51AFD7ED558CCD)
_SECOND: Final = np.uint64(0xC4CEB9FE1A85EC53)
_33: Final = np.uint64(33)
_56: Final = np.uint64(56)


def shard_of(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the virtual shards of ids: int64[n], 0 to 255.

    Notes
    -----
    The 64-bit finalizer of MurmurHash3. `RowIndex` uses another hash: with the same one the ids of a shard
    would crowd into one part of the index.
    """
    mixed = ids.view(np.uint64)
    mixed = (mixed ^ (mixed >> _33)) * _FIRST
    mixed = (mixed ^ (mixed >> _33)) * _SECOND
    return (mixed >> _56).view(np.int64)


@dataclass(frozen=True)
class Placement:
    """The map from virtual shards to servers.

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

    @classmethod
    def over(cls, num_servers: int) -> "Placement":
        """Return the initial placement of a job: contiguous runs of shards, as even as possible.

        Parameters
        ----------
        num_servers : int
            1 to 256, the number of shards.

        Returns
        -------
        Placement
            Of version 0.

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
        """Return which of the ids each server holds; servers without any are left out.

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
        if len(set(self.servers)) == 1:
            return {self.servers[0]: np.arange(ids.size)}
        of = np.array(self.servers, dtype=np.int64)[shard_of(ids)]
        order = np.argsort(of, kind="stable")
        servers, begins = np.unique(of[order], return_index=True)
        return dict(zip(servers.tolist(), np.split(order, begins[1:]), strict=True))
