"""The role of a replica in its job, and the base class of role makers."""

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import PurePath
from typing import ClassVar, Literal, TypeVar

from fleet.errors import ConfigurationError
from fleet.role_maker.variables import Variables, key_of, sync_mode_of

__all__ = ["File", "JobIdentity", "Role", "RoleKind", "RoleMaker", "identity_of", "share_of_files"]

File = TypeVar("File", bound=str | PurePath)
"""The name of a file, as text or as a path."""


class RoleKind(IntEnum):
    """The kind of a replica, numbered as in Paddle."""

    WORKER = 1
    SERVER = 2


@dataclass(frozen=True, slots=True)
class JobIdentity:
    """The job and the attempt to which a replica belongs.

    Frames carry the attempt and a hash of the job.

    Attributes
    ----------
    name : str
        The name of the FleetJob; ``local`` for a job that was started by hand.
    uid : str
        The uid of the FleetJob; empty without a FleetJob.
    attempt : int
        The number of earlier starts of this replica.
    life : str
        The job's life in which its training run began. In a parameter-server job, a trainer has it only if
        the end of its previous process was not recorded.
    key : bytes
        Authenticates this replica to the others; empty if the job has no key.
    """

    name: str = "local"
    uid: str = ""
    attempt: int = 0
    life: str = ""
    key: bytes = field(default=b"", repr=False, compare=False)


@dataclass(frozen=True)
class Role:
    """A replica's role in its job.

    Attributes
    ----------
    kind : RoleKind
    index : int
        The index among the replicas of its kind; in collective mode the process rank.
    worker_num : int
        The number of trainers; in collective mode the number of processes.
    worker_endpoints : tuple of str
        In collective mode only, if the launcher provides them.
    server_endpoints : tuple of str
        In parameter-server mode only.
    current_endpoint : str
        This server's entry in `server_endpoints`, or this collective worker's in `worker_endpoints`; else
        empty.
    current_host : str
        The host under which others reach this replica; empty if unknown.
    is_collective : bool
    is_alone : bool
        True if this process belongs to no job and therefore trains alone: with the only server of
        `server_endpoints` inside the process, or as the only collective worker.
    job : JobIdentity
    sync_mode : str
        The job's mode, which is the default mode of a strategy.
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
    is_alone: bool = False
    job: JobIdentity = field(default_factory=JobIdentity)
    sync_mode: str = "Sync"
    checkpoint_dir: str | None = None

    @property
    def is_worker(self) -> bool:
        """True if this replica is a trainer."""
        return self.kind is RoleKind.WORKER

    @property
    def is_server(self) -> bool:
        """True if this replica is a parameter server."""
        return self.kind is RoleKind.SERVER

    @property
    def is_first_worker(self) -> bool:
        """True if this replica is trainer 0, which acts for all trainers."""
        return self.is_worker and self.index == 0

    @property
    def server_num(self) -> int:
        """The number of parameter servers."""
        return len(self.server_endpoints)


class RoleMaker(ABC):
    """The base class of role makers, which also provides Paddle's methods for querying the role."""

    def __init__(self) -> None:
        self._role: Role | None = None

    def generate_role(self, environ: Mapping[str, str] | None = None) -> Role:
        """Build and return the role.

        Parameters
        ----------
        environ : mapping, optional
            The environment to read; this process's own by default.

        Returns
        -------
        Role

        Raises
        ------
        RoleError
            The environment or the arguments do not describe a replica.
        """
        variables = Variables(os.environ if environ is None else environ)
        self._role = replace(
            self._make(variables, identity_of(variables)),
            sync_mode=sync_mode_of(variables),
            checkpoint_dir=variables.optional("FLEET_CHECKPOINT_DIR") or None,
        )
        return self._role

    @abstractmethod
    def _make(self, variables: Variables, job: JobIdentity) -> Role:
        """Return the role, except for its mode and checkpoint directory, which the caller adds."""

    @property
    def role(self) -> Role:
        """The role, which is built from this process's environment on first use."""
        return self._role if self._role is not None else self.generate_role()

    def is_worker(self) -> bool:
        """Return whether this replica is a trainer."""
        return self.role.is_worker

    def is_server(self) -> bool:
        """Return whether this replica is a parameter server."""
        return self.role.is_server

    def is_first_worker(self) -> bool:
        """Return whether this replica is trainer 0, which acts for all trainers."""
        return self.role.is_first_worker

    def worker_index(self) -> int:
        """Return this trainer's index."""
        return self.role.index

    def server_index(self) -> int:
        """Return this server's index."""
        return self.role.index

    def worker_num(self) -> int:
        """Return the number of trainers."""
        return self.role.worker_num

    def server_num(self) -> int:
        """Return the number of parameter servers."""
        return self.role.server_num

    def get_trainer_endpoints(self) -> list[str]:
        """Return the trainers' endpoints; the list is empty unless the job is collective."""
        return list(self.role.worker_endpoints)

    def get_pserver_endpoints(self) -> list[str]:
        """Return the parameter servers' endpoints."""
        return list(self.role.server_endpoints)


def identity_of(variables: Variables) -> JobIdentity:
    """Read the identity of this replica's job; outside any job, the name is ``local``."""
    attempt = 0
    if variables.optional("FLEET_RESTARTS"):
        attempt = variables.number("FLEET_RESTARTS", least=0, meaning="how often this replica was restarted")
    return JobIdentity(
        name=variables.optional("FLEET_JOB_NAME", default="local"),
        uid=variables.optional("FLEET_JOB_UID"),
        attempt=attempt,
        life=variables.optional("FLEET_LIFE"),
        key=key_of(variables),
    )


def share_of_files(files: Sequence[File], index: int, num: int) -> list[File]:
    """Return one trainer's contiguous share of a list of files.

    Parameters
    ----------
    files : sequence of str or path
        All files, in the same order on every trainer.
    index, num : int
        The trainer's index, and the number of trainers.

    Raises
    ------
    ConfigurationError
        `files` is not a list of names.
    """
    listed = isinstance(files, Sequence) and not isinstance(files, str)
    if not listed or not all(isinstance(file, str | PurePath) for file in files):
        raise ConfigurationError(f"split_files: files is {files!r}; expected a list of file names or paths")
    share, extra = divmod(len(files), num)
    first = index * share + min(index, extra)
    return list(files[first : first + share + (index < extra)])
