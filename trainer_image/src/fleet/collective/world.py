"""The world of a collective job: this trainer's rank, the names of all trainers, and the rendezvous address.

The trainers rendezvous through a key-value store in trainer 0's process, at `World.host` and `World.port`.
Under torchrun its agent runs that store instead.
"""

import contextlib
import ipaddress
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from fleet.collective.heartbeats import SHOWN
from fleet.environment.endpoints import can_be_host
from fleet.errors import ConfigurationError

if TYPE_CHECKING:
    from fleet.role_maker import Role

__all__ = [
    "World",
    "find_world",
    "is_elsewhere",
    "is_here",
    "listen_at",
    "loopback_of",
    "with_separate_port",
]


@dataclass(frozen=True)
class World:
    """One trainer's view of the job.

    Attributes
    ----------
    rank, size : int
        This trainer's rank, and the number of trainers.
    host, port : str, int
        Where trainer 0's store listens.
    endpoints : tuple of str
        The trainers' addresses by rank; empty if they are unknown.
    launcher_has_store : bool
        True under torchrun, whose agent runs the store.
    launcher_restarts : str
        The number of times that torchrun's agent has restarted its processes. Its store outlives them, so
        each start uses separate keys.
    key : bytes
        The key of the job; empty if it has none.
    """

    rank: int
    size: int
    host: str
    port: int
    endpoints: tuple[str, ...] = ()
    launcher_has_store: bool = False
    launcher_restarts: str = "0"
    key: bytes = field(default=b"", repr=False)

    @property
    def others(self) -> list[int]:
        """All ranks except this trainer's."""
        return [rank for rank in range(self.size) if rank != self.rank]

    def name(self, rank: int) -> str:
        """Return a trainer's name for messages."""
        if rank < len(self.endpoints):
            return f"trainer {rank} ({self.endpoints[rank]})"
        return f"trainer {rank} ({self.host}:{self.port})" if rank == 0 else f"trainer {rank}"

    def names(self, ranks: Sequence[int], number: int | None = None) -> str:
        """Return the names of at most eight given trainers, and the number of the others, for messages.

        Parameters
        ----------
        ranks : sequence of int
        number : int, optional
            The total number of trainers, if `ranks` has only the first ones.
        """
        shown = ranks[:SHOWN]
        more = (len(ranks) if number is None else number) - len(shown)
        named = ", ".join(self.name(rank) for rank in shown)
        return f"{named} and {more} more" if more else named


def find_world(role: "Role", environ: Mapping[str, str]) -> World:
    """Return the world, whose store is at ``MASTER_ADDR:MASTER_PORT`` or else at trainer 0's endpoint.

    Raises
    ------
    ConfigurationError
        Neither is set, or a value is invalid; the message names the variable.
    """
    endpoints = tuple(role.worker_endpoints)
    address, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if not address or not port:
        if not endpoints:
            raise ConfigurationError(
                "MASTER_ADDR and MASTER_PORT are not set and the role has no trainer endpoints; expected "
                "one of the two, to find trainer 0"
            )
        address, _, port = endpoints[0].rpartition(":")
    if not can_be_host(address):
        raise ConfigurationError(f"MASTER_ADDR is {address!r}; expected a host name or an IP address")
    if not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigurationError(f"MASTER_PORT is {port!r}; expected a port number, 1 to 65535")
    return World(
        rank=role.index,
        size=role.worker_num,
        host=address,
        port=int(port),
        endpoints=endpoints,
        launcher_has_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        launcher_restarts=environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        key=role.job.key,
    )


def with_separate_port(world: World) -> World:
    """Return the world with another port than the script's process group, unless a launcher has the store.

    Every trainer must call this. Trainer 0 chooses the port, and the script's process group carries it.

    Raises
    ------
    ConfigurationError
        The script's process group does not consist of the job's trainers.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    if (rank, size) != (world.rank, world.size):
        raise ConfigurationError(
            f"init_process_group in the script has made this process rank {rank} of {size}, but to "
            f"fleet.init it is trainer {world.rank} of {world.size}; expected the same: create that group "
            "from all trainers of the job, in order, or leave it to fleet.init"
        )
    if world.launcher_has_store:
        return world
    free = 0
    if rank == 0:
        with listen_at(world.host, 0) as server:  # resolve the host as the store will
            free = int(server.getsockname()[1])
    device = torch.device("cpu" if "gloo" in str(dist.get_backend_config()) else "cuda")
    port = torch.tensor([free], device=device)
    dist.broadcast(port, src=0)
    return replace(world, port=int(port.item()))


def listen_at(host: str, port: int) -> socket.socket:
    """Listen on `host` if it is an address of this machine, or else on all addresses, as behind a Service.

    Raises
    ------
    OSError
        The port is taken.
    """
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        if is_here(host):
            family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
            return socket.create_server((host, port), family=family)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def loopback_of(host: str) -> str | None:
    """Return the loopback address that a host resolves to, or None if it resolves to anything else."""
    found = _addresses(host)
    if not found or not all(ipaddress.ip_address(each).is_loopback for each in found):
        return None
    return min(found, key=lambda each: ":" in each)


def is_here(host: str) -> bool:
    """Return True if a host resolves to an address of this machine."""
    for address in _addresses(host):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
            # The kernel binds only to addresses of this machine.
            probe.bind((address, 0))
            return True
    return False


def is_elsewhere(host: str) -> bool:
    """Return True if a host resolves, but not to an address of this machine."""
    return bool(_addresses(host)) and not is_here(host)


def _addresses(host: str) -> list[str]:
    """Return the addresses of a host, or an empty list if the host is unknown."""
    try:
        return [str(each[4][0]).partition("%")[0] for each in socket.getaddrinfo(host, None)]
    except OSError:
        return []
