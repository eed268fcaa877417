"""How trainers and servers keep step: one file per mode, all behind the interface of `interface`."""

from typing import TYPE_CHECKING

from fleet.errors import ConfigurationError
from fleet.parameter_server.modes.interface import Answer, Missing, ServerMode, TrainerMode
from fleet.parameter_server.modes.sync import SyncServer, SyncTrainer
from fleet.parameter_server.shard import Shard
from fleet.transpiler.config import DistributedMode

if TYPE_CHECKING:
    from fleet.parameter_server.client import Client

__all__ = ["Answer", "Missing", "ServerMode", "TrainerMode", "make_server_mode", "make_trainer_mode"]

_MODES = {DistributedMode.SYNC: (SyncServer, SyncTrainer)}


def make_server_mode(mode: DistributedMode, shard: Shard, num_trainers: int) -> ServerMode:
    """Build the server's half of a mode.

    Raises
    ------
    ConfigurationError
        This runtime has no such mode.
    """
    return _halves(mode)[0](shard, num_trainers)


def make_trainer_mode(mode: DistributedMode, client: "Client") -> TrainerMode:
    """Build the trainer's half of a mode.

    Raises
    ------
    ConfigurationError
        This runtime has no such mode.
    """
    return _halves(mode)[1](client)


def _halves(mode: DistributedMode) -> tuple[type[SyncServer], type[SyncTrainer]]:
    if mode not in _MODES:
        raise ConfigurationError(
            f"the program asks for the mode {mode.name}, and this runtime has "
            f"{', '.join(known.name for known in _MODES)}; set sync_mode=True (FLEET_SYNC_MODE=Sync)"
        )
    return _MODES[mode]
