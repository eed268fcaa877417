"""A process group that a script has made before ``fleet.init``, beside which the trainers meet."""

from dataclasses import replace

import torch
import torch.distributed as dist

from fleet.collective.gate import listen_at
from fleet.collective.rendezvous import Place
from fleet.errors import ConfigurationError

__all__ = ["place_beside"]


def place_beside(place: Place) -> Place:
    """Return where the trainers meet when the script's own store has taken their port; all call this.

    Raises
    ------
    ConfigurationError
        The script's process group is one of other processes than the job's trainers.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    if (rank, size) != (place.rank, place.size):
        raise ConfigurationError(
            f"the script's init_process_group has made this process rank {rank} of {size}, and to fleet.init "
            f"it is trainer {place.rank} of {place.size}; expected the same: make that group of all trainers "
            "of the job in their order, or leave it to fleet.init"
        )
    if place.launcher_has_store:
        return place
    device = torch.device("cpu" if "gloo" in str(dist.get_backend_config()) else "cuda")
    port = torch.tensor([_free_port(place.host) if rank == 0 else 0], device=device)
    dist.broadcast(port, src=0)
    return replace(place, port=int(port.item()))


def _free_port(host: str) -> int:
    with listen_at(host, 0) as server:  # as the store will
        return int(server.getsockname()[1])
