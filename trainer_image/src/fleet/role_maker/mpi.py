"""The role as mpirun gives it: even ranks are parameter servers, odd ranks are trainers."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from fleet.environment.deadlines import Deadlines
from fleet.environment.endpoints import endpoint_problem
from fleet.errors import ConfigurationError, RoleError
from fleet.mpi.rendezvous import Card, exchange
from fleet.role_maker.interface import RoleMaker, identity_of, sync_mode_of
from fleet.role_maker.role import Role, RoleKind
from fleet.role_maker.variables import Variables

__all__ = ["MPISymetricRoleMaker", "MPISymmetricRoleMaker"]

_RENDEZVOUS = "FLEET_MPI_RENDEZVOUS"


class MPISymmetricRoleMaker(RoleMaker):
    """Reads the role from the environment that Open MPI's ``mpirun`` gives each process.

    There is one server to each trainer: rank 0, 2, … serve, rank 1, 3, … train.

    Parameters
    ----------
    exchange : callable, optional
        How addresses are exchanged; over TCP with rank 0 otherwise.

    Notes
    -----
    mpi4py is not needed. The servers' addresses are exchanged once, by way of rank 0, which the others look
    for on their own host where all ranks run on one, else on mpirun's. Where rank 0 runs elsewhere,
    ``FLEET_MPI_RENDEZVOUS=host:port`` says where (``mpirun -x FLEET_MPI_RENDEZVOUS``).
    """

    def __init__(self, exchange: Callable[[Card], tuple[str, ...]] = exchange) -> None:
        super().__init__()
        self._exchange = exchange

    def _make(self, environ: Mapping[str, str]) -> Role:
        variables = Variables(environ)
        size = variables.number("OMPI_COMM_WORLD_SIZE", least=2, meaning="the number of ranks under mpirun")
        if size % 2:
            raise RoleError(
                f"OMPI_COMM_WORLD_SIZE is {str(size)!r}; expected an even number, as every second rank is a "
                f"parameter server: mpirun -np {size + 1}"
            )
        rank = variables.number("OMPI_COMM_WORLD_RANK", least=0, below=size, meaning="this process's rank")
        job = variables.optional("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", default="local")
        kind = RoleKind.WORKER if rank % 2 else RoleKind.SERVER
        hosts, port = _rank_zero(variables, size)
        identity = identity_of(variables)
        endpoints = self._exchange(
            Card(
                job=job,
                rank=rank,
                size=size,
                hosts=hosts,
                port=port,
                serves=kind is RoleKind.SERVER,
                deadline_seconds=_deadline_seconds(environ),
                key=identity.key,
            )
        )
        return Role(
            kind=kind,
            index=rank // 2,
            worker_num=size // 2,
            server_endpoints=endpoints[::2],
            current_endpoint=endpoints[rank],
            current_host=endpoints[rank].rpartition(":")[0],
            job=replace(identity, uid=identity.uid or job),
            sync_mode=sync_mode_of(variables),
            checkpoint_dir=variables.optional("FLEET_CHECKPOINT_DIR") or None,
        )


MPISymetricRoleMaker = MPISymmetricRoleMaker
"""The original's spelling."""


def _rank_zero(variables: Variables, size: int) -> tuple[tuple[str, ...], int | None]:
    """Return where rank 0 may be found: hosts, and the port if it is not one that follows from the job."""
    given = variables.optional(_RENDEZVOUS)
    if given:
        if (problem := endpoint_problem(given)) is not None:
            raise RoleError(f"{_RENDEZVOUS} is {given!r}: {problem}; expected host:port of rank 0's host")
        host, _, port = given.rpartition(":")
        return (host.strip("[]"),), int(port)
    if variables.number("OMPI_COMM_WORLD_LOCAL_SIZE", least=1, meaning="the ranks on this host") == size:
        return ("127.0.0.1",), None
    hosts = tuple(re.findall(r"\d+\.\d+\.\d+\.\d+", variables.optional("OMPI_MCA_orte_hnp_uri")))
    if not hosts:
        raise RoleError(
            f"{_RENDEZVOUS} is not set, and OMPI_MCA_orte_hnp_uri names no address of mpirun's host; "
            f"expected {_RENDEZVOUS}=host:port, with rank 0's host and a free port of it"
        )
    return hosts, None


def _deadline_seconds(environ: Mapping[str, str]) -> float:
    try:
        return Deadlines.from_environ(environ).deadline_seconds
    except ConfigurationError as error:
        raise RoleError(str(error)) from error
