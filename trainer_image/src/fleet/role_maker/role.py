"""A replica's place in its job, as data."""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import ClassVar, Literal

__all__ = ["JobIdentity", "Role", "RoleKind"]


class RoleKind(IntEnum):
    """What a replica does, with the original's numbers."""

    WORKER = 1
    SERVER = 2


@dataclass(frozen=True, slots=True)
class JobIdentity:
    """Which life of which job a replica belongs to: it stands in every message between replicas.

    Attributes
    ----------
    name : str
        The FleetJob's; ``local`` of a job that somebody started by hand.
    uid : str
        The FleetJob's; empty where there is none.
    attempt : int
        How often this replica has been started before.
    life : str
        The life of the job in which its training began; to a trainer beside servers it is told only where
        nobody has seen how its process before ended.
    key : bytes
        What proves to the others that this is a replica of the job; empty where it was given none.
    """

    name: str = "local"
    uid: str = ""
    attempt: int = 0
    """How often this replica has been started before."""
    life: str = ""
    """The life of the job in which its training began; to a trainer beside servers it is told only where
    nobody has seen how its process before ended."""
    key: bytes = field(default=b"", repr=False, compare=False)
    """What proves to the others that this is a replica of the job; empty where it was given none."""


@dataclass(frozen=True)
class Role:
    """A replica's place in its job.

    Attributes
    ----------
    kind : RoleKind
    index : int
        Among the replicas of its kind; in collective mode the process rank.
    worker_num : int
        Number of trainers; in collective mode of processes.
    worker_endpoints : tuple of str
        Collective mode only, and empty there too where the launcher gave none.
    server_endpoints : tuple of str
        Parameter-server mode only.
    current_endpoint : str
        A server's own entry in `server_endpoints`, a collective worker's in `worker_endpoints`; else empty.
    current_host : str
        The host under which others reach this replica; empty when nobody said.
    is_collective : bool
    job : JobIdentity
    sync_mode : str
        What the job asks for, the default of a strategy's mode.
    checkpoint_dir : str or None
    """

    WORKER: ClassVar[Literal[RoleKind.WORKER]] = RoleKind.WORKER
    SERVER: ClassVar[Literal[RoleKind.SERVER]] = RoleKind.SERVER

    kind: RoleKind
    index: int
    worker_num: int
    worker_endpoints: tuple[str, ...] = ()
    server_endpoints: tuple[str, ...] = ()
    current_endpoint: str = ""
    current_host: str = ""
    is_collective: bool = False
    job: JobIdentity = field(default_factory=JobIdentity)
    sync_mode: str = "Sync"
    checkpoint_dir: str | None = None

    @property
    def is_worker(self) -> bool:
        """Whether this replica trains."""
        return self.kind is RoleKind.WORKER

    @property
    def is_server(self) -> bool:
        """Whether this replica holds parameters."""
        return self.kind is RoleKind.SERVER

    @property
    def is_first_worker(self) -> bool:
        """Whether this replica is the trainer that acts for all."""
        return self.is_worker and self.index == 0

    @property
    def server_num(self) -> int:
        """Number of parameter servers."""
        return len(self.server_endpoints)
