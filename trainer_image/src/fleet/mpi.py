"""The ranks of an mpirun, by mpi4py: how many they are, and one exchange of small records among them."""

import contextlib
import json
import socket
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final, Protocol

from fleet.errors import RoleError

__all__ = ["Communicator", "connect", "own_place"]

_RECORD_BYTES: Final = 1024


class Communicator(Protocol):
    """What a role maker needs of MPI."""

    rank: int
    size: int

    def allgather(self, record: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the records of all ranks, in their order; every rank calls this."""


def connect() -> Communicator:
    """Meet the other ranks of this process's mpirun.

    Returns
    -------
    Communicator

    Raises
    ------
    RoleError
        mpi4py is not installed, or finds no MPI library.
    """
    is_the_scripts = "mpi4py.MPI" in sys.modules
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise RoleError(
            "MPISymmetricRoleMaker needs mpi4py, which is not installed: pip install 'fleet-trainer[mpi]'"
        ) from error
    except RuntimeError as error:  # mpi4py is there, and no library of MPI
        raise RoleError(f"mpi4py cannot load an MPI library ({error}); install the one of mpirun") from error
    return _World(MPI, finalizes=not is_the_scripts)


class _World:
    """All ranks of one mpirun.

    Parameters
    ----------
    mpi : module
        ``mpi4py.MPI``.
    finalizes : bool
        Whether MPI ends with the exchange, so that no thread of it is there when a DataLoader forks. A script
        that uses MPI itself has imported mpi4py before, and keeps it.
    """

    def __init__(self, mpi: Any, *, finalizes: bool) -> None:
        self._mpi = mpi
        self._finalizes = finalizes
        self.rank: int = mpi.COMM_WORLD.Get_rank()
        self.size: int = mpi.COMM_WORLD.Get_size()

    def allgather(self, record: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the records of all ranks, in their order; every rank calls this, once."""
        # The calls of mpi4py that take objects pickle them; these take bytes.
        mine = json.dumps(record).encode().ljust(_RECORD_BYTES)
        if len(mine) > _RECORD_BYTES:
            raise RoleError(
                f"rank {self.rank} describes itself in {len(mine)} bytes; expected {_RECORD_BYTES}"
            )
        everybodys = bytearray(_RECORD_BYTES * self.size)
        self._mpi.COMM_WORLD.Allgather(mine, everybodys)
        if self._finalizes:
            self._mpi.Finalize()
        starts = range(0, len(everybodys), _RECORD_BYTES)
        return [json.loads(everybodys[start : start + _RECORD_BYTES]) for start in starts]


@contextlib.contextmanager
def own_place() -> Iterator[dict[str, Any]]:
    """Give the name of this machine, an address of it for other machines, and a free port.

    No other process of this machine is given that port while the block runs.
    """
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = ""
    if not address or address.startswith("127."):  # as /etc/hosts of many machines says
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(("192.0.2.1", 9))  # sends nothing: the kernel only chooses the way out
                address = probe.getsockname()[0]
            except OSError:
                address = "127.0.0.1"
    with socket.socket() as held:  # bound, and not listening: nobody takes it for the server
        held.bind(("", 0))
        yield {"machine": name, "address": address, "port": held.getsockname()[1]}
