"""The role as mpirun gives it: even ranks are parameter servers, odd ranks are trainers."""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace

from fleet.errors import RoleError
from fleet.mpi import Communicator, connect, own_place
from fleet.role_maker.interface import RoleMaker, identity_of, sync_mode_of
from fleet.role_maker.role import Role, RoleKind
from fleet.role_maker.variables import Variables

__all__ = ["MPISymetricRoleMaker", "MPISymmetricRoleMaker"]

_KEY_BYTES = 32


class MPISymmetricRoleMaker(RoleMaker):
    """Takes the role from the rank under ``mpirun``.

    There is one server to each trainer: rank 0, 2, … serve, rank 1, 3, … train.

    Parameters
    ----------
    connect : callable, optional
        Meets the other ranks; by mpi4py otherwise.

    Notes
    -----
    Each rank tells the others its address. Rank 0 also makes the key of the job and tells it, unless all
    ranks have one in their environment. Where all ranks run on one machine, servers listen on loopback only.
    ``POD_IP`` says an address where the one that the machine's name has is of no use to others.
    """

    def __init__(self, connect: Callable[[], Communicator] = connect) -> None:
        super().__init__()
        self._connect = connect

    def _make(self, environ: Mapping[str, str]) -> Role:
        variables = Variables(environ)
        identity, ranks = identity_of(variables), self._connect()
        rank, size = ranks.rank, ranks.size
        if size < 2 or size % 2:
            raise RoleError(
                f"this MPI job has {size} {'rank' if size == 1 else 'ranks'}; expected an even number, as "
                f"every second rank is a parameter server: mpirun -np {size + 1}"
            )
        with own_place() as mine:  # until all ranks of this machine have a port
            mine["address"] = variables.optional("POD_IP", default=mine["address"])
            if rank == 0:
                made = "" if identity.key else secrets.token_hex(_KEY_BYTES)
                mine |= {"key": made, "uid": identity.uid or secrets.token_hex(8)}
            places = ranks.allgather(mine)
        made = places[0]["key"]
        if bool(made) == bool(identity.key) and rank:
            having, lacking = (rank, 0) if identity.key else (0, rank)
            raise RoleError(
                f"FLEET_JOB_KEY is set on rank {having} and not on rank {lacking}; "
                "expected all ranks or none: mpirun -x FLEET_JOB_KEY"
            )
        on_one_machine = len({each["machine"] for each in places}) == 1
        hosts = ["127.0.0.1" if on_one_machine else each["address"] for each in places]
        if not on_one_machine:
            _refuse_loopback(hosts, [each["machine"] for each in places])
        endpoints = [f"{host}:{place['port']}" for host, place in zip(hosts, places, strict=True)]
        serves = rank % 2 == 0
        return Role(
            kind=RoleKind.SERVER if serves else RoleKind.WORKER,
            index=rank // 2,
            worker_num=size // 2,
            server_endpoints=tuple(endpoints[::2]),
            current_endpoint=endpoints[rank] if serves else "",
            current_host=hosts[rank] if serves else "",
            job=replace(identity, uid=places[0]["uid"], key=identity.key or bytes.fromhex(made)),
            sync_mode=sync_mode_of(variables),
            checkpoint_dir=variables.optional("FLEET_CHECKPOINT_DIR") or None,
        )


MPISymetricRoleMaker = MPISymmetricRoleMaker
"""The original's spelling."""


def _refuse_loopback(hosts: list[str], machines: list[str]) -> None:
    """Refuse an address that leads other machines nowhere."""
    for rank, (host, machine) in enumerate(zip(hosts, machines, strict=True)):
        if host.startswith("127."):
            raise RoleError(
                f"rank {rank} on {machine} knows no address of its own but {host}, which other machines "
                "cannot reach: set POD_IP to one there, or give the machine's name an address"
            )
