"""A role maker for mpirun: even ranks are parameter servers, odd ranks are trainers."""

import contextlib
import json
import secrets
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from fleet.errors import RoleError
from fleet.role_maker.role import JobIdentity, Role, RoleKind, RoleMaker
from fleet.role_maker.variables import KEY_BYTES, Variables

__all__ = ["MPISymetricRoleMaker", "MPISymmetricRoleMaker", "World", "connect"]

_RECORD_BYTES: Final = 1024


class World:
    """All ranks of an MPI job.

    Parameters
    ----------
    mpi : module
        ``mpi4py.MPI``.
    finalizes : bool
        Whether to finalize MPI after the exchange, so that a DataLoader forks without MPI's threads. MPI is
        not finalized if the script has already imported mpi4py, because the script then uses MPI itself.
    """

    def __init__(self, mpi: Any, *, finalizes: bool) -> None:
        self._mpi = mpi
        self._finalizes = finalizes
        self.rank: int = mpi.COMM_WORLD.Get_rank()
        self.size: int = mpi.COMM_WORLD.Get_size()

    def allgather(self, record: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the records of all ranks, in rank order; every rank must call this once."""
        # mpi4py's lower-case methods pickle objects; this one sends bytes.
        mine = json.dumps(record).encode().ljust(_RECORD_BYTES)
        if len(mine) > _RECORD_BYTES:
            raise RoleError(
                f"rank {self.rank} describes itself in {len(mine)} bytes; expected {_RECORD_BYTES}"
            )
        all_records = bytearray(_RECORD_BYTES * self.size)
        self._mpi.COMM_WORLD.Allgather(mine, all_records)
        if self._finalizes:
            self._mpi.Finalize()
        starts = range(0, len(all_records), _RECORD_BYTES)
        return [json.loads(all_records[start : start + _RECORD_BYTES]) for start in starts]


def connect() -> World:
    """Initialize MPI and return the ranks of this job.

    Raises
    ------
    RoleError
        mpi4py is not installed, or does not find an MPI library.
    """
    is_the_scripts = "mpi4py.MPI" in sys.modules
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise RoleError(
            "MPISymmetricRoleMaker needs mpi4py, which is not installed: pip install 'fleet-trainer[mpi]'"
        ) from error
    except RuntimeError as error:  # mpi4py is installed without an MPI library
        raise RoleError(
            f"mpi4py cannot load an MPI library ({error}); install the library that belongs to mpirun"
        ) from error
    return World(MPI, finalizes=not is_the_scripts)


class MPISymmetricRoleMaker(RoleMaker):
    """Derives the role from the rank under ``mpirun``.

    There is one server per trainer: ranks 0, 2, … serve, and ranks 1, 3, … train.

    Parameters
    ----------
    connect : callable, optional
        Connects to the other ranks; uses mpi4py by default.

    Notes
    -----
    Each rank sends the others its address. Rank 0 also generates and sends the job's key, unless all ranks
    have one in their environment. If all ranks run on one machine, servers listen on loopback only. Set
    ``POD_IP`` if other machines cannot reach the address to which the machine's name resolves.
    """

    def __init__(self, connect: Callable[[], World] = connect) -> None:
        super().__init__()
        self._connect = connect

    def _make(self, variables: Variables, job: JobIdentity) -> Role:
        ranks = self._connect()
        rank, size = ranks.rank, ranks.size
        if size < 2 or size % 2:
            raise RoleError(
                f"this MPI job has {size} {'rank' if size == 1 else 'ranks'}; expected an even number, "
                f"because every second rank is a parameter server: mpirun -np {size + 1}"
            )
        with _own_place() as mine:  # held until all ranks of this machine have a port
            mine["address"] = variables.optional("POD_IP", default=mine["address"])
            if rank == 0:
                made = "" if job.key else secrets.token_hex(KEY_BYTES)
                mine |= {"key": made, "uid": job.uid or secrets.token_hex(8)}
            places = ranks.allgather(mine)
        made = places[0]["key"]
        if bool(made) == bool(job.key) and rank:
            having, lacking = (rank, 0) if job.key else (0, rank)
            raise RoleError(
                f"FLEET_JOB_KEY is set on rank {having} but not on rank {lacking}; expected all ranks or "
                "none: mpirun -x FLEET_JOB_KEY"
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
            job=replace(job, uid=places[0]["uid"], key=job.key or bytes.fromhex(made)),
        )


MPISymetricRoleMaker = MPISymmetricRoleMaker
"""`MPISymmetricRoleMaker` in Paddle's spelling."""


def _refuse_loopback(hosts: list[str], machines: list[str]) -> None:
    """Raise an error if an address is a loopback address, which other machines could not reach."""
    for rank, (host, machine) in enumerate(zip(hosts, machines, strict=True)):
        if host.startswith("127."):
            raise RoleError(
                f"rank {rank} on {machine} has no address except {host}, which other machines cannot reach: "
                "set POD_IP on it to an address that they can reach, or make the machine's name resolve to "
                "one"
            )


@contextlib.contextmanager
def _own_place() -> Iterator[dict[str, Any]]:
    """Yield this machine's name, the address at which other machines reach it, and a free port.

    No other process of this machine gets the port while the block runs.
    """
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = ""
    if not address or address.startswith(
        "127."
    ):  # many machines have this entry for their own name in /etc/hosts
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(("192.0.2.1", 9))  # sends nothing: the kernel only chooses a route
                address = probe.getsockname()[0]
            except OSError:
                address = "127.0.0.1"
    with socket.socket() as held:  # bound but not listening, so that no trainer mistakes it for the server
        held.bind(("", 0))
        yield {"machine": name, "address": address, "port": held.getsockname()[1]}
