"""Which part of a table an id belongs to, and which server holds that part.

A table has a fixed number of virtual shards for life. An id's shard depends on the id alone; only the map of
shards to servers changes with the number of servers. So what is done by shard (admission, eviction, files of
a checkpoint) is the same on any number of them.
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
    """Return the virtual shards of ids: int64[n], from 0 to 255.

    Notes
    -----
    The finalizer of MurmurHash3 for 64 bits. It is another hash than that of `RowIndex`, or the ids of one
    shard would meet in one part of an index.
    """
    mixed = ids.view(np.uint64)
    mixed = (mixed ^ (mixed >> _33)) * _FIRST
    mixed = (mixed ^ (mixed >> _33)) * _SECOND
    return (mixed >> _56).view(np.int64)


@dataclass(frozen=True)
class Placement:
    """Which server holds which virtual shards.

    Attributes
    ----------
    servers : tuple of int
        By shard, the index of its server.
    version : int
        Rises with each change.
    """

    servers: tuple[int, ...]
    version: int = 0

    def __post_init__(self) -> None:
        if len(self.servers) != SHARDS:
            raise ConfigurationError(f"a placement of {len(self.servers)} virtual shards, expected {SHARDS}")

    @classmethod
    def over(cls, num_servers: int) -> "Placement":
        """Return the placement that a job begins with: runs of shards, as even as can be.

        Parameters
        ----------
        num_servers : int
            From 1 to 256, which is the number of shards.

        Returns
        -------
        Placement
            Of version 0.

        Raises
        ------
        ConfigurationError
            There is no server, or there are more than shards.
        """
        if not 1 <= num_servers <= SHARDS:
            raise ConfigurationError(
                f"a table on {num_servers} parameter servers, expected 1 to {SHARDS}: it has as many shards"
            )
        return cls(tuple(shard * num_servers // SHARDS for shard in range(SHARDS)))

    def shards_of(self, server: int) -> tuple[int, ...]:
        """Return the virtual shards that a server holds.

        Parameters
        ----------
        server : int
            The server's index.

        Returns
        -------
        tuple of int
            Ascending.
        """
        return tuple(shard for shard, of in enumerate(self.servers) if of == server)

    def positions(self, ids: NDArray[np.int64]) -> dict[int, NDArray[np.int64]]:
        """Return by server where in `ids` its own are, in their order; a server without any is left out.

        Parameters
        ----------
        ids : int64[n]
            Of one table.

        Returns
        -------
        dict of int to int64[m]
            Positions in `ids`, ascending, by the index of a server.
        """
        if not ids.size:
            return {}
        if len(set(self.servers)) == 1:
            return {self.servers[0]: np.arange(ids.size)}
        of = np.array(self.servers, dtype=np.int64)[shard_of(ids)]
        order = np.argsort(of, kind="stable")
        servers, begins = np.unique(of[order], return_index=True)
        return dict(zip(servers.tolist(), np.split(order, begins[1:]), strict=True))
