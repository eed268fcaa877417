"""What all role makers have in common: the original's questions, answered by the role they made."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from fleet.environment.process import process_environment
from fleet.role_maker.key import key_of
from fleet.role_maker.role import JobIdentity, Role
from fleet.role_maker.variables import SYNC_MODES, Variables

__all__ = ["RoleMaker", "identity_of", "sync_mode_of"]


class RoleMaker(ABC):
    """Makes a `Role` once, and answers questions about it."""

    def __init__(self) -> None:
        self._role: Role | None = None

    def generate_role(self, environ: Mapping[str, str] | None = None) -> Role:
        """Make the role.

        Parameters
        ----------
        environ : mapping, optional
            The environment to read; this process's own otherwise.

        Returns
        -------
        Role

        Raises
        ------
        RoleError
            What was given does not describe a replica.
        """
        self._role = self._make(process_environment() if environ is None else environ)
        return self._role

    @abstractmethod
    def _make(self, environ: Mapping[str, str]) -> Role:
        """Make the role from what this role maker reads."""

    @property
    def role(self) -> Role:
        """The role, made from this process's environment at the first question."""
        return self._role if self._role is not None else self.generate_role()

    def is_worker(self) -> bool:
        """Whether this replica trains."""
        return self.role.is_worker

    def is_server(self) -> bool:
        """Whether this replica holds parameters."""
        return self.role.is_server

    def is_first_worker(self) -> bool:
        """Whether this replica is the trainer that acts for all."""
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
        """Return the trainers' endpoints, in collective mode."""
        return list(self.role.worker_endpoints)

    def get_pserver_endpoints(self) -> list[str]:
        """Return the parameter servers' endpoints."""
        return list(self.role.server_endpoints)


def identity_of(variables: Variables) -> JobIdentity:
    """Read which life of which job this is; a process outside any job is ``local``."""
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


def sync_mode_of(variables: Variables) -> str:
    """Read the mode that the job asks for."""
    if not variables.optional("FLEET_SYNC_MODE"):
        return SYNC_MODES[0]
    return variables.one_of("FLEET_SYNC_MODE", choices=SYNC_MODES, meaning="the job's mode")
