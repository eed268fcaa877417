"""How a parameter-server job's `fleet` saves and loads: trainers ask, servers load before they serve."""

from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING

from fleet.checkpoint import Checkpoint, TrainerPart, TrainStatus, find_checkpoint
from fleet.errors import ConfigurationError
from fleet.facade import FleetCalls
from fleet.fluid import Program
from fleet.parameter_server.sessions import find_trainer
from fleet.parameter_server.trainer.trainer import Trainer

if TYPE_CHECKING:
    from fleet.parameter_server.server.server import Server

__all__ = ["Saving"]


class Saving(FleetCalls):
    """Saves, loads and exports; what it works on, the heir knows."""

    @abstractmethod
    def _started_trainer(self) -> Trainer:
        """Return this trainer's session; ConfigurationError before there is one."""

    @abstractmethod
    def _loading_server(self) -> "Server | None":
        """Return the server that runs in this process already, if one does."""

    @abstractmethod
    def _load_first(self, directory: str) -> None:
        """Take note of where a server that does not run yet begins."""

    def _training(self, program: Program | None) -> Trainer:
        if self._started_role().is_server:
            raise ConfigurationError(
                "a parameter server saves when trainer 0 asks it to; expected fleet.is_worker() first"
            )
        trainer = self._started_trainer()
        if program is not None and find_trainer(program) is not trainer:
            raise ConfigurationError(
                "main_program is not the one that this replica trains; expected fleet.main_program, or None"
            )
        return trainer

    def _load(self, directory: str, program: Program | None) -> TrainStatus | None:
        if not self._started_role().is_server:
            return self._training(program).load(directory)
        server = self._loading_server()
        if server is not None:
            found = server.loader.load(directory)
        else:  # what the shards hold is looked at, and all damage told, when the server starts
            found = find_checkpoint(Path(directory), Checkpoint.keep_parts)
        if found is None:
            return None
        self._load_first(directory)
        part = found.trainer_part()
        if part is None:
            return TrainStatus(step=found.manifest.step)
        return TrainerPart.from_bytes(part, str(found.directory)).status
