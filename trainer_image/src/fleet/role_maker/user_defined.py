"""Role makers that take the role from their arguments, for scripts that know their cluster."""

from collections.abc import Iterable

from fleet.environment.endpoints import endpoints_problem, split_endpoints
from fleet.errors import RoleError
from fleet.role_maker.role import JobIdentity, Role, RoleKind, RoleMaker
from fleet.role_maker.variables import Variables

__all__ = ["UserDefinedCollectiveRoleMaker", "UserDefinedRoleMaker"]


class UserDefinedRoleMaker(RoleMaker):
    """Builds the role of a trainer or a parameter server from arguments.

    Parameters
    ----------
    current_id : int
        This replica's index among those of its role.
    role : RoleKind
        `Role.WORKER` or `Role.SERVER`.
    worker_num : int
        Number of trainers.
    server_endpoints : iterable of str, or str
        ``host:port`` of every parameter server.

    Raises
    ------
    RoleError
        The arguments do not describe a replica.
    """

    def __init__(
        self,
        current_id: int = 0,
        role: RoleKind = RoleKind.WORKER,
        worker_num: int = 0,
        server_endpoints: Iterable[str] | str = (),
    ) -> None:
        super().__init__()
        if role not in tuple(RoleKind) or isinstance(role, bool):
            raise RoleError(f"role is {role!r}; expected Role.WORKER or Role.SERVER")
        self._kind = RoleKind(role)
        self._worker_num = _whole("worker_num", worker_num, least=1)
        self._servers = _endpoints("server_endpoints", server_endpoints)
        count = len(self._servers) if self._kind is RoleKind.SERVER else self._worker_num
        self._index = _whole("current_id", current_id, least=0, below=count)

    def _make(self, variables: Variables, job: JobIdentity) -> Role:
        endpoint = self._servers[self._index] if self._kind is RoleKind.SERVER else ""
        return Role(
            kind=self._kind,
            index=self._index,
            worker_num=self._worker_num,
            server_endpoints=self._servers,
            current_endpoint=endpoint,
            current_host=endpoint.rpartition(":")[0] or variables.optional("POD_IP", "PADDLE_CURRENT_IP"),
            job=job,
        )


class UserDefinedCollectiveRoleMaker(RoleMaker):
    """Builds the role of a collective worker from arguments.

    Parameters
    ----------
    current_id : int
        This process's rank.
    worker_endpoints : iterable of str, or str
        ``host:port`` of every process, by rank.

    Raises
    ------
    RoleError
        The arguments do not describe a worker.
    """

    def __init__(self, current_id: int = 0, worker_endpoints: Iterable[str] | str = ()) -> None:
        super().__init__()
        self._workers = _endpoints("worker_endpoints", worker_endpoints)
        self._index = _whole("current_id", current_id, least=0, below=len(self._workers))

    def _make(self, variables: Variables, job: JobIdentity) -> Role:  # noqa: ARG002 - the arguments determine the role
        endpoint = self._workers[self._index]
        return Role(
            kind=RoleKind.WORKER,
            index=self._index,
            worker_num=len(self._workers),
            worker_endpoints=self._workers,
            current_endpoint=endpoint,
            current_host=endpoint.rpartition(":")[0],
            is_collective=True,
            job=job,
        )


def _whole(name: str, value: object, *, least: int, below: int | None = None) -> int:
    fits = isinstance(value, int) and not isinstance(value, bool)
    if fits and isinstance(value, int) and value >= least and (below is None or value < below):
        return value
    bounds = f"from {least} to {below - 1}" if below is not None else f"of at least {least}"
    raise RoleError(f"{name} is {value!r}; expected a whole number {bounds}")


def _endpoints(name: str, value: Iterable[str] | str) -> tuple[str, ...]:
    endpoints = split_endpoints(value)
    if (problem := endpoints_problem(endpoints)) is not None:
        raise RoleError(f"{name} is {value!r}: {problem}; expected host:port of each replica, each once")
    return tuple(endpoints)
