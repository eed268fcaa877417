"""What the user may configure about transpiling."""

from enum import IntEnum

__all__ = ["DistributedMode"]


class DistributedMode(IntEnum):
    """How trainers and servers keep step; the numbers are `listen_and_serv`'s `distributed_mode`."""

    SYNC = 0
    ASYNC = 1
    HALF_ASYNC = 2
    GEO = 3
